import pytest
import torch

from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import native, rounding
from qserve.quantize import gptq
from qserve.quantize.scales import search_groups
from qserve.quantize.sweep import sweep_with_torch

HERE = native.available()


def problem(outputs: int, inputs: int, scheme: WeightScheme, seed: int = 0):
    """A weight, the Hessian of correlated inputs, and what a sweep needs of both."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    rows = torch.randn(3 * inputs, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    hessian = rows.t() @ rows / len(rows)
    order = hessian.diagonal().argsort(descending=True)
    factor = gptq.inverse_factor(hessian, order)
    return weight, hessian, order, factor.upper, *search_groups(weight, hessian.diagonal(), scheme)


def decoded(codes, scales, zeros, scheme):
    grouped = codes.float().reshape(len(codes), scales.shape[1], -1)
    offset = float(scheme.zero) if zeros is None else zeros[..., None]
    return ((grouped - offset) * scales[..., None]).reshape(codes.shape)


def lost(weight, codes, scales, zeros, hessian, scheme):
    change = decoded(codes, scales, zeros, scheme) - weight
    return ((change @ hessian) * change).sum(1)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("outputs", "inputs", "width", "bits"), [
    (1, 8, 8, 4), (33, 24, 8, 2), (70, 128, 64, 3), (96, 176, 16, 4), (31, 30, -1, 8), (64, 17, -1, 4),
])  # fmt: skip
def test_the_sweep_is_that_of_torch(outputs, inputs, width, bits, symmetric, isa) -> None:
    scheme = WeightScheme(bits, width, symmetric)
    weight, hessian, order, upper, scales, zeros = problem(outputs, inputs, scheme)
    limits = dict(zero=scheme.zero, max_code=scheme.max_code, isa=isa)
    codes = rounding.sweep(weight, upper, order, scales, zeros, **limits)
    expected, *_ = sweep_with_torch(weight, hessian.diagonal(), scheme, order, upper, scales, zeros)
    # Sums in another order decide otherwise where a number lies between two codes, and everything after that differs.
    assert float((codes == expected).float().mean()) > 0.97
    ours, theirs = (lost(weight, each, scales, zeros, hessian, scheme) for each in (codes, expected))
    assert float(ours.sum()) == pytest.approx(float(theirs.sum()), rel=0.02)
    assert torch.equal(codes[:, order[0]], expected[:, order[0]])  # no sum is behind it


@pytest.mark.parametrize("isa", HERE)
def test_errors_are_counted_from_the_aims(isa) -> None:
    scheme = WeightScheme(4, 16, False)
    weight, hessian, order, upper, scales, zeros = problem(45, 176, scheme)
    aims = weight + 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    limits = dict(zero=scheme.zero, max_code=scheme.max_code)
    codes = rounding.sweep(weight, upper, order, scales, zeros, **limits, aims=aims, isa=isa)
    expected, *_ = sweep_with_torch(weight, hessian.diagonal(), scheme, order, upper, scales, zeros, aims)
    assert float((codes == expected).float().mean()) > 0.97
    assert float((codes == rounding.sweep(weight, upper, order, scales, zeros, **limits)).float().mean()) < 0.7
    same = rounding.sweep(weight, torch.eye(176), order, scales, zeros, **limits, aims=aims, isa=isa)
    assert torch.equal(same, rounding.sweep(weight, torch.eye(176), order, scales, zeros, **limits))


@pytest.mark.parametrize("isa", HERE)
def test_it_makes_up_for_errors(isa) -> None:
    scheme = WeightScheme(3, 32, True)
    weight, hessian, order, upper, scales, zeros = problem(40, 96, scheme)
    limits = dict(zero=scheme.zero, max_code=scheme.max_code, isa=isa)
    codes = rounding.sweep(weight, upper, order, scales, zeros, **limits)
    nearest = rounding.sweep(weight, torch.eye(96), order, scales, zeros, **limits)
    steps = (weight.reshape(40, 3, 32) / scales[..., None]).round().clamp(-scheme.zero, scheme.zero - 1) + scheme.zero
    assert torch.equal(nearest, steps.reshape(40, 96).to(torch.uint8))
    compensated, plain = (lost(weight, each, scales, zeros, hessian, scheme).sum() for each in (codes, nearest))
    assert float(compensated) < 0.6 * float(plain)


def test_neither_threads_nor_neighbours_nor_the_isa_change_a_row() -> None:
    scheme = WeightScheme(4, 16, False)
    weight, _, order, upper, scales, zeros = problem(150, 80, scheme)
    limits = dict(zero=scheme.zero, max_code=scheme.max_code)
    codes = rounding.sweep(weight, upper, order, scales, zeros, **limits, threads=1)
    for isa in HERE:
        assert torch.equal(codes, rounding.sweep(weight, upper, order, scales, zeros, **limits, threads=3, isa=isa))
    some = torch.tensor([149, 3, 64])
    alone = rounding.sweep(weight[some], upper, order, scales[some], zeros[some], **limits)
    assert torch.equal(alone, codes[some])


def test_what_is_not_finite_stays_in_its_row() -> None:
    scheme = WeightScheme(4, 16, True)
    weight, _, order, upper, scales, zeros = problem(40, 32, scheme)
    limits = dict(zero=scheme.zero, max_code=scheme.max_code)
    codes = rounding.sweep(weight, upper, order, scales, zeros, **limits)
    weight[7, 5], weight[33, 0] = float("nan"), float("inf")
    others = [row for row in range(40) if row not in (7, 33)]
    found = rounding.sweep(weight, upper, order, scales, zeros, **limits)
    assert torch.equal(found[others], codes[others])
    assert int(found.max()) <= scheme.max_code


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    scheme = WeightScheme(4, 16, True)
    weight, _, order, upper, scales, zeros = problem(8, 32, scheme)
    limits = dict(zero=scheme.zero, max_code=scheme.max_code)
    for wrong in ((weight[:, :16].contiguous(), upper, order, scales), (weight, upper, order[:5], scales),
                  (weight, upper, order, scales[:3])):  # fmt: skip
        with pytest.raises(ValueError, match="no sweep"):
            rounding.sweep(*wrong, zeros, **limits)
    with pytest.raises(ValueError, match="contiguous"):
        rounding.sweep(weight, upper.t(), order, scales, zeros, **limits)
