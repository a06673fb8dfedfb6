"""The linear products on a GPU: every scheme in every dtype, at few and at many rows, and in a graph.

``pytest -m gpu``. What is checked in float16 without a GPU is checked here in bfloat16 too, and the assembly with it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import ops, reference
from qserve.kernels.triton import linear, scaled_mm
from qserve.kernels.triton.target import is_interpreted, target
from qserve.kernels.triton.tuning.configs import bucket_of
from qserve.kernels.triton.workspace import Workspace
from tests.kernels.quantized_weights import make_weight

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(is_interpreted(), reason="no GPU is visible")]
graphs = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 1e-5}
FP8_TOLERANCE = 1e-3
"""Hopper adds up products of FP8 with some 14 bits."""
INT8, FP8 = ActivationScheme("int8"), ActivationScheme("fp8")
SCHEMES = [
    *[(WeightScheme(bits, group, symmetric), None)
      for bits, group in ((4, 128), (4, 64), (4, 32), (4, -1), (3, 128), (2, 64), (8, 128), (8, 32), (8, -1))
      for symmetric in (True, False)],
    *[(WeightScheme(bits, group, dtype="trellis"), None) for bits, group in ((2, 128), (3, 64), (4, 32), (3, -1))],
    (WeightScheme(8, -1), INT8),
    (WeightScheme(8, 128), INT8),
    (WeightScheme(8, -1), ActivationScheme("int8", "tensor", dynamic=False)),
    (WeightScheme(8, -1, dtype="fp8"), FP8),
    (WeightScheme(8, -1, dtype="fp8", rows=-1), ActivationScheme("fp8", "tensor", dynamic=False)),
    (WeightScheme(8, 128, dtype="fp8", rows=128), ActivationScheme("fp8", "group", group_size=128)),
    (WeightScheme(4, 128), FP8),
]  # fmt: skip


def weight_of(scheme: WeightScheme, activations: ActivationScheme | None, out: int, inp: int) -> QuantizedWeight:
    groups, height = scheme.groups(inp), scheme.row_height(out)
    scales = (torch.rand(-(-out // height), groups) * 0.02 + 0.001).half().float()
    codes = torch.randint(0, scheme.max_code + 1, (out, inp)).to(torch.uint8)
    if scheme.dtype == "trellis":
        return replace(make_weight(out, inp, scheme), scales=scales)
    if scheme.dtype == "fp8":
        codes = (torch.randn(out, inp) * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    zeros = None if scheme.symmetric else torch.randint(0, scheme.max_code + 1, (out, groups)).to(torch.uint8)
    static = activations is not None and not activations.dynamic
    made = QuantizedWeight(scheme, codes, scales.repeat_interleave(height, 0)[:out].contiguous(), zeros,
                           activations=activations, input_scale=0.02 if static else None)  # fmt: skip
    made.check()
    return made


def expected_of(op: ops.Linear, rows: int) -> torch.Tensor:
    """The reference's result on the GPU, in float32 without TF32."""
    assert isinstance(op.weight, QuantizedWeight) and op.bias is not None
    x = op.x[:rows].float().cpu()
    if op.weight.activations is not None:
        x = reference.round_input(x, op.weight.activations, op.weight.input_scale)
    product = x.to(DEVICE).double() @ op.weight.dequantize().to(DEVICE).double().t()
    return product + op.bias.double() + op.out[:rows].double()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("scheme", "activations"), SCHEMES, ids=str)
def test_every_scheme(scheme: WeightScheme, activations: ActivationScheme | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = weight_of(scheme, activations, 390, 1100)
    if reason := linear.supports(weight, target(DEVICE)):
        pytest.skip(reason)
    for rows in (1, 3, 17, 70, 300, 1100):  # the last two by the kernels for many rows
        x = torch.randn(rows, 1100, device=DEVICE, dtype=dtype)
        wide = torch.randn(rows, 422, device=DEVICE, dtype=dtype)
        before = wide.clone()
        op = ops.Linear(x, weight, wide[:, 16:-16], torch.randn(390, device=DEVICE, dtype=dtype), accumulate=True)
        expected = expected_of(op, rows)
        linear.prepare(op, Workspace(DEVICE)).run(rows)
        got = op.out.double()
        fp8 = activations is not None and activations.dtype == "fp8"
        tolerance = max(TOLERANCE[dtype], FP8_TOLERANCE if fp8 else 0.0)
        assert float((got - expected).norm() / expected.norm()) < tolerance, rows
        assert torch.equal(wide[:, :16], before[:, :16]) and torch.equal(wide[:, -16:], before[:, -16:])


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("scheme", "activations"), SCHEMES[-4:-2], ids=str)
def test_scaled_mm(scheme: WeightScheme, activations: ActivationScheme, adds: bool, rows: int) -> None:
    """Stored in bfloat16, or added to float32."""
    torch.manual_seed(4)
    dtype = torch.float32 if adds else torch.bfloat16
    x = torch.randn(rows, 1100, device=DEVICE, dtype=torch.bfloat16)
    out = torch.randn(rows, 400, device=DEVICE) if adds else torch.zeros(rows, 400, device=DEVICE, dtype=dtype)
    bias = torch.randn(400, device=DEVICE, dtype=dtype)
    op = ops.Linear(x, weight_of(scheme, activations, 400, 1100), out, bias, accumulate=adds)
    expected = expected_of(op, rows)
    product = linear.prepare(op, Workspace(DEVICE))
    if scaled_mm.CONFIG not in product.for_many():  # type: ignore[attr-defined]
        pytest.skip("this GPU has none")
    product.configure({bucket_of(rows): scaled_mm.CONFIG})  # type: ignore[attr-defined]
    product.run(rows)
    error = float((op.out.double() - expected).norm() / expected.norm())
    assert error < (FP8_TOLERANCE if adds else TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("activations", [None, INT8])
def test_a_row_is_the_same_in_every_batch(activations: ActivationScheme | None, shuffled: bool) -> None:
    torch.manual_seed(1)
    weight = weight_of(WeightScheme(4, 128), activations, 1024, 4096)
    if shuffled:
        weight = replace(weight, g_idx=(torch.arange(4096) // 128)[torch.randperm(4096)].int())
    x = torch.randn(600, 4096, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty(600, 1024, device=DEVICE, dtype=torch.bfloat16)
    product = linear.prepare(ops.Linear(x, weight, out), Workspace(DEVICE), batch_invariant=True)
    product.run(600)
    together = out.clone()
    for rows in (1, 16, 17, 64, 300):
        out.fill_(torch.nan)
        product.run(rows)
        assert torch.equal(out[:rows], together[:rows]), rows


@graphs
def test_a_graph_replays_a_split_product() -> None:
    torch.manual_seed(2)
    weight = weight_of(WeightScheme(4, 128), None, 1024, 8192)
    x = torch.randn(16, 8192, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty(16, 1024, device=DEVICE, dtype=torch.bfloat16)
    product = linear.prepare(ops.Linear(x, weight, out), Workspace(DEVICE))
    product.run(16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product.run(16)
    for _ in range(20):
        x.normal_()
        graph.replay()
        replayed = out.clone()
        out.fill_(torch.nan)
        product.run(16)
        assert torch.equal(out, replayed) and out.isfinite().all()


@graphs
@pytest.mark.parametrize("rows", [600, 2048])
@pytest.mark.parametrize(
    "scheme", [*SCHEMES[-4:-1], (WeightScheme(8, -1), INT8), (WeightScheme(4, 128), None)], ids=str
)
def test_a_graph_replays_a_product_of_many_rows(
    scheme: tuple[WeightScheme, ActivationScheme | None], rows: int
) -> None:
    """Descriptors are arguments by value: a graph has those of the addresses that it was captured with. Several tiles
    to a program."""
    torch.manual_seed(3)
    weight = weight_of(*scheme, 8192, 1024)
    if reason := linear.supports(weight, target(DEVICE)):
        pytest.skip(reason)
    x = torch.randn(rows, 1024, device=DEVICE, dtype=torch.bfloat16)
    out = torch.zeros(rows, 8192, device=DEVICE, dtype=torch.bfloat16)
    product = linear.prepare(ops.Linear(x, weight, out), Workspace(DEVICE))
    product.run(rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product.run(rows)
    for _ in range(10):
        x.normal_()
        out.fill_(torch.nan)
        graph.replay()
        replayed = out.clone()
        few = linear.prepare(ops.Linear(x, weight, torch.empty_like(out)), Workspace(DEVICE), batch_invariant=True)
        few.run(rows)
        want = few.op.out.double()  # type: ignore[attr-defined]
        assert float((replayed.double() - want).norm() / want.norm()) < TOLERANCE[torch.bfloat16]
        out.fill_(torch.nan)
        product.run(rows)
        assert torch.equal(out, replayed)
