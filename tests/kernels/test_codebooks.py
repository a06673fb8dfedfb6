"""Codebooks and real zero points in integer products: how far kernels are from ``dequantize``, at odd sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qserve.checkpoint.grid import BNB_FP4, E2M1, NF4, Grid
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import native
from qserve.kernels.code_tiles import tile_codes_reference
from qserve.kernels.prepack import anywhere, int_tiles, tile_bytes
from qserve.kernels.tiled import _stacked
from tests.kernels.quantized_weights import make_weight
from tests.kernels.test_operations import NF4_ERROR, Product, executor

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.mark.parametrize(("grid", "count", "error"), [(E2M1, 1, 0.0), (BNB_FP4, 2, 1e-7), (NF4, 2, NF4_ERROR)])
def test_a_book_has_the_numbers_of_the_grid(grid: Grid, count: int, error: float) -> None:
    tiles = int_tiles(make_weight(3, 64, WeightScheme(4, 64, dtype=grid.name)))
    assert tiles.codebook is not None and tiles.codebook.shape == (count, 16) and grid.codebook is not None
    numbers = (tiles.codebook.int() << torch.arange(0, 8 * count, 8)[:, None]).sum(0) - tiles.zero
    assert float((numbers.double() * grid.unit - torch.tensor(grid.codebook).double()).abs().max()) <= error
    assert count == 2 or int(tiles.codebook.max()) <= 31


@pytest.mark.parametrize("isa", native.available())
@pytest.mark.parametrize(
    ("bits", "group", "shape"), [(4, 64, (33, 192)), (8, 24, (17, 72)), (3, -1, (5, 75)), (2, 8, (150, 8))]
)
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8), (torch.float32, 0.0)]
)
def test_real_zero_points_are_not_rounded_in_between(
    isa: native.Isa, bits: int, group: int, shape: tuple[int, int], dtype: torch.dtype, rounding: float
) -> None:
    """HQQ rounds a weight, and the difference before it, to the dtype of its zero points; kernels round neither."""
    scheme = WeightScheme(bits, group, symmetric=False, dtype="hqq")
    weight = make_weight(*shape, scheme)
    assert weight.zeros is not None
    weight = QuantizedWeight(scheme, weight.codes, weight.scales.to(dtype).float(), weight.zeros.to(dtype))
    precise = QuantizedWeight(scheme, weight.codes, weight.scales, weight.zeros.float())
    assert int_tiles(weight).scales.dtype == (torch.float32 if dtype == torch.float32 else torch.float16)
    for rows in (1, 3, 13):
        product = Product(torch.randn(rows, shape[1]), precise, None, False)
        want, magnitude = product.expected()
        got = Product(product.x, weight, None, False).run(executor(isa))
        assert ((got - want).abs() <= 1e-6 * magnitude).all()
    exact = precise.dequantize()
    assert ((weight.dequantize() - exact).abs() <= 2.01 * rounding * exact.abs()).all()


@pytest.mark.parametrize("isa", native.available())
@pytest.mark.parametrize(("group", "shape"), [(16, (33, 80)), (32, (17, 96)), (8, (150, 8)), (-1, (5, 70))])
def test_scales_of_e4m3_stay_in_eight_bits(isa: native.Isa, group: int, shape: tuple[int, int]) -> None:
    """With a factor for each output, whatever it is. Others have 16 or 32; rows beside them have the same results."""
    weight = make_weight(*shape, WeightScheme(4, group, dtype="fp4"))
    weight.scales[0] = 0
    single = replace(weight, scales=torch.cat([weight.scales[:-1], 1e-3 * torch.rand(1, weight.scales.shape[1])]))
    halves = replace(weight, scales=torch.full_like(weight.scales, -0.5))
    held = [int_tiles(each).scales.dtype for each in (weight, single, halves)]
    assert held == [torch.float8_e4m3fn, torch.float32 if weight.scales.shape[1] > 1 else held[0], torch.float16]
    x, found = torch.randn(9, shape[1]), []
    for each in (weight, single, halves):
        product = Product(x, each, None, False)
        want, magnitude = product.expected()
        found.append(product.run(executor(isa)))
        assert ((found[-1] - want).abs() <= 1e-6 * magnitude).all()
    assert torch.equal(found[0][:, :-1], found[1][:, :-1])


def test_experts_whose_scales_differ_in_bits_are_held_in_single_precision() -> None:
    first = make_weight(32, 64, WeightScheme(4, 16, dtype="fp4"))
    other = replace(first, scales=torch.rand(32, 4))
    fields, _ = _stacked([first, other], anywhere, tile_codes_reference)
    assert fields["scale_dtype"] == 0 and fields["scales"].dtype == torch.float32
    scales = fields["scales"].transpose(-1, -2).flatten(1, 2)
    scales = scales * fields["row_scales"].flatten(1)[..., None] * 2  # the unit of the numbers
    torch.testing.assert_close(scales, torch.stack([first.scales, other.scales]), rtol=1e-6, atol=0)


def test_four_bits_are_held_in_four() -> None:
    for dtype, symmetric, each in (("nf4", True, 4.5), ("bnb-fp4", True, 4.5), ("hqq", False, 4.5)):
        scheme = WeightScheme(4, 64, symmetric, dtype=dtype)
        weight = make_weight(160, 256, scheme)
        if weight.zeros is not None:
            weight = QuantizedWeight(scheme, weight.codes, weight.scales.half().float(), weight.zeros.half())
        tiles = int_tiles(weight)
        held = tiles.weight.nbytes + tiles.scales.nbytes + (0 if tiles.zeros is None else tiles.zeros.nbytes)
        assert held == 160 * 256 * each / 8 == tile_bytes(scheme, None, 160, 256, narrow_scales=True)
