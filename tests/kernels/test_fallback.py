"""Operations without a kernel run by their reference, between the kernels of the others; no neighbour changes a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qserve.kernels import native, registry
from qserve.kernels.executor import Executor, Step
from qserve.kernels.ops import Activation, Attention, Linear, Op, RMSNorm, RopeKV
from qserve.kernels.reference import ReferenceExecutor

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 20, 48


class WithoutKernels(native.NativeExecutor):
    """The C kernels, but for some operations."""

    def __init__(self, *missing: type) -> None:
        super().__init__(2)
        self._lacks = missing

    def supports(self, op: Op) -> str | None:
        return "there is none" if isinstance(op, self._lacks) else super().supports(op)


def layer(x: Tensor) -> tuple[list[Op], Tensor]:
    """A norm, a product, attention and a gated product over the residual stream ``x``, and what it leaves there."""
    torch.manual_seed(1)
    rows, size = len(x), (HEADS + 2 * KV_HEADS) * DIM
    normed, qkv, attended = torch.empty_like(x), torch.empty(rows, size), torch.empty(rows, HEADS * DIM)
    gate_up, activated = torch.empty(rows, 64), torch.empty(rows, 32)
    k, v = torch.zeros(4, KV_HEADS, DIM, 16), torch.zeros(4, KV_HEADS, 16, DIM)
    angles = torch.rand(64, DIM // 2)
    heads = (HEADS, KV_HEADS, DIM)
    return [
        RMSNorm(x, torch.rand(WIDTH), normed, 1e-5),
        Linear(normed, 0.1 * torch.randn(size, WIDTH), qkv),
        RopeKV(qkv, angles.cos(), angles.sin(), k, v, *heads),
        Attention(qkv, attended, k, v, *heads, DIM**-0.5),
        Linear(attended, 0.1 * torch.randn(WIDTH, HEADS * DIM), x, accumulate=True),
        RMSNorm(x, torch.rand(WIDTH), normed, 1e-5),
        Linear(normed, 0.1 * torch.randn(64, WIDTH), gate_up),
        Activation(gate_up, activated, "silu", gated=True),
        Linear(activated, 0.1 * torch.randn(WIDTH, 32), x, accumulate=True),
    ], x


def run(executor: Executor, start: Tensor, chunks: list[int]) -> Tensor:
    ops, x = layer(torch.empty_like(start))
    program = executor.program(len(start))
    program.add(ops)
    done, found = 0, []
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    for count in chunks:
        positions = torch.arange(done, done + count, dtype=torch.int32)
        slots = (table[0][positions.long() // 16] * 16 + positions % 16).int()
        starts = torch.tensor([0, count], dtype=torch.int32)
        x[:count] = start[done : done + count]
        program.run(Step(positions, positions, slots, starts, table, positions[:0]))
        found.append(x[:count].clone())
        done += count
    return torch.cat(found)


@pytest.mark.parametrize(
    "missing", [(), (RMSNorm,), (Linear,), (Attention,), (RopeKV, Linear), (RMSNorm, Activation, RopeKV, Attention)]
)
def test_a_program_without_some_kernels_computes_the_same(missing: tuple[type, ...]) -> None:
    executor, start = WithoutKernels(*missing), torch.randn(37, WIDTH)
    whole = run(executor, start, [37])
    torch.testing.assert_close(whole, run(ReferenceExecutor(), start, [37]), rtol=1e-4, atol=1e-5)
    for chunks in ([20, 1, 16], [1] * 37):
        assert torch.equal(run(executor, start, chunks), whole)


def test_what_has_no_kernel_is_said() -> None:
    ops, _ = layer(torch.zeros(1, WIDTH))
    assert isinstance(ops[3], Attention)
    assert not registry.fallbacks(native.NativeExecutor(1), ops)
    wide = replace(ops[3], head_dim=257)
    found = registry.fallbacks(native.NativeExecutor(1), [wide])
    assert found == {"attention: a head_dim of 257 has no C kernel: at most 256": 1}
    assert not registry.fallbacks(ReferenceExecutor(), ops)
    assert "rms_norm: there is none" in registry.fallbacks(WithoutKernels(RMSNorm), ops)
