"""Two-level scales beside an exhaustive search, and what llama.cpp's blocks can hold of them."""

from dataclasses import replace

import pytest
import torch

from qserve.checkpoint.gguf_blocks import pack_blocks
from qserve.checkpoint.gguf_schemes import GGUF_SCHEMES
from qserve.quantize import gptq, rtn, superblocks
from tests.quantize.test_gptq import layer, loss, naive

TWO_LEVELS = [name for name, scheme in GGUF_SCHEMES.items() if scheme.scale_bits]
REAL = [name for name, scheme in GGUF_SCHEMES.items() if scheme.scale_bits or not scheme.symmetric]


def weights(out, inp, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(out, inp // 16, 1, generator=generator) + 0.3
    weight = (torch.randn(out, inp // 16, 16, generator=generator) * spread).view(out, inp) * 0.02 + 0.003
    return weight, torch.rand(inp, generator=generator) ** 2 + 0.1


def error(weight, importance, quantized):
    return float(((quantized.dequantize() - weight) ** 2 * importance).sum())


def exhaustive(weight, importance, scheme):
    """The least error of one superblock: of many float16 for scales (and minima), each with all integers of a group."""
    width, groups = scheme.group_size, 256 // scheme.group_size
    part, seen = weight.view(groups, 1, 1, width), importance.view(groups, 1, 1, width)
    if scheme.symmetric:
        whole = torch.arange(-(1 << scheme.scale_bits - 1), 1 << scheme.scale_bits - 1).view(1, -1, 1, 1)
        whole, minima, zero = whole[whole != 0].view(1, -1, 1, 1), [torch.zeros(1, 1, 1, 1)], scheme.zero
        largest = float(weight.abs().max()) / zero / (1 << scheme.scale_bits - 1)
        units = torch.linspace(0.6, 1.5, 150) * largest
    else:
        whole, zero = torch.arange(1, 1 << scheme.scale_bits).view(1, -1, 1, 1), 0
        low, high = part.amin((1, 2, 3)).clamp(max=0), part.amax((1, 2, 3))
        units = torch.linspace(0.7, 1.1, 9) * float((high - low).max()) / scheme.max_code / 63
        steps = torch.linspace(0.7, 1.1, 9) * float(-low.min()) / 63
        minima = [float(step.half()) * torch.arange(64).view(1, 1, -1, 1) for step in steps]
    best = float("inf")
    for unit in units.half().float().tolist():
        for minimum in minima:
            codes = ((part + minimum) / (unit * whole)).round_().clamp_(-zero, scheme.max_code - zero)
            errors = (codes.mul_(unit * whole).sub_(minimum).sub_(part).square_() * seen).sum(3)
            best = min(best, float(errors.flatten(1).amin(1).sum()))
    return best


@pytest.mark.parametrize("name", TWO_LEVELS)
def test_search_is_near_an_exhaustive_one(name):
    scheme = GGUF_SCHEMES[name]
    weight, importance = weights(2, 256)
    least = sum(exhaustive(row, importance, scheme) for row in weight)
    assert error(weight, importance, rtn.nearest(weight, importance, scheme)) < 1.2 * least


@pytest.mark.parametrize("name", REAL)
def test_what_is_found_lies_in_blocks(name):
    """Whatever the weights: ``pack_blocks`` refuses numbers that blocks would change."""
    scheme, (weight, importance) = GGUF_SCHEMES[name], weights(70, 512)
    weight[0], weight[1, :256], weight[2], weight[3], weight[4] = 0, 1e-30, 3.0, -1e-3, weight[4].abs()
    weight[5], weight[6, ::2], weight[7, :64], weight[8] = -weight[5].abs(), 0, 0, weight[8] * 1e5
    found = rtn.nearest(weight, importance, scheme)
    found.check()
    pack_blocks(found)
    assert bool((found.scales != 0).all())
    assert torch.equal(found.dequantize()[0], weight[0])
    limit = 0.02 * 0.25**scheme.bits * 2**6  # a bit more is a fourth of the error
    usual = weight[9:]
    assert error(usual, importance, replace(found, stored=found.codes[9:], scales=found.scales[9:],
                                            zeros=None if found.zeros is None else found.zeros[9:])) < (
        limit * float((usual**2 * importance).sum())
    )  # fmt: skip


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_important_inputs_are_closer_and_those_never_seen_count_alike(name):
    scheme, (weight, importance) = GGUF_SCHEMES[name], weights(40, 256)
    alike = rtn.nearest(weight, torch.ones(256), scheme)
    seen = rtn.nearest(weight, importance, scheme)
    assert error(weight, importance, seen) < 0.97 * error(weight, importance, alike)
    assert torch.equal(rtn.nearest(weight, torch.zeros(256), scheme).dequantize(), alike.dequantize())


def test_rows_are_independent(monkeypatch):
    weight, importance = weights(13, 512)
    scheme = GGUF_SCHEMES["Q4_K"]
    whole = superblocks.search(weight, importance, scheme)
    monkeypatch.setattr(superblocks, "_CHUNK", 3 * 512)
    for one, other in zip(whole, superblocks.search(weight, importance, scheme), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("gptq_alone")
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("name", [*TWO_LEVELS, "Q5_1"])
def test_error_compensation_equals_the_naive_one(name, act_order):
    weight, x, stats = layer(out=24, inp=256, dead=(5, 40))
    scheme = GGUF_SCHEMES[name]
    codes, expected = naive(weight, stats, scheme, act_order)
    result = gptq.quantize(weight, stats, scheme, act_order=act_order)
    result.weight.check()
    pack_blocks(result.weight)
    assert float((result.weight.codes.float() == codes).float().mean()) > 0.99
    assert loss(weight, result.weight.dequantize(), x) == pytest.approx(loss(weight, expected, x), rel=0.01)
    nearest = rtn.quantize(weight, stats, scheme)
    assert loss(weight, result.weight.dequantize(), x) < 0.8 * loss(weight, nearest.weight.dequantize(), x)


def test_without_kernels_it_is_the_same(monkeypatch):
    weight, _, stats = layer(out=24, inp=256)
    with_kernels = gptq.quantize(weight, stats, GGUF_SCHEMES["Q4_K"])
    monkeypatch.setattr("qserve.kernels.native.missing", lambda: "no compiler")
    without = gptq.quantize(weight, stats, GGUF_SCHEMES["Q4_K"])
    # Sums in another order: a code that moves moves those behind it.
    assert float((with_kernels.weight.codes == without.weight.codes).float().mean()) > 0.98
