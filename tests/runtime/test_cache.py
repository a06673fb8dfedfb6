"""Layers that keep different parts of a sequence: groups, blocks that windows give back, and unchanged tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qserve.runtime.blocks import BlockManager
from qserve.runtime.cache import CacheLayout, CacheSpec, blocks_needed, tokens_held
from qserve.runtime.config import EngineConfig
from qserve.runtime.digests import chain_digests
from qserve.runtime.engine import Engine
from qserve.runtime.memory import block_bytes_of
from qserve.runtime.sampling import SamplingParams

WINDOW, BLOCK = 20, 16
FULL, SLIDING = CacheSpec(2, 16), CacheSpec(2, 16, WINDOW)
SIZE = 4


def test_layers_of_one_kind_are_one_group() -> None:
    for spec in (FULL, SLIDING):
        layout = CacheLayout.of([spec] * 5)
        assert [group.layers for group in layout.groups] == [(0, 1, 2, 3, 4)]
        assert layout.windows == (spec.window,) and layout.places == 5
        assert block_bytes_of(layout, torch.float16) == 2 * 5 * 2 * 16 * 2 * 16


def test_the_rarest_kind_is_one_group_and_the_others_are_several() -> None:
    layout = CacheLayout.of([SLIDING, SLIDING, FULL] * 2 + [SLIDING])
    assert [group.layers for group in layout.groups] == [(0, 1), (3, 4), (6,), (2, 5)]
    assert layout.windows == (WINDOW, WINDOW, WINDOW, 0) and layout.places == 2
    assert [layout.place(layer) for layer in range(7)] == [(0, 0), (0, 1), (3, 0), (1, 0), (1, 1), (3, 1), (2, 0)]


def test_blocks_of_two_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="equally much"):
        CacheLayout.of([FULL, CacheSpec(4, 16)])


@pytest.mark.parametrize("windows", [(0,), (0, 0), (20,), (0, 20), (0, 1, 17, 33)], ids=str)
def test_a_window_needs_the_same_for_any_length(windows: tuple[int, ...]) -> None:
    for window in windows:
        most = max((p // BLOCK - max(p - window + 1, 0) // BLOCK + 1 for p in range(200)), default=0)
        if window:
            assert blocks_needed(5000, BLOCK, [window]) == most
    for blocks in range(1, 40):
        held = tokens_held(blocks, BLOCK, windows, 300)
        assert blocks_needed(held, BLOCK, windows) <= blocks
        assert held == 300 or blocks_needed(held + 1, BLOCK, windows) > blocks


def manager(num_blocks: int = 12, windows: Sequence[int] = (0, 6)) -> BlockManager:
    return BlockManager(num_blocks, SIZE, windows=windows)


def hold(blocks: BlockManager, name: str, tokens: list[int]) -> int:
    digests = chain_digests(tokens, SIZE)
    cached = blocks.open(name, digests)
    blocks.allocate(name, len(tokens), write_from=cached)
    for index in range(cached // SIZE, len(digests)):
        blocks.publish(name, index, digests[index])
    blocks.release_passed(name, len(tokens))
    blocks.check()
    return cached


def test_what_a_window_has_passed_is_free() -> None:
    blocks = manager()
    blocks.open("a")
    blocks.allocate("a", 20, write_from=0)
    assert blocks.num_used == 10 and blocks.spans("a") == ((0, 20), (0, 20))
    blocks.release_passed("a", 13)  # the next query sees positions 8 to 13
    assert blocks.spans("a") == ((0, 20), (8, 20)) and blocks.num_used == 8
    first, *rest = blocks.table("a", 1)[1:]
    assert blocks.table("a", 1)[0] == first and len({first, *rest}) == 3, "passed blocks read like the first"
    blocks.release_passed("a", 12)
    blocks.check()
    assert blocks.spans("a")[1] == (8, 20)
    blocks.free("a")
    blocks.check()
    assert blocks.num_free == 12


def test_a_prompt_of_any_length_begins_with_one_window() -> None:
    blocks = manager(windows=(6,))
    blocks.open("a")
    assert blocks.missing("a", 400, write_from=0, stepwise=True) == 3
    blocks.allocate("a", 400, write_from=0, stepwise=True)
    assert blocks.extend("a", 400, spare=4) == 32 and blocks.num_free == 4
    assert blocks.extend("a", 10, spare=0) == 10
    blocks.release_passed("a", 32)
    assert blocks.extend("a", 400, spare=0) == 32 + 10 * SIZE, "what was passed and what was left"
    blocks.check()


def test_a_hit_needs_all_of_a_full_group_and_the_last_window_of_the_others() -> None:
    blocks = manager()
    tokens = list(range(16))
    assert hold(blocks, "a", tokens) == 0
    blocks.free("a")
    assert blocks.num_cached == 8
    assert hold(blocks, "b", [*tokens, 1]) == 16
    assert len(blocks._tables["b"][1].blocks) == 2, "the last of the window, and the new one"
    blocks.free("b")
    # Block 2 of the window is lost: what goes on behind block 3 or 4 cannot see it, what goes on behind 2 need not.
    lost = blocks._block_of[1].pop(chain_digests(tokens, SIZE)[2])
    del blocks._digest_of[lost], blocks._evictable[lost]
    blocks._free.append(lost)
    blocks.check()
    assert hold(blocks, "c", [*tokens, 1]) == 8


def test_who_lags_too_far_behind_cannot_share() -> None:
    blocks = manager()
    blocks.open("parent")
    blocks.allocate("parent", 24, write_from=0)
    blocks.release_passed("parent", 12)
    assert blocks.can_fork("parent", 12)
    blocks.fork("parent", "child", 12)
    assert blocks.spans("child") == ((0, 12), (4, 12))
    blocks.free("child")
    blocks.release_passed("parent", 20)
    assert not blocks.can_fork("parent", 12)
    with pytest.raises(ValueError, match="of 12 tokens"):
        blocks.fork("parent", "child", 12)
    blocks.check()


@pytest.mark.parametrize("damage", ["shared", "found", "passed"])
def test_check_finds_damage_between_groups(damage: str) -> None:
    blocks = manager()
    hold(blocks, "a", list(range(10)))
    full, window = blocks._tables["a"]
    if damage == "shared":
        blocks._refs[window.blocks[-1]] -= 1
        blocks._free.append(window.blocks[-1])
        window.blocks[-1] = full.blocks[-1]
        blocks._refs[full.blocks[-1]] += 1
    elif damage == "found":
        one, other = blocks._block_of
        digest = next(iter(one))
        one[digest], other[digest] = other[digest], one[digest]
        blocks._digest_of = {b: (g, d) for g, known in enumerate(blocks._block_of) for d, b in known.items()}
    else:
        blocks._release(full.blocks.pop(0))
        full.first = 1
    with pytest.raises(AssertionError):
        blocks.check()


@pytest.fixture(scope="module")
def alternating(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, torch.nn.Module]:
    """A random model whose layers see a window and everything by turns, with the tokenizer of the tiny one."""
    path = tmp_path_factory.mktemp("alternating")
    for file in tiny_model.glob("token*"):
        (path / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=AutoConfig.from_pretrained(tiny_model).vocab_size, hidden_size=64, intermediate_size=112,
        num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        use_sliding_window=True, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data *= 2.0  # attention that matters
    model.save_pretrained(path)
    return path, model


def engine_of(path: Path, **config: Any) -> Engine:
    return Engine(str(path), EngineConfig(**{"kv_cache_memory": 1 << 20, "threads": 1, **config}))


def tokens_of(seed: int, length: int) -> list[int]:
    return [(seed * 31 + index * index * 7) % 250 + 3 for index in range(length)]


@pytest.mark.parametrize("chunk", [512, 24])
def test_logits_are_those_of_transformers_past_several_windows(
    alternating: tuple[Path, torch.nn.Module], chunk: int
) -> None:
    path, model = alternating
    tokens = tokens_of(1, 150)
    engine = engine_of(path, kv_cache_dtype="fp32", max_num_batched_tokens=chunk, max_num_seqs=4)
    assert engine.scheduler.blocks.windows == (WINDOW, WINDOW, 0)
    rows = torch.cat([rows for _, rows in engine.score(tokens)])
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    torch.testing.assert_close(rows, want[: len(rows)], rtol=0, atol=1e-4)


def test_a_window_holds_itself_a_block_and_what_is_in_flight(alternating: tuple[Path, torch.nn.Module]) -> None:
    engine = engine_of(alternating[0], max_num_batched_tokens=32, max_num_seqs=4)
    engine.submit("a", tokens_of(1, 150), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    blocks, flying = engine.scheduler.blocks, 32
    while engine.has_work():
        engine.step()
        engine.check()
        for (begin, end), window in zip(blocks.spans("a#0") if engine.has_work() else (), blocks.windows):
            flying = 0 if engine.scheduler.running()[0].is_decoding else 32
            if window:
                assert end - begin <= -(-window // BLOCK) * BLOCK + BLOCK + flying
            else:
                assert begin == 0
    assert blocks.num_used == 0


KINDS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2),
    "drawn": SamplingParams(max_tokens=70, seed=4, ignore_eos=True, logprobs=2),
    "two": SamplingParams(max_tokens=50, seed=5, n=2, ignore_eos=True),
    "beams": SamplingParams(max_tokens=8, n=2, use_beam_search=True, temperature=0.0, ignore_eos=True),
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
            logprobs = [*logprobs, *(output.logprobs or ())]
            found[output.request_id, output.index] = [*tokens, *output.token_ids], text + output.text, logprobs
        engine.check()
    assert engine.stats().kv_blocks_used == 0
    return found


@pytest.fixture(scope="module")
def alone(alternating: tuple[Path, torch.nn.Module]) -> dict[tuple[str, int], tuple[list[int], str, list[Any]]]:
    found = {}
    for name in KINDS:
        found |= run(engine_of(alternating[0], enable_prefix_caching=False), [name])
    return found


@pytest.mark.parametrize(
    "config",
    [{}, {"max_num_batched_tokens": 24, "max_num_seqs": 4}, {"kv_cache_memory": 30 * 4096, "max_num_seqs": 8}],
    ids=["together", "chunked", "preempting"],
)
def test_nobodys_tokens_change(
    alternating: tuple[Path, torch.nn.Module], alone: dict[tuple[str, int], Any], config: dict[str, Any]
) -> None:
    engine = engine_of(alternating[0], **config)
    assert run(engine, list(KINDS)) == alone
    assert engine.scheduler.num_preemptions or "kv_cache_memory" not in config
    again = {key: value for key, value in alone.items() if key[0] == "again"}
    hits = engine.scheduler.prefix_hits
    assert run(engine, ["again"]) == run(engine, ["again"]) == again
    assert engine.scheduler.prefix_hits > hits, "its prompt was found, and the last window of it"


def test_drafts_change_nothing_where_there_are_windows(
    alternating: tuple[Path, torch.nn.Module], alone: dict[tuple[str, int], Any]
) -> None:
    engine = engine_of(alternating[0])
    answers = {f"{name}#{index}": tokens for (name, index), (tokens, *_) in alone.items()}

    class Guesses:
        def draft(self, requests: Sequence[Any]) -> dict[str, list[int]]:
            drafts = {}
            for request in requests:
                count = len(request.output_token_ids)
                drafts[request.request_id] = answers[request.request_id][count : count + 5] + [7] * (count % 3)
            return drafts

        def expects(self, requests: Sequence[Any]) -> bool:
            return True

        def timed(self, rows: int, seconds: float) -> None:
            pass

    engine.drafter = Guesses()
    assert run(engine, list(KINDS)) == alone


def test_a_window_needs_less_memory_than_the_whole(alternating: tuple[Path, torch.nn.Module], tiny_model: Path) -> None:
    path, _ = alternating
    engine = engine_of(path, kv_cache_memory=12 * 4096)
    layout = engine.runner.decoder.layout  # type: ignore[attr-defined]
    assert engine.memory.kv_cache == engine.memory.num_blocks * block_bytes_of(layout, torch.float16) <= 12 * 4096
    # Two groups keep three blocks each, the third the rest.
    assert engine.max_model_len == (engine.memory.num_blocks - 2 * 3) * BLOCK
    assert engine_of(tiny_model).memory.windows == (0,)


@pytest.mark.parametrize(("layers", "window"), [(18, 512), (26, 512), (34, 1024), (48, 1024), (62, 1024)])
def test_gemma_3_keeps_a_quarter_of_what_full_layers_would(layers: int, window: int) -> None:
    """8,192 tokens, all sizes of the family: every sixth layer sees everything."""
    specs = [CacheSpec(4, 256, 0 if (layer + 1) % 6 == 0 else window) for layer in range(layers)]
    layout = CacheLayout.of(specs)
    full = CacheLayout.of([CacheSpec(4, 256)] * layers)
    kept = blocks_needed(8192, 16, layout.windows) * block_bytes_of(layout, torch.float16)
    whole = blocks_needed(8192, 16, full.windows) * block_bytes_of(full, torch.float16)
    assert kept <= (0.25 if window == 512 else 0.35) * whole
