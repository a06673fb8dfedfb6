"""Trellis codes (Tseng et al., QTIP, arXiv 2406.11235) chosen by GPTQ's error compensation.

The outputs of an input form rings of 64, each of which takes the path of least error through the states (Viterbi's
algorithm). So an input is rounded at once for all outputs, and GPTQ goes on from input to input as with integers. QTIP
rotates weights until they lie as its numbers do; here a scale for each group of inputs does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.checkpoint.trellis import RING, STATE_BITS, PackedTrellis, codes_of_states, whole_rings
from qserve.kernels import native, rounding
from qserve.kernels.executor import CPU
from qserve.quantize.scales import storable

_DEVIATION = 9.25  # of the numbers of all states
# How many deviations of a group those are: with more bits the tails are worth more. And the number that the largest
# weight of a group has at most.
_WIDTH = {2: 1.0, 3: 1.05, 4: 1.1}
_REACH = 24.0
# An input counts for its whole group where it has so much of the group's energy, and so much more than most inputs.
_MOST_OF_GROUP, _OVER_MEDIAN = 0.5, 50.0
_SEAM = RING // 2  # weights on each side of the seam of a ring by which the state there is chosen


def nearest(weight: Tensor, importance: Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """``weight`` float32 [out, in] without error compensation; ``importance`` float32 [in] weighs the inputs."""
    scales = group_scales(weight, importance, scheme)
    order = torch.arange(weight.shape[1])
    return QuantizedWeight(scheme, sweep(weight, None, order, scales, scheme), scales)


def group_scales(weight: Tensor, diagonal: Tensor, scheme: WeightScheme) -> Tensor:
    """float32 [out, groups]: by the deviation of a group, or by its largest weight. Where one input counts
    for the whole group, its weight decides: what rounding leaves of it no other input could make up for."""
    width = scheme.group_width(weight.shape[1])
    groups = weight.view(len(weight), -1, width)
    deviation = groups.square().mean(-1).sqrt() * (_WIDTH[scheme.bits] / _DEVIATION)
    scales = storable(torch.maximum(deviation, groups.abs().amax(-1) / _REACH))
    energy = diagonal.view(-1, width)
    counts = (energy > _MOST_OF_GROUP * energy.sum(1, keepdim=True)).flatten() & (
        diagonal > _OVER_MEDIAN * diagonal.median()
    )
    if not bool(counts.any()):
        return scales
    inputs = counts.nonzero().flatten()
    columns, own = weight[:, inputs].contiguous(), scales[:, inputs // width].contiguous()
    codes = sweep(columns, None, torch.arange(len(inputs)), own, scheme).unpack()
    numbers = scheme.grid.numbers(codes)
    change = columns / (own * torch.where(numbers.abs() < 2, torch.nan, numbers))
    fits = (change > 0.7) & (change < 1.4)
    scales[:, inputs // width] = torch.where(fits, storable(own * change.nan_to_num(1.0)), own)
    return scales


def sweep(
    weight: Tensor, upper: Tensor | None, order: Tensor, scales: Tensor, scheme: WeightScheme
) -> PackedTrellis:
    """GPTQ's pass over the inputs of ``weight`` float32 [out, in] in ``order``, ``upper`` being the factor of the
    Hessian's inverse in that order; None where no input makes up for another."""
    contiguous = weight.contiguous(), scales.contiguous()
    if native.missing() is None:  # a GPU has no kernel for it
        factor = None if upper is None else upper.cpu()
        steps, places, own = contiguous[0].cpu(), order.cpu(), contiguous[1].cpu()
        with CPU:
            symbols = rounding.trellis_sweep(steps, factor, places, own, scheme.bits)
        symbols = symbols.to(weight.device)
    else:
        symbols = sweep_with_torch(*contiguous, upper, order, scheme)
    return PackedTrellis.of_symbols(symbols, scheme.bits, len(weight))


def sweep_with_torch(
    weight: Tensor, scales: Tensor, upper: Tensor | None, order: Tensor, scheme: WeightScheme
) -> Tensor:
    """The symbols uint8 [rings, in, 64] as ``qs_trellis_sweep`` in ``csrc/qserve.h`` finds them, the slow way."""
    bits, width = scheme.bits, scheme.group_width(weight.shape[1])
    states = torch.arange(1 << STATE_BITS, dtype=torch.int32)
    numbers = scheme.grid.numbers(codes_of_states(_in_stream(states, bits)))
    left = whole_rings(weight)[:, order].t().reshape(len(order), -1, RING)
    spread = whole_rings(scales).repeat_interleave(width, 1)[:, order].t().reshape(len(order), -1, RING)
    counted = whole_rings(torch.ones(len(weight), 1)).view(-1, RING)
    symbols = torch.empty(left.shape[1], len(order), RING, dtype=torch.uint8)
    for place, (now, scale) in enumerate(zip(left, spread, strict=True)):
        steps = torch.where(scale != 0, now / scale, 0.0).clamp(-scheme.zero, scheme.zero)
        worth = scale.square()
        worth = worth * (counted.sum(1, keepdim=True) / worth.sum(1, keepdim=True)).nan_to_num(0.0, 0.0, 0.0)
        path = _rings(steps, worth, numbers, bits)
        symbols[:, order[place]] = (path & ((1 << bits) - 1)).to(torch.uint8)
        if upper is not None:
            error = (now - numbers[path.long()] * scale) * counted / upper[place, place]
            left[place + 1 :] -= upper[place, place + 1 :, None, None] * error
    return symbols


def _in_stream(states: Tensor, bits: int) -> Tensor:
    """States whose newest symbol is lowest, as those of a stream, in which it is highest."""
    turned = torch.zeros_like(states)
    for at in range(0, STATE_BITS, bits):
        turned |= ((states >> at) & ((1 << bits) - 1)) << (STATE_BITS - bits - at)
    return turned


def _rings(x: Tensor, worth: Tensor, numbers: Tensor, bits: int) -> Tensor:
    """The states int32 [rings, 64] of the best closed paths for ``x`` [rings, 64], newest symbol lowest."""
    classes = len(numbers) >> bits
    around = torch.arange(RING - _SEAM, RING + _SEAM) % RING
    seam = _path(x[:, around], worth[:, around], numbers, bits, None)[:, _SEAM - 1] % classes
    return _path(x, worth, numbers, bits, seam)


def _path(x: Tensor, worth: Tensor, numbers: Tensor, bits: int, seam: Tensor | None) -> Tensor:
    """The states of the cheapest path, of those that continue and end with ``seam`` [rings] where it is given."""
    classes, branches = len(numbers) >> bits, 1 << bits
    best = torch.zeros(len(x), classes)
    if seam is not None:
        best = torch.where(torch.arange(classes) == seam[:, None], 0.0, 1e30)
    came, cost = [], best
    for at in range(x.shape[1]):
        if at:
            best, which = cost.view(-1, branches, classes).min(1)
            came.append(which)
        off = x[:, at, None] - numbers
        cost = best.repeat_interleave(branches, 1) + off * worth[:, at, None] * off
    if seam is not None:
        cost = torch.where(torch.arange(len(numbers)) % classes == seam[:, None], cost, torch.inf)
    state = cost.argmin(1)
    path = [state]
    for which in reversed(came):
        before = state // branches
        state = which.gather(1, before[:, None])[:, 0] * classes + before
        path.append(state)
    return torch.stack(path[::-1], 1).int()
