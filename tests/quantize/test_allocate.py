"""Mixed precision against trying every mix."""

from __future__ import annotations

import itertools
import random

import pytest

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize.mixed.allocate import Allocation, allocate
from qserve.quantize.mixed.sensitivity import Candidate, Sensitivities, Sensitivity

SCHEMES = [WeightScheme(bits, size) for bits in (3, 4, 8) for size in (64, 32)]


def sensitivities(seed: int, count: int, schemes: int = 4) -> Sensitivities:
    """Units of different sizes; divergences fall with the bits, roughly as rounding errors do."""
    draw = random.Random(seed)
    result = []
    for number in range(count):
        out, scale = 64 * draw.randint(1, 6), 10 ** draw.uniform(-3, 0)
        offered = draw.sample(SCHEMES, schemes) if schemes < len(SCHEMES) else SCHEMES
        found = [
            Candidate(s, s.storage_bits(out, 64), scale * 4.0**-s.bits * draw.uniform(0.5, 1.5)) for s in offered
        ]
        module = f"model.layers.{number}.mlp.down_proj"
        result.append(Sensitivity((module,), 64 * out, tuple(sorted(found, key=lambda each: (each.bits, each.kl)))))
    return tuple(result)


def every_mix(units: Sensitivities) -> list[tuple[float, float]]:
    """(bits per weight, divergence)"""
    weights = sum(unit.weights for unit in units)
    mixes = itertools.product(*(unit.candidates for unit in units))
    return [(sum(c.bits for c in mix) / weights, sum(c.kl for c in mix)) for mix in mixes]


@pytest.mark.parametrize("seed", range(8))
def test_the_best_of_every_mix(seed):
    units = sensitivities(seed, 6)
    mixes = every_mix(units)
    low, high = min(mixes)[0], max(mixes)[0]
    for share in (0.0, 0.1, 0.3, 0.5, 0.8, 1.0):
        target = low + share * (high - low) + 1e-9
        found = allocate(units, target_bits=target)
        assert found.bits_per_weight <= target
        assert found.predicted_kl == pytest.approx(min(kl for bits, kl in mixes if bits <= target))
        limit = found.predicted_kl * (1 + 1e-9)
        small = allocate(units, max_kl=limit)
        assert small.predicted_kl <= limit
        assert small.bits_per_weight == pytest.approx(min(bits for bits, kl in mixes if kl <= limit))


def test_the_curve_is_the_best_there_is_at_its_sizes():
    units = sensitivities(3, 6)
    mixes = every_mix(units)
    curve = allocate(units, max_kl=1e9).curve
    assert curve[0].bits_per_weight == min(mixes)[0] and len(curve) > 50
    for before, point in itertools.pairwise(curve):
        assert before.bits_per_weight < point.bits_per_weight and not point.label and not point.measured
        assert point.kl == pytest.approx(min(kl for bits, kl in mixes if bits <= point.bits_per_weight + 1e-12))


def test_sizes_that_have_no_common_measure_never_exceed_the_budget():
    draw = random.Random(0)
    low, high = WeightScheme(4, 64), WeightScheme(8, 64)
    units = tuple(
        Sensitivity((f"m{n}",), w, (Candidate(low, 4 * w + 1, draw.random()), Candidate(high, 8 * w + 3, 0.0)))
        for n, w in enumerate(draw.randint(10**6, 10**7) for _ in range(40))
    )
    smallest = sum(unit.candidates[0].bits for unit in units) / sum(unit.weights for unit in units)
    assert allocate(units, target_bits=smallest).bits_per_weight == smallest
    for target in (4.1, 5.0, 6.7):
        assert 0.995 * target < allocate(units, target_bits=target).bits_per_weight <= target


def test_many_units_spend_nearly_all_of_the_budget():
    units = sensitivities(0, 120, len(SCHEMES))
    found = allocate(units, target_bits=4.25)
    assert 4.24 < found.bits_per_weight <= 4.25
    beaten = {each.label: each for each in found.tried if each.label}
    uniform = beaten["all 4 bit g64 symmetric"]
    assert uniform.bits_per_weight == pytest.approx(4 + 20 / 64)
    assert found.predicted_kl < uniform.kl and found.bits_per_weight < uniform.bits_per_weight
    assert (beaten["chosen"].bits_per_weight, beaten["chosen"].kl) == (found.bits_per_weight, found.predicted_kl)
    assert found.schemes.keys() == {unit.modules[0] for unit in units}
    assert allocate(units, target_bits=4.25) == found


def test_candidates_that_are_no_use_are_never_taken():
    a, b, c, kept = WeightScheme(3, 64), WeightScheme(4, 64), WeightScheme(8, 64), None
    unit = Sensitivity(
        ("m",), 100, (Candidate(a, 330, 0.5), Candidate(b, 430, 0.6), Candidate(c, 830, 0.0), Candidate(kept, 1600, 0))
    )
    assert allocate((unit,), target_bits=8.0).schemes == {"m": a}
    assert allocate((unit,), target_bits=16.0).schemes == {"m": c}
    assert allocate((unit,), max_kl=0.0).schemes == {"m": c}


def test_predictions_are_corrected_by_a_factor():
    units = sensitivities(1, 20, len(SCHEMES))
    first = allocate(units, max_kl=0.005)
    second = allocate(units, max_kl=0.005, calibration_factor=3.0)
    assert first.predicted_kl <= 0.005 < 3 * first.predicted_kl
    assert second.predicted_kl == pytest.approx(3 * sum(candidate.kl for candidate in second.chosen))
    assert second.predicted_kl <= 0.005 and second.bits_per_weight > first.bits_per_weight
    assert allocate(units, target_bits=5).schemes == allocate(units, target_bits=5, calibration_factor=3.0).schemes


def test_what_cannot_be_reached_is_refused():
    units = sensitivities(2, 4, len(SCHEMES))
    with pytest.raises(UsageError, match=r"--target-bits 2.5 is below 3.30"):
        allocate(units, target_bits=2.5)
    with pytest.raises(UsageError, match=r"no mix of schemes .* raise --max-kl"):
        allocate(units, max_kl=1e-12)


def test_it_says_what_it_chose_and_why():
    low, high = WeightScheme(4, 64), WeightScheme(8, 64)

    def unit(names: tuple[str, ...], weights: int, kl: float) -> Sensitivity:
        return Sensitivity(names, weights, (Candidate(low, 4 * weights, kl), Candidate(high, 8 * weights, kl / 256)))

    expert = tuple(f"model.layers.1.mlp.experts.{n}.w1" for n in range(8))
    found: Allocation = allocate(
        (
            unit(("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"), 100, 0.06),
            unit(("model.layers.0.mlp.down_proj",), 800, 0.01),
            unit(expert, 100, 0.03),
        ),
        target_bits=4.8,
    )
    assert found.lines() == [
        "4.80 bits per weight, predicted divergence 0.0104: 1 of 3 units have 4 bit g64 symmetric",
        "model.layers.0.self_attn.q_proj, k_proj: 8 bit g64 symmetric; at 4 bit g64 symmetric it would be 60.0% of "
        "the divergence, with 10.0% of the weights",
        "model.layers.1.mlp.experts.0.w1 and 7 more: 8 bit g64 symmetric; at 4 bit g64 symmetric it would be 30.0% "
        "of the divergence, with 10.0% of the weights",
    ]
