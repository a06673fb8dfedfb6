"""Decodes whose keys are shared out evenly: the plan against what it has to cover, the kernel against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from qserve.kernels.executor import Step
from qserve.kernels.ops import PACKED_KV, Attention
from qserve.kernels.reference import ReferenceExecutor
from qserve.kernels.triton.attention import Shape
from qserve.kernels.triton.executor import TritonExecutor
from qserve.kernels.triton.schedule import Numbers, share_out
from qserve.kernels.triton.split_decode import Sharing
from qserve.kernels.triton.staging import Staging
from tests.kernels.packed_cache import packed
from tests.kernels.triton.test_engine_kernels import FP8, LIMITS, ints, run_on, triton_executor

KEYS = 64
LENGTHS = ([1], [255], [256], [257], [64, 65], [3000], [2100, 1, 700, 64, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [129] * 7)


def step_of(lengths: list[int], prompt: int = 0) -> Step:
    """A decode behind each of ``lengths`` tokens, it among them; in their midst a prompt."""
    spans = [(length - 1, length) for length in lengths]
    if prompt:
        spans.insert(len(spans) // 2, (0, prompt))
    width = -(-max(end for _, end in spans) // 16)
    tables = torch.randperm(len(spans) * width, generator=torch.Generator().manual_seed(1)).int().view(-1, width)
    positions = torch.cat([torch.arange(*span, dtype=torch.int32) for span in spans])
    starts = torch.tensor([0, *(end - begin for begin, end in spans)]).cumsum(0).int()
    return Step(positions, positions, positions, starts, tables, ints([]))


def chains(splits: Numbers, programs: int) -> list[list[list[int]]]:
    """The splits of each program, in its order."""
    found = []
    for program in range(programs):
        mine, at = [], program
        while at >= 0 and splits[at, 0] >= 0:
            mine.append(splits[at].tolist())
            at = int(splits[at, 7])
        found.append(mine)
    return found


@pytest.mark.parametrize("window", [0, 100, 1000])
@pytest.mark.parametrize("programs", [1, 2, 5, 49])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_key_is_in_one_split_and_programs_have_equally_many(
    lengths: list[int], programs: int, window: int
) -> None:
    for prompt, least in ((0, 1), (30, 3)):
        step = step_of(lengths, prompt)
        sharing = Sharing(Shape(16, KEYS, 4, 3), programs, least)
        work = share_out(step, 16, sharing, [window])
        rows = step.seq_start[:-1].numpy()[np.diff(step.seq_start.numpy()) == 1]
        splits = work.splits[window]
        assert splits.shape == (programs + len(rows), 8) and len(work.tiles) == -(-prompt // 16)
        mine = chains(splits, programs)
        every = [split for chain in mine for split in chain]
        assert len(every) == int((splits[:, 0] >= 0).sum())
        sizes = [sum(-(-(end - begin) // KEYS) for _, begin, end, *_ in chain) for chain in mine]
        share = max(least, -(-sum(sizes) // programs))
        assert max(sizes) <= share and all(size in (share, 0) for size in sizes[: -(-sum(sizes) // share) - 1])
        slots: list[int] = []
        for sequence, (row, length) in enumerate(zip(rows.tolist(), lengths)):
            of_row = sorted(split for split in every if split[0] == row)
            at = (max(0, length - window) if window else 0) // KEYS * KEYS
            for place, (_, begin, end, table, first, index, count, _) in enumerate(of_row):
                assert begin == at < end and begin % KEYS == 0
                assert (index, count) == (place, len(of_row))
                assert table == (sequence + (prompt > 0 and sequence >= len(lengths) // 2)) * step.block_tables.shape[1]
                slots += [first + index] if count > 1 else []
                at = end
            assert at == length
        assert sorted(slots) == list(range(len(slots))) and len(slots) <= sharing.slots


def test_splits_are_staged_in_places_that_the_padded_size_gives() -> None:
    sharing, staging, places = Sharing(Shape(16, KEYS, 4, 3), 5), Staging(torch.device("cpu")), []
    for lengths in ([5, 400, 1], [700, 2], [1]):
        step = step_of(lengths)
        width = step.block_tables.shape[1]
        batch, _ = staging.load(step, share_out(step, 16, sharing, [0, 100]), 4, 0)
        places.append([batch.positions.data_ptr(), *(splits.data_ptr() for splits in batch.splits.values())])
        for splits in batch.splits.values():
            assert len(splits) == 9
            for row, _, _, table, *_ in splits[splits[:, 0] >= 0].tolist():
                assert batch.staged[table : table + width].tolist() == step.block_tables[row].tolist()
    assert places[0] == places[1] == places[2]


class _Few(TritonExecutor):
    """With so few programs that sequences are cut where a test wants it."""

    def __init__(self, programs: int, least: int = 1) -> None:
        super().__init__(torch.device("cpu"), torch.float32)
        self._few = programs, least

    def sharing(self, op: Attention) -> Sharing:
        programs, least = self._few
        return replace(super().sharing(op), programs=programs, least=least)


def attention(
    step: Step, cache: torch.dtype, heads: int, kv_heads: int, dim: int, **options: Any
) -> tuple[Attention, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (step.block_tables.numel(), kv_heads, 16, dim)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    scales = {}
    if cache in LIMITS:
        k, v = ((x * 40).round().clamp(-127, 127) for x in (k, v))
        scales = {name: torch.rand(kv_heads, generator=generator) / 20 for name in ("k_scale", "v_scale")}
    qkv = torch.randn(len(step.token_ids), (heads + 2 * kv_heads) * dim, generator=generator)
    out = torch.full((len(qkv), heads * dim), torch.nan)
    if cache == PACKED_KV:
        k, v = packed(k, keys=True), packed(v, keys=False)
        return Attention(qkv, out, k, v, heads, kv_heads, dim, dim**-0.5, **options), out
    return Attention(
        qkv, out, k.to(cache).transpose(2, 3), v.to(cache), heads, kv_heads, dim, dim**-0.5, **options, **scales
    ), out


CASES = [
    # heads, kv_heads, dim, cache, options
    (4, 2, 16, torch.float32, {}),
    (9, 3, 64, torch.float16, {"window": 300}),
    (6, 3, 100, torch.float32, {"softcap": 1.5, "sinks": True}),
    pytest.param(4, 1, 128, torch.float8_e4m3fn, {"sinks": True}, marks=FP8),
    (2, 1, 256, torch.int8, {"window": 70, "sinks": True}),
    (6, 2, 96, PACKED_KV, {"sinks": True}),
    (71, 1, 16, torch.float16, {}),
]


@pytest.mark.parametrize("programs", [1, 3, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "cache", "options"), CASES)
@pytest.mark.parametrize("lengths", [[1], [255, 256], [257], [1300], [700, 1, 300, 64, 5]], ids=str)
def test_decodes_are_those_of_the_reference(
    lengths: list[int], heads: int, kv_heads: int, dim: int, cache: torch.dtype, options: dict[str, Any], programs: int
) -> None:
    step = step_of(lengths, 9 if len(lengths) > 2 else 0)
    if options.get("sinks"):
        options = options | {"sinks": torch.linspace(-2, 3, heads)}
    op, out = attention(step, cache, heads, kv_heads, dim, **options)
    run_on(_Few(programs), [op], step)
    got = out.clone()
    run_on(ReferenceExecutor(), [op], step)
    close = {"rtol": 1e-5, "atol": 2e-5} if cache == torch.float32 else {"rtol": 0, "atol": 4e-3}
    torch.testing.assert_close(got, out, **close)


def test_counters_are_ready_for_the_next_step() -> None:
    """The same program runs steps of other lengths, then the first again, to the same bits."""
    steps = [step_of(lengths) for lengths in ([700, 3, 300], [5, 640, 640], [700, 3, 300])]
    op, out = attention(replace(steps[0], block_tables=torch.zeros(3, 44)), torch.float32, 4, 2, 16)
    program, outs = _Few(7).program(3), []
    program.add([op])
    for step in steps:
        program.run(step)
        outs.append(out.clone())
        partials = program._partials
        assert not partials.arrived.any() and len(partials.values) == 14, "the memory of the first decode suffices"
    assert torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[1])


def test_layers_with_different_windows_have_splits_of_their_own() -> None:
    step = step_of([700, 3])
    ops, outs = zip(*(attention(step, torch.float32, 4, 2, 16, window=window) for window in (0, 100, 0)))
    run_on(_Few(5), list(ops), step)
    got = [out.clone() for out in outs]
    run_on(ReferenceExecutor(), list(ops), step)
    for mine, want in zip(got, outs):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=2e-5)


def test_there_are_no_more_programs_than_tiles_of_keys() -> None:
    step = step_of([40])
    op, _ = attention(step, torch.float32, 4, 2, 16)
    program = triton_executor().program(1)
    program.add([op])
    program._positions = 100
    program.run(step)
    assert len(program._partials.values) == 4, "two programs, two partial results each"
