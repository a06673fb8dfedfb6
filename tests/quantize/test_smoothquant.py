import pytest
import torch

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels.reference import round_input
from qserve.quantize import fp8, rtn, smoothquant
from qserve.quantize.layer import static_scales

INT8, FP8 = WeightScheme(8, -1), WeightScheme(8, -1, dtype="fp8")
TOKEN = ActivationScheme("int8", "token")
STATIC = ActivationScheme("int8", "tensor", dynamic=False)


def inputs(outliers=True):
    x = torch.randn(400, 128, generator=torch.Generator().manual_seed(1))
    if outliers:
        x[:, ::31] *= 60
    return x


def stats_of(x, sample_rows=300):
    stats = LayerStats(x.shape[1], sample_rows=sample_rows)
    stats.update(x)
    return stats


def product_error(x, weight, scale, scheme, activations):
    scale = torch.ones(x.shape[1]) if scale is None else scale
    nearest = fp8.nearest if scheme.dtype == "fp8" else rtn.nearest
    rounded = nearest(weight * scale, x.square().mean(0) / scale.square(), scheme).dequantize()
    fixed = None if activations.dynamic else float(static_scales((x / scale).abs().max(), activations.grid))
    exact = x @ weight.t()
    return float((round_input(x / scale, activations, fixed) @ rounded.t() - exact).square().sum()
                 / exact.square().sum())


@pytest.mark.parametrize("activations", [TOKEN, STATIC], ids=str)
def test_outliers_are_smoothed(activations):
    x, weight = inputs(), torch.randn(96, 128)
    weight[:, ::31] /= 60  # the products of all inputs count
    scale = smoothquant.search([weight[:64], weight[64:]], stats_of(x), INT8, activations)
    assert scale is not None
    plain = product_error(x, weight, None, INT8, activations)
    assert product_error(x, weight, scale, INT8, activations) < 0.2 * plain


@pytest.mark.parametrize("scheme", [FP8, WeightScheme(8, -1, dtype="fp8", rows=-1)], ids=str)
def test_fp8_is_never_worse_for_it(scheme):
    x, weight, activations = inputs(), torch.randn(96, 128), ActivationScheme("fp8", "token")
    scale = smoothquant.search([weight], stats_of(x, 400), scheme, activations)
    plain = product_error(x, weight, None, scheme, activations)
    assert scale is None or product_error(x, weight, scale, scheme, activations) < plain


def test_inputs_that_share_a_channel_share_a_scale():
    channels = torch.arange(128) % 64
    scale = smoothquant.search([torch.randn(32, 128)], stats_of(inputs()), INT8, TOKEN, channels)
    assert scale is not None and torch.equal(scale[:64], scale[64:]) and len(scale.unique()) > 2


def test_a_scale_can_be_folded_into_float16():
    x, weight = inputs(), torch.randn(32, 128)
    x[:, 1], x[:, 2], weight[:, 3] = 0, 1e7, 0
    scale = smoothquant.search([weight], stats_of(x), INT8, TOKEN)
    assert scale is not None and bool((scale >= 1e-3).all() and (scale <= 1e3).all())


def test_nothing_to_gain_gives_none():
    even = torch.ones(50, 128) * torch.randn(50, 1).sign()
    assert smoothquant.search([torch.ones(16, 128)], stats_of(even), INT8, TOKEN) is None
    assert smoothquant.search([torch.randn(16, 128)], stats_of(torch.zeros(9, 128)), INT8, TOKEN) is None
    assert smoothquant.search([torch.zeros(16, 128)], stats_of(inputs()), INT8, TOKEN) is None


def test_rows_must_have_been_sampled():
    with pytest.raises(ValueError, match="sampled"):
        smoothquant.search([torch.randn(16, 128)], stats_of(inputs(), 0), INT8, TOKEN)
