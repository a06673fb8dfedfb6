"""Models with gated delta nets: logits of transformers, states by sequence, and unchanged tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qserve.checkpoint.errors import CapacityError, CheckpointError, UsageError
from qserve.checkpoint.hf import HFDirectory
from qserve.kernels import native
from qserve.runtime.blocks import BlockManager
from qserve.runtime.cache import CacheLayout, CacheSpec, StateSpec
from qserve.runtime.config import EngineConfig
from qserve.runtime.digests import chain_digests
from qserve.runtime.draft_model import DraftModel
from qserve.runtime.engine import Engine
from qserve.runtime.memory import block_bytes_of
from qserve.runtime.models.config import decoder_config
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.speculative_config import SpeculativeConfig
from qserve.runtime.state_slots import StateSlots

MOE = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5-biases": ("qwen3_5_text", {
        "attention_bias": True, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3, "linear_value_head_dim": 32,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
                            "mrope_section": [3, 3, 2], "mrope_interleaved": True}}),
    "qwen3_next": ("qwen3_next", {**MOE, "decoder_sparse_step": 2}),
    "qwen3_next-unscaled": ("qwen3_next", {**MOE, "norm_topk_prob": False, "mlp_only_layers": [1],
                                           "linear_num_key_heads": 3, "linear_num_value_heads": 3}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**MOE, "linear_num_value_heads": 2}),
}  # fmt: skip


def save_hybrid(tiny_model: Path, path: Path, case: str, **more: Any) -> torch.nn.Module:
    """A random model of ``case`` with the tokenizer of the tiny one."""
    for file in tiny_model.glob("token*"):
        (path / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(3)
    kind, changes = CASES[case]
    shape: dict[str, Any] = {
        "vocab_size": AutoConfig.from_pretrained(tiny_model).vocab_size, "hidden_size": 64, "intermediate_size": 112,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "initializer_range": 0.05, "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": 2, **changes, **more,
    }  # fmt: skip
    if kind == "qwen3_5_moe_text":
        del shape["intermediate_size"]
    config = AutoConfig.for_model(kind, **shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():  # biases start as zeros and norms as they change nothing
        if name.endswith("conv1d.weight"):
            parameter.data *= 5.0
        elif parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return model  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    save_hybrid(tiny_model, path, "qwen3_5", linear_value_head_dim=32)
    return path


def engine_of(path: Path, **config: Any) -> Engine:
    return Engine(str(path), EngineConfig(**{"kv_cache_memory": 1 << 20, "threads": 1, "max_num_seqs": 8, **config}))


def tokens_of(seed: int, length: int) -> list[int]:
    return [(seed * 31 + index * index * 7) % 250 + 3 for index in range(length)]


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, kernels: str, tiny_model: Path, tmp_path: Path) -> None:
    if kernels == "native" and native.missing():
        pytest.skip(str(native.missing()))
    model = save_hybrid(tiny_model, tmp_path, case)
    tokens = tokens_of(1, 100)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    found = []
    for chunk in (128, 24, 9):
        engine = engine_of(tmp_path, kernels=kernels, kv_cache_dtype="fp32", max_num_batched_tokens=chunk)
        assert not any("without a kernel" in note for note in engine.notes)
        found.append(torch.cat([rows for _, rows in engine.score(tokens)]))
        torch.testing.assert_close(found[-1], want[: len(found[-1])], rtol=0, atol=1e-4)
    assert kernels == "reference" or all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("case", CASES)
def test_every_feature_matters(case: str, tiny_model: Path, tmp_path: Path) -> None:
    """Of the parts that are small, or that begin as nothing: without them the logits are others."""
    model = save_hybrid(tiny_model, tmp_path, case)
    tokens = torch.tensor([tokens_of(1, 60)])
    parts = ("A_log", "dt_bias", "conv1d.weight", "linear_attn.norm.weight", "q_norm.weight", "k_norm.weight")
    with torch.no_grad():
        want = model(tokens).logits
        for part in parts:
            parameters = [p for name, p in model.named_parameters() if name.endswith(part)]
            assert parameters
            kept = [p.data.clone() for p in parameters]
            for p in parameters:
                p.data += 0.2 * torch.randn_like(p)
            assert (model(tokens).logits - want).abs().max() > 1e-3, part
            for p, data in zip(parameters, kept):
                p.data = data


KINDS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2),
    "drawn": SamplingParams(max_tokens=70, seed=4, ignore_eos=True, logprobs=2),
    "two": SamplingParams(max_tokens=50, seed=5, n=2, ignore_eos=True),
    "beams": SamplingParams(max_tokens=12, n=3, use_beam_search=True, temperature=0.0, ignore_eos=True),
    "scored": SamplingParams(max_tokens=5, prompt_logprobs=1, temperature=0.0, ignore_eos=True),
    "again": SamplingParams(max_tokens=30, seed=6, ignore_eos=True),
}


def run(engine: Engine, names: Sequence[str]) -> dict[tuple[str, int], tuple[list[int], str, list[Any]]]:
    found: dict[tuple[str, int], tuple[list[int], str, list[Any]]] = {}
    for name in names:
        engine.submit(name, tokens_of(1, 70 + 12 * list(KINDS).index(name)), KINDS[name])
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens, text, logprobs = found.get((output.request_id, output.index), ([], "", []))
            logprobs = [*logprobs, *(output.logprobs or ()), *(output.prompt_logprobs or ())]
            found[output.request_id, output.index] = [*tokens, *output.token_ids], text + output.text, logprobs
        engine.check()
    assert engine.stats().kv_blocks_used == 0
    return found


@pytest.fixture(scope="module")
def alone(hybrid: Path) -> dict[tuple[str, int], tuple[list[int], str, list[Any]]]:
    engine = engine_of(hybrid)
    return {key: value for name in KINDS for key, value in run(engine, [name]).items()}


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize(
    "config",
    [{}, {"max_num_batched_tokens": 24, "max_num_seqs": 4}, {"kv_cache_memory": 26 * 4096}, {"threads": 2}],
    ids=["together", "chunked", "preempting", "threads"],
)
def test_nobodys_tokens_change(hybrid: Path, alone: dict[tuple[str, int], Any], config: dict[str, Any]) -> None:
    engine = engine_of(hybrid, **config)
    assert run(engine, list(KINDS)) == alone
    assert engine.scheduler.num_preemptions or "kv_cache_memory" not in config
    again = {key: value for key, value in alone.items() if key[0] == "again"}
    hits = engine.scheduler.prefix_hits
    assert run(engine, ["again"]) == run(engine, ["again"]) == again
    assert engine.scheduler.prefix_hits > hits, "its beginning is found again"


def test_beams_are_those_of_scored_sequences(hybrid: Path, alone: dict[tuple[str, int], Any]) -> None:
    """The sum of a beam's log-probabilities is that of its tokens, scored as a prompt: its state was copied rightly."""
    engine = engine_of(hybrid)
    prompt = tokens_of(1, 70 + 12 * list(KINDS).index("beams"))
    sums = []
    for index in range(3):
        tokens = alone["beams", index][0]
        rows = torch.cat([rows for _, rows in engine.score([*prompt, *tokens])])[len(prompt) - 1 :]
        sums.append(float(rows[torch.arange(len(tokens)), tokens].sum()))
    assert sums == sorted(sums, reverse=True) and len(set(sums)) == 3
    greedy = engine_of(hybrid)
    greedy.submit("g", prompt, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    tokens = [token for _ in iter(greedy.has_work, False) for output in greedy.step() for token in output.token_ids]
    rows = torch.cat([rows for _, rows in engine.score([*prompt, *tokens])])[len(prompt) - 1 :]
    assert sums[0] >= float(rows[torch.arange(12), tokens].sum()) - 1e-3


def answer(engine: Engine, prompt: list[int], **more: Any) -> tuple[list[int], list[Any], int]:
    """The tokens, their log-probabilities, and how much of the prompt was found."""
    before, tokens, logprobs = engine.scheduler.prefix_hits, list[int](), list[Any]()
    engine.submit("a", prompt, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=3), **more)
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens += output.token_ids
            logprobs += output.logprobs or ()
        engine.check()
    return tokens, logprobs, engine.scheduler.prefix_hits - before


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("chunk", [512, 24])
def test_what_begins_equally_goes_on_from_a_snapshot(case: str, chunk: int, tiny_model: Path, tmp_path: Path) -> None:
    """With the tokens and the logits, to the bit, of an engine that finds nothing."""
    if native.missing():
        pytest.skip(str(native.missing()))
    save_hybrid(tiny_model, tmp_path, case)
    cold = engine_of(tmp_path, enable_prefix_caching=False)
    warm = engine_of(tmp_path, max_num_batched_tokens=chunk, max_num_seqs=16)
    shared = tokens_of(1, 90)
    first = [*shared, *tokens_of(2, 30)]
    turn = [*first, *answer(cold, first)[0], *tokens_of(3, 9)]  # it goes on behind the 128 tokens of prompt and answer
    asked = [
        (first, 0), (first, 112), ([*shared, *tokens_of(4, 30)], 0), ([*shared, *tokens_of(5, 30)], 80), (turn, 128),
        (shared[:70], 0), (shared[:70], 64), (first, 112),
    ]  # fmt: skip
    for prompt, found in asked:
        want = answer(cold, prompt)
        assert answer(warm, prompt) == (*want[:2], found) and want[2] == 0
    assert answer(warm, first, cache_salt="other")[2] == 0
    together = {name: [*shared, *tokens_of(number, 12)] for number, name in enumerate("bcdefg", 6)}
    hits, found = warm.scheduler.prefix_hits, {name: list[int]() for name in together}
    for name, prompt in together.items():
        warm.submit(name, prompt, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    while warm.has_work():
        for output in warm.step():
            found[output.request_id] = found[output.request_id] + list(output.token_ids)
        warm.check()
    assert found == {name: answer(cold, prompt)[0] for name, prompt in together.items()}
    assert warm.scheduler.prefix_hits - hits == 6 * 80, "all of them at once"


def managed(num_blocks: int, num_running: int, num_snapshots: int = 0) -> tuple[BlockManager, StateSlots]:
    states = StateSlots(num_running, num_snapshots, 4, first_doubling=16)
    return BlockManager(num_blocks, 4, states=states), states


def hold(blocks: BlockManager, name: str, tokens: list[int]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Compute a prompt at once: how much was found, and what was saved."""
    digests = chain_digests(tokens, 4)
    found = blocks.open(name, digests[: (len(tokens) - 1) // 4])
    blocks.allocate(name, len(tokens), write_from=found)
    saves = blocks.save_states(name, found, len(tokens))
    for index in range(found // 4, len(digests)):
        blocks.publish(name, index, digests[index])
    blocks.check()
    return found, saves


def test_snapshots_are_at_ends_forks_and_doublings() -> None:
    blocks, states = managed(64, 2, 6)
    text = list(range(80))
    found, saves = hold(blocks, "a", [*text, 1])
    assert found == 0 and [tokens for tokens, _ in saves] == [16, 32, 64, 80] and states.num_found == 4
    assert not blocks.take_state_copies()
    blocks.free("a")
    found, others = hold(blocks, "b", [*text[:46], *text[:10]])
    assert found == 32 and [tokens for tokens, _ in others] == [44, 52, 56], "a fork, the end, and one behind it"
    assert blocks.take_state_copies() == [(dict(saves)[32], blocks.state("b"))]
    assert hold(blocks, "c", [*text[:46], 3])[0] == 44


def test_the_newest_state_of_an_answer_takes_the_place_of_the_one_before() -> None:
    blocks, states = managed(16, 1, 2)
    tokens = [7] * 5
    hold(blocks, "a", tokens)
    for length in range(6, 30):
        blocks.allocate("a", length, write_from=length - 1)
        saves = blocks.save_states("a", length - 1, length)
        assert [border for border, _ in saves] == [length] * (length % 4 == 0)
        if saves:
            blocks.publish("a", length // 4 - 1, chain_digests([7] * length, 4)[-1])
        blocks.check()
    assert states.num_found == 2, "that of the prompt, and one of the answer"
    blocks.free("a")
    assert hold(blocks, "b", [7] * 30)[0] == 28


def test_a_snapshot_ends_with_its_block() -> None:
    blocks, states = managed(4, 2, 6)
    hold(blocks, "a", [1] * 9)
    blocks.free("a")
    assert states.num_found == 1
    hold(blocks, "b", [2] * 12)  # takes two free blocks and the last one of the first prompt
    assert states.num_found == 2 and chain_digests([1] * 8, 4)[1] not in states
    blocks.free("b")
    states._snapshots[b"nothing"] = states._free.pop()
    with pytest.raises(AssertionError, match="lost its block"):
        blocks.check()


def test_a_state_has_one_owner() -> None:
    blocks, states = managed(8, 2)
    assert not blocks.enable_prefix_caching
    blocks.open("a")
    blocks.allocate("a", 9, write_from=0)
    assert blocks.state("a") >= 0 and not blocks.can_fork("a", 8)
    blocks.fork("a", "b", 9)
    assert {blocks.state("a"), blocks.state("b")} == {0, 1}
    blocks.check()
    with pytest.raises(ValueError, match="2 sequences have states already"):
        blocks.open("c")
    assert blocks.take_state_copies() == [(blocks.state("a"), blocks.state("b"))] and not blocks.take_state_copies()
    blocks.free("a")
    blocks.open("c")
    blocks.check()
    states._sequences["c"].slot = blocks.state("b")
    with pytest.raises(AssertionError, match="lost or shared"):
        blocks.check()


def test_layers_with_a_state_take_no_blocks() -> None:
    state, full = StateSpec(((3, 40), (2, 8, 4))), CacheSpec(2, 16)
    layout = CacheLayout.of([state, full, state, full])
    assert [group.layers for group in layout.groups] == [(1, 3)] and layout.windows == (0,)
    assert layout.state_bytes == 2 * 4 * (120 + 64)
    assert block_bytes_of(layout, torch.float16) == block_bytes_of(CacheLayout.of([full, full]), torch.float16)
    with pytest.raises(ValueError, match="some layer must keep it"):
        CacheLayout.of([state])


def test_the_plan_counts_states(hybrid: Path) -> None:
    engine = engine_of(hybrid, max_num_seqs=5)
    layout = engine.runner.decoder.layout  # type: ignore[attr-defined]
    assert engine.memory.states == (5 + 4) * layout.state_bytes == 9 * 3 * 4 * (3 * 256 + 6 * 16 * 32)
    assert all(len(state) == 9 for state in engine.runner.decoder.sequence_states)  # type: ignore[attr-defined]
    assert any("for the states of sequences" in line for line in engine.memory.lines())
    without = engine_of(hybrid, max_num_seqs=5, enable_prefix_caching=False)
    assert without.memory.states == 5 * layout.state_bytes and engine.config.num_snapshots == 4
    with pytest.raises(CapacityError, match="max-num-seqs 1000000: lower it"):
        engine_of(hybrid, max_num_seqs=1000000, max_num_batched_tokens=1000000)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"speculative_config": SpeculativeConfig(method="ngram")}, "speculative decoding"),
        ({"kv_offload_memory": 1 << 20}, "kv-offload-memory"),
    ],
    ids=["drafts", "offload"],
)
def test_what_goes_back_is_refused(hybrid: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        engine_of(hybrid, **config)


def test_it_cannot_draft(hybrid: Path, tiny_model: Path) -> None:
    target = HFDirectory(tiny_model)
    with pytest.raises(UsageError, match="cannot draft"):
        DraftModel.load(str(hybrid), EngineConfig(), target, target.tokenizer().get_vocab())


def test_layers_that_predict_more_tokens_are_left_out(hybrid: Path, tmp_path: Path) -> None:
    for file in hybrid.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "mtp.layers.0.fc.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    assert HFDirectory(tmp_path).names() == HFDirectory(hybrid).names()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"linear_num_value_heads": 5}, "no multiple of 2 linear"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer of full attention"),
        ({"linear_conv_kernel_dim": 1}, "convolution of 1"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(hybrid: Path, change: dict[str, Any], says: str) -> None:
    config = json.loads((hybrid / "config.json").read_text())
    with pytest.raises(CheckpointError, match=says):
        decoder_config({**config, **change}, "it")
