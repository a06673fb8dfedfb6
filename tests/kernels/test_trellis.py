"""Products with trellis codes, on each ISA of this machine: those of the reference, and bit for bit those of the same
codes in bytes, whichever tiles of a ring a weight has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows, take_inputs, take_rows
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.checkpoint.trellis import LANES, PackedTrellis
from qserve.kernels import native
from qserve.kernels.fusion import alternating, fuse
from qserve.kernels.ops import Activation, Experts, Function, Linear, Op, RMSNorm
from qserve.kernels.prepack import int_tiles, tile_bytes
from qserve.kernels.reference import ReferenceExecutor
from tests.kernels.quantized_weights import make_weight
from tests.kernels.test_experts import experts_op
from tests.kernels.test_operations import SUM, Product, check_product, executor, make_step, run

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
BITS = pytest.mark.parametrize("bits", [2, 3, 4])
INT8 = ActivationScheme("int8")


def scheme_of(bits: int, group: int = 32) -> WeightScheme:
    return WeightScheme(bits, group, dtype="trellis")


def in_bytes(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, stored=weight.codes)


def multiplied(x: Tensor, weight: QuantizedWeight, isa: native.Isa) -> Tensor:
    return Product(x, weight, None, False).run(executor(isa))


def check_bits(x: Tensor, weight: QuantizedWeight) -> None:
    """Streams stay such, and give what bytes give."""
    assert int_tiles(weight).before is not None and int_tiles(in_bytes(weight)).before is None
    for isa in native.available():
        assert torch.equal(multiplied(x, weight, isa), multiplied(x, in_bytes(weight), isa)), isa


SHAPES = [(16, 8, -1), (80, 24, -1), (100, 64, 32), (192, 40, 8), (33, 192, 64), (70, 1640, -1), (4, 832, 32)]


@BITS
@pytest.mark.parametrize(("out", "inp", "group"), SHAPES)
def test_products_are_those_of_the_reference_and_of_bytes(bits: int, out: int, inp: int, group: int) -> None:
    weight = make_weight(out, inp, scheme_of(bits, group))
    for rows in (1, 2, 5, 13, 50):
        x = torch.randn(rows, inp, generator=torch.Generator().manual_seed(rows))
        check_product(Product(x, weight, torch.randn(out), rows % 2 == 0), rows - 1)
        check_bits(x, weight)


@BITS
@pytest.mark.parametrize("activations", [INT8, ActivationScheme("int8", "group", group_size=32)], ids=str)
def test_rounded_inputs_are_those_of_the_reference_executor(bits: int, activations: ActivationScheme) -> None:
    product = Product(torch.randn(13, 96), make_weight(80, 96, scheme_of(bits), activations), None, False)
    want, (_, magnitude) = product.run(ReferenceExecutor()), product.expected()
    for isa in native.available():
        assert ((product.run(executor(isa)) - want).abs() <= SUM * magnitude).all()
    check_bits(product.x, product.weight)  # type: ignore[arg-type]


@BITS
def test_a_row_does_not_depend_on_the_rows_beside_it(bits: int) -> None:
    x, weight = torch.randn(53, 192), make_weight(100, 192, scheme_of(bits, 64))
    for isa in native.available():
        whole = multiplied(x, weight, isa)
        for some in (slice(0, 1), slice(3, 5), slice(50, 53), slice(7, 20), slice(2, 51)):
            assert torch.equal(multiplied(x[some].clone(), weight, isa), whole[some]), (isa, some)
        one = native.NativeExecutor(1, isa)
        assert torch.equal(Product(x, weight, None, False).run(one), whole)


@BITS
def test_inputs_that_fill_no_group_are_held_in_bytes(bits: int) -> None:
    """A last group that is short, a width that is no multiple of 8, groups in any order."""
    short, odd = make_weight(80, 72, scheme_of(bits, 32)), make_weight(80, 36, scheme_of(bits, -1))
    for weight in (short, odd, make_weight(80, 64, scheme_of(bits, 16), shuffled=True)):
        assert isinstance(weight.stored, PackedTrellis) and int_tiles(weight).before is None
        check_product(Product(torch.randn(5, weight.in_features), weight, None, False), 3)


@BITS
def test_streams_are_held_as_they_are_stored(bits: int) -> None:
    weight = make_weight(128, 256, scheme_of(bits, 64))
    weight = replace(weight, scales=weight.scales.half().float())
    tiles = int_tiles(weight)
    assert tiles.weight.nbytes == 128 * 256 * bits // 8
    held = tiles.weight.nbytes + tiles.scales.nbytes
    assert held == tile_bytes(weight.scheme, None, 128, 256, narrow_scales=True)


@BITS
@pytest.mark.parametrize("width", [48, 64, 112])
def test_gates_and_their_factors_alternate(bits: int, width: int) -> None:
    inp, scheme = 96, scheme_of(bits)
    weight = concat_rows([make_weight(width, inp, scheme, seed=seed) for seed in (1, 2)])
    gated = alternating(weight)
    assert isinstance(gated, QuantizedWeight) and isinstance(gated.stored, PackedTrellis)
    scale, bias = torch.rand(inp), torch.randn(2 * width)
    for rows in (1, 13):
        x = torch.randn(rows, inp)
        check_bits(x, gated)
        for function in get_args(Function):
            for isa in native.available():
                outs = [torch.empty(rows, width) for _ in range(3)]
                for out, each, together in zip(outs, (weight, weight, in_bytes(weight)), (False, True, True)):
                    normed, between = torch.empty(rows, inp), torch.empty(rows, 2 * width)
                    ops: list[Op] = [
                        RMSNorm(x, scale, normed, 1e-5), Linear(normed, each, between, bias),
                        Activation(between, out, function, gated=True),
                    ]  # fmt: skip
                    assert len(fuse(ops)) == 1
                    for some in [ops] if together else [[op] for op in ops]:
                        run(executor(isa), some, make_step(rows))
                assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2]), (isa, function)


Slice = Callable[[list[QuantizedWeight]], QuantizedWeight]


def tiles_of(*tiles: int) -> Tensor:
    return torch.cat([torch.arange(LANES) + LANES * tile for tile in tiles])


SLICES: dict[str, Slice] = {
    "q, k and v": concat_rows,
    "heads of q, k and v": lambda parts: take_rows(concat_rows(parts), tiles_of(1, 2, 7, 11)),
    "without the tile before": lambda parts: take_rows(parts[0], tiles_of(2)),
    "across two rings": lambda parts: take_rows(parts[0], tiles_of(3, 4, 5)),
    "the first, whose last precedes it": lambda parts: take_rows(parts[1], tiles_of(0)),
    "backwards, and twice": lambda parts: take_rows(parts[0], tiles_of(5, 4, 3, 3, 0)),
    "a slice of a slice": lambda parts: take_rows(take_rows(concat_rows(parts), tiles_of(9, 8, 7, 2)), tiles_of(2, 1)),
    "the last, which is not full": lambda parts: concat_rows([take_rows(parts[0], tiles_of(1)), parts[2]]),
}


@BITS
@pytest.mark.parametrize("name", SLICES)
def test_any_tiles_of_any_rings(bits: int, name: str) -> None:
    parts = [make_weight(out, 64, scheme_of(bits), seed=seed) for seed, out in enumerate((96, 48, 56))]
    weight = SLICES[name](parts)
    plain = SLICES[name]([in_bytes(part) for part in parts])
    x = torch.randn(9, 64)
    check_bits(x, weight)
    assert torch.equal(weight.codes, plain.codes)
    for isa in native.available():
        assert torch.equal(multiplied(x, weight, isa), multiplied(x, plain, isa))


@BITS
def test_shards_have_the_columns_of_the_whole(bits: int) -> None:
    """Whole tiles and others, of all outputs; and a shard of the inputs."""
    whole, x = make_weight(192, 64, scheme_of(bits)), torch.randn(13, 64)
    for isa in native.available():
        out = multiplied(x, whole, isa)
        for start, stop in ((0, 48), (48, 80), (80, 192), (64, 128), (10, 50)):
            shard = take_rows(whole, torch.arange(start, stop))
            assert torch.equal(multiplied(x, shard, isa), out[:, start:stop]), (isa, start)
        cut = x.clone()
        cut[:, :32] = 0
        part = take_inputs(whole, range(32, 64))
        assert torch.equal(multiplied(x[:, 32:].contiguous(), part, isa), multiplied(cut, whole, isa))


@BITS
@pytest.mark.parametrize(("width", "inner"), [(64, 64), (64, 48), (48, 64), (80, 112)])
@pytest.mark.parametrize("sliced", [False, True])
def test_experts_are_those_of_bytes(bits: int, width: int, inner: int, sliced: bool) -> None:
    """Those whose outputs fill no ring, and a shard of each, too."""
    count, rows, top_k, scheme = 5, 21, 2, scheme_of(bits, 16)
    gate_up = [make_weight(2 * inner, width, scheme, seed=e) for e in range(count)]
    tall = [make_weight(width + 32, inner, scheme, seed=e) for e in range(count)]
    down = [take_rows(each, torch.arange(16, 16 + width)) if sliced else take_rows(each, torch.arange(width))
            for each in tall]  # fmt: skip
    experts = torch.stack([torch.randperm(count - 1)[:top_k] for _ in range(rows)]).int()
    x, weights = torch.randn(rows, width), torch.rand(rows, top_k)

    def op(change: Callable[[QuantizedWeight], QuantizedWeight]) -> Experts:
        return experts_op(x, map(change, gate_up), [*map(change, down)], experts, weights, torch.empty(rows, width))

    for isa in native.available():
        outs = []
        for change in (lambda weight: weight, in_bytes):
            outs.append(op(change))
            run(executor(isa), [outs[-1]], make_step(rows))
        assert torch.equal(outs[0].out, outs[1].out), isa
