"""``Grid``: the numbers that codes stand for, before scales.

Adding a number format begins with a row in ``GRIDS``. The reference kernel then computes with it; formats, loaders,
other kernels and methods refuse it until they name it, so none can mistake it for another grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qserve.checkpoint.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """
    name         what a scheme's ``dtype`` calls it
    bits         the sizes of its codes
    zero_points  whether a group may have a zero point, a code that is subtracted from its codes
    exact        whether products of codes, and sums of them, are exact on integers
    largest      the largest magnitude of an input that is rounded to the grid in 8 bits
    numbers      uint8 codes of any shape -> float32: the numbers they stand for, before zero point and scale
    nan          the code of NaN without its sign bit, or None
    codebook     the number of each code, where a table gives them
    real_zeros   whether zero points are real numbers rather than codes
    unit         of an exact grid: all its numbers are whole multiples of it; those of NF4 are within 2 ** -16.96 of one
    scale_bits   of a scale as it is stored
    most         the largest code, where the bits of a code as it is stored do not say it
    zero         the code of 0 then
    ring         outputs whose codes share bits
    """

    name: str
    bits: tuple[int, ...]
    zero_points: bool
    exact: bool
    largest: float
    numbers: Callable[[Tensor], Tensor]
    nan: int | None = None
    codebook: tuple[float, ...] | None = None
    unit: float = 1.0
    real_zeros: bool = False
    scale_bits: int = 16
    most: int | None = None
    zero: int | None = None
    ring: int = 1


def _whole(codes: Tensor) -> Tensor:
    return codes.float()


def _e4m3(codes: Tensor) -> Tensor:
    import torch  # not where a command only asks for names

    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def _from_codebook(
    name: str, codebook: tuple[float, ...], *, unit: float | None = None, scale_bits: int = 16
) -> Grid:
    """A grid of four bits. It is exact where its numbers are multiples of a ``unit``."""

    def numbers(codes: Tensor) -> Tensor:
        import torch

        return torch.tensor(codebook, device=codes.device).index_select(0, codes.flatten().int()).view(codes.shape)

    return Grid(
        name, (4,), zero_points=False, exact=unit is not None, largest=max(map(abs, codebook)), numbers=numbers,
        codebook=codebook, unit=unit or 1.0, scale_bits=scale_bits,
    )  # fmt: skip


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
INTEGERS = Grid("int", (2, 3, 4, 5, 6, 8), zero_points=True, exact=True, largest=127.0, numbers=_whole)
E4M3 = Grid("fp8", (8,), zero_points=False, exact=False, largest=448.0, numbers=_e4m3, nan=0x7F)
"""OCP 8-bit floating point, 2023."""
E2M1 = _from_codebook("fp4", (*_E2M1, *(-number for number in _E2M1)), unit=0.5, scale_bits=8)
"""Four bits of the OCP Microscaling Formats specification, 2023: MXFP4 and NVFP4. Twice a number is an integer."""
NF4 = _from_codebook("nf4", (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
), unit=1 / 31908)  # fmt: skip
"""Quantiles of a normal distribution (Dettmers et al., arXiv 2305.14314): bitsandbytes."""
_BNB_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
BNB_FP4 = _from_codebook("bnb-fp4", (*_BNB_FP4, *(-number for number in _BNB_FP4)), unit=1 / 192)
"""bitsandbytes' own four bits of floating point, in float32: multiples of 1/192, in an order of their own."""
AFFINE = Grid("hqq", (2, 3, 4, 5, 8), zero_points=True, exact=True, largest=255.0, numbers=_whole, real_zeros=True)
"""Integers around a zero point that is a real number."""
TRELLIS = Grid(
    "trellis", (2, 3, 4), zero_points=False, exact=True, largest=30.0, numbers=lambda codes: codes.float() - 30,
    most=60, zero=30, ring=64,
)  # fmt: skip
"""Codes that neighbours choose together: ``trellis``. Their numbers are -30 to 30, most of them near 0."""
GRIDS = {grid.name: grid for grid in (INTEGERS, E4M3, E2M1, NF4, BNB_FP4, AFFINE, TRELLIS)}
_OF_INPUTS = {"int8": INTEGERS, "fp8": E4M3, "fp4": E2M1}


def grid_named(name: str) -> Grid:
    """The grid of a weight. Raises ``UsageError`` for an unknown name."""
    if name not in GRIDS:
        raise UsageError(f"unknown numbers {name!r}; known: {', '.join(GRIDS)}")
    return GRIDS[name]


def input_grid(name: str) -> Grid:
    """The grid of the input of a product, int8, fp8 or fp4, or of a KV cache. Raises ``UsageError`` for another."""
    if name not in _OF_INPUTS:
        raise UsageError(f"inputs are rounded to {' or '.join(_OF_INPUTS)}, not to {name!r}")
    return _OF_INPUTS[name]
