"""The Triton kernels of adapters, in the interpreter, against the torch reference at odd sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qserve.kernels.executor import CPU
from qserve.kernels.ops import Linear, Lora
from qserve.kernels.reference import ReferenceExecutor
from qserve.kernels.triton import lora, target
from qserve.kernels.triton.adapted_rows import adapted_rows
from qserve.kernels.triton.executor import TritonExecutor
from tests.kernels.test_lora import run, slots_of, step_of
from tests.kernels.triton.test_engine_kernels import triton_executor

pytestmark = pytest.mark.skipif(not target.is_interpreted(), reason="the interpreter computes them in float32")
MIXED = [1, 0, -1, 0, 2, 2, 3, -1, 3, 1]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("width", "parts"), [
    (64, [(0, 64), (64, 32), (96, 32)]), (576, [(0, 576)]), (17, [(0, 5), (5, 33)]), (1, [(0, 1)]),
    (1200, [(0, 150), (150, 20)]),
])  # fmt: skip
def test_the_kernels_compute_what_the_reference_does(
    width: int, parts: list[tuple[int, int]], invariant: bool
) -> None:
    torch.manual_seed(width)
    slots, columns = slots_of(width, parts, [16, 1, 5, 70]), sum(n for _, n in parts)
    for adapters in ([0], [-1], [3] * 7, MIXED, [0] * 61 + [2] * 30):
        x, start = torch.randn(len(adapters), width), torch.randn(len(adapters), columns + 3)
        step, free, whole = step_of(adapters), torch.tensor(adapters) < 0, start.clone()
        wanted = run(ReferenceExecutor(), Lora(x, start.clone()[:, 1:-2], slots), step)
        found = run(triton_executor(invariant=invariant), Lora(x, whole[:, 1:-2], slots), step)
        assert torch.equal(whole[free], start[free]), "a row without an adapter has changed"
        assert torch.equal(whole[:, [0, -2, -1]], start[:, [0, -2, -1]]), "it wrote beside its columns"
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4 * width**0.5)


def test_steps_of_many_rows_have_larger_tiles() -> None:
    torch.manual_seed(3)
    slots = slots_of(130, [(0, 40)], [16, 4, 33])
    adapters = ([0] * 70 + [2] * 130 + [-1, 1] * 60)[: lora._MOST_OF_FEW + 50]
    x, start = torch.randn(len(adapters), 130), torch.randn(len(adapters), 40)
    wanted = run(ReferenceExecutor(), Lora(x, start.clone(), slots), step_of(adapters))
    assert lora.shape_of(len(adapters), invariant=False) is lora.MANY
    found = run(triton_executor(), Lora(x, start.clone(), slots), step_of(adapters))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_row_has_the_same_bits_beside_others(same_sums: None, invariant: bool) -> None:
    """As long as the number of rows asks for no other tiles; in the invariant mode with any."""
    torch.manual_seed(1)
    width, parts = 1100, [(0, 70), (70, 18)]
    slots, adapters = slots_of(width, parts, [16, 40, 7, 1]), MIXED + [0] * (300 if invariant else 20)
    x, start = torch.randn(len(adapters), width), torch.randn(len(adapters), 88)
    together = run(triton_executor(invariant=invariant), Lora(x, start.clone(), slots), step_of(adapters))
    for row, adapter in enumerate(adapters[:12]):
        alone = Lora(x[row : row + 1].clone(), start[row : row + 1].clone(), slots)
        found = run(triton_executor(invariant=invariant), alone, step_of([adapter]))
        assert torch.equal(found[0], together[row])


def test_adapters_come_and_go_in_a_program_that_is_ready() -> None:
    torch.manual_seed(2)
    slots, other = (slots_of(48, [(0, 20), (20, 12)], [8, 3]) for _ in range(2))
    x, start, step = torch.randn(3, 48), torch.randn(3, 32), step_of([0, 1, 0])
    out = start.clone()
    program = triton_executor().program(3)
    program.add([Lora(x, out, slots)])
    for slot, matrices in ((1, other.held[0]), (0, other.held[1]), (1, (None, None)), (0, (None, None))):
        slots.put(slot, matrices)
        out.copy_(start)
        program.run(step)
        wanted = run(ReferenceExecutor(), Lora(x, start.clone(), slots), step)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-3)
    assert torch.equal(out, start)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_matrices_are_held_in_the_dtype_of_the_activations(kind: torch.dtype) -> None:
    """Behind a product, into the residual stream in float32 and into a buffer of the activations."""
    torch.manual_seed(4)
    slots, weight = slots_of(48, [(0, 32)], [8]), torch.randn(32, 48)
    x, step = torch.randn(5, 48).to(kind), step_of([0, -1, 0, 0, -1])
    for out_kind in {kind, torch.float32}:
        start = torch.randn(5, 32).to(out_kind)

        def outputs(executor: TritonExecutor | ReferenceExecutor, start: Tensor = start) -> Tensor:
            out = start.clone()
            program = executor.program(5)
            program.add([Linear(x, weight.to(kind), out, accumulate=out.dtype == torch.float32), Lora(x, out, slots)])
            program.run(step)
            return out.float()

        close = {"rtol": 1e-5, "atol": 1e-3} if kind == torch.float32 else {"rtol": 2e-3, "atol": 0.1}
        torch.testing.assert_close(outputs(TritonExecutor(CPU, kind)), outputs(ReferenceExecutor()), **close)


def test_every_row_with_an_adapter_is_in_one_tile() -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        rows, block = int(torch.randint(1, 90, (), generator=generator)), 16
        adapters = torch.randint(-2, 6, (rows,), generator=generator).clamp(-1).tolist()
        found = adapted_rows(step_of(adapters), 8, block)
        assert found is not None and len(found.tiles) <= found.most(rows)
        covered = []
        for slot, first, count in found.tiles.tolist():
            covered += found.order[first : first + count].tolist()
            assert 0 < count <= block and all(adapters[row] == slot for row in found.order[first : first + count])
        assert covered == found.order.tolist()
        assert sorted(covered) == [row for row, slot in enumerate(adapters) if slot >= 0]
