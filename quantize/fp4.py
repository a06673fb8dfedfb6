"""Weights as e2m1 numbers, four bits of floating point. MXFP4 has a power of two for every 32 inputs; NVFP4 has an e4m3
number for every 16, over a factor that the whole weight shares."""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.checkpoint.grid import E2M1, E4M3
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import MXFP4, NVFP4, WeightScheme
from qserve.kernels import native, rounding
from qserve.kernels.reference import round_e2m1
from qserve.quantize.passes import elements

# Candidates of a scale, counted from the one that lays the largest weight of a group on 6, the largest number. Smaller
# ones clip it; larger ones lay it on 4 or 3, between numbers that are nearer to each other (compare arXiv 2606.07618).
# Powers of two, and e4m3 numbers, of which eight lie within a factor of two. More gain 0.1 % of the error at most.
_POWERS, _NUMBERS = range(-1, 1), range(-6, 8)
# The largest candidate of a group whose largest weight lies on 6 is less than this many times its scale.
_BEYOND = 2.0
_SMALLEST = 2.0**-100
# Elements per pass.
_CHUNK = 1 << 22


def nearest(weight: Tensor, importance: Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """``weight`` float32 [out, in] with the scales of least squared error, each input's weighted by ``importance``
    float32 [in], and the nearest numbers. Groups must divide ``in``."""
    scales = search(weight, importance, scheme)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    rows = max(1, elements(weight, _CHUNK) // weight.shape[1])
    for part in (slice(start, start + rows) for start in range(0, len(weight), rows)):
        codes[part] = encode(weight[part] / scales[part].repeat_interleave(scheme.group_size, 1))
    return QuantizedWeight(scheme, codes, scales, global_scale=global_scale(scales, scheme))


def encode(steps: Tensor) -> Tensor:
    """uint8 codes of the nearest numbers to ``steps``, half to even; what is not a number counts as 6."""
    numbers = round_e2m1(steps)
    size = numbers.abs()
    place = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4))
    return place.add_(8.0 * (numbers < 0)).to(torch.uint8)


def search(weight: Tensor, importance: Tensor, scheme: WeightScheme) -> Tensor:
    """Scales of least error that the ``scheme`` can store, float32 [out, groups]; arguments as those of ``nearest``.
    The factor of NVFP4 is a power of two."""
    if scheme not in (MXFP4, NVFP4):
        raise ValueError(f"e2m1 numbers are in groups of 32 or 16 inputs, not in {scheme}")
    out, width = len(weight), scheme.group_size
    grouped, importance = weight.reshape(-1, width), importance.reshape(-1, width)
    importance = torch.where(importance.amax(dim=1, keepdim=True) > 0, importance, 1.0).contiguous()
    first = grouped.abs().amax(1).div_(E2M1.largest).clamp_(min=_SMALLEST)
    shared = global_scale(first * _BEYOND, scheme)
    scales = torch.empty(len(grouped))
    rows = max(1, elements(weight, _CHUNK) // (width * len(importance))) * len(importance)
    for part in (slice(start, start + rows) for start in range(0, len(grouped), rows)):
        candidates = _candidates(first[part], shared)
        if native.serves(weight):
            scales[part] = rounding.choose_scales(grouped[part].contiguous(), importance, candidates)
        else:
            scales[part] = choose_with_torch(grouped[part], importance, candidates)
    return scales.view(out, -1)


def choose_with_torch(weight: Tensor, importance: Tensor, candidates: Tensor) -> Tensor:
    """The reference for ``rounding.choose_scales``."""
    seen = importance.repeat(-(-len(weight) // len(importance)), 1)[: len(weight)]
    errors = [
        E2M1.numbers(encode(weight / scale)).mul_(scale).sub_(weight).square_().mul_(seen).sum(1)
        for scale in candidates[:, :, None].unbind(1)
    ]
    return candidates.gather(1, torch.stack(errors, 1).argmin(1, keepdim=True))[:, 0]


def global_scale(scales: Tensor, scheme: WeightScheme) -> float | None:
    """What the ``scales`` of NVFP4 are multiplied by to be e4m3 numbers: the largest power of two with which the
    largest is one. None for MXFP4."""
    if scheme != NVFP4:
        return None
    return float(torch.exp2((E4M3.largest / scales.max()).log2().floor()))


def storable(scales: Tensor, shared: float | None) -> Tensor:
    """The nearest positive numbers to ``scales`` that NVFP4 with the factor ``shared`` can store, or MXFP4 without."""
    if shared is None:
        lower = torch.exp2(scales.clamp(_SMALLEST, 1 / _SMALLEST).log2().floor())
        return torch.where(scales > 1.5 * lower, 2 * lower, lower)
    numbers = (scales * shared).clamp(2.0**-9, E4M3.largest).to(torch.float8_e4m3fn)
    return numbers.to(torch.float32) / shared


def _candidates(first: Tensor, shared: float | None) -> Tensor:
    """float32 [groups, steps], positive; ``first`` float32 [groups] lay the largest weight on 6."""
    if shared is None:
        return torch.exp2(first.log2().ceil()[:, None] + torch.tensor(_POWERS))
    number = (first * shared).clamp(2.0**-9, E4M3.largest).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = number.int()[:, None] + torch.tensor(_NUMBERS, dtype=torch.int32)
    eight = codes.clamp_(1, 126).to(torch.uint8).view(torch.float8_e4m3fn)  # 2 ** -9 to 448
    return eight.to(torch.float32) / shared
