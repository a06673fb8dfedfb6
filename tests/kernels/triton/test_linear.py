"""The linear products of the Triton kernels against the reference, at odd sizes.

In float16 and float32 only: the interpreter multiplies the raw bits of bfloat16 and says nothing. On a machine with
a GPU the same tests run compiled, on it.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import NVFP4, NVFP4_INPUTS, ActivationScheme, WeightScheme
from qserve.kernels import ops, reference
from qserve.kernels.triton import dequantize, linear, target, weight_only
from qserve.kernels.triton.dense import multiply
from qserve.kernels.triton.executor import TritonExecutor
from qserve.kernels.triton.prepack import planes
from qserve.kernels.triton.tuning.configs import Config
from qserve.kernels.triton.workspace import Workspace
from tests.kernels.quantized_weights import make_weight

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = pytest.mark.skipif("fp8" not in target.target(DEVICE).features, reason="this GPU has no e4m3")

pytestmark = pytest.mark.skipif(target.missing() is not None, reason=str(target.missing()))


def packed(
    out: int, inp: int, bits: int, group: int, symmetric: bool = True, *, shuffled: bool = False, half: bool = True
) -> QuantizedWeight:
    """Random integers; ``half``: with scales that float16 holds exactly."""
    scheme = WeightScheme(bits, group, symmetric)
    groups = scheme.groups(inp)
    codes = torch.randint(0, scheme.max_code + 1, (out, inp)).to(torch.uint8)
    scales = torch.rand(out, groups) * 0.02 + 0.001
    zeros = None if symmetric else torch.randint(0, scheme.max_code + 1, (out, groups)).to(torch.uint8)
    g_idx = (torch.arange(inp) // scheme.group_width(inp))[torch.randperm(inp)].int() if shuffled else None
    weight = QuantizedWeight(scheme, codes, scales.half().float() if half else scales, zeros, g_idx)
    weight.check()
    return weight


def want(op: ops.Linear, rows: int) -> torch.Tensor:
    """What the reference makes of the same op, in float32 on the CPU."""
    weight = op.weight if isinstance(op.weight, QuantizedWeight) else op.weight.float().cpu()
    out = op.out[:rows].float().cpu().clone()  # not the memory that the kernel will write
    same = ops.Linear(
        op.x[:rows].float().cpu(), weight, out, None if op.bias is None else op.bias.float().cpu(), op.accumulate
    )
    reference.prepare(same).run(slice(0, rows))
    return out


def run(op: ops.Linear, rows: int, batch_invariant: bool = False) -> torch.Tensor:
    weight = op.weight
    assert linear.supports(weight, target.target(DEVICE)) is None
    linear.prepare(op, Workspace(DEVICE), batch_invariant).run(rows)
    return op.out[:rows].float().cpu()


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp_min(1e-12))


TOLERANCE = {torch.float16: 1e-3, torch.float32: 2e-6}
FP8_TOLERANCE = 1e-3 if torch.cuda.is_available() else 2e-6
"""Of what multiplies the same codes: a GPU keeps some 14 bits of sums of e4m3."""
STEP = 2.0**-6
"""The static scale of inputs."""


@pytest.mark.parametrize(
    ("rows", "out", "inp", "bits", "group", "dtype"),
    [
        (1, 130, 512, 4, 128, torch.float16),
        (3, 70, 192, 4, 64, torch.float16),
        (17, 128, 96, 4, 32, torch.float16),
        (70, 200, 256, 4, 128, torch.float16),
        (1, 40, 100, 4, -1, torch.float16),
        (3, 129, 300, 3, 128, torch.float16),
        (2, 20, 48, 2, 16, torch.float16),
        (2, 20, 80, 4, 24, torch.float16),
        (2, 20, 600, 4, 256, torch.float16),
        (1, 130, 256, 8, 128, torch.float16),
        (17, 40, 192, 8, 32, torch.float16),
        (3, 40, 100, 8, -1, torch.float16),
        (3, 70, 192, 4, 64, torch.float32),
        (70, 40, 64, 8, 64, torch.float32),
    ],
)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_weight_only(
    rows: int, out: int, inp: int, bits: int, group: int, dtype: torch.dtype, symmetric: bool
) -> None:
    torch.manual_seed(0)
    weight = packed(out, inp, bits, group, symmetric)
    x = torch.randn(rows + 2, inp, dtype=dtype, device=DEVICE)
    wide = torch.randn(rows + 2, out + 32, dtype=dtype, device=DEVICE)
    before = wide.clone()
    op = ops.Linear(x, weight, wide[:, 16:-16], torch.randn(out, dtype=dtype, device=DEVICE), accumulate=True)
    expected = want(op, rows)
    assert error(run(op, rows), expected) < TOLERANCE[dtype]
    assert torch.equal(wide[:, :16], before[:, :16]) and torch.equal(wide[:, -16:], before[:, -16:])
    assert torch.equal(wide[rows:], before[rows:])


@pytest.mark.parametrize(
    ("inp", "bits", "group", "symmetric"),
    [(320, 4, 32, True), (300, 4, 128, False), (320, 8, 64, True), (300, 3, 128, True)],
)
def test_inputs_in_the_order_of_their_groups(inp: int, bits: int, group: int, symmetric: bool) -> None:
    """Act-order: the inputs of a group are anywhere, and the last group may be short."""
    torch.manual_seed(1)
    weight = packed(70, inp, bits, group, symmetric, shuffled=True)
    x = torch.randn(5, inp, dtype=torch.float16, device=DEVICE)
    op = ops.Linear(x, weight, torch.empty(5, 70, dtype=torch.float16, device=DEVICE))
    expected = want(op, 5)
    assert error(run(op, 5), expected) < 1e-3


def test_scales_that_float16_does_not_hold_stay_exact() -> None:
    torch.manual_seed(2)
    for symmetric in (True, False):
        weight = packed(70, 256, 4, 64, symmetric, half=False)
        x = torch.randn(3, 256, dtype=torch.float16, device=DEVICE)
        op = ops.Linear(x, weight, torch.empty(3, 70, dtype=torch.float32, device=DEVICE))
        expected = want(op, 3)
        # float16 inputs and integers: only the order of a float32 sum differs.
        assert error(run(op, 3), expected) < 1e-6


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_the_same_in_every_batch(bits: int) -> None:
    torch.manual_seed(3)
    weight = packed(140, 1024, bits, 128)
    x = torch.randn(70, 1024, dtype=torch.float16, device=DEVICE)
    out = torch.empty(70, 140, dtype=torch.float16, device=DEVICE)
    op = ops.Linear(x, weight, out)
    together = run(op, 70, batch_invariant=True)
    for rows in (1, 17):
        first = 70 - rows
        alone = run(replace(op, x=x[first:], out=torch.empty_like(out[first:])), rows, batch_invariant=True)
        assert torch.equal(together[first:], alone)


def test_a_split_sum_is_the_same_every_time_and_the_counters_return_to_zero() -> None:
    torch.manual_seed(4)
    weight = packed(256, 4096, 4, 128)
    x = torch.randn(16, 4096, dtype=torch.float16, device=DEVICE)
    op = ops.Linear(x, weight, torch.empty(16, 256, dtype=torch.float16, device=DEVICE))
    product = linear.prepare(op, Workspace(DEVICE))
    assert product.configs[16].splits > 1
    expected = want(op, 16)
    runs = []
    for _ in range(2):
        op.out.fill_(torch.nan)
        product.run(16)
        runs.append(op.out.clone())
    assert torch.equal(runs[0], runs[1]) and error(runs[0].float().cpu(), expected) < 1e-3
    assert int(product.arrived.abs().sum()) == 0


@pytest.mark.parametrize("activations", [None, ActivationScheme("int8")], ids=str)
def test_a_program_keeps_nothing_of_the_weight_it_was_made_of(activations: ActivationScheme | None) -> None:
    weight = packed(64, 128, 8, -1)
    weight = replace(weight, activations=activations)
    x, out = (torch.zeros(4, width, dtype=torch.float16, device=DEVICE) for width in (128, 64))
    codes = weakref.ref(weight.codes)
    program = TritonExecutor(DEVICE, torch.float16).program(4)
    program.add([ops.Linear(x, weight, out), ops.Argmax(out, torch.zeros(4, dtype=torch.int64, device=DEVICE))])
    del weight
    gc.collect()
    assert codes() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dense(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x = torch.randn(7, 100, dtype=dtype, device=DEVICE)
    wide = torch.randn(7, 60, dtype=dtype, device=DEVICE)
    op = ops.Linear(x, torch.randn(33, 100), wide[:, 10:43], torch.randn(33, device=DEVICE), accumulate=True)
    expected = want(op, 5)
    assert error(run(op, 5), expected) < TOLERANCE[dtype]


def rounded(weight: QuantizedWeight, activations: ActivationScheme) -> QuantizedWeight:
    return replace(weight, activations=activations, input_scale=None if activations.dynamic else STEP)


TOKEN8, STATIC8 = ActivationScheme("int8"), ActivationScheme("int8", "tensor", dynamic=False)
GROUP8 = ActivationScheme("int8", "group", group_size=64)


@pytest.mark.parametrize(
    ("rows", "out", "inp", "bits", "group", "symmetric", "activations"),
    [
        (1, 130, 300, 8, -1, True, TOKEN8),
        (3, 70, 192, 8, 64, True, TOKEN8),
        (17, 128, 256, 4, 128, False, TOKEN8),
        (70, 40, 256, 8, 128, True, STATIC8),
        (3, 40, 200, 8, 64, True, GROUP8),
        (2, 40, 256, 8, -1, True, GROUP8),
    ],
)
def test_int8(
    rows: int, out: int, inp: int, bits: int, group: int, symmetric: bool, activations: ActivationScheme
) -> None:
    torch.manual_seed(6)
    for shuffled in [False] + [True] * (group > 0 and activations is TOKEN8):
        weight = rounded(packed(out, inp, bits, group, symmetric, shuffled=shuffled), activations)
        x = torch.randn(rows, inp, dtype=torch.float16, device=DEVICE)
        wide = torch.randn(rows, out + 32, device=DEVICE)
        op = ops.Linear(x, weight, wide[:, 16:-16], torch.randn(out, device=DEVICE), accumulate=True)
        expected = want(op, rows)
        assert error(run(op, rows), expected) < 2e-6  # the codes are the same, so nothing is lost but float32's places


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-30])
def test_extreme_inputs_stay_in_their_row(value: float) -> None:
    torch.manual_seed(7)
    for activations in (TOKEN8, STATIC8, GROUP8):
        weight = rounded(packed(40, 128, 8, 64), activations)
        x = torch.randn(3, 128, device=DEVICE)
        x[1] = value
        op = ops.Linear(x, weight, torch.empty(3, 40, device=DEVICE))
        expected = want(op, 3)
        torch.testing.assert_close(run(op, 3), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("scheme", [TOKEN8, STATIC8])
def test_a_row_that_registers_do_not_hold_is_rounded_in_pieces(scheme: ActivationScheme) -> None:
    torch.manual_seed(7)
    weight = rounded(packed(8, 16500, 8, -1), scheme)
    x = torch.randn(3, 16500, dtype=torch.float16, device=DEVICE)
    x[1, 16490], x[2, 5] = 30.0, torch.inf
    op = ops.Linear(x, weight, torch.empty(3, 8, device=DEVICE))
    expected = want(op, 3)
    torch.testing.assert_close(run(op, 3), expected, rtol=1e-5, atol=1e-4, equal_nan=True)


def e4m3_inputs(rows: int, inp: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Multiples of STEP that e4m3 holds, and as large as it can in each group of 128. Of other numbers the interpreter
    makes half as much where rounding reaches the next power of two."""
    x = (torch.randn(rows, inp, device=DEVICE) / STEP).to(torch.float8_e4m3fn).float() * STEP
    x[:, ::128] = 448 * STEP
    return x.to(dtype)


def packed_fp8(out: int, inp: int, group: int, rows: int) -> QuantizedWeight:
    scheme = WeightScheme(8, group, dtype="fp8", rows=rows)
    height = scheme.row_height(out)
    codes = (torch.randn(out, inp) * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(-(-out // height), scheme.groups(inp)) * 0.01 + 0.001
    weight = QuantizedWeight(scheme, codes, scales.repeat_interleave(height, 0)[:out].contiguous())
    weight.check()
    return weight


TOKEN_FP8, STATIC_FP8 = ActivationScheme("fp8"), ActivationScheme("fp8", "tensor", dynamic=False)
GROUP_FP8 = ActivationScheme("fp8", "group", group_size=128)


@FP8
@pytest.mark.parametrize(
    ("rows", "out", "inp", "group", "height", "activations"),
    [
        (1, 130, 300, -1, 1, TOKEN_FP8),
        (17, 40, 256, -1, -1, STATIC_FP8),
        (3, 200, 300, 128, 128, GROUP_FP8),
        (70, 140, 256, 128, 128, TOKEN_FP8),
    ],
)
def test_fp8(rows: int, out: int, inp: int, group: int, height: int, activations: ActivationScheme) -> None:
    torch.manual_seed(8)
    weight = rounded(packed_fp8(out, inp, group, height), activations)
    x = e4m3_inputs(rows, inp)
    op = ops.Linear(x, weight, torch.randn(rows, out, device=DEVICE), torch.randn(out, device=DEVICE), accumulate=True)
    expected = want(op, rows)
    assert error(run(op, rows), expected) < FP8_TOLERANCE


@FP8
def test_integers_of_four_bits_are_exact_in_fp8() -> None:
    torch.manual_seed(9)
    weight = rounded(packed(70, 256, 4, 128, False), TOKEN_FP8)
    op = ops.Linear(e4m3_inputs(5, 256), weight, torch.empty(5, 70, device=DEVICE))
    expected = want(op, 5)
    assert error(run(op, 5), expected) < FP8_TOLERANCE


@pytest.mark.parametrize(("bits", "side", "refused"), [(4, 1 << 16, False), (4, 100_000, True), (8, 1 << 16, True)])
def test_what_the_kernel_cannot_count_is_refused(bits: int, side: int, refused: bool) -> None:
    codes = torch.empty(side, side, dtype=torch.uint8, device="meta")
    weight = QuantizedWeight(WeightScheme(bits, -1), codes, torch.empty(side, 1, device="meta"))
    reason = linear.supports(weight, (9, 0))
    assert (reason is not None and "16 bits" in reason) == refused


def test_inputs_past_what_is_counted_in_32_bits_are_launched_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(100_000, 28672, dtype=torch.float16, device="meta")
    rows = weight_only.most_rows(x)
    assert 74_000 < rows < 2**31 / 28672
    torch.manual_seed(9)
    weight = packed(70, 256, 4, 128)
    x = torch.randn(300, 256, dtype=torch.float16, device=DEVICE)
    op = ops.Linear(x, weight, torch.empty(300, 70, dtype=torch.float16, device=DEVICE))
    together = run(op, 300)
    launched: list[int] = []
    launch = weight_only.WeightOnly._launch

    def counted(product: weight_only.WeightOnly, x: torch.Tensor, out: torch.Tensor, rows: int, config: Config) -> None:
        launched.append(rows)
        launch(product, x, out, rows, config)

    monkeypatch.setattr(weight_only.WeightOnly, "_launch", counted)
    monkeypatch.setattr(weight_only, "MOST_PLACES", 130 * 256 + 100)
    assert torch.equal(run(op, 300), together) and launched == [130, 130, 40]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_dense_products_in_float32_are_not_rounded_on_the_way(accumulate: bool, biased: bool) -> None:
    """Logits, and what is added to the residual stream."""
    torch.manual_seed(1)
    x, weight = torch.randn(5, 96).bfloat16(), torch.randn(33, 96).bfloat16()
    bias, out = torch.randn(33), torch.randn(5, 33)
    want = x.double() @ weight.double().t() + (bias if biased else 0) + (out if accumulate else 0)
    multiply(x, weight, bias if biased else None, out, accumulate)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "out", "inp", "group", "dtype"),
    [(1, 130, 512, 32, torch.float16), (3, 70, 192, 16, torch.float32), (20, 128, 96, -1, torch.float16),
     (33, 40, 2880, 32, torch.float16)],
)  # fmt: skip
def test_fp4(rows: int, out: int, inp: int, group: int, dtype: torch.dtype) -> None:
    scheme = WeightScheme(4, group, dtype="fp4")
    codes = torch.randint(0, 16, (out, inp), dtype=torch.uint8)
    scales = torch.exp2(torch.randint(-9, -3, (out, scheme.groups(inp))).float())
    weight = QuantizedWeight(scheme, codes, scales)
    x = torch.randn(rows, inp, dtype=dtype, device=DEVICE)
    op = ops.Linear(x, weight, torch.empty(rows, out, dtype=dtype, device=DEVICE))
    assert error(run(op, rows), want(op, rows)) < TOLERANCE[dtype]
    rounded = replace(weight, activations=ActivationScheme("int8"))
    assert "fp4" in str(linear.supports(rounded, target.target(DEVICE)))


def test_inputs_that_nvfp4_rounds_stay_finer() -> None:
    plain = make_weight(70, 192, NVFP4)
    weight = replace(plain, activations=NVFP4_INPUTS, input_scale=0.01)
    x = torch.randn(3, 192, device=DEVICE)
    op = ops.Linear(x, weight, torch.empty(3, 70, device=DEVICE))
    finer = linear.with_finer_inputs(op)
    assert isinstance(finer, ops.Linear) and linear.supports(finer.weight, target.target(DEVICE)) is None
    assert linear.packed_bytes(NVFP4, NVFP4_INPUTS, 70, 192) == linear.packed_bytes(NVFP4, None, 70, 192)
    assert torch.equal(run(finer, 3), run(replace(op, weight=plain), 3))
    assert linear.with_finer_inputs(replace(op, weight=plain)).weight is plain


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_fp4_is_dequantized_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(130, 8)
    scales = torch.exp2(torch.randint(-9, 3, (130, 4)).float())
    weight = QuantizedWeight(WeightScheme(4, 32, dtype="fp4"), codes, scales)
    made = planes(weight, dtype, DEVICE)
    memory = torch.empty(130 * 16 // made.bits * made.slice * made.blocks, dtype=dtype, device=DEVICE)
    assert torch.equal(dequantize.dequantize(made, memory, 0, 130).float().cpu(), weight.dequantize())
