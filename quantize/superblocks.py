"""Two-level scales, as llama.cpp's K-quants have them: an integer of few bits for each group, times a float16 that the
groups of a superblock share; with real zero points also such minima.

First every group gets the scale (and minimum) of least weighted error, as if it were alone. What a deviation from it
costs is known: the error grows with its square, by the weighted sum of squared codes. So scales of a superblock are
themselves a group of weights to be rounded, with that importance, and the same search rounds them. Integers next to
those found are tried on the weights themselves, and the float16 is solved anew in the end.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from qserve.checkpoint.spec import SUPERBLOCK, WeightScheme
from qserve.kernels.threads import torch_threads
from qserve.quantize import scales as scale_search
from qserve.quantize.passes import elements

# Weights per pass: its few buffers then stay in the second-level cache.
_CHUNK = 1 << 16
# Ranges of a group that its codes may cover, relative to its own, about its middle.
_SHARES = (0.7, 0.78, 0.85, 0.91, 0.96, 1.0, 1.04)
# Steps from each integer that are tried. Further ones have less weighted error, and no less divergence.
_AROUND = (0, -1, 1)
_TINY = 1e-30


def search(weight: Tensor, importance: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor | None]:
    """Scales of least error, the sum of importance * (w - dequantized w)**2, that ``scheme`` can store.

    ``weight`` float32 [out, in], ``importance`` float32 [in], non-negative -> scales float32 [out, groups], none of
    them 0; and real zero points of that shape, or None where symmetric. Where ``scheme`` has two levels, ``in`` must be
    whole superblocks; else it has real zero points, and scales and minima are float16 each.
    """
    out, inp = weight.shape
    groups = scheme.groups(inp)
    scales, minima = torch.empty(out, groups), torch.zeros(out, groups)
    importance = importance.view(groups, -1)
    # For a group whose inputs were never seen any value is as good, so the plain error decides.
    importance = torch.where(importance.amax(1, keepdim=True) > 0, importance, 1.0)
    with torch_threads(1):  # the operations are too small for two threads
        for start in range(0, out, count := max(1, elements(weight, _CHUNK) // inp)):
            rows = slice(start, start + count)
            part = weight[rows].reshape(-1, groups, inp // groups)
            found = _Groups(part, importance, scheme).search()
            scales[rows], minima[rows] = found
    return scales, None if scheme.symmetric else minima / scales


class _Groups:
    """Some rows while their scales are searched: ``weight`` float32 [rows, groups, width], ``importance`` float32
    [groups, width]. A number is scale * (code - zero) - minimum."""

    def __init__(self, weight: Tensor, importance: Tensor, scheme: WeightScheme) -> None:
        self.weight, self.importance, self.scheme = weight, importance, scheme
        self.zero = scheme.zero if scheme.symmetric else 0
        self.per = SUPERBLOCK // scheme.group_size

    def search(self) -> tuple[Tensor, Tensor]:
        """Scales and minima [rows, groups]."""
        scales, minima = self._alone()
        if not self.scheme.scale_bits:
            scales = scale_search.storable(scales)
            return scales, self._minima(scales, self._codes(scales, minima)).half().float()
        codes = self._codes(scales, minima)
        cost = (codes.square() * self.importance).sum(2)
        d, whole = self._levels(scales, cost, signed=self.scheme.symmetric)
        whole = _not_zero(whole)
        dmin, lowest = torch.zeros_like(d), torch.zeros_like(whole)
        if not self.scheme.symmetric:
            scales = self._spread(d) * whole
            minima = self._minima(scales, self._codes(scales, minima))
            seen = self.importance.sum(1).expand(minima.shape)
            dmin, lowest = self._levels(minima, seen, signed=False)
        whole, lowest = self._neighbours(d, whole, dmin, lowest)
        d, dmin = self._solved(d, whole, dmin, lowest)
        return self._spread(d) * whole, self._spread(dmin) * lowest

    def _alone(self) -> tuple[Tensor, Tensor]:
        """Those of each group by itself, in float32."""
        rows, groups, width = self.weight.shape
        if self.scheme.symmetric:
            plain = WeightScheme(self.scheme.bits, self.scheme.group_size)
            scales, _ = scale_search.search(self.weight.reshape(-1, width), self.importance, plain)
            return scales.view(rows, groups), torch.zeros(rows, groups)
        low, high = torch.aminmax(self.weight, dim=2)
        low = low.clamp(max=0)
        middle, half = (low + high) / 2, ((high - low) / 2).clamp(min=scale_search.SMALLEST)
        best = torch.full_like(low, torch.inf)
        scales, minima = 2 * half / self.scheme.max_code, -low
        for share in _SHARES:
            candidate, lowest = half * (2 * share / self.scheme.max_code), (half * share - middle).clamp(min=0)
            for _ in range(2):
                candidate, lowest = self._least_squares(self._codes(candidate, lowest), candidate, lowest)
            error = self._error(candidate, lowest)
            better = error < best
            torch.where(better, error, best, out=best)
            torch.where(better, candidate, scales, out=scales)
            torch.where(better, lowest, minima, out=minima)
        return scales, minima

    def _least_squares(self, codes: Tensor, scales: Tensor, minima: Tensor) -> tuple[Tensor, Tensor]:
        """The best scale and minimum, which is not below 0, for ``codes``; those given where they are all alike."""
        weighted = codes * self.importance
        h, hq, hqq = self.importance.sum(1), weighted.sum(2), (weighted * codes).sum(2)
        hw, hqw = (self.weight * self.importance).sum(2), (weighted * self.weight).sum(2)
        determinant = h * hqq - hq * hq
        usable = determinant > 1e-6 * h * hqq
        found = (h * hqw - hq * hw) / determinant.clamp(min=_TINY)
        lowest = (hq * found - hw) / h
        alone = lowest < 0
        found, lowest = torch.where(alone, hqw / hqq.clamp(min=_TINY), found), lowest.clamp(min=0)
        usable &= found > 0
        return torch.where(usable, found, scales), torch.where(usable, lowest, minima)

    def _minima(self, scales: Tensor, codes: Tensor) -> Tensor:
        """The best minima for ``scales`` and ``codes``."""
        missing = (codes * scales[..., None]).sub_(self.weight).mul_(self.importance).sum(2)
        return (missing / self.importance.sum(1)).clamp(min=0)

    def _levels(self, numbers: Tensor, cost: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
        """Float16 numbers, as float32 [rows, superblocks], and whole ones [rows, groups], whose products are near
        ``numbers``, a deviation of which has this ``cost``."""
        scheme = WeightScheme(self.scheme.scale_bits, self.scheme.group_size, symmetric=signed)
        rows = numbers.reshape(-1, self.per)
        d, zeros = scale_search.search(rows, cost.reshape(-1, self.per), scheme)
        offset: Tensor | float = float(scheme.zero) if zeros is None else zeros[:, None]
        whole = scale_search.encode(rows, d[:, None], offset, scheme.max_code) - offset
        return d.view(len(numbers), -1), whole.view(numbers.shape)

    def _neighbours(self, d: Tensor, whole: Tensor, dmin: Tensor, lowest: Tensor) -> tuple[Tensor, Tensor]:
        """The best of each group's integers and those next to them."""
        least, most = (-1, 1) if self.scheme.symmetric else (0, 2)
        half = 1 << (self.scheme.scale_bits - 1)
        best, found, below = torch.full_like(whole, torch.inf), whole, lowest
        for step, other in product(_AROUND, (0,) if self.scheme.symmetric else _AROUND):
            tried = _not_zero((whole + step).clamp(least * half, most * half - 1))
            minimum = (lowest + other).clamp(0, 2 * half - 1)
            error = self._error(self._spread(d) * tried, self._spread(dmin) * minimum)
            better = error < best
            best, found = torch.where(better, error, best), torch.where(better, tried, found)
            below = torch.where(better, minimum, below)
        return found, below

    def _solved(self, d: Tensor, whole: Tensor, dmin: Tensor, lowest: Tensor) -> tuple[Tensor, Tensor]:
        """The float16 of each superblock by least squares, where it is better than the one that led to the codes."""
        scales, minima = self._spread(d) * whole, self._spread(dmin) * lowest
        a = self._codes(scales, minima) * whole[..., None]
        b = lowest[..., None].expand(a.shape)

        def total(x: Tensor, y: Tensor) -> Tensor:
            return (x * y * self.importance).sum(2).view(*d.shape, -1).sum(2)

        aa, bb, ab, aw, bw = total(a, a), total(b, b), total(a, b), total(a, self.weight), total(b, self.weight)
        determinant = aa * bb - ab * ab
        both = determinant > 1e-6 * aa * bb  # never where symmetric: then ``b`` is 0
        first = torch.where(both, (bb * aw - ab * bw) / determinant.clamp(min=_TINY), aw / aa.clamp(min=_TINY))
        second = torch.where(both, (ab * aw - aa * bw) / determinant.clamp(min=_TINY), dmin)
        found = scale_search.storable(first), torch.where(both, scale_search.storable(second), dmin)
        after = self._error(self._spread(found[0]) * whole, self._spread(found[1]) * lowest)
        before = self._error(scales, minima)
        usable = after.view(*d.shape, -1).sum(2) < before.view(*d.shape, -1).sum(2)
        if not self.scheme.symmetric:
            usable &= (first > 0) & (second >= 0)
        return torch.where(usable, found[0], d), torch.where(usable, found[1], dmin)

    def _spread(self, numbers: Tensor) -> Tensor:
        """[rows, superblocks] -> [rows, groups]."""
        return numbers.repeat_interleave(self.per, 1)

    def _codes(self, scales: Tensor, minima: Tensor) -> Tensor:
        """What scales multiply: the nearest codes, less their zero."""
        codes = (self.weight + minima[..., None]).div_(scales[..., None]).round_()
        return codes.clamp_(-self.zero, self.scheme.max_code - self.zero)

    def _error(self, scales: Tensor, minima: Tensor) -> Tensor:
        """Of each group."""
        found = self._codes(scales, minima).mul_(scales[..., None]).sub_(minima[..., None])
        return found.sub_(self.weight).square_().mul_(self.importance).sum(2)


def _not_zero(whole: Tensor) -> Tensor:
    """A scale of 0 would leave one number, which 1 has among others."""
    return torch.where(whole == 0, 1.0, whole)
