import pytest
import torch

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize import rtn

SCHEMES = [WeightScheme(b, g, s) for b in (2, 3, 4, 8) for g in (16, -1) for s in (True, False)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_each_code_is_the_nearest_to_its_weight(scheme):
    weight = torch.randn(24, 64)
    packed = rtn.quantize(weight, None, scheme).weight
    packed.check()
    chosen = (packed.dequantize() - weight).abs()
    zeros = torch.full_like(packed.scales, scheme.zero) if packed.zeros is None else packed.zeros.float()
    group = packed.group_of_input()
    for code in range(scheme.max_code + 1):
        other = (code - zeros[:, group]) * packed.scales[:, group]
        assert bool((chosen <= (other - weight).abs() + 1e-5).all())


def test_importance_is_what_the_scales_serve():
    weight, x = torch.randn(64, 64), torch.randn(500, 64)
    x[:, ::16] *= 30
    full, diagonal = LayerStats(64), LayerStats(64, hessian=False)
    full.update(x)
    diagonal.update(x)
    scheme = WeightScheme(4, 64)
    blind = rtn.quantize(weight, None, scheme).weight.dequantize()
    seen = rtn.quantize(weight, full, scheme)
    assert torch.equal(rtn.quantize(weight, diagonal, scheme).weight.codes, seen.weight.codes)
    output = [float(((w - weight) @ x.t()).square().sum()) for w in (seen.weight.dequantize(), blind)]
    assert output[0] < 0.7 * output[1]


def test_statistics_that_are_not_finite_are_ignored():
    weight, stats = torch.randn(8, 32), LayerStats(32)
    stats.update(torch.full((4, 32), float("inf")))
    result = rtn.quantize(weight, stats, WeightScheme(4, 32))
    assert torch.equal(result.weight.codes, rtn.quantize(weight, None, WeightScheme(4, 32)).weight.codes)
    assert 0 < result.report("x").error < 0.05


def test_eight_bits_per_channel_lose_almost_nothing():
    weight, stats = torch.randn(40, 96), LayerStats(96)
    stats.update(torch.randn(200, 96))
    result = rtn.quantize(weight, stats, WeightScheme(8, -1))
    assert result.weight.scales.shape == (40, 1) and result.report("x").error < 1e-4


def test_integers_that_share_a_scale_among_outputs_are_refused():
    with pytest.raises(ValueError, match="integers"):
        rtn.quantize(torch.randn(4, 32), None, WeightScheme(8, -1, rows=-1))
