"""Codebooks and real zero points in integer products: how far kernels are from ``dequantize``, at odd sizes."""

from __future__ import annotations

import pytest
import torch

from qserve.checkpoint.grid import BNB_FP4, E2M1, NF4, Grid
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import native
from qserve.kernels.prepack import int_tiles, tile_bytes
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


def test_four_bits_are_held_in_four() -> None:
    for dtype, symmetric, each in (("nf4", True, 4.5), ("bnb-fp4", True, 4.5), ("hqq", False, 4.5)):
        scheme = WeightScheme(4, 64, symmetric, dtype=dtype)
        weight = make_weight(160, 256, scheme)
        if weight.zeros is not None:
            weight = QuantizedWeight(scheme, weight.codes, weight.scales.half().float(), weight.zeros.half())
        tiles = int_tiles(weight)
        held = tiles.weight.nbytes + tiles.scales.nbytes + (0 if tiles.zeros is None else tiles.zeros.nbytes)
        assert held == 160 * 256 * each / 8 == tile_bytes(scheme, None, 160, 256, half_scales=True)
