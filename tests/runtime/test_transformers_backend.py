"""Model types that transformers' modules compute: logits of plain transformers, the same tokens in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from qserve.checkpoint.errors import CapacityError, CheckpointError, UsageError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.source import open_model
from qserve.kernels import native
from qserve.runtime.backend_choice import backend_for
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.fallback.attention import AttentionCall, cache_layout
from qserve.runtime.native_backend import NativeBackend
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.transformers_backend import TransformersBackend
from tests import model_table
from tests.model_table import Trial, table, trial
from tests.small_models import save_small, small
from tests.tiny_model import save_tiny_model

needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
# A decoder that counts its own positions, positions behind a padding index, experts joined from many tensors, keys
# wider than values, a capped score and a window, fused weights [in, out], two calls of attention in a layer.
KINDS = ("bart", "roberta", "mixtral", "deepseek_v3", "gemma2", "gpt2", "diffllama")


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_plain_transformers_however_the_prompt_is_divided(kind: str, tmp_path: Path) -> None:
    found: Trial = trial(kind, tmp_path)
    assert found.difference < 1e-3 and found.same_tokens
    assert found.same_bits, "a prompt in chunks of another size has other bits"


def directory(kind: str, path: Path, **changes: Any) -> Path:
    """A small model of ``kind`` with a tokenizer."""
    save_tiny_model(path)
    config = small(kind)
    config.update({"vocab_size": 320, **changes})
    save_small(config, path)
    return path


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory("olmoe", tmp_path_factory.mktemp("olmoe"))


def engine(path: Path, **changes: Any) -> Engine:
    return Engine(str(path), EngineConfig(**{"kv_cache_memory": 1 << 20, "threads": 1, "max_num_seqs": 4, **changes}))


def answers(served: Engine, prompts: list[list[int]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for output in served.generate(prompts, [GREEDY] * len(prompts)):
        found[int(output.request_id)] += output.token_ids
    served.check()
    return found


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 300, (5 + 9 * i,), generator=generator).tolist() for i in range(count)]


@needs_native
def test_an_engine_says_which_backend_serves_and_neighbours_change_no_token(experts: Path) -> None:
    served = engine(experts, backend="transformers")
    assert served.kernels == "transformers, native"
    assert any(note.startswith("served through transformers, slower") for note in served.notes)
    alone = [answers(served, [prompt])[0] for prompt in prompts(4)]
    assert answers(served, prompts(4)) == alone
    chunked = engine(experts, backend="transformers", max_num_batched_tokens=7, enable_prefix_caching=False)
    assert answers(chunked, prompts(4)) == alone
    block = served.memory.kv_cache // served.memory.num_blocks
    crowded = engine(experts, backend="transformers", kv_cache_memory=5 * block, max_model_len=48)
    alike = [prompts(2)[1][i:] for i in range(4)]  # four that begin in a block each, and end in two
    assert answers(crowded, alike) == [answers(served, [prompt])[0] for prompt in alike]
    assert crowded.stats().num_preemptions > 0


@needs_native
def test_prompt_logprobs_are_those_of_plain_transformers(experts: Path) -> None:
    served, ids = engine(experts, backend="transformers", kv_cache_dtype="fp32", max_num_seqs=2), prompts(2)[1]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    (output,) = [each for each in served.generate([ids], [params]) if each.prompt_logprobs]
    plain = AutoModelForCausalLM.from_pretrained(experts, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        wanted = plain(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    for position, entry in enumerate(output.prompt_logprobs):
        assert entry.chosen.logprob == pytest.approx(float(wanted[position, ids[position + 1]]), abs=1e-3)


def test_the_native_decoder_comes_first(tiny_model: Path, experts: Path) -> None:
    native_model = open_model(str(tiny_model))
    assert isinstance(backend_for(native_model, EngineConfig()), NativeBackend)
    assert isinstance(backend_for(native_model, EngineConfig(backend="transformers")), TransformersBackend)
    assert isinstance(backend_for(native_model, EngineConfig(backend="vllm")), NativeBackend)
    other = HFDirectory(directory_of("bert", experts.parent / "bert"))
    assert isinstance(backend_for(other, EngineConfig()), TransformersBackend)
    with pytest.raises(CheckpointError, match="native decoder serves"):
        backend_for(other, EngineConfig(backend="native")).load(other, EngineConfig(backend="native"))
    with pytest.raises(UsageError, match="unknown backend"):
        EngineConfig(backend="torch")


def directory_of(kind: str, path: Path) -> Path:
    save_small(small(kind), path)
    return path


def test_what_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    config = EngineConfig(kv_cache_memory=1 << 20, threads=1)
    for kind, reason in {"mamba": "recurrence", "bloom": "AttentionInterface", "doge": "mask of its own"}.items():
        source = HFDirectory(directory_of(kind, tmp_path / kind))
        with pytest.raises(CheckpointError, match=f"not served through transformers: it has .*{reason}"):
            TransformersBackend().load(source, config)
    with pytest.raises(CapacityError, match="on the CPU"):
        TransformersBackend().load(source, EngineConfig(kernels="triton"))


@needs_native
def test_logits_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if transformers changed what it passes to attention: the scale is another."""
    source = HFDirectory(directory_of("qwen3", tmp_path))
    real = AttentionCall.of

    def other(*args: Any) -> AttentionCall:
        call = real(*args)
        return AttentionCall(call.heads, call.kv_heads, call.key_dim, call.value_dim, 9 * call.scale)

    monkeypatch.setattr(AttentionCall, "of", other)
    with pytest.raises(CheckpointError, match=r"its logits differ from those of plain transformers by \d"):
        TransformersBackend().load(source, EngineConfig(kv_cache_memory=1 << 20, threads=1))


def test_layers_that_keep_differently_much_are_padded() -> None:
    layout = cache_layout([AttentionCall(4, 2, 16, 16, 1.0), AttentionCall(8, 1, 72, 64, 1.0, window=9)])
    assert [(group.spec.kv_heads, group.spec.head_dim) for group in layout.groups] == [(2, 48), (1, 96)]
    assert layout.windows == (0, 9)


@pytest.mark.slow
@needs_native
def test_the_page_of_models_is_what_a_trial_of_each_finds(pytestconfig: pytest.Config) -> None:
    """A third of the types, or all with ``--everything``. With another transformers than the page names, every type
    that it still has is served as the page says or better: its new types are no fault of the page."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    kinds = model_table.KINDS if pytestconfig.getoption("--everything") else model_table.KINDS[::3]
    said, found = how_served(page), how_served(table(kinds))
    if f"transformers {transformers.__version__} has" in page:
        same = {f"`{kind}`" for kind in model_table.KINDS} == said.keys() and found.items() <= said.items()
        assert same, "renew it: python -m tests.model_table > docs/models.md"
    worse = {kind: found[kind] for kind, how in said.items() if how != "refused" and found.get(kind, how) == "refused"}
    assert not worse
    assert sum(how != "refused" for how in found.values()) >= len(kinds) * 115 / 196


def how_served(page: str) -> dict[str, str]:
    """Type: native, fallback or refused. A remark may be an error of the installed transformers."""
    return {row.split("|")[1].strip(): row.split("|")[2].strip() for row in page.splitlines() if row.startswith("| `")}
