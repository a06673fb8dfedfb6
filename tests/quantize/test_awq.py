import pytest
import torch

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize import awq, gptq, refit, rtn

W4 = WeightScheme(4, 32)


def stats_of(x, **options):
    stats = LayerStats(x.shape[1], **options)
    stats.update(x)
    return stats


def inputs(seed=0, outliers=True, rows=600, width=128):
    """Correlated inputs; a few of them are far larger than the rest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) @ torch.randn(width, width, generator=generator) / 11
    x += 0.3 * torch.randn(rows, width, generator=generator)
    if outliers:
        x[:, ::17] *= 25
    return x


def output_error(x, weight, scale, scheme):
    stats = stats_of(x)
    scale = torch.ones(x.shape[1]) if scale is None else scale
    changed = rtn.quantize(weight * scale, stats.divided(scale), scheme).weight.dequantize() / scale - weight
    return float((x @ changed.t()).square().sum() / (x @ weight.t()).square().sum())


@pytest.mark.parametrize("scheme", [WeightScheme(3, 32), W4, WeightScheme(4, -1, False), WeightScheme(8, 32)], ids=str)
def test_outliers_make_a_scale_clearly_better_than_none(scheme):
    x, weight = inputs(), torch.randn(192, 128)
    scale = awq.search([weight[:128], weight[128:]], stats_of(x), [scheme, scheme])
    assert scale is not None
    assert output_error(x, weight, scale, scheme) < 0.8 * output_error(x, weight, None, scheme)


@pytest.mark.parametrize("seed", range(4))
def test_a_scale_is_never_worse_than_none_on_its_data(seed):
    torch.manual_seed(seed)
    x, weight = inputs(seed, outliers=seed % 2 == 0), torch.randn(96, 128)
    scale = awq.search([weight], stats_of(x), [W4])
    assert scale is None or output_error(x, weight, scale, W4) < output_error(x, weight, None, W4)


def test_a_few_rows_decide_as_all_of_them_do():
    x, weight = inputs(), torch.randn(2000, 128)
    scale = awq.search([weight], stats_of(x), [W4])
    assert scale is not None and output_error(x, weight, scale, W4) < 0.8 * output_error(x, weight, None, W4)


def test_inputs_that_share_a_channel_share_a_scale():
    channels = (torch.arange(128) // 64) * 32 + torch.arange(128) % 32  # two groups of two heads of 32
    scale = awq.search([torch.randn(64, 128)], stats_of(inputs()), [W4], channels)
    assert scale is not None and len(scale.unique()) > 32
    for channel in channels.unique():
        assert len(scale[channels == channel].unique()) == 1


def test_a_scale_can_be_folded_into_float16():
    x = inputs()
    x[:, 5], x[:, 6], x[:, 7] = 0, 1e-20, 1e6
    weight = torch.randn(64, 128)
    weight[:, 9] = 0
    scale = awq.search([weight], stats_of(x), [W4])
    assert scale is not None and scale.dtype == torch.float32
    assert bool((scale >= 1e-3).all() and (scale <= 1e3).all())


def test_nothing_to_gain_gives_none():
    zeros, noise = torch.zeros(64, 128), torch.randn(300, 128)
    assert awq.search([zeros], stats_of(noise), [W4]) is None
    assert awq.search([torch.randn(64, 128)], stats_of(torch.zeros(10, 128)), [W4]) is None
    noise[3, 4] = torch.inf
    assert awq.search([torch.randn(64, 128)], stats_of(noise), [W4]) is None


def test_sampled_rows_stand_in_for_the_hessian():
    x, weight = inputs(), torch.randn(96, 128)
    scale = awq.search([weight], stats_of(x, hessian=False, sample_rows=200), [W4])
    assert scale is not None
    assert output_error(x, weight, scale, W4) < 0.8 * output_error(x, weight, None, W4)


def test_importance_of_what_gptq_cannot_make_up_for_helps_gptq():
    x, weight = inputs(), torch.randn(96, 128)
    weight[:, 3::16] *= 4
    stats = stats_of(x)
    hessian = stats.hessian.double() + 0.01 * stats.diagonal.mean() * torch.eye(128)
    order = stats.diagonal.argsort(descending=True)
    upper = torch.linalg.cholesky(hessian[order][:, order].inverse(), upper=True)
    importance = torch.empty(128)
    importance[order] = upper.diagonal().pow(-2).float()
    scale = awq.search([weight], stats, [W4], importance=importance)
    assert scale is not None
    before = gptq.quantize(weight, stats, W4).error.sum()
    assert gptq.quantize(weight * scale, stats.divided(scale), W4).error.sum() < 0.95 * before


@pytest.mark.parametrize("scheme", [W4, WeightScheme(4, 32, False), WeightScheme(3, -1)], ids=str)
def test_fitted_scales_lower_every_output_s_error(scheme):
    x, weight = inputs(), torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    weight[0], weight[1, :32], weight[2] = 0, 0, 1e-9
    stats = stats_of(x)
    plain, fitted = rtn.quantize(weight, stats, scheme), awq.quantize(weight, stats, scheme)
    fitted.weight.check()
    assert torch.equal(fitted.weight.codes, plain.weight.codes)
    assert torch.equal(fitted.weight.scales.half().float(), fitted.weight.scales)
    assert bool((fitted.error <= plain.error).all())
    assert fitted.error.sum() < (0.97 if scheme.group_size == 32 else 1.0) * plain.error.sum()
    change = fitted.weight.dequantize() - weight
    measured = 2 / len(x) * (x @ change.t()).square().sum(0)
    torch.testing.assert_close(fitted.error.float(), measured, rtol=1e-2, atol=1e-6)


def test_fitting_many_outputs_in_parts_changes_nothing(monkeypatch):
    stats, weight = stats_of(inputs()), torch.randn(50, 128)
    whole = awq.quantize(weight, stats, W4)
    monkeypatch.setattr(refit, "_NUMBERS", 3 * 16)
    torch.testing.assert_close(awq.quantize(weight, stats, W4).weight.scales, whole.weight.scales, rtol=2e-3, atol=0)


def test_without_a_hessian_nothing_is_fitted():
    stats, weight = stats_of(inputs(), hessian=False), torch.randn(8, 128)
    assert torch.equal(awq.quantize(weight, stats, W4).weight.scales, rtn.quantize(weight, stats, W4).weight.scales)
