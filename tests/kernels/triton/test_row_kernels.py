"""The Triton kernels that take row by row, in the interpreter, against the torch reference over odd sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels.ops import (
    Activation,
    Cast,
    Function,
    HeadNorm,
    LayerNorm,
    Linear,
    Op,
    PositionEmbed,
    RMSNorm,
    SigmoidMul,
    SoftCap,
)
from qserve.kernels.reference import ReferenceExecutor
from tests.kernels.quantized_weights import make_weight
from tests.kernels.triton.test_engine_kernels import make_step, run_on, triton_executor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_gpu_engine.py runs")

DTYPES = [torch.float32, torch.float16]
WIDTHS = [1, 63, 100, 1536]


def compare(make: Callable[[Tensor], list[Op]], out: Tensor, *, rows: int | None = None) -> None:
    """``make`` gives the operations that write to a buffer, which begins as a copy of ``out``. More rows than a step
    has are left alone."""
    rows = len(out) if rows is None else rows
    got, want = out.clone(), out.float()
    run_on(triton_executor(), make(got), make_step(rows))
    run_on(ReferenceExecutor(), make(want), make_step(rows))
    close = {"rtol": 2e-3, "atol": 1e-4} if out.dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got.float(), want, equal_nan=True, **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, weight, bias = torch.randn(4, width) * 5 + 2, torch.randn(width), torch.randn(width)
    x[1, width // 2], x[2, 0] = math.nan, 1e4
    out = torch.randn(4, width).to(dtype)
    stream = out.float()
    compare(lambda out: [RMSNorm(x, weight, out, 1e-5)], out)
    compare(lambda out: [RMSNorm(x, weight, out, 1e-5, accumulate=True)], stream, rows=3)
    compare(lambda out: [LayerNorm(x, weight, bias, out, 1e-5)], out)
    compare(lambda out: [LayerNorm(x, weight.half(), None, out, 1e-5, rows="logits")], out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_heads_in_a_part_of_a_buffer(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    heads, dim = 5, 12
    weight = torch.randn(heads * dim)
    qkv = (torch.randn(3, 8 * dim) * 3).to(dtype)
    compare(lambda qkv: [HeadNorm(qkv[:, 2 * dim : 7 * dim], weight, dim, 1e-5)], qkv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", get_args(Function))
def test_activations(function: Function, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    for width, gated in itertools.product((1, 33, 1100), (False, True)):
        x = (torch.randn(3, width * (1 + gated)) * 6).to(dtype)
        x[1, width // 2] = math.nan
        out = torch.zeros(3, width, dtype=dtype)
        compare(lambda out, x=x, gated=gated: [Activation(x, out, function, gated)], out)
        if not gated:
            compare(lambda x: [Activation(x, x, function, False)], x)  # in place


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 1100])
def test_gates_caps_positions_and_dtypes(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, table = torch.randn(4, width) * 9, torch.randn(9, width).to(dtype)
    for gates in (1, width):
        gate = (torch.randn(4, gates) * 4).to(dtype)
        compare(lambda out, gate=gate: [SigmoidMul(gate, out)], x.to(dtype))
    logits = torch.cat([x, x * 1e4, torch.tensor([math.inf, -math.inf, math.nan])[:, None].expand(3, width)])
    for cap in (0.7, 30.0):
        compare(lambda x, cap=cap: [SoftCap(x, cap)], logits)
    compare(lambda x: [PositionEmbed(table, x, offset=5)], x)
    compare(lambda out: [Cast(x, out)], torch.zeros(4, width, dtype=dtype))


def test_what_makes_a_row_rounds_it_for_the_product_behind_it() -> None:
    """Whoever makes it; the residual stream, to which a norm adds, too."""
    torch.manual_seed(4)
    weight = make_weight(24, 96, WeightScheme(8, -1), ActivationScheme("int8"))
    x, ones, given = torch.randn(5, 96) * 3 + 1, torch.rand(96) + 0.5, torch.randn(5, 96)
    makers: list[Callable[[Tensor], Op]] = [
        lambda made: RMSNorm(x, ones, made, 1e-5, accumulate=True),
        lambda made: LayerNorm(x, ones, ones, made, 1e-5),
        lambda made: Activation(x, made, "gelu_tanh", gated=False),
    ]
    for maker in makers:
        rounded, apart = torch.empty(5, 24), torch.empty(5, 24)
        one, other = given.clone(), given.clone()
        run_on(triton_executor(), [maker(one), Linear(one, weight, rounded)], make_step(5))
        run_on(triton_executor(), [maker(other)], make_step(5))
        run_on(triton_executor(), [Linear(other, weight, apart)], make_step(5))
        assert torch.equal(one, other) and torch.equal(rounded, apart)
