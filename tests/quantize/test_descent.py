import pytest
import torch

from qserve.checkpoint.spec import MXFP4, NVFP4, WeightScheme
from qserve.kernels import native
from qserve.quantize import descent, fp4, rtn

SCHEMES = [
    WeightScheme(4, 8), WeightScheme(2, 24, symmetric=False), WeightScheme(3, -1), WeightScheme(8, 8, symmetric=False),
    NVFP4, MXFP4,
]  # fmt: skip


class Case:
    """A weight, the Hessian of correlated inputs (the last of them never seen), and codes to nearest."""

    def __init__(self, scheme, outputs=7, seed=0):
        inputs = 32 if scheme.dtype == "fp4" else 24
        generator = torch.Generator().manual_seed(seed)
        self.scheme, self.weight = scheme, torch.randn(outputs, inputs, generator=generator)
        mixed = torch.randn(3 * inputs, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
        mixed[:, -1] = 0
        self.hessian = mixed.t() @ mixed / len(mixed)
        self.diagonal = 1.2 * self.hessian.diagonal()
        self.order = torch.randperm(inputs, generator=generator)
        self.scales, self.zeros = rtn.group_scales(self.weight, self.hessian.diagonal(), scheme)
        self.codes = self.nearest()

    def _spread(self, grouped):
        return grouped.repeat_interleave(self.scheme.group_width(self.weight.shape[1]), 1)

    def nearest(self):
        """Codes uint8 [out, in]."""
        steps = self.weight / self._spread(self.scales)
        if self.scheme.dtype == "fp4":
            return fp4.encode(steps)
        return steps.round().add(self._offset()).clamp(0, self.scheme.max_code).to(torch.uint8)

    def _offset(self):
        return float(self.scheme.zero) if self.zeros is None else self._spread(self.zeros)

    def numbers(self, codes):
        """float64 [out, in]: what codes stand for, before scales."""
        if self.scheme.dtype == "fp4":
            return self.scheme.grid.numbers(codes).double()
        return codes.double() - self._offset()

    def storable(self, scales, before):
        if self.scheme.dtype == "fp4":
            return fp4.storable(scales, fp4.global_scale(before, self.scheme))
        return descent.storable(scales)

    def raised(self):
        """The Hessian that counts, float64."""
        result = self.hessian.double()
        result.diagonal().copy_(self.diagonal)
        return result

    def lost(self, codes, scales):
        return self.weight.double() - self.numbers(codes) * self._spread(scales).double()

    def error(self, codes, scales):
        """float64 [outputs]."""
        lost = self.lost(codes, scales)
        return (lost @ self.raised() * lost).sum(1)

    def descend(self, **options):
        return descent.descend(
            self.weight, self.codes, self.scales, self.zeros, self.scheme, self.hessian, self.diagonal, self.order,
            **options,
        )  # fmt: skip


def naive(case, turns, fit_scales):
    """Every code tries all values, and every scale the one where the error's derivative is zero."""
    codes, scales, hessian = case.codes.clone(), case.scales.clone(), case.raised()
    width = case.scheme.group_width(codes.shape[1])

    def fit():
        start = scales.clone()
        for group in range(scales.shape[1] if fit_scales else 0):
            steps = torch.zeros(codes.shape, dtype=torch.float64)
            part = slice(group * width, (group + 1) * width)
            steps[:, part] = case.numbers(codes)[:, part]
            slope = (case.lost(codes, scales) @ hessian * steps).sum(1)
            curvature = (steps @ hessian * steps).sum(1)
            change = torch.where(curvature > 0, slope / curvature, 0.0)
            scales[:, group] = case.storable((scales[:, group].double() + change).float(), start)

    fit()
    for _ in range(turns):
        for column in case.order.tolist():
            tried = []
            for code in range(case.scheme.max_code + 1):
                codes[:, column] = code
                tried.append(case.error(codes, scales))
            best = torch.stack(tried).argmin(0)
            if float(hessian[column, column]) == 0:  # an input never seen is rounded to nearest
                best = fp4.encode(case.weight / case._spread(scales))[:, column] if case.scheme.dtype == "fp4" else (
                    (case.weight / case._spread(scales)).add(case._offset())[:, column].round()
                )
            codes[:, column] = best.clamp(0, case.scheme.max_code).to(torch.uint8)
        fit()
    return codes, scales


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("fit_scales", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_code_and_scale_in_turn_is_the_best_one(scheme, fit_scales, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "missing", lambda: "left out")
    monkeypatch.setattr(descent, "_TILE", 5)
    case = Case(scheme)
    codes, scales = case.descend(fit_scales=fit_scales)
    expected, fitted = naive(case, descent.turns(24), fit_scales)
    assert codes.dtype == torch.uint8 and codes.is_contiguous()
    # Sums in float32 may decide otherwise where two codes are as good, and then all that follows may differ.
    same = (codes == expected).all(1)
    assert float(same.float().mean()) > 0.7
    torch.testing.assert_close(scales[same], fitted[same], rtol=2e-3, atol=0)
    assert float(case.error(codes, scales).sum()) == pytest.approx(float(case.error(expected, fitted).sum()), rel=0.02)
    assert fit_scales or torch.equal(scales, case.scales)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_output_gets_worse_and_scales_are_what_formats_store(scheme, seed):
    case = Case(scheme, outputs=40, seed=seed)
    codes, scales = case.descend()
    before, after = case.error(case.codes, case.scales), case.error(codes, scales)
    assert bool((after <= 1.001 * before).all()) and float(after.sum()) < 0.97 * float(before.sum())
    assert torch.equal(scales, case.storable(scales, scales))


def test_after_many_turns_no_other_code_would_be_better(monkeypatch):
    monkeypatch.setattr(descent, "turns", lambda inputs: 40)
    case = Case(SCHEMES[0])
    codes, scales = case.descend(fit_scales=False)
    reached = case.error(codes, scales)
    for column in range(23):
        for code in range(16):
            other = codes.clone()
            other[:, column] = code
            assert bool((case.error(other, scales) >= reached * (1 - 1e-5)).all())


def test_an_output_depends_only_on_itself(monkeypatch):
    monkeypatch.setattr(descent, "_WEIGHTS", 1)  # 32 outputs at once
    case = Case(SCHEMES[0], outputs=70)
    codes, scales = case.descend()
    some = torch.tensor([3, 64, 69])
    case.weight, case.codes, case.scales = case.weight[some], case.codes[some], case.scales[some]
    found = case.descend()
    assert torch.equal(found[0], codes[some])
    torch.testing.assert_close(found[1], scales[some], rtol=2e-3, atol=0)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_leaves_scales_finite_and_other_outputs_as_they_are(broken):
    case = Case(SCHEMES[0])
    codes, scales = case.descend()
    case.weight[2, 5] = broken
    found = case.descend()
    others = torch.arange(7) != 2
    assert torch.equal(found[0][others], codes[others]) and torch.equal(found[1][others], scales[others])
    assert bool(found[1].isfinite().all()) and int(found[0].max()) <= SCHEMES[0].max_code


def test_the_widest_inputs_have_fewer_turns():
    assert descent.turns(8192) == 3 and descent.turns(8193) == 1
