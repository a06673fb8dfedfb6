"""``Lora`` on the C kernels and in the reference: at odd sizes, with mixed adapters, and bit for bit the same alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qserve.checkpoint.lora import LoraWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import native
from qserve.kernels.executor import Executor, Step
from qserve.kernels.lora_slots import LoraSlots, LoraTiles
from qserve.kernels.ops import Linear, Lora
from qserve.kernels.reference import ReferenceExecutor
from tests.kernels.quantized_weights import make_weight

SHAPES = [  # width, (first column, columns) of each linear
    (64, [(0, 64), (64, 32), (96, 32)]),
    (576, [(0, 576)]),
    (17, [(0, 5), (5, 33)]),
    (1, [(0, 1)]),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def slots_of(width: int, parts: list[tuple[int, int]], ranks: list[int]) -> LoraSlots:
    """An adapter of each rank, of all linears but the one that its number names."""
    slots = LoraSlots(parts, len(ranks), max(ranks))
    for slot, rank in enumerate(ranks):
        dtype = DTYPES[slot % 3]
        weights = [LoraWeight(torch.randn(rank, width).to(dtype), torch.randn(n, rank).to(dtype), 0.3 + slot)
                   for _, n in parts]  # fmt: skip
        slots.put(slot, [None if part + 1 == slot else LoraTiles.of(weight) for part, weight in enumerate(weights)])
    return slots


def step_of(adapters: list[int]) -> Step:
    every = torch.arange(len(adapters), dtype=torch.int32)
    starts = torch.tensor([0, len(adapters)], dtype=torch.int32)
    return Step(every, every, every, starts, every[None], every, torch.tensor(adapters, dtype=torch.int32))


def run(on: Executor, op: Lora, step: Step) -> Tensor:
    program = on.program(step.tokens)
    program.add([op])
    program.run(step)
    return op.out


def executors() -> list[Executor]:
    return [native.NativeExecutor(2, isa) for isa in native.available()]


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize(("width", "parts"), SHAPES)
def test_the_kernels_compute_what_the_reference_does(width: int, parts: list[tuple[int, int]]) -> None:
    torch.manual_seed(width)
    slots = slots_of(width, parts, [16, 1, 5, 64])
    for adapters in ([0], [-1], [3] * 7, [1, 0, -1, 0, 2, 2, 3, -1, 3, 1], [0] * 61 + [2] * 30):
        x, start = torch.randn(len(adapters), width), torch.randn(len(adapters), sum(n for _, n in parts) + 3)
        step, free = step_of(adapters), torch.tensor(adapters) < 0
        wanted = run(ReferenceExecutor(), Lora(x, start.clone()[:, 1:-2], slots), step)
        assert torch.equal(wanted[free], start[free, 1:-2])
        for executor in executors():
            whole = start.clone()
            found = run(executor, Lora(x, whole[:, 1:-2], slots), step)
            assert torch.equal(whole[free], start[free]), "a row without an adapter has changed"
            assert torch.equal(whole[:, [0, -2, -1]], start[:, [0, -2, -1]]), "it wrote beside its columns"
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4 * width**0.5)


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_a_row_has_the_same_bits_alone() -> None:
    torch.manual_seed(1)
    width, parts = 100, [(0, 70), (70, 18)]
    slots, adapters = slots_of(width, parts, [16, 40, 7]), [0, 0, 0, 0, 0, 0, 0, 2, 1, -1, 1, 2, 0, 0]
    x, start = torch.randn(len(adapters), width), torch.randn(len(adapters), 88)
    for executor in executors():
        together = run(executor, Lora(x, start.clone(), slots), step_of(adapters))
        for row, adapter in enumerate(adapters):
            alone = Lora(x[row : row + 1].clone(), start[row : row + 1].clone(), slots)
            assert torch.equal(run(executor, alone, step_of([adapter]))[0], together[row])


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize(("width", "parts"), [
    (100, [(0, 64), (64, 48), (112, 7)]), (33, [(0, 400)]), (17, [(0, 5), (5, 33)]),
])  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
def test_with_its_product_it_gives_the_bits_that_it_gives_behind_it(
    width: int, parts: list[tuple[int, int]], packed: bool
) -> None:
    """Linears that begin within a tile are computed behind the product; there both sides do the same."""
    torch.manual_seed(width)
    slots, n = slots_of(width, parts, [16, 1, 40]), sum(size for _, size in parts)
    weight = torch.randn(n, width)
    linear = make_weight(n, width, WeightScheme(8, -1), ActivationScheme("int8")) if packed else weight
    for adapters in ([0], [2, -1], [1, 0, -1, 0, 2, 2, 2], [2] * 50 + [-1, 0, 1, 2, 0, 1]):
        x, start, step = torch.randn(len(adapters), width), torch.randn(len(adapters), n), step_of(adapters)
        for executor in executors():
            for accumulate in (False, True):
                apart, together = start.clone(), start.clone()
                for ops in ([Linear(x, linear, apart, accumulate=accumulate)], [Lora(x, apart, slots)],
                            [Linear(x, linear, together, accumulate=accumulate), Lora(x, together, slots)]):
                    program = executor.program(len(adapters))
                    program.add(ops)
                    program.run(step)
                assert torch.equal(apart, together), (executor.isa, adapters, accumulate)


def test_matrices_take_the_narrowest_dtype_that_holds_them() -> None:
    a, b = torch.randn(4, 24), torch.randn(20, 4)
    for dtype in DTYPES:
        tiles = LoraTiles.of(LoraWeight(a.to(dtype).float(), b.to(dtype).float(), 1.0))
        assert tiles.a.dtype == tiles.b.dtype == dtype
        assert all(map(torch.equal, tiles.matrices(20), (a.to(dtype).float(), b.to(dtype).float())))


def test_an_emptied_slot_adds_nothing() -> None:
    slots = slots_of(32, [(0, 32)], [8])
    x, start = torch.randn(2, 32), torch.randn(2, 32)
    slots.clear(0)
    for executor in [*executors(), ReferenceExecutor()]:
        assert torch.equal(run(executor, Lora(x, start.clone(), slots), step_of([0, 0])), start)
