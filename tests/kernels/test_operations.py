"""Every operation of the C kernels at random shapes and with inputs that are hard to get right: each ISA of this
machine against the torch reference, and against the scalar kernels.

A few examples of each, and many in CI.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qserve.checkpoint.grid import AFFINE
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import native
from qserve.kernels.executor import Executor, Step
from qserve.kernels.kv_cache import PACKED_HEADS
from qserve.kernels.ops import (
    PACKED_KV,
    SCALED_KV,
    Activation,
    Argmax,
    Attention,
    Embed,
    Function,
    Gather,
    HeadNorm,
    LayerNorm,
    Linear,
    LogSoftmax,
    Op,
    PositionEmbed,
    RMSNorm,
    RopeKV,
    SoftCap,
)
from qserve.kernels.prepack import int_tiles
from qserve.kernels.reference import ReferenceExecutor, round_input
from tests.kernels.packed_cache import packed, unpacked
from tests.kernels.quantized_weights import make_weight

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

HARD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, -1e-42, 1e-31, 1e12, -1e12]
ACTIVATIONS = [
    None,
    ActivationScheme("int8"),
    ActivationScheme("int8", "tensor", dynamic=False),
    ActivationScheme("int8", "group", group_size=32),
    ActivationScheme("fp8"),
    ActivationScheme("fp8", "tensor", dynamic=False),
    ActivationScheme("fp8", "tensor"),
    ActivationScheme("fp8", "group", group_size=128),
]
INTEGERS = st.builds(
    WeightScheme, st.sampled_from([2, 3, 4, 5, 6, 8]), st.sampled_from([-1, 8, 16, 24, 32, 64, 128]), st.booleans()
)
FP8 = st.sampled_from([WeightScheme(8, -1, dtype="fp8"), WeightScheme(8, -1, dtype="fp8", rows=-1),
                       WeightScheme(8, 128, dtype="fp8", rows=128), WeightScheme(8, 24, dtype="fp8")])  # fmt: skip
FP4 = st.builds(WeightScheme, st.just(4), st.sampled_from([-1, 8, 16, 32, 64]), dtype=st.just("fp4"))
NF4 = st.builds(WeightScheme, st.just(4), st.sampled_from([-1, 8, 24, 64]), dtype=st.sampled_from(["nf4", "bnb-fp4"]))
HQQ = st.builds(
    WeightScheme, st.sampled_from(AFFINE.bits), st.sampled_from([-1, 8, 24, 64, 128]), st.just(False), st.just("hqq")
)
TRELLIS = st.builds(
    WeightScheme, st.sampled_from([2, 3, 4]), st.sampled_from([-1, 8, 24, 32, 64, 128]), dtype=st.just("trellis")
)
DENSE = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SUM = 2e-5
"""The error of a sum in float32, for terms of magnitude one, of some hundreds of them in any order."""
NF4_ERROR = 2.0**-16.96
"""How far a number of NF4 at most is from that with which kernels multiply."""


def holds(*strategies: Any) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """A test of a few examples, and a slow one of many."""

    def decorate(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("examples", [15, pytest.param(150, marks=pytest.mark.slow)])
        def test(examples: int) -> None:
            limits = settings(
                max_examples=examples, deadline=None, derandomize=True, database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            )  # fmt: skip
            limits(given(*strategies)(check))()

        return test

    return decorate


@cache
def executor(isa: native.Isa, threads: int = 2) -> native.NativeExecutor:
    return native.NativeExecutor(threads, isa)


def others() -> list[native.Isa]:
    return [isa for isa in native.available() if isa != "scalar"]


def make_step(rows: int, token_ids: Tensor | None = None, logit_rows: Tensor | None = None) -> Step:
    every = torch.arange(rows, dtype=torch.int32)
    starts = torch.tensor([0, rows], dtype=torch.int32)
    return Step(every if token_ids is None else token_ids, every, every, starts, every[None],
                every if logit_rows is None else logit_rows)  # fmt: skip


def run(on: Executor, ops: list[Op], step: Step) -> None:
    for op in ops:
        assert on.supports(op) is None
    program = on.program(max(1, len(step.token_ids), len(step.logit_rows)))
    program.add(ops)
    program.run(step)


@st.composite
def matrices(draw: st.DrawFn, rows: int, width: int) -> Tensor:
    """float32 of one of many magnitudes, some of it hard."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    x = torch.randn(rows, width, generator=generator) * draw(st.sampled_from([1.0, 1e-3, 50.0]))
    places = st.tuples(st.integers(0, rows - 1), st.integers(0, width - 1), st.sampled_from(HARD))
    for row, column, value in draw(st.lists(places, max_size=3)):
        x[row, column] = value
    return x


def either(x: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    """``x`` rounded, and how far each number is from what it could be rounded to as well, being next to a tie."""
    rounded = round_input(x, *how)
    others = (round_input(x + 1e-6 * sign * x.abs(), *how) for sign in (1, -1))
    return rounded, sum(((other - rounded).abs() for other in others), torch.zeros_like(x))


@dataclass(frozen=True)
class Product:
    x: Tensor
    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    accumulate: bool

    def run(self, on: Executor, rows: slice = slice(None)) -> Tensor:
        x = self.x[rows].clone()
        out = self.start(len(x))
        run(on, [Linear(x, self.weight, out, self.bias, self.accumulate)], make_step(len(x)))
        return out

    def start(self, rows: int) -> Tensor:
        width = self.weight.out_features if isinstance(self.weight, QuantizedWeight) else len(self.weight)
        return torch.full((rows, width), 0.5)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The result in double precision, of inputs rounded as the kernels do, and the sum of its magnitudes."""
        x, weight = self.x, self.weight
        unsure = torch.zeros_like(x)
        if isinstance(weight, QuantizedWeight):
            dense, activations, scheme = weight.dequantize(), weight.activations, weight.scheme
            steps = weight.scales[:, weight.group_of_input()]
            if activations is None and scheme.grid.exact:
                tiles = int_tiles(weight)
                if tiles.permutation is not None:
                    order = tiles.permutation.long()
                    x, dense, steps = (
                        torch.where(order < 0, 0.0, each[:, order.clamp_min(0)]) for each in (x, dense, steps)
                    )
                x, unsure = either(x, ActivationScheme("int8", "group", group_size=tiles.act_span))
            elif activations is not None:
                x, unsure = either(x, activations, weight.input_scale)
        else:
            dense = weight
        exact, wide = dense.double().T, x.double()
        bias = torch.zeros(exact.shape[1]) if self.bias is None else self.bias
        before = 0.5 * self.accumulate
        magnitude = wide.abs() @ exact.abs() + bias.abs() + before
        if isinstance(weight, QuantizedWeight) and weight.scheme.dtype == "nf4":  # fixed point
            magnitude += wide.abs() @ steps.double().T * NF4_ERROR / SUM
        return wide @ exact + bias + before, magnitude + unsure.double() @ exact.abs() / SUM

    @property
    def rounds(self) -> bool:
        """Whether an input that is not finite makes its whole row NaN."""
        if not isinstance(self.weight, QuantizedWeight):
            return False
        weight = self.weight
        return weight.activations is not None or weight.scheme.grid.exact


@st.composite
def products(draw: st.DrawFn) -> Product:
    rows, out, inp = draw(st.integers(1, 70)), draw(st.integers(1, 150)), draw(st.integers(1, 300))
    kind = draw(st.sampled_from(["int", "int", "fp4", "nf4", "hqq", "trellis", "fp8", "dense"]))
    weight: Tensor | QuantizedWeight
    if kind == "dense":
        weight = torch.randn(out, inp, generator=torch.Generator().manual_seed(inp)).to(draw(DENSE))
    else:
        kinds = {"int": INTEGERS, "fp4": FP4, "nf4": NF4, "hqq": HQQ, "trellis": TRELLIS, "fp8": FP8}
        scheme = draw(kinds[kind])
        ordered = scheme.group_size == -1 or inp % scheme.group_size != 0 or draw(st.booleans())
        weight = make_weight(out, inp, scheme, draw(st.sampled_from(ACTIVATIONS)), shuffled=not ordered)
    x = draw(matrices(rows, inp))
    assume(executor("scalar").supports(Linear(x, weight, x)) is None)
    bias = torch.randn(out, generator=torch.Generator().manual_seed(out)) if draw(st.booleans()) else None
    return Product(x, weight, bias, draw(st.booleans()))


def check_product(case: Product, row: int) -> None:
    want, magnitude = case.expected()
    finite = case.x.isfinite().all(-1)
    results = {isa: case.run(executor(isa)) for isa in native.available()}
    for got in results.values():
        error = (got[finite] - want[finite]).abs()
        assert (error <= SUM * magnitude[finite] + 1e-37).all()
        assert not got[~finite].isfinite().any()
        assert not case.rounds or got[~finite].isnan().all()
    for isa in others():
        error = (results[isa][finite] - results["scalar"][finite]).abs()
        assert (error <= SUM * magnitude[finite] + 1e-37).all()
    # A row of its own, on other threads, has the same bits.
    for isa, got in results.items():
        alone = case.run(executor(isa, 1), slice(row, row + 1))
        torch.testing.assert_close(alone[0], got[row], rtol=0, atol=0, equal_nan=True)


@holds(products(), st.integers(0, 1 << 20))
def test_linear(case: Product, pick: int) -> None:
    check_product(case, pick % len(case.x))


@pytest.mark.parametrize("scheme", [
    WeightScheme(4, 64), WeightScheme(4, -1), WeightScheme(8, 32), WeightScheme(8, -1, False),
    WeightScheme(4, 32, dtype="fp4"), WeightScheme(4, 64, False, "hqq"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("rows", [12, 50])
def test_many_rows_of_many_inputs(scheme: WeightScheme, rows: int) -> None:
    """Kernels cut both into pieces, the last of them shorter: rows into 48 at most, inputs into 768."""
    x = torch.randn(rows, 1640, generator=torch.Generator().manual_seed(rows))
    check_product(Product(x, make_weight(70, 1640, scheme, None, shuffled=False), None, False), rows - 1)


@st.composite
def rows_of(draw: st.DrawFn) -> Tensor:
    return draw(matrices(draw(st.integers(1, 20)), draw(st.integers(1, 300))))


def check_rows(make: Callable[[Tensor], Op], want: Tensor, rtol: float, atol: float) -> None:
    """``make`` gives the operation that writes to a buffer, in ``want``'s shape."""
    results = {}
    for isa in native.available():
        got = results[isa] = torch.full_like(want, 7)
        run(executor(isa), [make(got)], make_step(len(want)))
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
    for isa in others():
        torch.testing.assert_close(results[isa], results["scalar"], rtol=rtol, atol=atol, equal_nan=True)


def by_reference(op: Callable[[Tensor], Op], shape: tuple[int, int]) -> Tensor:
    out = torch.full(shape, 7.0)
    run(ReferenceExecutor(), [op(out)], make_step(shape[0]))
    return out


@holds(rows_of(), st.booleans())
def test_rms_norm(x: Tensor, accumulate: bool) -> None:
    weight = torch.rand(x.shape[1]) + 0.5
    make = lambda out: RMSNorm(x, weight, out, 1e-5, accumulate=accumulate)  # noqa: E731
    want = by_reference(make, (len(x), x.shape[1]))
    check_rows(make, want, 2e-5, 2e-4 if accumulate else 1e-7)
    wide = torch.full((len(x), x.shape[1] + 3), 7.0)  # the columns beside its own stay as they are
    run(executor(native.best_isa()), [make(wide[:, 2:-1])], make_step(len(x)))
    torch.testing.assert_close(wide[:, 2:-1], want, rtol=2e-5, atol=2e-4 if accumulate else 1e-7, equal_nan=True)
    assert bool((wide[:, [0, 1, -1]] == 7.0).all())


@holds(rows_of(), st.booleans())
def test_layer_norm(x: Tensor, biased: bool) -> None:
    x = torch.where(x.isfinite().all(-1, keepdim=True), x, torch.nan)  # infinity becomes NaN, as in each kernel
    weight, bias = torch.rand(x.shape[1]) + 0.5, torch.rand(x.shape[1]) if biased else None
    make = lambda out: LayerNorm(x, weight, bias, out, 1e-5)  # noqa: E731
    check_rows(make, by_reference(make, (len(x), x.shape[1])), 2e-5, 1e-5)


@holds(rows_of(), st.integers(1, 7), st.integers(0, 5), st.integers(0, 5))
def test_head_norm(x: Tensor, heads: int, before: int, behind: int) -> None:
    """Of columns in the middle of a buffer; the others stay as they are."""
    x = torch.where(x.isfinite().all(-1, keepdim=True), x, torch.nan)
    head_dim = max(1, (x.shape[1] - before - behind) // heads)
    columns = slice(before, before + heads * head_dim)
    assume(columns.stop <= x.shape[1])
    weight = torch.rand(heads * head_dim) + 0.5
    want = x.clone()
    run(ReferenceExecutor(), [HeadNorm(want[:, columns], weight, head_dim, 1e-5)], make_step(len(x)))
    results = {}
    for isa in native.available():
        got = results[isa] = x.clone()
        run(executor(isa), [HeadNorm(got[:, columns], weight, head_dim, 1e-5)], make_step(len(x)))
        torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-5, equal_nan=True)
        rest = torch.ones(x.shape[1], dtype=torch.bool)
        rest[columns] = False
        torch.testing.assert_close(got[:, rest], x[:, rest], rtol=0, atol=0, equal_nan=True)
        alone = x[-1:].clone()
        run(executor(isa, 1), [HeadNorm(alone[:, columns], weight, head_dim, 1e-5)], make_step(1))
        torch.testing.assert_close(alone[0], got[-1], rtol=0, atol=0, equal_nan=True)
    for isa in others():
        torch.testing.assert_close(results[isa], results["scalar"], rtol=2e-5, atol=1e-5, equal_nan=True)


EXACT: dict[Function, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (-x / math.sqrt(2)).erfc() / 2,
    "gelu_tanh": lambda x: x / (1 + (-math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)).exp()),
    "relu": lambda x: x.clamp_min(0),
    "relu2": lambda x: x.clamp_min(0) ** 2,
    "swigluoai": lambda x: x.clamp(max=7) / (1 + (-1.702 * x.clamp(max=7)).exp()),
}


@holds(rows_of(), st.sampled_from(get_args(Function)), st.booleans())
def test_activation(x: Tensor, function: Function, gated: bool) -> None:
    gate, up = x, x.flip(0) if gated else torch.ones_like(x)
    factor = up.clamp(-7, 7) + 1 if gated and function == "swigluoai" else up
    exact = EXACT[function](gate.double()) * factor
    real = gate.isfinite() & up.isfinite() & (exact.abs() < 3e38)
    both = torch.cat([gate, up], -1) if gated else x
    for isa in native.available():
        given, out = both.clone(), torch.empty_like(x)
        run(executor(isa), [Activation(given, out if gated else given, function, gated)], make_step(len(x)))
        got = out if gated else given  # a plain one may be in place
        # 70 units in the last place at most; an exp ends at 1e-38. The cube in tanh's argument, up to 88, has more.
        close = 2e-5 if function == "gelu_tanh" else 8e-6
        error = (got - exact).abs() - close * exact.abs() - 1e-36 * (gate * factor).abs() - 1e-37
        assert (error[real] <= 0).all(), isa
        assert not got[~real & ~exact.isfinite()].isfinite().any()
        alone = torch.empty_like(x[:1])
        run(executor(isa, 1), [Activation(both[-1:].clone(), alone, function, gated)], make_step(1))
        torch.testing.assert_close(alone[0], got[-1], rtol=0, atol=0, equal_nan=True)


@holds(rows_of(), st.sampled_from([0.7, 30.0, 50.0]))
def test_soft_cap(x: Tensor, cap: float) -> None:
    want = (cap * (x.double() / cap).tanh()).float()
    for isa in native.available():
        got = x.clone()
        run(executor(isa), [SoftCap(got, cap)], make_step(len(x)))
        # Four units in the last place of a tanh, and those of a product and a quotient of small numbers.
        torch.testing.assert_close(got, want, rtol=4e-7, atol=1e-43, equal_nan=True)


@holds(rows_of(), DENSE, st.integers(0, 5))
def test_position_embed(x: Tensor, dtype: torch.dtype, offset: int) -> None:
    table = torch.randn(len(x) + offset, x.shape[1]).to(dtype)
    for isa in native.available():
        got = x.clone()
        run(executor(isa), [PositionEmbed(table, got, offset)], make_step(len(x)))
        torch.testing.assert_close(got, x + table[offset:].float(), rtol=0, atol=0, equal_nan=True)


@holds(rows_of())
def test_log_softmax(x: Tensor) -> None:
    want = x.log_softmax(-1)
    for isa in native.available():
        got = x.clone()
        run(executor(isa), [LogSoftmax(got)], make_step(len(x)))
        finite = x.isfinite().all(-1)
        # A difference of numbers of 1e12 has the precision of those.
        size = x[finite].abs().amax(-1, keepdim=True) if finite.any() else 0.0
        assert ((got - want)[finite].abs() <= 1e-5 + 2e-7 * size).all()
        bad = x.isnan().any(-1) | (x == math.inf).any(-1)
        assert got[bad].isnan().all()


@holds(rows_of(), st.booleans())
def test_argmax(x: Tensor, ties: bool) -> None:
    x = x.round() if ties else x
    want = torch.where(x.isnan().any(-1), -1, x.argmax(-1)).tolist()
    for row, best in enumerate(want):  # the first of equals, which torch does not promise
        assert best == -1 or x[row, best] == x[row].max()
        want[row] = best if best == -1 else int((x[row] == x[row].max()).nonzero()[0])
    for isa in native.available():
        best = torch.empty(len(x), dtype=torch.int32)
        run(executor(isa), [Argmax(x, best)], make_step(len(x)))
        assert best.tolist() == want


@holds(rows_of(), st.data())
def test_gather(x: Tensor, data: st.DataObject) -> None:
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=20)), dtype=torch.int32)
    for isa in native.available():
        out = torch.empty(len(rows), x.shape[1])
        run(executor(isa), [Gather(x, out)], make_step(len(x), logit_rows=rows))
        torch.testing.assert_close(out, x[rows.long()], rtol=0, atol=0, equal_nan=True)


@holds(st.one_of(INTEGERS, FP8, DENSE), st.integers(1, 40), st.integers(1, 200), st.data())
def test_embed(kind: WeightScheme | torch.dtype, vocab: int, width: int, data: st.DataObject) -> None:
    table: Tensor | QuantizedWeight
    if isinstance(kind, WeightScheme):
        table = make_weight(vocab, width, kind)
        want = table.dequantize()
    else:
        table = data.draw(matrices(vocab, width)).to(kind)
        want = table.float()
    ids = torch.tensor(data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=9)), dtype=torch.int32)
    for isa in native.available():
        out = torch.empty(len(ids), width)
        run(executor(isa), [Embed(table, out)], make_step(len(ids), ids))
        torch.testing.assert_close(out, want[ids.long()], rtol=0, atol=0, equal_nan=True)
        run(executor(isa), [Embed(table, out, scale=0.3)], make_step(len(ids), ids))
        torch.testing.assert_close(out, want[ids.long()] * 0.3, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("vocab", "width", "group"), [(11, 576, 64), (7, 101, -1), (1, 100, 24)])
def test_six_bits_are_looked_up_as_the_reference_does(vocab: int, width: int, group: int) -> None:
    table, ids = make_weight(vocab, width, WeightScheme(6, group)), torch.tensor([vocab - 1, 0, vocab // 2]).int()
    want = torch.empty(3, width)
    run(ReferenceExecutor(), [Embed(table, want)], make_step(3, ids))
    for isa in native.available():
        out = torch.empty(3, width)
        run(executor(isa), [Embed(table, out)], make_step(3, ids))
        assert torch.equal(out, want) and torch.equal(out, table.dequantize()[ids.long()])


@dataclass(frozen=True)
class Attending:
    """Sequences of (cached tokens, new tokens) over a cache that holds no number where nobody has written."""

    heads: int
    kv_heads: int
    dim: int
    rotary: int
    window: int
    dtype: torch.dtype
    lengths: list[tuple[int, int]]
    qkv: Tensor
    normed: Literal["", "heads", "all"]
    centred: bool
    softcap: float
    scaled: bool
    sinks: bool

    def step(self) -> Step:
        pages = [-(-(cached + new) // 16) for cached, new in self.lengths]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).tolist()
        tables, slots, positions, starts = [], [], [], [0]
        for (cached, new), count in zip(self.lengths, pages):
            table, order = order[:count], order[count:]
            positions += range(cached, cached + new)
            slots += [table[p // 16] * 16 + p % 16 for p in range(cached, cached + new)]
            tables.append(table + [0] * (max(pages) - count))
            starts.append(starts[-1] + new)
        ints = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
        return Step(ints(range(starts[-1])), ints(positions), ints(slots), ints(starts), ints(tables), ints([0]))

    def caches(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(2)
        pages = sum(-(-(cached + new) // 16) for cached, new in self.lengths)
        k, v = (torch.full((pages, self.kv_heads, *shape), math.nan) for shape in ((self.dim, 16), (16, self.dim)))
        for table, (cached, _) in zip(self.step().block_tables.tolist(), self.lengths):
            for p in range(cached):
                k[table[p // 16], :, :, p % 16] = torch.randn(self.kv_heads, self.dim, generator=generator)
                v[table[p // 16], :, p % 16] = torch.randn(self.kv_heads, self.dim, generator=generator)
        if self.scale is not None:
            k, v = k * 40, v * 40
        if self.dtype == torch.int8:
            k, v = (each.clamp(-127, 127).nan_to_num(-128) for each in (k, v))
        if self.dtype == PACKED_KV:
            return packed(k.mT, keys=True), packed(v, keys=False)
        return k.to(self.dtype), v.to(self.dtype)

    @property
    def scale(self) -> Tensor | None:
        return torch.arange(1, self.kv_heads + 1) * 0.02 if self.dtype in SCALED_KV else None

    def store(self, on: Executor) -> tuple[Tensor, Tensor, Tensor]:
        """The rotated rows, and the caches with them."""
        generator = torch.Generator().manual_seed(3)
        angles = torch.rand(128, self.rotary // 2, generator=generator) * 6
        norms: list[Tensor | None] = [None, None]
        if self.normed:
            widths = [1, 1] if self.normed == "heads" else [self.heads, self.kv_heads]
            norms = [torch.rand(width * self.dim, generator=generator) + 0.5 for width in widths]
        q_scale = torch.rand(128, generator=generator) + 0.5 if self.scaled else None
        center = torch.randn(self.kv_heads, self.dim, generator=generator) if self.centred else None
        qkv, (k, v), shape = self.qkv.clone(), self.caches(), (self.heads, self.kv_heads, self.dim)
        rope = RopeKV(
            qkv, angles.cos(), angles.sin(), k, v, *shape, *norms, 1e-6, self.scale, self.scale, center, q_scale
        )
        run(on, [rope], self.step())
        return qkv, k, v

    def attend(self, on: Executor, qkv: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, shape = torch.empty(len(qkv), self.heads * self.dim), (self.heads, self.kv_heads, self.dim)
        sinks = torch.linspace(-2, 3, self.heads) if self.sinks else None
        op = Attention(
            qkv, out, k, v, *shape, self.dim**-0.5, self.window, self.scale, self.scale, self.softcap, sinks
        )
        run(on, [op], self.step())
        return out

    def touched(self) -> Tensor:
        """bool [tokens]: which see a token whose row is not finite, their own or an earlier one."""
        bad, found = (~self.qkv.isfinite().all(-1)).tolist(), []
        for (cached, new), start in zip(self.lengths, self.step().seq_start.tolist()):
            for t in range(new):
                first = 0 if self.window == 0 else max(0, cached + t - self.window + 1)
                found.append(any(bad[start + p - cached] for p in range(max(first, cached), cached + t + 1)))
        return torch.tensor(found)


HEAD_DIMS = st.one_of(st.sampled_from([16, 32, 48, 64, 72, 80, 96, 128, 256]), st.integers(2, 100))


@st.composite
def attendings(draw: st.DrawFn) -> Attending:
    kv_heads = draw(st.integers(1, 3))
    heads, dim = kv_heads * draw(st.sampled_from([1, 2, 3, 5, 14])), draw(HEAD_DIMS)
    packable = [] if dim % PACKED_HEADS else [PACKED_KV]
    lengths = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=3))
    tokens = sum(new for _, new in lengths)
    return Attending(
        heads, kv_heads, dim, 2 * draw(st.integers(1, dim // 2)), draw(st.sampled_from([0, 0, 1, 7, 20])),
        draw(st.sampled_from([torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn, *packable])), lengths,
        draw(matrices(tokens, (heads + 2 * kv_heads) * dim)), draw(st.sampled_from(["", "heads", "all"])),
        draw(st.booleans()), draw(st.sampled_from([0.0, 0.0, 2.0])), draw(st.booleans()), draw(st.booleans()),
    )  # fmt: skip


def check_cache(mine: Tensor, want: Tensor, atol: float, dim: int, *, keys: bool) -> None:
    """A rotation's last bit may round to the next value that the cache has."""
    if mine.dtype == torch.uint8:
        (one, step), (two, _) = unpacked(mine, dim, keys=keys), unpacked(want, dim, keys=keys)
        assert torch.equal(one.isnan(), two.isnan())
        assert ((one - two).nan_to_num().abs() <= 1.02 * step.nan_to_num() + atol).all()
        return
    if mine.dtype not in SCALED_KV:
        rtol = 2**-10 if mine.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(mine, want, rtol=rtol, atol=atol, equal_nan=True)
        return
    one, two = (codes.view(torch.int8).int() for codes in (mine, want))
    if mine.dtype != torch.int8:  # in the order of the values
        one, two = (torch.where(codes < 0, -(codes & 127), codes) for codes in (one, two))
    assert (one - two).abs().max() <= 1


@holds(attendings())
def test_rope_and_attention(case: Attending) -> None:
    finite = case.qkv.isfinite().all(-1, keepdim=True)
    clean, touched = replace(case, qkv=torch.where(finite, case.qkv, 0.0)), case.touched()
    size = max(1.0, float(clean.qkv.abs().max()))
    rows, keys, values = clean.store(ReferenceExecutor())
    scalar = case.store(executor("scalar"))
    scalar_out = case.attend(executor("scalar"), *scalar)
    for isa in native.available():
        stored = clean.store(executor(isa))
        torch.testing.assert_close(stored[0], rows, rtol=1e-5, atol=size * 1e-5)
        if size < 1e3:  # else what the norm or the rotation cancels is as large as a value
            check_cache(stored[1], keys, size * 1e-5, case.dim, keys=True)
            check_cache(stored[2], values, size * 1e-5, case.dim, keys=False)
        out = clean.attend(executor(isa), *stored)
        if size < 20:  # else scores are so large that their last digits choose between keys
            want = clean.attend(ReferenceExecutor(), *stored)
            torch.testing.assert_close(out, want, rtol=1e-3, atol=size * 1e-4)
        hard = case.store(executor(isa))
        for mine, other in zip(hard, scalar):
            if case.normed != "all":  # a sum over all heads has another order in vectors
                torch.testing.assert_close(mine.float(), other.float(), rtol=0, atol=0, equal_nan=True)
            assert torch.equal(mine.isnan(), other.isnan())
        hard_out = case.attend(executor(isa), *hard)
        torch.testing.assert_close(hard_out[~touched], out[~touched], rtol=0, atol=0, equal_nan=True)
        if size < 20:
            torch.testing.assert_close(hard_out, scalar_out, rtol=1e-3, atol=size * 1e-4, equal_nan=True)
