"""The times of kernels stand beside the machine's peaks, each figure with its meaning."""

from __future__ import annotations

import pytest

from qserve.checkpoint.errors import UsageError
from qserve.evals.bench import kernels
from qserve.kernels import native, peaks
from qserve.runtime.config import EngineConfig

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there are no C kernels here")


def test_every_kernel_is_timed_at_every_number_of_rows() -> None:
    seen: list[tuple[int, int]] = []
    report = kernels.run(
        native.NativeExecutor(1), "qserve bench kernels", repeats=1, shapes=[(48, 192)], rotated=1 << 14,
        update=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    timings = report.data["timings"]
    assert [(t["kernel"], t["rows"]) for t in timings] == [
        (kernel.name, rows) for kernel in kernels.KERNELS for rows in kernels.ROWS
    ]
    assert len(report.sections[0].rows) == len(report.metrics) == len(timings)
    for timing, metric in zip(timings, report.metrics):
        assert metric.value == pytest.approx(timing["rows"] * 48 * 192 / timing["seconds"] / 1e9)
    assert seen[-1] == (len(kernels.KERNELS), len(kernels.KERNELS))
    (roofline,) = report.plots
    assert [series.name for series in roofline.series] == ["the machine", *(kernel.name for kernel in kernels.KERNELS)]


def test_the_roof_has_two_slopes() -> None:
    peak = peaks.Peaks(products=400e9, bytes=20e9)
    assert kernels.roof(peak, 2.0) == 40e9
    assert kernels.roof(peak, 1000.0) == 400e9
    assert kernels.roof(peaks.Peaks(None, 20e9), 1000.0) == 20e12


def test_what_is_no_c_kernel_is_refused() -> None:
    from qserve import benching

    with pytest.raises(UsageError, match="C kernels"):
        benching.kernels(EngineConfig(kernels="reference"), 1)
    with pytest.raises(UsageError, match="unknown kernels"):
        benching.kernels(EngineConfig(kernels="native-sse"), 1)
    with pytest.raises(UsageError, match="--repeats"):
        benching.kernels(EngineConfig(), 0)


def test_static_batches_have_one_length_of_prompts() -> None:
    from qserve import benching

    with pytest.raises(UsageError, match="one --prompt"):
        benching.static("demo", "64", "8,16", None, None, 0, EngineConfig())
