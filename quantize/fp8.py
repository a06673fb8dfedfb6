"""Weights as e4m3 numbers (OCP 8-bit floating point): one scale per output, per tensor, or per block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qserve.checkpoint.grid import E4M3
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import MXFP8, WeightScheme
from qserve.quantize.passes import elements

# Elements per pass of the search.
_CHUNK = 1 << 20
# Scales within a factor of two put the weights in different places between e4m3's numbers. Beyond that everything
# repeats, except for underflow. Twice as many steps gain about 1 %.
_STEPS = 16
_SMALLEST = 2.0**-100


def nearest(weight: Tensor, importance: Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """``weight`` float32 [out, in] with the scales of least squared error, each input's weighted by ``importance``
    float32 [in], and the nearest e4m3 numbers; blocks at the edges may be short. Raises ``ValueError`` for integer
    schemes.

    Each tensor, output or block takes the scale of least error between absmax / 448 and twice that. A few inputs often
    carry most of the error, and their weights then lie near e4m3 numbers. Scales are float32 and positive; those of
    MXFP8 are powers of two.
    """
    if scheme.grid is not E4M3:
        raise ValueError(f"e4m3 numbers cannot store {scheme}")
    scales = search(weight, importance, scheme)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for part in _parts(weight):
        codes[part] = _encode(weight[part], scales[part], scheme).view(torch.uint8)
    return QuantizedWeight(scheme, codes, scales)


def search(weight: Tensor, importance: Tensor, scheme: WeightScheme) -> Tensor:
    """The scales of least error, see ``nearest``: float32 [out, groups], equal in rows that share one."""
    if not bool((importance > 0).any()):
        importance = torch.ones_like(importance)
    out, inp = weight.shape
    groups = scheme.groups(inp)
    block = torch.arange(out) // scheme.row_height(out)
    blocks = int(block[-1]) + 1
    peak = torch.zeros(blocks, groups)
    for part in _parts(weight):
        largest = _by_group(weight[part].abs(), scheme).amax(2)
        peak.scatter_reduce_(0, block[part, None].expand_as(largest), largest, "amax")
    first = (peak / E4M3.largest).clamp(min=_SMALLEST)
    if scheme == MXFP8:  # a larger power of two would only make small weights coarser
        return torch.exp2(first.log2().ceil())[block]
    factors = torch.exp2(torch.arange(_STEPS) / _STEPS)
    error = torch.zeros(_STEPS, blocks, groups)
    for part in _parts(weight):
        for step, factor in enumerate(factors.tolist()):
            scales = first[block[part]] * factor
            rounded = _encode(weight[part], scales, scheme).to(torch.float32)
            change = rounded.mul_(_spread(scales, scheme, inp)).sub_(weight[part]).square_().mul_(importance)
            error[step].index_add_(0, block[part], _by_group(change, scheme).sum(2))
    return (first * factors[error.argmin(0)])[block]


def _parts(weight: Tensor) -> list[slice]:
    rows = max(1, elements(weight, _CHUNK) // weight.shape[1])
    return [slice(start, start + rows) for start in range(0, len(weight), rows)]


def _by_group(values: Tensor, scheme: WeightScheme) -> Tensor:
    """[rows, in] -> [rows, groups, width], zeros behind the last input."""
    rows, inp = values.shape
    groups, width = scheme.groups(inp), scheme.group_width(inp)
    return F.pad(values, (0, groups * width - inp)).reshape(rows, groups, width)


def _spread(scales: Tensor, scheme: WeightScheme, inp: int) -> Tensor:
    """[rows, groups] -> [rows, in], or [rows, 1] where a row has one scale."""
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(scheme.group_width(inp), 1)[:, :inp]


def _encode(weight: Tensor, scales: Tensor, scheme: WeightScheme) -> Tensor:
    """float8_e4m3fn. The clamp keeps a quotient that rounding carried past 448 from becoming NaN."""
    steps = weight / _spread(scales, scheme, weight.shape[1])
    return steps.clamp_(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn)
