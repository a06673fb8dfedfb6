"""Products and embeddings whose weights, inputs or both are int8 or e4m3: each ISA against the torch reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qserve.checkpoint.packed import PackedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import native
from qserve.kernels.ops import Embed, Executor, Linear, Op, Step
from qserve.kernels.prepack import tile_bytes
from qserve.kernels.reference import ReferenceExecutor, round_input

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


@pytest.fixture(params=native.ISAS[: native.ISAS.index(native.best_isa()) + 1] if native.missing() is None else [])
def isa(request: pytest.FixtureRequest) -> native.Isa:
    return request.param


def run_on(executor: Executor, op: Op, rows: int, token_ids: torch.Tensor | None = None) -> None:
    assert executor.supports(op) is None
    every = torch.arange(rows, dtype=torch.int32)
    program = executor.program(rows)
    program.add([op])
    ids = every if token_ids is None else token_ids.int()
    program.run(Step(ids, every, every, torch.tensor([0, rows], dtype=torch.int32), every[None], every))


def product(
    executor: Executor, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.full((len(x), weight.out_features), 2.0)
    run_on(executor, Linear(x, weight, out, bias, accumulate=bias is not None), len(x))
    return out


def make_weight(
    out: int, inp: int, scheme: WeightScheme, activations: ActivationScheme | None, *, shuffled: bool = False
) -> PackedWeight:
    generator = torch.Generator().manual_seed(out * 31 + inp)
    groups, height = scheme.groups(inp), scheme.row_height(out)
    blocks = torch.rand(-(-out // height), groups, generator=generator) * 0.02 + 0.001
    scales = blocks.repeat_interleave(height, 0)[:out].contiguous()
    zeros = g_idx = None
    if scheme.dtype == "fp8":
        codes = (torch.randn(out, inp, generator=generator) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        codes = codes.view(torch.uint8)
        codes[:, ::7] = torch.randint(0, 8, codes[:, ::7].shape, generator=generator).to(torch.uint8)  # subnormal
    else:
        codes = torch.randint(0, scheme.max_code + 1, (out, inp), generator=generator).to(torch.uint8)
        if not scheme.symmetric:
            zeros = torch.randint(0, scheme.max_code + 1, (out, groups), generator=generator).to(torch.uint8)
    if shuffled:
        g_idx = (torch.arange(inp) // scheme.group_width(inp))[torch.randperm(inp, generator=generator)].int()
    static = activations is not None and not activations.dynamic
    weight = PackedWeight(
        scheme, codes, scales, zeros, g_idx, activations=activations, input_scale=0.011 if static else None
    )
    weight.check()
    return weight


def identity(size: int, dtype: str, activations: ActivationScheme, input_scale: float | None = None) -> PackedWeight:
    """A weight whose product is its input as it was rounded."""
    one, zero = (0x38, 0) if dtype == "fp8" else (129, 128)
    codes = torch.full((size, size), zero, dtype=torch.uint8)
    codes.fill_diagonal_(one)
    scheme = FP8_CHANNEL if dtype == "fp8" else CHANNEL
    return PackedWeight(scheme, codes, torch.ones(size, 1), activations=activations, input_scale=input_scale)


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


@pytest.mark.parametrize(
    ("rows", "out", "inp", "scheme", "activations", "shuffled"),
    [
        (1, 70, 192, CHANNEL, INT8, False),
        (5, 130, 576, CHANNEL, INT8, False),
        (3, 33, 100, CHANNEL, INT8, False),
        (37, 65, 128, WeightScheme(8, 64), INT8, False),
        (7, 40, 96, WeightScheme(4, 32, False), INT8, False),
        (6, 40, 128, WeightScheme(4, 32), INT8, True),
        (35, 48, 104, WeightScheme(8, -1, False), INT8_STATIC, False),
        (4, 20, 72, WeightScheme(6, 32), INT8, False),
        (4, 40, 300, CHANNEL, INT8_GROUP, False),
        (9, 40, 96, WeightScheme(8, 24), INT8_GROUP, False),
        (4, 40, 100, WeightScheme(8, 64), INT8_GROUP, False),
        (1, 70, 192, FP8_CHANNEL, FP8, False),
        (5, 130, 576, FP8_CHANNEL, FP8, False),
        (37, 33, 101, FP8_CHANNEL, FP8, False),
        (40, 65, 129, FP8_PER_TENSOR, FP8_STATIC, False),
        (3, 65, 40, FP8_PER_TENSOR, FP8_TENSOR, False),
        (6, 300, 384, FP8_BLOCK, FP8_GROUP, False),
        (33, 150, 200, FP8_BLOCK, FP8_GROUP, False),
        (8, 50, 64, FP8_CHANNEL, None, False),
        (50, 70, 200, FP8_BLOCK, None, False),
        (4, 30, 64, FP8_CHANNEL, INT8, False),
        (6, 40, 96, WeightScheme(4, 32, False), FP8, True),
        (34, 40, 96, CHANNEL, FP8_GROUP, False),
    ],
)
def test_products(
    isa: native.Isa, rows: int, out: int, inp: int, scheme: WeightScheme, activations: ActivationScheme | None,
    shuffled: bool,
) -> None:  # fmt: skip
    torch.manual_seed(2)
    x, bias = torch.randn(rows, inp), torch.randn(out)
    weight = make_weight(out, inp, scheme, activations, shuffled=shuffled)
    got = product(native.NativeExecutor(2, isa), x, weight, bias)
    want = product(ReferenceExecutor(), x, weight, bias)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5 * float(want.abs().max()))
    if activations is not None:  # the rounding is there: without it the result is another
        plain = x @ weight.dequantize().T + bias + 2
        assert float((got - plain).norm() / plain.norm()) > 1e-3


def test_six_bits_without_a_scheme_are_bytes(isa: native.Isa) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(5, 128), make_weight(40, 128, WeightScheme(6, 64), None)
    got, want = (product(e, x, weight) for e in (native.NativeExecutor(1, isa), ReferenceExecutor()))
    assert float((got - want).norm() / want.norm()) < 0.012  # the kernels' own int8 inputs


@pytest.mark.parametrize(
    ("scheme", "activations"),
    [(CHANNEL, INT8), (WeightScheme(4, 64), INT8), (CHANNEL, INT8_STATIC), (FP8_CHANNEL, FP8),
     (FP8_BLOCK, FP8_GROUP), (FP8_CHANNEL, None), (CHANNEL, FP8)],
    ids=str,
)  # fmt: skip
@given(rows=st.integers(2, 80), pick=st.integers(0, 10**6))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_row_does_not_depend_on_its_neighbours(
    isa: native.Isa, rows: int, pick: int, scheme: WeightScheme, activations: ActivationScheme | None
) -> None:
    torch.manual_seed(rows)
    x, weight, row = torch.randn(rows, 256), make_weight(90, 256, scheme, activations), pick % rows
    x[(row + 1) % rows] = math.nan
    together = product(native.NativeExecutor(3, isa), x, weight)
    alone = product(native.NativeExecutor(1, isa), x[row : row + 1].clone(), weight)
    assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e-42, 3e38])
@pytest.mark.parametrize("activations", [None, *SCHEMES], ids=str)
def test_extreme_inputs_stay_in_their_row(isa: native.Isa, activations: ActivationScheme | None, value: float) -> None:
    torch.manual_seed(4)
    x = torch.randn(3, 256)
    x[1, 70] = value
    scheme = FP8_CHANNEL if activations is None or activations.dtype == "fp8" else CHANNEL
    weight = make_weight(40, 256, scheme, activations)
    got, want = (product(e, x, weight) for e in (native.NativeExecutor(2, isa), ReferenceExecutor()))
    clean = x.clone()
    clean[1] = 0
    assert torch.equal(got[[0, 2]], product(native.NativeExecutor(2, isa), clean, weight)[[0, 2]])
    if math.isfinite(value):
        torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=float(want[1].abs().max()) * 1e-5)
    elif activations is None:
        assert not got[1].isfinite().any()
    else:
        assert got[1].isnan().all() and want[1].isnan().all()


@pytest.mark.parametrize(
    ("scheme", "width"),
    [(WeightScheme(8, -1), 40), (WeightScheme(8, 32, False), 72), (WeightScheme(6, 64), 192), (WeightScheme(4, 16), 64),
     (FP8_CHANNEL, 33), (FP8_PER_TENSOR, 48), (FP8_BLOCK, 200)],
    ids=str,
)  # fmt: skip
def test_packed_embeddings_are_exact(isa: native.Isa, scheme: WeightScheme, width: int) -> None:
    table = make_weight(30, width, scheme, None)
    ids = torch.tensor([29, 0, 3, 3, 17])
    want = table.dequantize()[ids]
    for executor in (native.NativeExecutor(2, isa), ReferenceExecutor()):
        out = torch.empty(5, width)
        run_on(executor, Embed(table, out), 5, ids)
        assert torch.equal(out, want)


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
    weight = PackedWeight(WeightScheme(8, -1, False), codes, torch.ones(16, 1), torch.zeros(16, 1, dtype=torch.uint8),
                          activations=INT8_STATIC, input_scale=1.0)
    got = product(native.NativeExecutor(1, isa), torch.full((2, inp), -500.0), weight)
    assert (got == -255.0 * 128 * inp).all()


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
