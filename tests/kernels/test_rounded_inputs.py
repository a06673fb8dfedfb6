"""Inputs that are rounded to int8 or e4m3 before a product: the reference against its own definition, and each ISA bit
for bit like it; refusals, and memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.grid import E2M1
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import MXFP4, NVFP4, NVFP4_INPUTS, ActivationScheme, WeightScheme
from qserve.kernels import native
from qserve.kernels.executor import Executor, Step
from qserve.kernels.ops import Embed, Linear
from qserve.kernels.prepack import int_tiles, tile_bytes
from qserve.kernels.reference import round_input
from tests.kernels.quantized_weights import make_weight

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

INT8 = ActivationScheme("int8")
INT8_STATIC = ActivationScheme("int8", "tensor", dynamic=False)
INT8_GROUP = ActivationScheme("int8", "group", group_size=32)
FP8 = ActivationScheme("fp8")
FP8_STATIC = ActivationScheme("fp8", "tensor", dynamic=False)
FP8_TENSOR = ActivationScheme("fp8", "tensor")
FP8_GROUP = ActivationScheme("fp8", "group", group_size=128)
SCHEMES = [INT8, INT8_STATIC, INT8_GROUP, FP8, FP8_STATIC, FP8_TENSOR, FP8_GROUP]

CHANNEL = WeightScheme(8, -1)
FP8_CHANNEL = WeightScheme(8, -1, dtype="fp8")
FP8_PER_TENSOR = WeightScheme(8, -1, dtype="fp8", rows=-1)
FP8_BLOCK = WeightScheme(8, 128, dtype="fp8", rows=128)


@pytest.fixture(params=native.available())
def isa(request: pytest.FixtureRequest) -> native.Isa:
    return request.param


def product(executor: Executor, x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    out = torch.empty(len(x), weight.out_features)
    op = Linear(x, weight, out)
    assert executor.supports(op) is None
    every = torch.arange(len(x), dtype=torch.int32)
    program = executor.program(len(x))
    program.add([op])
    program.run(Step(every, every, every, torch.tensor([0, len(x)], dtype=torch.int32), every[None], every))
    return out


def identity(size: int, dtype: str, activations: ActivationScheme, input_scale: float | None = None) -> QuantizedWeight:
    """A weight whose product is its input as it was rounded."""
    one, zero = (0x38, 0) if dtype == "fp8" else (129, 128)
    codes = torch.full((size, size), zero, dtype=torch.uint8)
    codes.fill_diagonal_(one)
    scheme = FP8_CHANNEL if dtype == "fp8" else CHANNEL
    return QuantizedWeight(scheme, codes, torch.ones(size, 1), activations=activations, input_scale=input_scale)


def e4m3_grid() -> torch.Tensor:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("activations", SCHEMES, ids=str)
def test_round_input_takes_the_nearest_of_the_grid(activations: ActivationScheme) -> None:
    """Against a search over all values that the scheme can hold, a span and an element at a time."""
    torch.manual_seed(0)
    x = torch.randn(4, 200) * torch.tensor([[0.01], [1.0], [30.0], [1e-35]])
    grid = e4m3_grid() if activations.dtype == "fp8" else torch.arange(-128, 128.0)
    limit = 448 if activations.dtype == "fp8" else 127
    scale = None if activations.dynamic else 0.02
    got = round_input(x, activations, scale)
    assert got.dtype == torch.float32 and got.shape == x.shape
    size = activations.group_size if activations.granularity == "group" else 200
    for row, rounded in zip(x.double(), got.double()):
        for span, mine in zip(row.split(size), rounded.split(size)):
            step = scale or float(span.abs().max()) / limit
            if step * limit < 1e-30:
                assert not mine.any()
                continue
            nearest = (span[:, None] / step - grid.double()).abs().amin(-1)
            torch.testing.assert_close((span / step - mine / step).abs(), nearest, rtol=1e-5, atol=2e-5)


def test_inputs_in_four_bits_take_the_nearest_number_of_the_nearest_scale() -> None:
    """Against a search over all e4m3 numbers, then over all e2m1 numbers (NVFP4)."""
    torch.manual_seed(0)
    x = torch.randn(5, 72) * torch.tensor([[0.01], [1.0], [30.0], [1e-35], [1e4]])
    got, step = round_input(x, NVFP4_INPUTS, 0.02).double(), 0.02
    eights, numbers = e4m3_grid().double(), torch.tensor(E2M1.codebook).double().unique()
    for row, rounded in zip(x.double(), got):
        for span, mine in zip(row.split(16), rounded.split(16)):
            scale = step * float(eights[(span.abs().max() / 6 / step - eights).abs().argmin()])
            if scale == 0:
                assert not mine.any()
                continue
            nearest = (span[:, None] / scale - numbers).abs().amin(-1)
            torch.testing.assert_close((span / scale - mine / scale).abs(), nearest, rtol=1e-5, atol=2e-5)
    half = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -5, 0, 0, 0, 0, 0, 0]])
    assert round_input(half, NVFP4_INPUTS, 1.0).tolist() == [[6, 0, 1, 1, 2, 2, 4, 4, 0, -4, 0, 0, 0, 0, 0, 0]]


def test_the_kernels_round_to_four_bits_like_the_reference(isa: native.Isa) -> None:
    """Not to the last bit, which scales of four-bit floats do not keep."""
    torch.manual_seed(1)
    x = torch.randn(7, 144) * torch.tensor([1e-3, 0.1, 1.0, 40.0, 1e-35, 1e30, 0.0])[:, None]
    codes = torch.zeros(144, 144, dtype=torch.uint8).fill_diagonal_(2)  # 1.0
    weight = QuantizedWeight(NVFP4, codes, torch.ones(144, 9), activations=NVFP4_INPUTS, input_scale=0.03125)
    got, want = product(native.NativeExecutor(2, isa), x, weight), round_input(x, NVFP4_INPUTS, 0.03125)
    torch.testing.assert_close(got, want, rtol=3e-7, atol=0)
    x[3, 20], x[4, 143] = torch.nan, torch.inf
    got = product(native.NativeExecutor(2, isa), x, weight)
    assert bool(got[3].isnan().all() & got[4].isnan().all())  # a product sums over all inputs
    others = [0, 1, 2, 5, 6]
    torch.testing.assert_close(got[others], want[others], rtol=3e-7, atol=0)


@pytest.mark.parametrize("rows", [1, 5, 13, 50])
def test_products_of_weights_and_inputs_in_four_bits(isa: native.Isa, rows: int) -> None:
    weight = make_weight(70, 208, NVFP4, NVFP4_INPUTS)
    x = torch.randn(rows, 208, generator=torch.Generator().manual_seed(rows))
    got = product(native.NativeExecutor(2, isa), x, weight)
    rounded = round_input(x, NVFP4_INPUTS, weight.input_scale).double()
    want = rounded @ weight.dequantize().double().t()
    bound = rounded.abs() @ weight.dequantize().double().abs().t()
    assert bool(((got - want).abs() <= 2e-6 * bound + 1e-9).all())
    plain = x.double() @ weight.dequantize().double().t()
    assert float((got - plain).norm()) > 0.03 * float(plain.norm())
    for row in range(rows):
        alone = product(native.NativeExecutor(1, isa), x[row : row + 1], weight)
        assert torch.equal(alone[0], got[row])


def test_weights_that_no_product_with_inputs_in_four_bits_is_for() -> None:
    shuffled = make_weight(16, 64, WeightScheme(4, 16), NVFP4_INPUTS, shuffled=True)
    for weight in (make_weight(16, 64, FP8_CHANNEL, NVFP4_INPUTS), shuffled):
        reason = native.NativeExecutor(1).supports(Linear(torch.zeros(1, 64), weight, torch.zeros(1, 16)))
        assert reason is not None and "inputs in fp4 have no C kernel" in reason
    with pytest.raises(UsageError, match="for each group of 16"):
        ActivationScheme("fp4")


def test_round_input_is_half_even_and_saturates() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 500.0, -500.0]])
    assert round_input(x, INT8_STATIC, 1.0).tolist() == [[0, 2, 2, 0, -2, 126, 127, -128]]
    x = torch.tensor([[17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, 464.0, 1e6, -1e6]])
    assert round_input(x, FP8_STATIC, 1.0).tolist() == [[16, 20, -16, 0, 2.0**-8, 448, 448, -448]]


@pytest.mark.parametrize(
    ("dtype", "activations"),
    [*(("int", scheme) for scheme in SCHEMES if scheme.dtype == "int8"), *(("fp8", scheme) for scheme in SCHEMES)],
    ids=str,
)
def test_the_kernels_round_bit_for_bit_like_the_reference(
    isa: native.Isa, activations: ActivationScheme, dtype: str
) -> None:
    torch.manual_seed(1)
    x = torch.randn(6, 136) * torch.tensor([1e-3, 0.1, 1.0, 40.0, 1e-35, 1e30])[:, None]
    x[2, :3] = torch.tensor([0.5, 2.5, -1.5]) * 0.25
    scale = None if activations.dynamic else 0.25
    got = product(native.NativeExecutor(2, isa), x, identity(136, dtype, activations, scale))
    assert torch.equal(got, round_input(x, activations, scale))


def test_what_has_no_kernel_is_refused_with_a_reason() -> None:
    executor = native.NativeExecutor(1)
    x, out = torch.zeros(1, 256), torch.zeros(1, 40)
    shuffled = make_weight(40, 256, WeightScheme(8, 64), INT8_GROUP, shuffled=True)
    assert "out of order" in str(executor.supports(Linear(x, shuffled, out)))
    shuffled = make_weight(40, 256, WeightScheme(8, 64, dtype="fp8"), FP8, shuffled=True)
    assert "out of order" in str(executor.supports(Linear(x, shuffled, out)))
    assert "out of order" in str(executor.supports(Embed(shuffled, x)))
    wide = make_weight(1, 70000, CHANNEL, INT8)
    assert "overflow" in str(executor.supports(Linear(torch.zeros(1, 70000), wide, torch.zeros(1, 1))))
    assert executor.supports(Linear(torch.zeros(1, 70000), make_weight(1, 70000, CHANNEL, None), out)) is None


def test_the_largest_sums_do_not_overflow(isa: native.Isa) -> None:
    inp = 65536
    codes = torch.full((16, inp), 255, dtype=torch.uint8)
    zeros = torch.zeros(16, 1, dtype=torch.uint8)
    weight = QuantizedWeight(WeightScheme(8, -1, False), codes, torch.ones(16, 1), zeros,
                             activations=INT8_STATIC, input_scale=1.0)
    got = product(native.NativeExecutor(1, isa), torch.full((2, inp), -500.0), weight)
    assert (got == -255.0 * 128 * inp).all()


@pytest.mark.parametrize(
    "scheme",
    [
        WeightScheme(4, 64), WeightScheme(4, 64, False), WeightScheme(4, 64, dtype="nf4"), WeightScheme(8, 64),
        WeightScheme(4, 64, dtype="trellis"), WeightScheme(3, 64, dtype="trellis"), MXFP4,
    ],
    ids=str,
)  # fmt: skip
def test_sums_of_sixteen_bits_hold_what_they_are_given(isa: native.Isa, scheme: WeightScheme) -> None:
    """Kernels choose how many products go into such a sum by what the rounded inputs can reach at most. Here the codes
    are the greatest, and the inputs of a sum all have one sign and stop at, before and behind what it holds."""
    inp = 128
    weight = make_weight(33, inp, scheme)
    if scheme.dtype != "trellis":  # whose codes are a stream
        codes = torch.full((33, inp), 7 if scheme is MXFP4 else scheme.max_code, dtype=torch.uint8)  # 7 is 6.0
        codes[1], codes[2, ::2] = 0, 0
        zeros = None if weight.zeros is None else torch.full_like(weight.zeros, 1)
        weight = replace(weight, stored=codes, scales=torch.full_like(weight.scales, 0.5), zeros=zeros)
    dense, executor = weight.dequantize().double(), native.NativeExecutor(2, isa)
    pairs = [i for i in range(inp) if i % 4 < 2]  # the inputs of one sum
    for reach in (127, 519, 520, 521, 647, 1056, 1057, 1058, 2184, 2185, 2311, 4064):
        for sign, rows in itertools.product((1.0, -1.0), (7, 13)):
            row = torch.zeros(inp)
            row[pairs[: reach // 127]] = 127.0
            row[pairs[reach // 127]] = float(reach % 127)
            row[-1] = 127.0  # the scale of both groups is 1
            got = product(executor, sign * row.expand(rows, inp).contiguous(), weight).double()
            want = (sign * row.double() @ dense.t()).expand(rows, -1)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("scheme", "activations"), [(WeightScheme(4, 32), INT8), (CHANNEL, INT8), (FP8_BLOCK, FP8_GROUP), (CHANNEL, FP8)],
    ids=str,
)  # fmt: skip
def test_tile_bytes_is_what_is_held(scheme: WeightScheme, activations: ActivationScheme) -> None:
    program = native.NativeExecutor(1).program(1)
    x, out, weight = torch.zeros(1, 256), torch.zeros(1, 160), make_weight(160, 256, scheme, activations)
    program.add([Linear(x, weight, out)])
    held = sum(t.nbytes for t in program._keep if t.data_ptr() not in (x.data_ptr(), out.data_ptr()))
    assert held == tile_bytes(scheme, activations, 160, 256)


def test_scales_that_float16_holds_take_two_bytes_and_give_the_same_bits(isa: native.Isa) -> None:
    x, scheme = torch.randn(5, 256), WeightScheme(4, 64, False)
    weight = make_weight(160, 256, scheme)
    halves = replace(weight, scales=weight.scales.half().float())
    # One more output that float16 does not hold leaves all of them in float32.
    scales = torch.cat([halves.scales, torch.full((1, 4), 1e-9)])
    singles = replace(halves, stored=torch.cat([halves.codes, halves.codes[:1]]), scales=scales,
                      zeros=torch.cat([halves.zeros, halves.zeros[:1]]))  # fmt: skip
    assert int_tiles(halves).scales.dtype == torch.float16 and int_tiles(singles).scales.dtype == torch.float32
    executor = native.NativeExecutor(2, isa)
    assert torch.equal(product(executor, x, halves), product(executor, x, singles)[:, :160])
    program, out = executor.program(5), torch.zeros(5, 160)
    program.add([Linear(x, halves, out)])
    held = sum(t.nbytes for t in program._keep if t.data_ptr() not in (x.data_ptr(), out.data_ptr()))
    widest = tile_bytes(scheme, None, 160, 256)
    assert held == tile_bytes(scheme, None, 160, 256, narrow_scales=True) == widest - 4 * 640
