"""A model on several ranks gives bitwise the logits of one. Here they are threads, in ``test_processes`` processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme
from qserve.checkpoint.writer import CheckpointWriter
from qserve.kernels import native, registry
from qserve.kernels.executor import Step
from qserve.kernels.ops import AllGather
from qserve.kernels.ranks import RankLost
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder
from qserve.runtime.models.lora_layers import LoraLayers
from qserve.runtime.parallel.group import RankGroup, SharedMemory
from qserve.runtime.parallel.shard import Shard
from tests.adapters import random_adapter
from tests.kernels.quantized_weights import make_weight
from tests.runtime import test_delta_net
from tests.runtime.models import test_decoder, test_latent, test_layer_norm_families, test_moe
from tests.runtime.models.test_decoder import LIMITS, SMALL, run_chunks, save_random
from tests.runtime.models.test_lora_layers import Adapted

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

TOKENS = torch.randint(0, SMALL["vocab_size"], (40,), generator=torch.Generator().manual_seed(7)).tolist()
CHUNKS = [17, 1, 1, 21]


def logits(
    path: Path, size: int, *, kernels: str = "native", threads: int = 1, kv_dtype: torch.dtype = torch.float16,
    head: bool = False, adapted: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The logits of ``TOKENS``, computed by ``size`` ranks. ``adapted``: with an adapter of all linears."""
    memory = SharedMemory()

    def rank(number: int) -> torch.Tensor:
        source = HFDirectory(path)
        group = RankGroup(Shard(number, size), SharedMemory(memory.fd) if size > 1 else None)
        try:
            lora = LoraLayers(2, 8) if adapted else None
            decoder: Any = Decoder(
                source, decoder_config(source.config, "small"), registry.make(kernels, threads=threads),
                replace(LIMITS, num_states=1),
                kv_dtype=kv_dtype, int8_head=head, lora=lora, group=group,
            )  # fmt: skip
            if lora is not None:
                lora.put(1, lora.lay_out(random_adapter(lora.shapes)))
                decoder = Adapted(decoder, 1)
            return run_chunks(decoder, TOKENS, CHUNKS)
        except BaseException:
            group.ranks.give_up()
            raise

    with ThreadPoolExecutor(size) as pool:
        first, *_ = pool.map(rank, range(size))
    return first


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


DENSE = [
    "llama", "llama-gelu", "llama-tied", "llama-biases", "mistral-window", "qwen2", "qwen3-tied", "granite",
    "gemma-mqa", "gemma2", "gemma3", "hyperclovax", "arcee", "glm", "glm4", "phi3", "cwm-layers",
    "olmo2", "olmo2-mqa", "olmo3",
]  # fmt: skip


@pytest.mark.parametrize("case", DENSE)
def test_dense_models(case: str, tmp_path: Path) -> None:
    save_random(*test_decoder.CASES[case], tmp_path)
    want = logits(tmp_path, 1)
    for size in (2, 3, 4):
        assert torch.equal(logits(tmp_path, size), want), f"{size} ranks"


def test_more_ranks_than_key_heads_and_uneven_shards(tmp_path: Path) -> None:
    """The heads of SmolLM2-135M."""
    changes = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 101}
    save_random("llama", {**changes, "vocab_size": 203, "tie_word_embeddings": True}, tmp_path)
    want = logits(tmp_path, 1)
    for size in (2, 4, 5):
        assert torch.equal(logits(tmp_path, size), want), f"{size} ranks"
    assert torch.equal(logits(tmp_path, 2, threads=2), want)


@pytest.mark.parametrize(
    "case",
    ["cohere-qk-norm", "falcon-new", "gpt_neox", "gpt2", "gpt_neo", "gpt_bigcode", "gptj-odd", "opt-odd", "phi-odd"],
)
def test_families_with_parts_of_their_own(case: str, tmp_path: Path) -> None:
    save_random(*test_layer_norm_families.CASES[case], tmp_path)
    want = logits(tmp_path, 1)
    for size in (2, 3):
        assert torch.equal(logits(tmp_path, size), want), f"{size} ranks"


@pytest.mark.parametrize(
    "case",
    ["mixtral", "qwen2_moe", "qwen3_moe-some-layers", "glm4_moe", "dots1", "granitemoe", "granitemoeshared", "gpt_oss",
     "olmoe"],
)
def test_experts(case: str, tmp_path: Path) -> None:
    test_moe.make(case).save_pretrained(tmp_path)
    want = logits(tmp_path, 1)
    for size in (2, 3):
        assert torch.equal(logits(tmp_path, size), want), f"{size} ranks"
    assert torch.equal(logits(tmp_path, 2, threads=2), want)


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v2-lite", "deepseek_v3"])
def test_latent_attention(case: str, tmp_path: Path) -> None:
    """Every rank has the whole latents, and some of the heads."""
    test_latent.make(case, tmp_path)
    want = logits(tmp_path, 1)
    for size in (2, 3):
        assert torch.equal(logits(tmp_path, size), want), f"{size} ranks"
    test_moe.quantize(tmp_path, WeightScheme(4, 8), "gptq")
    want = logits(tmp_path / "quantized", 1)
    assert torch.equal(logits(tmp_path / "quantized", 3), want)


def test_latent_attention_in_blocks_of_fp8(tmp_path: Path) -> None:
    test_latent.save_in_fp8(tmp_path)
    want = logits(tmp_path / "fp8", 1)
    for size in (2, 3):
        assert torch.equal(logits(tmp_path / "fp8", size), want), f"{size} ranks"


@pytest.mark.parametrize(("case", "packed"), [
    ("llama", True), ("falcon-new", False), ("gpt2", False), ("gemma2", False), ("glm4_moe", True),
    ("deepseek_v3", True), ("hybrid", True),
])  # fmt: skip
def test_adapters(case: str, packed: bool, tiny_model: Path, tmp_path: Path) -> None:
    """Of queries, keys and values in parts, of shared experts, latents and gated delta nets."""
    if case == "hybrid":
        test_delta_net.save_hybrid(tiny_model, tmp_path, "qwen3_5")
    elif case == "deepseek_v3":
        test_latent.make(case, tmp_path)
    elif case in test_moe.CASES:
        test_moe.make(case).save_pretrained(tmp_path)
    else:
        save_random(*(test_decoder.CASES | test_layer_norm_families.CASES)[case], tmp_path)
    if packed:
        test_moe.quantize(tmp_path, WeightScheme(4, 8), "gptq")
        tmp_path = tmp_path / "quantized"
    want = logits(tmp_path, 1, adapted=True)
    assert not torch.equal(want, logits(tmp_path, 1))
    for size in (2, 3):
        assert torch.equal(logits(tmp_path, size, adapted=True), want), f"{size} ranks"


@pytest.mark.parametrize("case", test_delta_net.CASES)
def test_gated_delta_nets(case: str, tiny_model: Path, tmp_path: Path) -> None:
    """A rank has the states of its heads: of whole key heads, or some of one that others have, too."""
    changes = test_delta_net.CASES[case][1]
    # So that every rank has whole tiles of the shared expert.
    more = {"shared_expert_intermediate_size": 64} if "shared_expert_intermediate_size" in changes else {}
    test_delta_net.save_hybrid(tiny_model, tmp_path, case, **more)
    want = logits(tmp_path, 1)
    for size in range(2, min(4, changes.get("linear_num_value_heads", 6)) + 1):
        assert torch.equal(logits(tmp_path, size), want), f"{size} ranks"
    assert torch.equal(logits(tmp_path, 2, threads=2), want)
    test_moe.quantize(tmp_path, WeightScheme(4, 8), "gptq")
    want = logits(tmp_path / "quantized", 1)
    assert torch.equal(logits(tmp_path / "quantized", 2), want)


@pytest.mark.parametrize(("scheme", "form"), [
    (WeightScheme(4, 16), "gptq"), (WeightScheme(3, 16, dtype="trellis"), "compressed-tensors"),
])  # fmt: skip
def test_quantized_experts(scheme: WeightScheme, form: str, tmp_path: Path) -> None:
    test_moe.make("mixtral").save_pretrained(tmp_path)
    test_moe.quantize(tmp_path, scheme, form)
    want = logits(tmp_path / "quantized", 1)
    assert torch.equal(logits(tmp_path / "quantized", 3), want)


SCHEMES: dict[str, tuple[str, WeightScheme, ActivationScheme | None, bool]] = {
    "gptq": ("gptq", WeightScheme(4, 16), None, False),
    "gptq-act-order": ("gptq_v2", WeightScheme(4, 16, symmetric=False), None, True),
    "awq": ("awq", WeightScheme(4, 16, symmetric=False), None, False),
    "w8a8": ("compressed-tensors", WeightScheme(8, -1), ActivationScheme("int8"), False),
    "w8a8-static": (
        "compressed-tensors", WeightScheme(8, -1), ActivationScheme("int8", "tensor", dynamic=False), False
    ),
    "w4a8": ("compressed-tensors", WeightScheme(4, 16), ActivationScheme("int8"), False),
    "fp8": ("compressed-tensors", WeightScheme(8, -1, dtype="fp8"), ActivationScheme("fp8"), False),
    "fp8-blocks": (
        "fp8", WeightScheme(8, 32, dtype="fp8", rows=32), ActivationScheme("fp8", "group", group_size=32), False
    ),
    "trellis": ("compressed-tensors", WeightScheme(3, 16, dtype="trellis"), None, False),
}  # fmt: skip


def save_quantized(path: Path, scheme: str, layers: int = 3) -> Path:
    """Random codes in the place of the linears of the layers."""
    form, weights, activations, shuffled = SCHEMES[scheme]
    changes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True}
    save_random("llama", {**changes, "intermediate_size": 128, "num_hidden_layers": layers}, path)
    source, spec = HFDirectory(path), QuantSpec("rtn", weights, activations)
    with CheckpointWriter(path / "quantized", format=FORMATS[form]) as writer:
        for name in source.names():
            if name.endswith("_proj.weight"):
                weight = make_weight(*source.shape(name), weights, activations, shuffled=shuffled)  # type: ignore[misc,arg-type]
                writer.put_linear(name.removesuffix(".weight"), weight)
            else:
                writer.put(name, source.tensor(name))
        writer.put_json("config.json", {**source.config, "quantization_config": FORMATS[form].config_of(spec)})
        writer.finish()
    return path / "quantized"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_models(scheme: str, tmp_path: Path) -> None:
    """With an output head that is rounded to int8 as it is read."""
    path = save_quantized(tmp_path, scheme)
    want = logits(path, 1, head=True)
    for size in (2, 4):
        assert torch.equal(logits(path, size, head=True), want), f"{size} ranks"


def test_an_fp8_cache(tmp_path: Path) -> None:
    save_random("llama", {}, tmp_path)
    want = logits(tmp_path, 1, kv_dtype=torch.float8_e4m3fn)
    assert torch.equal(logits(tmp_path, 2, kv_dtype=torch.float8_e4m3fn), want)


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_the_reference_of_what_ranks_do(case: str, tmp_path: Path) -> None:
    if case == "llama":
        save_random(*test_decoder.CASES[case], tmp_path)
    else:
        test_moe.make(case).save_pretrained(tmp_path)
    got = logits(tmp_path, 2, kernels="reference")
    torch.testing.assert_close(got, logits(tmp_path, 1, kernels="reference"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_who_waits_for_a_rank_that_has_ended_is_told(kernels: str) -> None:
    group = RankGroup(Shard(0, 2), SharedMemory())
    op = AllGather(torch.zeros(4, 8), group.ranks)
    program = registry.make(kernels, threads=2).program(4)
    program.add([op])
    group.ranks.give_up()
    ints = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(RankLost):
        program.run(Step(ints, ints, ints, torch.tensor([0, 4], dtype=torch.int32), ints[None], ints[:0]))
    with pytest.raises(RankLost):
        native.meeting(group.ranks)()
