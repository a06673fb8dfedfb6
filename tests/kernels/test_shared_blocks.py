"""Sequences that begin with the same KV blocks are attended together, with the bits that each has alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qserve.kernels import native
from qserve.kernels.executor import Step
from qserve.kernels.ops import PACKED_KV, SCALED_KV, Attention, RopeKV
from qserve.kernels.reference import ReferenceExecutor
from tests.kernels.packed_cache import packed

BLOCK = 16


def ints(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Batch:
    """Sequences with one new token each. ``lengths``: cached tokens; ``shared``: leading blocks that each has in common
    with those before it."""

    def __init__(
        self, lengths: list[int], shared: list[int], heads: int, kv_heads: int, dim: int,
        dtype: torch.dtype = torch.float16,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(len(lengths))
        self.shape, self.lengths = (heads, kv_heads, dim), lengths
        tables: list[list[int]] = []
        count = 0
        for length, common in zip(lengths, shared):
            own = length // BLOCK + 1 - common
            tables.append([*(tables[-1][:common] if tables else []), *range(count, count + own)])
            count += own
        width = max(map(len, tables))
        self.tables = ints([table + [0] * (width - len(table)) for table in tables])
        self.qkv = torch.randn(len(lengths), (heads + 2 * kv_heads) * dim, generator=generator)
        keys = torch.randn(count, kv_heads, dim, BLOCK, generator=generator)
        values = torch.randn(count, kv_heads, BLOCK, dim, generator=generator)
        scale = 40 if dtype in SCALED_KV else 1
        if dtype == PACKED_KV:
            self.k, self.v = packed(keys.mT, keys=True), packed(values, keys=False)
            self.scale = None
            return
        self.k, self.v = ((each * scale).clamp(-127, 127).to(dtype) for each in (keys, values))
        self.scale = torch.full((kv_heads,), 0.02) if dtype in SCALED_KV else None

    def step(self, rows: range) -> Step:
        lengths = [self.lengths[row] for row in rows]
        slots = [int(self.tables[row][n // BLOCK]) * BLOCK + n % BLOCK for row, n in zip(rows, lengths)]
        every = list(range(len(rows)))
        return Step(ints(every), ints(lengths), ints(slots), ints([*every, len(rows)]),
                    self.tables[rows.start : rows.stop].contiguous(), ints([0]))  # fmt: skip

    def attend(self, on: native.NativeExecutor | ReferenceExecutor, rows: range, **options: float) -> Tensor:
        heads, _, dim = self.shape
        qkv, k, v = self.qkv[rows.start : rows.stop].clone(), self.k.clone(), self.v.clone()
        out = torch.full((len(rows), heads * dim), torch.nan)
        angles = torch.arange(1024 * (dim // 2)).view(1024, -1) * 0.01
        attention = Attention(qkv, out, k, v, *self.shape, dim**-0.5, 0, self.scale, self.scale)
        program = on.program(len(rows))
        program.add([
            RopeKV(qkv, angles.cos(), angles.sin(), k, v, *self.shape, None, None, 1e-6, self.scale, self.scale),
            replace(attention, **options),  # type: ignore[arg-type]
        ])
        program.run(self.step(rows))
        return out


@pytest.mark.parametrize("isa", native.available())
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        (9, 3, 64, torch.float16), (4, 4, 40, torch.float32), (5, 1, 16, torch.bfloat16), (13, 1, 32, torch.float16),
        (6, 2, 24, torch.int8), (6, 2, 64, torch.float8_e4m3fn), (9, 3, 64, PACKED_KV),
    ],
)  # fmt: skip
@pytest.mark.parametrize("threads", [1, 3])
def test_together_and_alone_have_the_same_bits(
    isa: native.Isa, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, threads: int
) -> None:
    lengths = [130, 95, 96, 97, 64, 170, 80, 33, 128, 128, 128, 300, 65, 64, 63]
    shared = [0, 5, 5, 6, 4, 4, 5, 2, 0, 8, 8, 8, 4, 4, 3]
    batch = Batch(lengths, shared, heads, kv_heads, dim, dtype)
    executor, every = native.NativeExecutor(threads, isa), range(len(lengths))
    for options in ({}, {"window": 70}, {"softcap": 5.0}):
        together = batch.attend(executor, every, **options)
        alone = [batch.attend(executor, range(row, row + 1), **options) for row in every]
        assert torch.equal(together, torch.cat(alone))
        reference = batch.attend(ReferenceExecutor(), every, **options)
        tolerance = 2e-2 if dtype in (torch.bfloat16, *SCALED_KV) else 2e-3
        torch.testing.assert_close(together, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("isa", native.available())
def test_many_that_share_a_prompt_have_the_same_bits(isa: native.Isa) -> None:
    batch = Batch([256 + 3 * row for row in range(32)], [0, *[16] * 31], 9, 3, 64)
    executor = native.NativeExecutor(2, isa)
    together = batch.attend(executor, range(32))
    assert torch.equal(together, torch.cat([batch.attend(executor, range(row, row + 1)) for row in range(32)]))
