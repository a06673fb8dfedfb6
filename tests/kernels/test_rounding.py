import pytest
import torch

from qserve.checkpoint.grid import E2M1
from qserve.checkpoint.spec import MXFP4, NVFP4, WeightScheme
from qserve.kernels import native, rounding
from qserve.quantize import fp4, gptq, rtn
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
    return weight, hessian, order, factor.upper, *rtn.group_scales(weight, hessian.diagonal(), scheme)


def decoded(codes, scales, zeros, scheme):
    if scheme.dtype == "fp4":
        return scheme.grid.numbers(codes) * scales.repeat_interleave(scheme.group_size, 1)
    grouped = codes.float().reshape(len(codes), scales.shape[1], -1)
    offset = float(scheme.zero) if zeros is None else zeros[..., None]
    return ((grouped - offset) * scales[..., None]).reshape(codes.shape)


def lost(weight, codes, scales, zeros, hessian, scheme):
    change = decoded(codes, scales, zeros, scheme) - weight
    return ((change @ hessian) * change).sum(1)


INTEGERS = [
    (outputs, inputs, WeightScheme(bits, width, symmetric)) for symmetric in (True, False)
    for outputs, inputs, width, bits in (
        (1, 8, 8, 4), (33, 24, 8, 2), (70, 128, 64, 3), (96, 176, 16, 4), (31, 30, -1, 8), (64, 17, -1, 4),
    )
]  # fmt: skip


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize(("outputs", "inputs", "scheme"), [
    *INTEGERS, (1, 16, NVFP4), (33, 48, NVFP4), (70, 176, NVFP4), (31, 32, MXFP4), (64, 160, MXFP4),
], ids=str)  # fmt: skip
def test_the_sweep_is_that_of_torch(outputs, inputs, scheme, isa) -> None:
    weight, hessian, order, upper, scales, zeros = problem(outputs, inputs, scheme)
    limits = dict(scheme=scheme, isa=isa)
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
    limits = dict(scheme=scheme)
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
    limits = dict(scheme=scheme, isa=isa)
    codes = rounding.sweep(weight, upper, order, scales, zeros, **limits)
    nearest = rounding.sweep(weight, torch.eye(96), order, scales, zeros, **limits)
    steps = (weight.reshape(40, 3, 32) / scales[..., None]).round().clamp(-scheme.zero, scheme.zero - 1) + scheme.zero
    assert torch.equal(nearest, steps.reshape(40, 96).to(torch.uint8))
    compensated, plain = (lost(weight, each, scales, zeros, hessian, scheme).sum() for each in (codes, nearest))
    assert float(compensated) < 0.6 * float(plain)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("width", [1, 7, 16, 32, 45])
def test_the_chosen_scale_is_the_best_candidate(width, isa) -> None:
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(95, width, generator=generator) * torch.logspace(-6, 3, 95)[:, None]
    weight[40] = 0
    importance = torch.rand(5, width, generator=generator).square()
    candidates = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 6 * (0.6 + torch.rand(95, 9, generator=generator))
    found = rounding.choose_scales(weight, importance, candidates, threads=2, isa=isa)
    places = (candidates == found[:, None]).int().argmax(1)
    assert bool((candidates == found[:, None]).any(1).all()) and int(places[40]) == 0
    numbers = fp4.encode(weight[:, None, :] / candidates[..., None])
    lost = E2M1.numbers(numbers) * candidates[..., None] - weight[:, None, :]
    errors = (lost.double().square() * importance.repeat(19, 1)[:, None]).sum(2)
    assert bool((errors.gather(1, places[:, None])[:, 0] <= errors.amin(1) * (1 + 1e-5)).all())
    expected = fp4.choose_with_torch(weight, importance, candidates)
    assert float((found == expected).float().mean()) > 0.95


@pytest.mark.parametrize("isa", HERE)
def test_codes_of_four_bit_floats_are_the_nearest_numbers(isa) -> None:
    """Half to even, as the specification has it; what is larger than 6 is 6."""
    steps = torch.cat([torch.arange(-260, 261) / 32, torch.tensor([-1e30, 1e30, -0.0, 1e-30])])
    weight = steps[:, None].expand(-1, 16).contiguous()
    codes = rounding.sweep(weight, torch.eye(16), torch.arange(16), torch.ones(len(steps), 1), None, NVFP4, isa=isa)
    book = torch.tensor(E2M1.codebook)
    even = [code for magnitude in range(8) for code in ((magnitude, magnitude + 8) if magnitude % 2 == 0 else ())]
    for step, code in zip(steps.tolist(), codes[:, 0].tolist(), strict=True):
        off = (book.double() - max(-6.0, min(6.0, step))).abs()
        nearest = [each for each in range(16) if float(off[each]) == float(off.min())]
        assert code in nearest and (len({abs(float(book[each])) for each in nearest}) == 1 or code in even), step
    assert torch.equal(codes, fp4.encode(weight)) and 8 not in codes  # zero has no sign


def test_neither_threads_nor_neighbours_nor_the_isa_change_a_row() -> None:
    scheme = WeightScheme(4, 16, False)
    weight, _, order, upper, scales, zeros = problem(150, 80, scheme)
    limits = dict(scheme=scheme)
    codes = rounding.sweep(weight, upper, order, scales, zeros, **limits, threads=1)
    for isa in HERE:
        assert torch.equal(codes, rounding.sweep(weight, upper, order, scales, zeros, **limits, threads=3, isa=isa))
    some = torch.tensor([149, 3, 64])
    alone = rounding.sweep(weight[some], upper, order, scales[some], zeros[some], **limits)
    assert torch.equal(alone, codes[some])


def test_what_is_not_finite_stays_in_its_row() -> None:
    scheme = WeightScheme(4, 16, True)
    weight, _, order, upper, scales, zeros = problem(40, 32, scheme)
    limits = dict(scheme=scheme)
    codes = rounding.sweep(weight, upper, order, scales, zeros, **limits)
    weight[7, 5], weight[33, 0] = float("nan"), float("inf")
    others = [row for row in range(40) if row not in (7, 33)]
    found = rounding.sweep(weight, upper, order, scales, zeros, **limits)
    assert torch.equal(found[others], codes[others])
    assert int(found.max()) <= scheme.max_code


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    scheme = WeightScheme(4, 16, True)
    weight, _, order, upper, scales, zeros = problem(8, 32, scheme)
    limits = dict(scheme=scheme)
    for wrong in ((weight[:, :16].contiguous(), upper, order, scales), (weight, upper, order[:5], scales),
                  (weight, upper, order, scales[:3])):  # fmt: skip
        with pytest.raises(ValueError, match="no sweep"):
            rounding.sweep(*wrong, zeros, **limits)
    with pytest.raises(ValueError, match="contiguous"):
        rounding.sweep(weight, upper.t(), order, scales, zeros, **limits)
