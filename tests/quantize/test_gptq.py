from dataclasses import replace

import pytest
import torch

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize import gptq, rtn, scales


def naive(weight, stats, scheme, act_order):
    """GPTQ as the OBQ paper writes it: after each column, eliminate it from an explicit inverse, in float64."""
    w = weight.double().clone()
    out, inp = w.shape
    width = scheme.group_width(inp)
    h = stats.hessian.double().clone()
    h.diagonal()[h.diagonal() == 0] = mean = h.diagonal()[h.diagonal() != 0].mean()
    h.diagonal().mul_(1.1 + 1.4 * inp / stats.tokens).add_(0.01 * mean)
    inverse = torch.linalg.inv(h)
    importance = stats.hessian.diagonal()
    chosen = {}

    def scale_of(group, source):
        span = slice(group * width, (group + 1) * width)
        return scales.search(source[:, span].float().contiguous(), importance[span], scheme)

    if act_order or scheme.scale_bits or scheme.grid.real_zeros:
        found, zeros = rtn.group_scales(weight, importance, scheme)
        chosen = {group: (found[:, group], None if zeros is None else zeros[:, group]) for group in range(inp // width)}
    codes = torch.zeros(out, inp)
    left = list(importance.argsort(descending=True, stable=True)) if act_order else list(range(inp))
    while left:
        column = int(left.pop(0))
        group = column // width
        if group not in chosen:
            chosen[group] = scale_of(group, w)
        scale, zeros = chosen[group]
        offset = float(scheme.zero) if zeros is None else zeros
        if scheme.grid.real_zeros:
            codes[:, column] = (w[:, column].float() / scale + offset).round().clamp(0, scheme.max_code)
        else:
            codes[:, column] = scales.encode(w[:, column].float(), scale, offset, scheme.max_code)
        rounded = (codes[:, column] - offset).double() * scale.double()
        error = (w[:, column] - rounded) / inverse[column, column]
        w -= error[:, None] * inverse[column][None, :]
        w[:, column] = rounded
        inverse -= inverse[:, column : column + 1] @ inverse[column : column + 1, :] / inverse[column, column]
    return codes, w


def layer(out=48, inp=96, tokens=2000, seed=0, dead=()):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, inp, generator=generator) / 8
    mix = torch.randn(inp, inp, generator=generator) / inp**0.5
    x = torch.randn(tokens, inp, generator=generator) @ mix * (torch.rand(inp, generator=generator) * 3 + 0.1)
    x[:, list(dead)] = 0
    stats = LayerStats(inp)
    stats.update(x)
    return weight, x, stats


def loss(weight, quantized, x):
    return float(((quantized.double() - weight.double()) @ x.double().t()).square().sum())


@pytest.mark.usefixtures("gptq_alone")
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(
    "scheme",
    [
        WeightScheme(4, 32), WeightScheme(4, 16, False), WeightScheme(4, -1), WeightScheme(8, 32),
        WeightScheme(3, 32), WeightScheme(2, 8), WeightScheme(8, -1, False), WeightScheme(4, 48),
    ],
    ids=str,
)
def test_equals_the_naive_column_by_column_reference(scheme, act_order):
    weight, x, stats = layer(dead=(5, 40))
    codes, expected = naive(weight, stats, scheme, act_order)
    result = gptq.quantize(weight, stats, scheme, act_order=act_order)
    result.weight.check()
    same = result.weight.codes.float() == codes
    if act_order:
        assert float(same.float().mean()) > 0.995
    else:
        # Scales are chosen on compensated weights: at 8 bits two, often of either sign, may be so nearly as good that
        # the order of torch's sums decides. That changes other codes of the same row too, and no other row.
        assert float(same.all(dim=1).float().mean()) > 0.8
    assert loss(weight, result.weight.dequantize(), x) == pytest.approx(loss(weight, expected, x), rel=0.01)
    assert result.fallback == "" and result.damping == 0.01 and result.dead_inputs == 2
    assert result.weight.g_idx is None


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_beats_rounding_to_nearest(bits, act_order):
    weight, x, stats = layer(seed=bits)
    scheme = WeightScheme(bits, 32)
    nearest = rtn.quantize(weight, stats, scheme)
    result = gptq.quantize(weight, stats, scheme, act_order=act_order)
    assert loss(weight, result.weight.dequantize(), x) < 0.8 * loss(weight, nearest.weight.dequantize(), x)


@pytest.mark.usefixtures("gptq_alone")
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_on_text_it_did_not_see_few_tokens_are_better_than_none(tokens):
    """Without shrinkage fewer tokens than inputs fit chance: worse than to nearest."""
    weight, x, _ = layer()
    seen, unseen = x[:tokens], x[tokens:]
    stats, scheme = LayerStats(96), WeightScheme(4, 32)
    stats.update(seen)
    with_it = gptq.inverse_of(stats)
    without = replace(with_it, factor=gptq.inverse_factor(stats.hessian, with_it.order))
    errors = [
        loss(weight, gptq.quantize_with(inverse, weight, stats, scheme).weight.dequantize(), unseen)
        for inverse in (with_it, without)
    ]
    nearest = loss(weight, rtn.quantize(weight, stats, scheme).weight.dequantize(), unseen)
    assert errors[0] < nearest < errors[1]


FP8 = [
    WeightScheme(8, -1, dtype="fp8"), WeightScheme(8, -1, dtype="fp8", rows=-1),
    WeightScheme(8, 64, dtype="fp8", rows=64), WeightScheme(8, 40, dtype="fp8", rows=20),
]  # fmt: skip


@pytest.mark.parametrize("scheme", FP8, ids=str)
def test_e4m3_weights_make_up_for_each_others_errors(scheme):
    weight, x, stats = layer(dead=(5, 40))
    nearest = rtn.quantize(weight, stats, scheme)
    result = gptq.quantize(weight, stats, scheme)
    result.weight.check()
    assert torch.equal(result.weight.scales, nearest.weight.scales)
    assert loss(weight, result.weight.dequantize(), x) < 0.6 * loss(weight, nearest.weight.dequantize(), x)
    measured = loss(weight, result.weight.dequantize(), x) / float((weight.double() @ x.double().t()).square().sum())
    assert result.report("a").error == pytest.approx(measured, rel=1e-3)
    other = gptq.quantize(weight, stats, scheme, act_order=False)
    assert loss(weight, other.weight.dequantize(), x) < 0.7 * loss(weight, nearest.weight.dequantize(), x)


@pytest.mark.parametrize("scheme", FP8, ids=str)
def test_e4m3_weights_without_error_to_pass_on_are_rounded_to_nearest(scheme):
    weight, _, stats = layer()
    stats = LayerStats(96)
    stats.update(torch.eye(96) * 3)  # a diagonal Hessian: no input can make up for another
    result = gptq.quantize(weight, stats, scheme)
    assert torch.equal(result.weight.codes, rtn.quantize(weight, stats, scheme).weight.codes)


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_reported_error_is_that_of_the_output(method, monkeypatch):
    monkeypatch.setattr("qserve.quantize.layer._TILE", 40)  # of 96 inputs
    weight, x, stats = layer()
    result = (gptq if method == "gptq" else rtn).quantize(weight, stats, WeightScheme(4, 32))
    measured = loss(weight, result.weight.dequantize(), x) / float((weight.double() @ x.double().t()).square().sum())
    assert result.report("a").error == pytest.approx(measured, rel=1e-3)


def test_rows_are_independent_so_linears_may_be_stacked():
    weight, _, stats = layer()
    scheme = WeightScheme(4, 32, False)
    whole = gptq.quantize(weight, stats, scheme)
    top, part = gptq.quantize(weight[:16], stats, scheme), whole.rows(0, 16)
    assert float((top.weight.codes == part.weight.codes).float().mean()) > 0.999
    assert torch.equal(top.weight.scales, part.weight.scales)
    assert whole.rows(16, 48).weight.codes.shape == (32, 96)
    assert whole.rows(0, 16).report("x").error == pytest.approx(top.report("x").error, rel=0.02)


def test_inverse_factor_is_the_cholesky_factor_of_the_inverse():
    hessian = layer()[2].hessian
    factor = gptq.inverse_factor(hessian, torch.arange(len(hessian)))
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(96)
    torch.testing.assert_close(
        factor.upper.double().t() @ factor.upper.double() @ damped, torch.eye(96).double(), atol=1e-3, rtol=0
    )
    assert torch.equal(factor.upper, factor.upper.triu()) and factor.note == ""


def test_damping_climbs_the_ladder():
    hessian = torch.eye(16) * 1.0
    hessian[0, 1] = hessian[1, 0] = 1.05  # smallest eigenvalue -0.05: 0.01 is not enough, 0.1 is
    factor = gptq.inverse_factor(hessian, torch.arange(len(hessian)))
    assert factor.damping == 0.1 and "damping raised to 0.1" in factor.note
    hessian[0, 1] = hessian[1, 0] = 1.5
    assert gptq.inverse_factor(hessian, torch.arange(len(hessian))).damping == 1.0


def test_an_indefinite_hessian_gets_a_dominant_diagonal():
    hessian = torch.eye(16)
    hessian[0, 1] = hessian[1, 0] = 50.0
    factor = gptq.inverse_factor(hessian, torch.arange(len(hessian)))
    assert "diagonal raised" in factor.note
    assert bool(torch.isfinite(factor.upper).all())


def test_a_hessian_that_is_not_finite_is_rounded_and_reported():
    weight, x, stats = layer()
    x[3, 7] = float("nan")
    stats.update(x)
    result = gptq.quantize(weight, stats, WeightScheme(4, 32))
    assert "NaN" in result.fallback and result.damping is None
    result.weight.check()
    assert torch.equal(result.weight.codes, rtn.quantize(weight, None, WeightScheme(4, 32)).weight.codes)


def test_no_rung_of_the_ladder_holds(monkeypatch):
    weight, _, stats = layer()
    monkeypatch.setattr(gptq, "_invert", lambda *_: None)
    result = gptq.quantize(weight, stats, WeightScheme(4, 32))
    assert "no damping" in result.fallback
    result.weight.check()


def test_inputs_that_are_all_dead():
    weight = torch.randn(8, 32)
    stats = LayerStats(32)
    stats.update(torch.zeros(50, 32))
    result = gptq.quantize(weight, stats, WeightScheme(4, 32))
    assert result.dead_inputs == 32 and result.report("x").error == 0.0
    assert torch.equal(result.weight.codes, rtn.quantize(weight, stats, WeightScheme(4, 32)).weight.codes)


def test_fewer_tokens_than_inputs_is_damped_not_refused():
    weight, _, stats = layer(tokens=10)
    result = gptq.quantize(weight, stats, WeightScheme(4, 32))
    assert result.damping == 0.01
    result.weight.check()


def test_what_the_input_has_drifted_is_made_up_for():
    """Outputs on a drifted input come closer to the float model's than with the weight's own on that input."""
    torch.manual_seed(3)
    floats = torch.randn(900, 64)
    inputs = floats @ (torch.eye(64) + 0.1 * torch.randn(64, 64)) + 0.05 * torch.randn(900, 64)
    weight = torch.randn(32, 64)
    plain, drifted = LayerStats(64), LayerStats(64)
    for stats in (plain, drifted):
        stats.update(inputs)
    drifted.update_drift(inputs[:600], floats[:600])
    scheme = WeightScheme(4, 32)
    wanted = floats[600:] @ weight.t()  # of rows whose drift was not seen
    error = [
        float((inputs[600:] @ gptq.quantize(weight, stats, scheme).weight.dequantize().t() - wanted).square().mean())
        for stats in (plain, drifted)
    ]
    assert error[1] < 0.3 * error[0]
