"""A grid that is only a row of the table: the reference computes with it, and all others refuse it."""

from __future__ import annotations

import pytest
import torch

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.grid import E4M3, GRIDS, INTEGERS, Grid, grid_named, input_grid
from qserve.checkpoint.loaders import LOADERS, verdicts
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme

TABLE = torch.linspace(-1, 1, 16) ** 3


@pytest.fixture
def cubes(monkeypatch) -> WeightScheme:
    """Four bits that stand for the numbers of a table."""
    grid = Grid("cubes", (4,), zero_points=False, exact=False, largest=1.0, numbers=lambda codes: TABLE[codes.long()])
    monkeypatch.setitem(GRIDS, "cubes", grid)
    return WeightScheme(4, 32, dtype="cubes")


def weight(scheme: WeightScheme) -> QuantizedWeight:
    return QuantizedWeight(scheme, torch.randint(0, 16, (32, 64), dtype=torch.uint8), torch.rand(32, 2) + 0.5)


def test_names():
    assert WeightScheme(4).grid is INTEGERS and WeightScheme(8, -1, dtype="fp8").grid is E4M3
    assert ActivationScheme("int8").grid is INTEGERS and ActivationScheme("fp8").grid is E4M3
    for refuse in (lambda: WeightScheme(4, dtype="nf5"), lambda: grid_named("nf5"), lambda: input_grid("int4"),
                   lambda: ActivationScheme("bf8"), lambda: WeightScheme(4, dtype="fp8"),  # type: ignore[arg-type]
                   lambda: WeightScheme(8, symmetric=False, dtype="fp8"), lambda: WeightScheme(4, dtype="hqq")):
        with pytest.raises(UsageError):
            refuse()


def test_integers_are_codes_and_e4m3_is_what_torch_makes_of_the_byte():
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(INTEGERS.numbers(codes), codes.float())
    numbers = E4M3.numbers(codes)
    assert torch.equal(numbers.nan_to_num(0.0), codes.view(torch.float8_e4m3fn).float().nan_to_num(0.0))
    assert numbers.isnan().nonzero().flatten().tolist() == [E4M3.nan, E4M3.nan | 0x80]
    assert float(numbers.nan_to_num(0.0).max()) == E4M3.largest


def test_a_row_is_enough_for_a_weight_to_have_numbers(cubes):
    packed = weight(cubes)
    packed.check()
    expected = TABLE[packed.codes.long()] * packed.scales.repeat_interleave(32, 1)
    assert torch.equal(packed.dequantize(), expected)
    assert cubes.storage_bits(32, 64) == 32 * 64 * 4 + 64 * 16  # no zero points
    with pytest.raises(UsageError, match="no zero points"):
        WeightScheme(4, 32, False, dtype="cubes")


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_formats_and_loaders_refuse_what_they_do_not_name(format, cubes):
    spec = QuantSpec("rtn", cubes)
    shapes = {"model.layers.0.mlp.up_proj": (128, 128)}
    assert "cubes" in format.limit(spec, dict.fromkeys(shapes, cubes), shapes) or format.name == "fp8"
    assert not any(verdict.accepts for verdict in verdicts(spec, shapes, LOADERS, format=format))
    with pytest.raises(UsageError):
        format.config_of(spec)
    with pytest.raises(CheckpointError):
        format.pack(weight(cubes))
