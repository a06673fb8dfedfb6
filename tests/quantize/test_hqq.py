"""HQQ against a slow reference that takes one group and one weight at a time."""

from __future__ import annotations

import pytest
import torch

from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize import hqq, pipeline, scales
from qserve.quantize.job import QuantizeJob

SCHEMES = [WeightScheme(bits, size, False) for bits, size in ((2, 16), (3, 32), (4, 64), (8, -1))]


def power_sum(group: list[float], scale: float, zero: float, top: int) -> float:
    return sum(abs(w - scale * (code(w / scale, zero, top) - zero)) ** 0.7 for w in group)


def code(steps: float, zero: float, top: int) -> int:
    return min(max(round(steps + zero), 0), top)


def reference(group: list[float], scheme: WeightScheme) -> tuple[float, float]:
    """(scale, zero point), in double precision."""
    first_scales, first_zeros = scales.minmax(torch.tensor([group]), scheme)
    start = scale, zero = float(first_scales), float(first_zeros)
    top = scheme.max_code
    for step in range(23):
        if step == 20:
            zero = min(max(round(zero), 0), top)
        codes = [code(w / scale, zero, top) for w in group]
        wanted = []
        for w, q in zip(group, codes, strict=True):
            error = w / scale - (q - zero)
            size = abs(error)
            part = max(0.0, size - size**-0.3 / (10 * 1.01**step)) if size else 0.0
            wanted.append(w / scale - (part if error > 0 else -part))
        if step < 20:
            zero = sum(q - x for q, x in zip(codes, wanted, strict=True)) / len(group)
        along = sum(x * (q - zero) for q, x in zip(codes, wanted, strict=True))
        scale *= min(max(along / max(sum((q - zero) ** 2 for q in codes), 1e-9), 0.5), 2.0)
    scale = float(scales.storable(torch.tensor([scale])))
    return (scale, zero) if power_sum(group, scale, zero, top) < power_sum(group, *start, top) else start


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_search_finds_what_the_slow_one_finds(scheme):
    weight = torch.randn(40, scheme.group_width(128)) * torch.rand(40, 1).exp() + 0.3 * torch.randn(40, 1)
    found_scales, found_zeros = hqq.search(weight, scheme)
    alike = 0
    for group, scale, zero in zip(weight.tolist(), found_scales.tolist(), found_zeros.tolist(), strict=True):
        expected = reference(group, scheme)
        alike += expected[1] == zero and abs(expected[0] - scale) < 2e-3 * abs(scale)
        found = power_sum(group, scale, zero, scheme.max_code)
        # A code that lies between two may go the other way in single precision, and the rest with it.
        assert found == pytest.approx(power_sum(group, *expected, scheme.max_code), rel=0.1)
    assert alike >= 36


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_group_is_worse_than_min_max_and_most_are_better(scheme):
    weight = torch.randn(64, scheme.group_width(128))
    weight[:, 0] *= 4  # outliers, which the norm cares less about

    def sums(found: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        each = zip(weight.tolist(), found[0].tolist(), found[1].tolist(), strict=True)
        return torch.tensor([power_sum(group, scale, zero, scheme.max_code) for group, scale, zero in each])

    found, first = sums(hqq.search(weight, scheme)), sums(scales.minmax(weight, scheme))
    assert bool((found <= first * 1.0001).all()) and (found < first).float().mean() > 0.5


def test_shrinking_takes_least_from_what_is_large():
    errors = torch.tensor([-0.5, -0.1, 0.0, 0.1, 0.3, 0.5])
    shrunk = hqq.shrink(errors, 10.0)
    assert shrunk[[1, 2, 3]].tolist() == [0.0, 0.0, 0.0] and torch.equal(shrunk, -hqq.shrink(-errors, 10.0))
    assert errors[5] - shrunk[5] < errors[4] - shrunk[4]
    assert torch.allclose(hqq.shrink(errors, 1e9), errors, atol=1e-6)  # held to the error, it is the error


def test_degenerate_groups():
    scheme = WeightScheme(4, 32, False)
    for value in (0.0, 1e-30, -3.0, 70000.0):
        result = hqq.quantize(torch.full((3, 64), value), None, scheme).weight
        result.check()
        assert torch.isfinite(result.dequantize()).all()
    assert hqq.quantize(torch.zeros(3, 64), None, scheme).weight.dequantize().count_nonzero() == 0


@pytest.mark.parametrize(
    "scheme", [WeightScheme(4, 32), WeightScheme(8, -1, dtype="fp8"), WeightScheme(8, -1, False, rows=-1)], ids=str
)
def test_schemes_without_zero_points_are_refused(scheme):
    with pytest.raises(ValueError, match="zero point"):
        hqq.quantize(torch.randn(4, 32), None, scheme)


@pytest.mark.parametrize("format", ["auto", "awq", "gptq_v2"])
def test_it_writes_formats_with_zero_points_and_reads_no_text(format, llama, tmp_path):
    job = QuantizeJob(method="hqq", symmetric=False, group_size=32, format=format, calibration="there is no such file")
    report = pipeline.run(HFDirectory(llama), tmp_path / "out", job)
    written = HFDirectory(tmp_path / "out")
    assert (written.spec.method, written.spec.weights) == ("hqq", WeightScheme(4, 32, False))
    module = "model.layers.0.mlp.up_proj"
    original = HFDirectory(llama).tensor(f"{module}.weight").float()
    expected = hqq.quantize(original, None, WeightScheme(4, 32, False)).weight
    assert torch.equal(written.linear(module).dequantize(), expected.dequantize())
    assert report.format == {"auto": "compressed-tensors"}.get(format, format) and report.calibration_sha256 is None
