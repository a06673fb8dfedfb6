import pytest
import torch

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.spec import MXFP8, ActivationScheme, WeightScheme
from qserve.quantize import fp8, rtn
from qserve.quantize.layer import with_activations

CHANNEL = WeightScheme(8, -1, dtype="fp8")
TENSOR = WeightScheme(8, -1, dtype="fp8", rows=-1)
BLOCK = WeightScheme(8, 128, dtype="fp8", rows=128)
SMALL = WeightScheme(8, 32, dtype="fp8", rows=16)
SCHEMES = [CHANNEL, TENSOR, BLOCK, SMALL, WeightScheme(8, 64, dtype="fp8")]
E4M3 = torch.arange(256, dtype=torch.uint8)[(torch.arange(256) & 0x7F) != 0x7F].view(torch.float8_e4m3fn).float()


def stats_of(x):
    stats = LayerStats(x.shape[1], hessian=False)
    stats.update(x)
    return stats


def blocks(weight, scheme):
    """Each part of ``weight`` that shares a scale."""
    height, width = scheme.row_height(len(weight)), scheme.group_width(weight.shape[1])
    return [part for rows in weight.split(height) for part in rows.split(width, 1)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", [(128, 256), (130, 200), (7, 40)])
def test_weights_that_e4m3_can_hold_come_back_exactly(scheme, shape):
    scheme_scale = 0.375  # exact in float32 with every e4m3 number
    weight = E4M3[torch.randint(len(E4M3), shape)]
    for part in blocks(weight, scheme):
        part[0, 0] = 448
    packed = rtn.quantize(weight * scheme_scale, None, scheme).weight
    packed.check()
    assert torch.equal(packed.dequantize(), weight * scheme_scale)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_each_error_is_within_half_a_step(scheme):
    weight = torch.randn(200, 300) * torch.logspace(-2, 1, 200)[:, None]
    result = rtn.quantize(weight, stats_of(torch.randn(50, 300)), scheme)
    result.weight.check()
    scales = result.weight.scales[:, result.weight.group_of_input()]
    bound = (weight.abs() * 2.0**-4).maximum(scales * 2.0**-10)  # 3 bits behind the first; steps of 2**-9 below 2**-6
    assert bool(((result.weight.dequantize() - weight).abs() <= bound * (1 + 1e-5)).all())
    assert 0 < result.report("x").error < 1e-3


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_chosen_scale_beats_absmax_where_some_inputs_matter_most(scheme):
    x, weight = torch.randn(400, 256), torch.randn(256, 256)
    x[:, ::64] *= 40
    stats = stats_of(x)
    importance, plain = stats.diagonal, 0.0
    for index, part in enumerate(blocks(weight, scheme)):
        scale = part.abs().amax() / 448
        weights = importance.expand_as(weight).split(scheme.group_width(256), 1)
        change = (part / scale).to(torch.float8_e4m3fn).float() * scale - part
        plain += float((change.square() * weights[index % len(weights)][: len(part)]).sum())
    chosen = float(rtn.quantize(weight, stats, scheme).error.sum())
    assert chosen <= plain * (1 + 1e-5)
    assert scheme.rows != 1 or scheme.group_size != -1 or chosen < 0.85 * plain


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zero_tiny_and_huge_weights_stay_finite(scheme):
    weight = torch.randn(130, 200)
    weight[0], weight[1], weight[2], weight[3], weight[-1, -1] = 0, 1e-42, 3e38, -1e-30, -3e38
    packed = rtn.quantize(weight, stats_of(torch.zeros(3, 200)), scheme).weight
    packed.check()
    assert bool((packed.scales > 0).all()) and bool(torch.isfinite(packed.dequantize()).all())
    assert rtn.quantize(torch.zeros(40, 64), None, scheme).weight.dequantize().count_nonzero() == 0


def test_rows_of_one_weight_do_not_depend_on_how_it_is_cut(monkeypatch):
    weight, stats = torch.randn(300, 96), stats_of(torch.randn(40, 96))
    whole = [rtn.quantize(weight, stats, scheme).weight for scheme in SCHEMES]
    monkeypatch.setattr(fp8, "_CHUNK", 1000)
    for scheme, expected in zip(SCHEMES, whole, strict=True):
        assert torch.equal(rtn.quantize(weight, stats, scheme).weight.codes, expected.codes)


def test_a_static_scale_is_that_of_the_largest_input():
    x, weight = torch.randn(100, 64), torch.randn(16, 64)
    x[3, 4] = -9.0
    static = ActivationScheme("fp8", "tensor", dynamic=False)
    packed = with_activations(rtn.quantize(weight, stats_of(x), CHANNEL), static, stats_of(x)).weight
    packed.check()
    assert packed.input_scale == float(torch.tensor(9.0) / 448) and packed.activations == static
    int8 = ActivationScheme("int8", "tensor", dynamic=False)
    rounded = rtn.quantize(weight, stats_of(x), WeightScheme(8, -1))
    assert with_activations(rounded, int8, stats_of(x)).weight.input_scale == float(torch.tensor(9.0) / 127)
    assert with_activations(rounded, int8, stats_of(torch.zeros(2, 64))).weight.input_scale > 0
    for useless in (None, stats_of(torch.full((2, 64), torch.inf))):
        with pytest.raises(ValueError, match="finite statistics"):
            with_activations(rounded, int8, useless)


def test_a_dynamic_scale_needs_no_statistics():
    dynamic = ActivationScheme("fp8", "token")
    packed = with_activations(rtn.quantize(torch.randn(16, 64), None, CHANNEL), dynamic, None).weight
    packed.check()
    assert packed.activations == dynamic and packed.input_scale is None


def test_scales_of_mxfp8_are_the_least_powers_of_two():
    weight = torch.randn(40, 96) * torch.logspace(-5, 5, 40)[:, None]
    weight[3] = 0
    packed = rtn.quantize(weight, stats_of(torch.randn(50, 96)), MXFP8).weight
    packed.check()
    largest = weight.view(40, 3, 32).abs().amax(2)
    assert bool((packed.scales.frexp().mantissa == 0.5).all()) and bool((largest <= 448 * packed.scales).all())
    others = largest > 0
    assert bool((largest > 224 * packed.scales)[others].all())


def test_integers_are_refused():
    with pytest.raises(ValueError, match="e4m3"):
        fp8.nearest(torch.randn(4, 32), torch.ones(32), WeightScheme(8, 32))
