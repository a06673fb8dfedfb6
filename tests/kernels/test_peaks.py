"""The machine's peaks: reported where they have a meaning, and nowhere else."""

from __future__ import annotations

import pytest

from qserve.kernels import native, peaks

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there are no C kernels here")


def test_the_peaks_of_this_machine() -> None:
    peak = peaks.measure(threads=1, repeats=2)
    assert peak.bytes > 1e8
    assert (peak.products is not None) == (native.best_isa() in ("amx", "avx512", "avx2"))
    assert peak.products is None or peak.products > 1e9


@pytest.mark.skipif("avx2" not in native.available(), reason="there is no AVX2 here")
def test_a_product_of_pairs_is_timed_where_there_is_no_dot_of_bytes() -> None:
    products = peaks.measure(threads=1, isa="avx2", repeats=2).products
    assert products is not None and products > 1e9


def test_without_such_an_instruction_there_is_no_peak_of_products() -> None:
    assert peaks.measure(threads=1, isa="scalar", repeats=1).products is None
