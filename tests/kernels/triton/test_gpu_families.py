"""What families other than Llama's need, in the 16 bits of a GPU: norms, activations, gates, caps, and experts.

``pytest -m gpu``; beside ``test_gpu_engine.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from qserve.kernels import ops
from qserve.kernels.executor import Step
from qserve.kernels.ops import Op
from qserve.kernels.reference import ReferenceExecutor, on_device
from qserve.kernels.triton.executor import TritonExecutor
from tests.kernels.triton.test_expert_kernels import SCHEMES, experts_op, route
from tests.kernels.triton.test_gpu_engine import ACTIVATIONS, DEVICE, ints

pytestmark = pytest.mark.gpu
PLACES = {torch.float16: 2**-9, torch.bfloat16: 2**-6}


def plain_step(rows: int) -> Step:
    every = torch.arange(rows, dtype=torch.int32)
    return Step(every, every, every, ints([0, rows]), every[:1, None], every)


def run(op: Op, executor: TritonExecutor | ReferenceExecutor, rows: int) -> None:
    assert executor.supports(op) is None
    program = executor.program(rows)
    program.add([op])
    program.run(plain_step(rows))


@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("width", [40, 1100])
def test_what_families_need_row_by_row(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    rows = 3
    x, stream, gate = torch.randn(rows, width) * 4, torch.randn(rows, width), torch.randn(rows, 1).to(dtype)
    weight, bias, table = torch.randn(width), torch.randn(width), torch.randn(9, width).to(dtype)
    low = x.to(dtype)
    out = torch.empty_like(low)
    made: list[tuple[Op, str]] = [
        (ops.LayerNorm(x, weight, bias, out, 1e-5), "out"),
        (ops.RMSNorm(x, weight, stream, 1e-5, accumulate=True), "out"),
        (ops.HeadNorm(low, weight, width // 4, 1e-5), "x"),
        (ops.PositionEmbed(table, stream, 2), "out"),
        (ops.Cast(x, out), "out"),
        (ops.SoftCap(x, 3.0), "x"),
        (ops.SigmoidMul(gate, low), "out"),
        *((ops.Activation(low, out, function, False), "out") for function in get_args(ops.Function)),
    ]
    for op, name in made:
        got, want = (on_device(copied(op), device) for device in (DEVICE, torch.device("cpu")))
        run(got, TritonExecutor(DEVICE, dtype), rows)
        run(want, ReferenceExecutor(), rows)
        torch.testing.assert_close(
            getattr(got, name).cpu().float(), getattr(want, name).float(), rtol=PLACES[dtype], atol=PLACES[dtype]
        )


def copied(op: Op) -> Op:
    found = {name: value.clone() for name, value in vars(op).items() if isinstance(value, torch.Tensor)}
    return replace(op, **found)


@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("kind", ["dense", *SCHEMES])
def test_experts_in_16_bits(kind: str, dtype: torch.dtype) -> None:
    op = experts_op(kind, 20, 3, dtype)
    small: Any = on_device(op, DEVICE)
    executor = TritonExecutor(DEVICE, dtype)
    if (reason := executor.supports(small)) is not None:
        pytest.skip(reason)
    want = replace(op, x=op.x.float(), out=op.out.clone())
    run(want, ReferenceExecutor(), 20)
    run(small, executor, 20)
    size = want.out.abs().max()
    loose = 3 * PLACES[dtype]
    if kind in ("int8", "int8-groups", "fp8"):  # a last bit of an activation may cross a tie
        loose = 0.1 if kind == "fp8" else 0.03
    assert (small.out.cpu() - want.out).abs().max() <= loose * size


def test_routing_in_a_graph() -> None:
    """Without attention every step is captured: once launched and once replayed, padded from 7 rows to 8."""
    torch.manual_seed(0)
    op = on_device(route(torch.randn(8, 60), 6, groups=4, top_groups=2, sigmoid=True), DEVICE)
    want = on_device(replace(op, experts=op.experts.clone()), torch.device("cpu"))
    run(want, ReferenceExecutor(), 7)
    program = TritonExecutor(DEVICE).program(8)
    program.add([op])
    for _ in range(2):
        op.experts.fill_(-9)
        program.run(plain_step(7))
        assert torch.equal(op.experts[:7].cpu(), want.experts[:7])
