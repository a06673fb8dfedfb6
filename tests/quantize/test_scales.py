import pytest
import torch

from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import native, rounding
from qserve.quantize import scales

HERE = native.available()
SCHEMES = [WeightScheme(bits, 32, symmetric) for bits in (2, 3, 4, 8) for symmetric in (True, False)]


def error(weight, importance, scale, zeros, scheme):
    offset = float(scheme.zero) if zeros is None else zeros[:, None]
    codes = scales.encode(weight, scale[:, None], offset, scheme.max_code)
    return (((codes - offset) * scale[:, None] - weight) ** 2 * importance).sum(1)


@pytest.fixture(scope="module")
def groups():
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(400, 32, generator=generator) * torch.rand(400, 1, generator=generator)
    return weight, torch.rand(400, 32, generator=generator) ** 4 * 10


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_search_never_loses_to_minmax_and_wins_clearly(groups, scheme):
    weight, importance = groups
    before = error(weight, importance, *scales.minmax(weight, scheme), scheme)
    after = error(weight, importance, *scales.search(weight, importance, scheme), scheme)
    assert bool((after <= before * (1 + 1e-5)).all())
    assert after.sum() < (0.95 if scheme.bits == 8 else 0.85) * before.sum()


def test_search_is_near_an_exhaustive_one(groups):
    weight, importance = groups
    scheme = WeightScheme(4, 32, True)
    best = torch.full((400,), float("inf"))
    for ratio in torch.linspace(0.5, 1.6, 300).tolist():
        for sign in (-1, 1):
            candidate = scales.storable(sign * ratio / 8 * weight.abs().amax(1))
            best = torch.minimum(best, error(weight, importance, candidate, None, scheme))
    found = error(weight, importance, *scales.search(weight, importance, scheme), scheme)
    assert found.sum() < 1.03 * best.sum()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("choose", ["minmax", "search"])
def test_what_is_chosen_can_be_stored(groups, scheme, choose):
    weight = groups[0].clone()
    weight[0], weight[1], weight[2], weight[3] = 0, 1e-30, 3.0, -1e7
    weight[4] = weight[4].abs()
    scale, zeros = (scales.minmax(weight, scheme) if choose == "minmax"
                    else scales.search(weight, groups[1], scheme))
    assert torch.equal(scale, scale.half().float()) and bool((scale != 0).all())
    assert bool(torch.isfinite(scale).all())
    if zeros is not None:
        assert bool((zeros >= 0).all() and (zeros <= scheme.max_code).all() and (zeros == zeros.round()).all())


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("width, period", [(8, 1), (17, 3), (64, 9), (71, 300), (576, 1)])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_c_kernel_finds_what_torch_finds(scheme, width, period, isa):
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(900, width, generator=generator) * torch.logspace(-2, 3, 900)[:, None]
    weight[0], weight[1] = 0, weight[1].abs()
    importance = torch.rand(period, width, generator=generator) ** 6
    start = scales.minmax(weight, scheme)
    expected = scales.search_with_torch(weight, importance, *(t if t is None else t.clone() for t in start), scheme)
    candidates = scales._ranges(scheme) if scheme.symmetric else scales._shares(scheme)
    limits = dict(zero=scheme.zero, max_code=scheme.max_code, threads=3, isa=isa)
    rounding.search_scales(weight, importance, *start, candidates, **limits)
    every = importance.repeat(900 // period, 1)
    energy = (weight.square() * every).sum(1).clamp(min=1e-20)
    lost, found = (error(weight, every, *each, scheme) / energy for each in (expected, start))
    # Sums in another order may prefer another of candidates that are about equal, and scales are float16.
    assert float(found.mean()) == pytest.approx(float(lost.mean()), rel=0.01, abs=1e-6)
    assert float(((found - lost).abs() <= 0.001 * lost + 2e-6).float().mean()) > 0.95
    assert torch.equal(start[0], start[0].half().float()) and bool((start[0] != 0).all())


def test_both_signs_of_a_symmetric_scale_are_used(groups):
    scale, _ = scales.search(*groups, WeightScheme(4, 32, True))
    assert 0.3 < float((scale > 0).float().mean()) < 0.7


def test_a_weight_on_the_grid_is_found_exactly():
    scheme = WeightScheme(4, 32, True)
    codes = torch.randint(0, 16, (50, 32)).float() - 8
    codes[:, 0], codes[:, 1] = -8, 7
    step = torch.where(torch.rand(50) < 0.5, -1.0, 1.0) * (torch.rand(50) + 0.1).half().float()
    weight = codes * step[:, None]
    importance = torch.ones(1, 32)
    assert float(error(weight, importance, *scales.search(weight, importance, scheme), scheme).max()) < 1e-9


def test_inputs_never_seen_still_get_sensible_scales(groups):
    weight, _ = groups
    scheme = WeightScheme(4, 32, True)
    unseen = scales.search(weight, torch.zeros(1, 32), scheme)[0]
    assert torch.equal(unseen, scales.search(weight, torch.ones(1, 32), scheme)[0])
