"""One pass over the inputs of a weight that rounds them one by one: the reference for ``kernels.rounding.sweep``, and
what a GPU runs, whose kernel takes a few inputs at a time."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from qserve.checkpoint.grid import AFFINE, E2M1, E4M3, INTEGERS
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize import fp4
from qserve.quantize import scales as scale_search

# Columns rounded one by one before a matrix product applies their error to the others.
_LEAF = 8


def sweep_with_torch(
    weight: Tensor,
    diagonal: Tensor,
    scheme: WeightScheme,
    order: Tensor,
    upper: Tensor,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    aims: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The reference for ``rounding.sweep``, also used on GPUs, by installs without it, for e4m3, and for scales that
    are not fixed beforehand (None). Returns codes, scales and zeros."""
    sweep = _Sweep(weight, diagonal, scheme, order, upper, scales, zeros, aims)
    sweep.run(0, weight.shape[1])
    codes = torch.empty_like(sweep.codes)
    codes[order] = sweep.codes
    return codes.t(), sweep.scales.t(), None if sweep.zeros is None else sweep.zeros.t()


@cache
def _kernel() -> ModuleType:
    """The kernel of a GPU. Triton is imported where there is one."""
    return import_module("qserve.kernels.triton.sweep")


class _Sweep:
    """The state of one pass over the inputs. Everything is transposed, [in, out], so that an input is a row."""

    def __init__(
        self,
        weight: Tensor,
        diagonal: Tensor,
        scheme: WeightScheme,
        order: Tensor,
        upper: Tensor,
        scales: Tensor | None,
        zeros: Tensor | None,
        aims: Tensor | None,
    ) -> None:
        out, inp = weight.shape
        self.scheme, self.upper = scheme, upper
        self.width = scheme.group_width(inp)
        self.groups = (order // self.width).int()
        self.group = self.groups.tolist()
        self.left = weight.t()[order].contiguous()  # weights not yet rounded, with earlier errors made up for
        self.aims = self.left if aims is None else aims.t()[order].contiguous()
        self.error = torch.empty_like(self.left)
        self.codes = torch.empty(inp, out, dtype=torch.uint8)
        self.importance = diagonal
        self.fixed_scales = scales is not None
        self.inverse = (1.0 / upper.diagonal()).tolist()
        self.on_gpu = weight.is_cuda and scheme.grid in (INTEGERS, AFFINE, E2M1)
        if scales is not None:
            self.scales, self.zeros = scales.t().contiguous(), None if zeros is None else zeros.t().contiguous()
        else:
            self.scales = torch.empty(scheme.groups(inp), out)
            self.zeros = None if scheme.symmetric else torch.empty(scheme.groups(inp), out)

    def _choose_scales(self, group: int, weight: Tensor) -> None:
        importance = self.importance[group * self.width : (group + 1) * self.width]
        scales, zeros = scale_search.search(weight.contiguous(), importance, self.scheme)
        self.scales[group] = scales
        if self.zeros is not None and zeros is not None:
            self.zeros[group] = zeros

    def run(self, start: int, stop: int) -> None:
        """Round rows start..stop, which already make up for every earlier row. First the first half; then one product
        applies its error to the second half; then the second half."""
        size = stop - start
        # Halves are whole groups where possible, so that a group's scales see every earlier error.
        unit = self.width if size > self.width else _kernel().COLUMNS if self.on_gpu else _LEAF
        if not self.fixed_scales and size == self.width:
            self._choose_scales(start // self.width, self.left[start : start + self.width].t())
        if size <= unit:
            self._leaf(start, stop)
            return
        middle = start + max(1, size // 2 // unit) * unit
        self.run(start, middle)
        self.left[middle:stop].addmm_(
            self.upper[start:middle, middle:stop].t(), self.error[start:middle], alpha=-1.0
        )
        self.run(middle, stop)

    def _leaf(self, start: int, stop: int) -> None:
        if self.on_gpu:
            aims = None if self.aims is self.left else self.aims
            _kernel().round_columns(
                self.left, aims, self.error, self.codes, self.upper, self.scales, self.zeros, self.groups,
                range(start, stop), zero=self.scheme.zero, max_code=self.scheme.max_code,
                e2m1=self.scheme.grid is E2M1,
            )  # fmt: skip
            return
        for row in range(start, stop):
            left, group = self.left[row], self.group[row]
            rounded = self._round(row, left, group)
            error = torch.sub(self.aims[row], rounded, out=self.error[row]).mul_(self.inverse[row])
            if row + 1 < stop:
                self.left[row + 1 : stop].addr_(self.upper[row, row + 1 : stop], error, alpha=-1.0)

    def _round(self, row: int, left: Tensor, group: int) -> Tensor:
        """Note the codes of ``left``, which become row ``row``, and return what they stand for."""
        scales = self.scales[group]
        codes = torch.div(left, scales)
        if self.scheme.grid is E4M3:
            numbers = codes.clamp_(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn)
            self.codes[row] = numbers.view(torch.uint8)
            return numbers.to(torch.float32).mul_(scales)
        if self.scheme.grid is E2M1:
            self.codes[row] = fp4.encode(codes)
            return E2M1.numbers(self.codes[row]).mul_(scales)
        offset = float(self.scheme.zero) if self.zeros is None else self.zeros[group]
        codes = codes.round_().add_(offset).clamp_(0, self.scheme.max_code)
        self.codes[row] = codes
        return codes.sub_(offset).mul_(scales)
