import pytest
import torch

from qserve.calibration.stats import LayerStats
from qserve.kernels import products

KINDS = [torch.float32]
if products.multiplied() == torch.bfloat16:
    KINDS.append(torch.bfloat16)


@pytest.fixture(params=KINDS, ids=str)
def fast(request, monkeypatch):
    """Whether moments are computed in bfloat16."""
    monkeypatch.setattr(products, "multiplied", lambda device=None: request.param)
    return request.param == torch.bfloat16


@pytest.mark.parametrize("features", [5, 192, 450])
def test_running_hessian_equals_the_whole(features, fast):
    x = torch.randn(2500, features)
    stats = LayerStats(features)
    for part in x.split([1, 1700, 799]):
        stats.update(part.reshape(1, -1, features))
    seen = (x.bfloat16() if fast else x).double()
    torch.testing.assert_close(stats.hessian.double(), 2 / 2500 * seen.t() @ seen, atol=2e-5, rtol=1e-4)
    assert torch.equal(stats.hessian, stats.hessian.t())
    assert stats.tokens == 2500
    torch.testing.assert_close(stats.absmax, x.abs().amax(0))
    torch.testing.assert_close(stats.absmean, x.abs().mean(0))
    diagonal_only = LayerStats(features, hessian=False)
    diagonal_only.update(seen.float())
    assert diagonal_only.hessian is None
    torch.testing.assert_close(diagonal_only.diagonal, stats.diagonal, atol=1e-5, rtol=1e-4)


def test_a_long_run_of_large_inputs_does_not_overflow(fast):
    stats = LayerStats(4)
    for _ in range(20):
        stats.update(torch.full((1000, 4), 2.0**56))
    assert stats.finite()
    torch.testing.assert_close(stats.hessian, torch.full((4, 4), 2.0**113), rtol=1e-4, atol=0)


@pytest.mark.parametrize("hessian", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_finite_notices_a_single_bad_input(bad, hessian, fast):
    x = torch.randn(300, 7)
    stats = LayerStats(7, hessian=hessian)
    stats.update(x)
    assert stats.finite()
    x[123, 4] = bad
    stats.update(x)
    assert not stats.finite()


def test_divided_statistics_are_those_of_the_divided_input(monkeypatch) -> None:
    monkeypatch.setattr(products, "multiplied", lambda device=None: torch.float32)
    inputs, scale = torch.randn(300, 24), torch.rand(24) + 0.5
    stats, direct = LayerStats(24, sample_rows=40), LayerStats(24, sample_rows=40)
    for part in inputs.split(100):
        stats.update(part, share=1 / 3)
        direct.update(part / scale, share=1 / 3)
    divided = stats.divided(scale)
    assert divided.hessian is not None and direct.hessian is not None
    torch.testing.assert_close(divided.hessian, direct.hessian)
    for name in ("diagonal", "absmax", "absmean", "sample"):
        torch.testing.assert_close(getattr(divided, name), getattr(direct, name))
    torch.testing.assert_close(stats.absmean, inputs.abs().mean(0))
    assert 30 <= len(stats.sample) <= 40


def test_drift_is_the_mean_over_all_rows(fast) -> None:
    inputs = torch.randn(700, 33)
    floats = inputs + 0.1 * torch.randn(700, 33) @ torch.randn(33, 33)
    stats = LayerStats(33)
    for start in range(0, 700, 300):
        stats.update_drift(inputs[start : start + 300], floats[start : start + 300])
    expected = 2 / 700 * (floats - inputs).t() @ inputs
    assert stats.drift is not None
    tolerance = 1e-2 if fast else 1e-5
    assert float((stats.drift - expected).norm() / expected.norm()) < tolerance


def test_the_float_outputs_say_as_much_as_the_float_inputs(fast) -> None:
    inputs, weight = torch.randn(4000, 33), torch.randn(9, 33)
    floats = inputs + 0.1 * torch.randn(4000, 33) @ torch.randn(33, 33)
    stats = LayerStats(33)
    for part in torch.arange(4000).split(1500):
        stats.update(inputs[part])
        stats.update_target(inputs[part], floats[part] @ weight.t())
    expected = 2 / 4000 * weight @ (floats - inputs).t() @ inputs
    for scale in (torch.ones(33), torch.rand(33) + 0.5):
        divided = stats.divided(scale)
        assert divided.target is not None and divided.hessian is not None
        found = (divided.target - weight * scale @ divided.hessian) * scale
        assert float((found - expected).norm() / expected.norm()) < (1e-2 if fast else 1e-4)
