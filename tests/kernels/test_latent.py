"""Operations of latent attention: the C kernels of each ISA beside their reference, and what a row depends on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qserve.kernels import native
from qserve.kernels.executor import Executor, Step
from qserve.kernels.ops import HeadLinear, LatentAttention, LatentKV, Op
from qserve.kernels.reference import ReferenceExecutor

BLOCK = 16
ISAS = pytest.mark.parametrize("isa", native.available())


def ints(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(executor: Executor, *ops: Op, step: Step) -> None:
    assert not [reason for op in ops if (reason := executor.supports(op))]
    program = executor.program(step.tokens)
    program.add(ops)
    program.run(step)


class Sequences:
    """Sequences that have ``cached`` tokens and compute ``new`` ones, over a cache whose free places are NaN."""

    def __init__(self, cached: list[int], new: list[int], heads: int, rank: int, rope: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(len(cached))
        self.cached, self.new, self.heads, self.rank = cached, new, heads, rank
        width = rank + rope
        counts = [-(-(a + b) // BLOCK) for a, b in zip(cached, new)]
        order = torch.randperm(sum(counts), generator=generator).split(counts)
        self.tables = [table.tolist() for table in order]
        self.cache = torch.full((sum(counts), BLOCK, width), math.nan)
        for table, a, b in zip(order, cached, new):
            keys = torch.randn(a + b, width, generator=generator)
            self.cache[table] = torch.cat([keys, self.cache[table].flatten(0, 1)[a + b :]]).view(-1, BLOCK, width)
        self.cache = self.cache.to(dtype)
        self.q = torch.randn(sum(new), heads * width, generator=generator)

    def step(self) -> Step:
        positions = [p for a, b in zip(self.cached, self.new) for p in range(a, a + b)]
        starts = [sum(self.new[:i]) for i in range(len(self.new) + 1)]
        widest = max(map(len, self.tables))
        tables = ints([table + [0] * (widest - len(table)) for table in self.tables])
        every = list(range(len(positions)))
        return Step(ints(every), ints(positions), ints(every), ints(starts), tables, ints([0]))

    def attend(self, executor: Executor) -> Tensor:
        out = torch.full((len(self.q), self.heads * self.rank), math.nan)
        scale = self.cache.shape[2] ** -0.5
        run(executor, LatentAttention(self.q, out, self.cache, self.heads, scale), step=self.step())
        return out

    def part(self, sequence: int, first: int, last: int) -> Sequences:
        """The new tokens ``first`` .. ``last - 1`` of one of them alone."""
        other = object.__new__(Sequences)
        start = sum(self.new[:sequence])
        other.heads, other.rank, other.cache = self.heads, self.rank, self.cache
        other.cached, other.new = [self.cached[sequence] + first], [last - first]
        other.tables, other.q = [self.tables[sequence]], self.q[start + first : start + last].contiguous()
        return other


SHAPES = [
    (16, 64, 16, torch.float16), (20, 40, 8, torch.float32), (3, 17, 2, torch.bfloat16), (1, 512, 64, torch.float16),
    (40, 33, 6, torch.float16),
]  # fmt: skip


@ISAS
@pytest.mark.parametrize(("heads", "rank", "rope", "dtype"), SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_attention_is_that_of_its_reference(
    isa: native.Isa, heads: int, rank: int, rope: int, dtype: torch.dtype, threads: int
) -> None:
    for cached, new in (([0], [1]), ([5, 0, 31, 16], [1, 19, 3, 1]), ([1020, 2100], [7, 1])):
        batch = Sequences(cached, new, heads, rank, rope, dtype)
        got, want = batch.attend(native.NativeExecutor(threads, isa)), batch.attend(ReferenceExecutor())
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@ISAS
@pytest.mark.parametrize(("heads", "rank", "rope", "dtype"), [SHAPES[0], SHAPES[1]])
def test_a_row_does_not_depend_on_chunks_neighbours_or_threads(
    isa: native.Isa, heads: int, rank: int, rope: int, dtype: torch.dtype
) -> None:
    """Nor on whether the chunks of a long sequence are computed side by side."""
    batch = Sequences([1000, 0, 2050], [45, 3, 1], heads, rank, rope, dtype)
    whole = batch.attend(native.NativeExecutor(2, isa))
    for threads in (1, 5, 40):
        assert torch.equal(batch.attend(native.NativeExecutor(threads, isa)), whole)
        for first, last in ((0, 45), (0, 1), (1, 24), (24, 25), (25, 45)):
            got = batch.part(0, first, last).attend(native.NativeExecutor(threads, isa))
            assert torch.equal(got, whole[first:last])
        assert torch.equal(batch.part(2, 0, 1).attend(native.NativeExecutor(threads, isa)), whole[48:])


@ISAS
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_reaches_only_the_rows_that_see_it(isa: native.Isa, bad: float) -> None:
    batch = Sequences([0, 3], [24, 1], 6, 20, 4, torch.float32)
    want = batch.attend(native.NativeExecutor(2, isa))
    batch.cache[batch.tables[0][0], 13, 2] = bad
    got = batch.attend(native.NativeExecutor(2, isa))
    assert torch.equal(got[:13], want[:13]) and torch.equal(got[24:], want[24:])
    assert not got[13:24, 2].isfinite().any()


def check_write(executor: Executor, dtype: torch.dtype, rows: int) -> None:
    """Latents are normed, rotated and stored as by the reference, and so are their queries."""
    heads, rank, rope, nope = 5, 37, 6, 11
    generator = torch.Generator().manual_seed(3)
    kv, norm = torch.randn(rows, rank + rope, generator=generator), torch.rand(rank, generator=generator)
    q, angles = torch.randn(rows, heads, nope + rope, generator=generator), torch.rand(50, rope // 2) * 6
    step = Sequences([20], [rows], heads, rank, rope, dtype).step()
    step = replace(step, slots=torch.randperm(48, generator=generator)[:rows].int())
    found = []
    for each in (executor, ReferenceExecutor()):
        out, cache = torch.zeros(rows, heads, rank + rope), torch.zeros(3, BLOCK, rank + rope, dtype=dtype)
        op = LatentKV(kv.clone(), norm, q[..., nope:], out[..., rank:], angles.cos(), angles.sin(), cache, 1e-6)
        run(each, op, step=step)
        found.append((out, cache.float()))
    for got, want in zip(*found):
        torch.testing.assert_close(got, want, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


@ISAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_latents_are_written_as_by_the_reference(isa: native.Isa, dtype: torch.dtype) -> None:
    check_write(native.NativeExecutor(2, isa), dtype, rows=21)


@ISAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "inp", "out"), [(1, 1, 1), (5, 24, 40), (16, 40, 20), (3, 128, 130)])
def test_products_of_heads_are_those_of_the_reference(
    isa: native.Isa, dtype: torch.dtype, heads: int, inp: int, out: int
) -> None:
    generator = torch.Generator().manual_seed(heads)
    weight = torch.randn(heads, out, inp, generator=generator).to(dtype)
    for rows in (1, 2, 40):
        x = torch.randn(rows, heads, inp + 3, generator=generator)[..., :inp]
        step = Sequences([0], [rows], heads, 16, 2, torch.float32).step()
        found = []
        for executor in (native.NativeExecutor(3, isa), ReferenceExecutor()):
            wide = torch.full((rows, heads, out + 5), 7.0)
            run(executor, HeadLinear(x, weight, wide[..., 2 : 2 + out]), step=step)
            assert (wide[..., :2] == 7).all() and (wide[..., 2 + out :] == 7).all()
            found.append(wide)
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)


def test_a_latent_that_is_too_wide_has_no_kernel() -> None:
    out, cache = torch.empty(1, 640), torch.empty(1, BLOCK, 656)
    reason = native.NativeExecutor(1).supports(LatentAttention(torch.empty(1, 656), out, cache, 1, 1.0))
    assert reason == "a latent of 656 has no C kernel: at most 640"
