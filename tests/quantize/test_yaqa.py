"""YAQA against its definition, and where it must be GPTQ."""

import pytest
import torch

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize import gptq, yaqa
from tests.quantize.test_gptq import layer

W3 = WeightScheme(3, 16)


def gradients(outputs, tokens=600, seed=3, rank=None):
    """Statistics of correlated gradients."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(rank or outputs, outputs, generator=generator) / outputs**0.5
    stats = LayerStats(outputs)
    stats.update(torch.randn(tokens, rank or outputs, generator=generator) @ mix)
    return stats


def objective(weight, result, stats, outputs):
    """tr(G E H E^T) with the Hessians that count, E being what the unrounded weight loses."""
    curvature = yaqa.Curvature.of(outputs)
    lost = (weight - result.weight.dequantize())[curvature.order].double()
    hessian = stats.hessian.double().clone()
    hessian.diagonal().copy_(gptq.descent_diagonal(stats))
    return float((curvature.hessian.double() @ lost @ hessian * lost).sum())


def naive(weight, stats, scheme, outputs):
    """Row after row. The rows still to come take, as real numbers, the values that make up best for the errors of those
    that are done: then the next one of them is rounded by GPTQ."""
    inverse, curvature = gptq.inverse_of(stats), yaqa.Curvature.of(outputs)
    hessian, order = curvature.hessian.double(), curvature.order.tolist()
    lost, codes = torch.zeros(weight.shape, dtype=torch.float64), torch.zeros(weight.shape, dtype=torch.uint8)
    for place, row in enumerate(order):
        aim = weight[row].double()
        if place:
            coupled = torch.linalg.solve(hessian[place:, place:], hessian[place:, :place] @ lost[:place])
            aim = aim + coupled[0]
        code, scale, _ = gptq.rounded(
            inverse, inverse.factor.upper, aim.float()[None], stats.diagonal, scheme
        )
        codes[row] = code[0]
        steps = (code.double() - scheme.zero) * scale.double().repeat_interleave(scheme.group_width(weight.shape[1]), 1)
        lost[place] = weight[row].double() - steps[0]
    return codes


def test_equals_the_naive_row_by_row_twin(gptq_alone, monkeypatch):
    monkeypatch.setattr(yaqa, "ROWS", 1)
    monkeypatch.setattr(yaqa, "TURNS", 0)
    weight, _, stats = layer(out=24, inp=48)
    outputs = [gradients(24)]
    found = yaqa.quantize(weight, stats, W3, outputs).weight.codes
    expected = naive(weight, stats, W3, outputs)
    # A sum in another order may round another way, which the rows behind it follow.
    assert float((found == expected).float().mean()) > 0.97
    assert float((found == gptq.quantize(weight, stats, W3).weight.codes).float().mean()) < 0.9


@pytest.mark.parametrize("scheme", [W3, WeightScheme(2, 16, symmetric=False), WeightScheme(4, -1)], ids=str)
@pytest.mark.parametrize("rows", [5, 32])
def test_it_diverges_less_than_gptq_and_each_turn_helps(scheme, rows, monkeypatch):
    monkeypatch.setattr(yaqa, "ROWS", rows)
    weight, _, stats = layer(out=72, inp=96)
    outputs, found = [gradients(40), gradients(32, seed=4)], []
    for turns in (0, 1, 2):
        monkeypatch.setattr(yaqa, "TURNS", turns)
        found.append(objective(weight, yaqa.quantize(weight, stats, scheme, outputs), stats, outputs))
    assert found[0] < 0.85 * objective(weight, gptq.quantize(weight, stats, scheme), stats, outputs)
    assert found[2] < found[1] < found[0]


@pytest.mark.parametrize("dead", [False, True])
def test_outputs_that_are_not_coupled_are_those_of_gptq(dead, monkeypatch):
    monkeypatch.setattr(yaqa, "TURNS", 0)
    monkeypatch.setattr(yaqa, "ROWS", 7)
    weight, _, stats = layer(out=30)
    scales = torch.linspace(0.5, 3, 30)
    scales[3] = 0 if dead else 1
    alone = LayerStats(30)
    alone.update(torch.eye(30) * scales)
    found, expected = yaqa.quantize(weight, stats, W3, [alone]), gptq.quantize(weight, stats, W3)
    assert torch.equal(found.weight.codes, expected.weight.codes)
    assert torch.equal(found.weight.scales, expected.weight.scales)
    assert torch.equal(found.error, expected.error)


def test_without_gradients_it_is_gptq():
    weight, _, stats = layer()
    broken, silent = LayerStats(48), LayerStats(48)
    broken.update(torch.full((4, 48), torch.nan))
    silent.update(torch.zeros(4, 48))
    expected = gptq.quantize(weight, stats, W3).weight
    for outputs in ([], [broken], [silent]):
        found = yaqa.quantize(weight, stats, W3, outputs).weight
        assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)


def test_few_tokens_and_few_directions_do_no_harm():
    weight, _, stats = layer(tokens=500)
    outputs = [gradients(48, tokens=6, rank=2)]
    found = yaqa.quantize(weight, stats, W3, outputs)
    assert bool(torch.isfinite(found.weight.dequantize()).all())
    assert float(found.error.sum()) < 3 * float(gptq.quantize(weight, stats, W3).error.sum())
