"""The default split of K for decodes with 4-bit weights leaves no time idle."""

from __future__ import annotations

import pytest
from waves import SHAPES, waves


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_the_last_wave_keeps_the_memory_busy(name: str, rows: int) -> None:
    """Empty slots cost nothing as long as the programs beside them have asked for enough and issue in time."""
    made = waves(*SHAPES[name], rows)
    assert made.asked > 2 and made.busiest < 0.96


def test_a_product_of_few_tiles_is_split() -> None:
    assert waves(4096, 4096, 16).splits > 1 and waves(4096, 4096, 16).idle < 0.08
    assert waves(57344, 8192, 16).splits == 1
