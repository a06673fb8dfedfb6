"""The scale and zero point of each group of a weight: min-max, or searched for the least weighted error.

Formats store scales as float16. Every scale here is already a float16 value, so codes are chosen for what is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import native, rounding
from qserve.kernels.threads import torch_threads
from qserve.quantize.passes import elements

# Elements per pass of the search: its few buffers then stay in the second-level cache.
_CHUNK = 1 << 16
# Four times as many steps gain under 1 % of the error at 4 bits.
_STEPS = 14
SMALLEST, _LARGEST = 2.0**-24, 65504.0


def minmax(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor | None]:
    """Scales that just cover every value.

    weight float32 [groups, width] -> (scales float32 [groups], zeros float32 [groups] or None where symmetric).
    Symmetric scales may be negative: the end of the code range that reaches one further (-2**(bits-1)) is put on the
    side of zero with the larger value.
    """
    low, high = torch.aminmax(weight, dim=1)
    if scheme.symmetric:
        positive = torch.maximum(-low / scheme.zero, high / (scheme.zero - 1))
        negative = torch.maximum(high / scheme.zero, -low / (scheme.zero - 1))
        return storable(torch.where(negative < positive, -negative, positive)), None
    low, high = low.clamp(max=0), high.clamp(min=0)
    scales = storable((high - low) / scheme.max_code)
    return scales, zero_points(low, scales, scheme)


def search(weight: Tensor, importance: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor | None]:
    """Scales of least error: the sum over a group of importance * (w - dequantized w)**2.

    weight float32 [groups, width]; importance float32 [width] or [period, width], non-negative, that of group g being
    g % period; returns as ``minmax``. A candidate is the range that a group's largest magnitude is mapped to. For each
    candidate codes are chosen and the scale is then solved exactly (least squares), so the steps may be coarse.
    Symmetric: both signs of the scale are tried. Asymmetric: the range shrinks about its zero point.
    """
    scales, zeros = minmax(weight, scheme)
    importance = importance.reshape(-1, weight.shape[1])
    # For a group whose inputs were never seen any value is as good, so the plain error decides.
    importance = torch.where(importance.amax(dim=1, keepdim=True) > 0, importance, 1.0)
    if native.serves(weight):
        ranges = _ranges(scheme) if zeros is None else _shares(scheme)
        rounding.search_scales(
            weight.contiguous(), importance.contiguous(), scales, zeros, ranges,
            zero=scheme.zero, max_code=scheme.max_code,
        )  # fmt: skip
        return scales, zeros
    return search_with_torch(weight, importance, scales, zeros, scheme)


def search_groups(weight: Tensor, importance: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor | None]:
    """``search`` in every group of consecutive inputs: ``weight`` float32 [out, in], ``importance`` float32 [in] ->
    scales and zeros float32 [out, groups]."""
    out, inp = weight.shape
    width = scheme.group_width(inp)
    scales, zeros = search(weight.reshape(-1, width), importance.reshape(-1, width), scheme)
    return scales.view(out, -1), None if zeros is None else zeros.view(out, -1)


def search_with_torch(
    weight: Tensor, importance: Tensor, scales: Tensor, zeros: Tensor | None, scheme: WeightScheme
) -> tuple[Tensor, Tensor | None]:
    """The reference for the C kernel, also used by installs without it: improves ``scales`` and ``zeros``."""
    period, width = importance.shape
    rows = max(1, elements(weight, _CHUNK) // (width * period)) * period
    with torch_threads(1):  # the operations are too small for two threads
        for start in range(0, weight.shape[0], rows):
            part = slice(start, start + rows)
            count = len(weight[part])
            seen = importance.repeat(-(-count // period), 1)[:count]
            if zeros is None:
                scales[part] = _symmetric(weight[part], seen, scales[part], scheme)
            else:
                scales[part], zeros[part] = _asymmetric(weight[part], seen, scales[part], zeros[part], scheme)
    return scales, zeros


def storable(scales: Tensor) -> Tensor:
    """float32 with float16 values, never zero or infinite, with the same sign."""
    sign = torch.where(scales < 0, -1.0, 1.0)
    return sign * scales.abs().clamp(SMALLEST, _LARGEST).to(torch.float16).to(torch.float32)


def zero_points(low: Tensor, scales: Tensor, scheme: WeightScheme) -> Tensor:
    """The code of 0.0 when ``low`` has code 0."""
    return torch.round(-low / scales).clamp_(0, scheme.max_code)


def encode(weight: Tensor, scales: Tensor, zeros: Tensor | float, max_code: int) -> Tensor:
    """Codes as float32: the nearest of 0..max_code. ``scales`` and ``zeros`` broadcast to ``weight``."""
    return torch.div(weight, scales).round_().add_(zeros).clamp_(0, max_code)


def _ranges(scheme: WeightScheme) -> list[float]:
    """The codes to which the largest magnitude is mapped, counted from the zero point: from a little inside the code
    range (fewer codes, better aligned) to well beyond it (clipped)."""
    half = float(scheme.zero)
    low, high = half - 1.5, half * (1.6 if scheme.bits <= 4 else 1.03)
    return torch.linspace(low, high, _STEPS).tolist()


def _shares(scheme: WeightScheme) -> list[float]:
    """The parts of a group's range that the codes cover, one for each candidate."""
    return torch.linspace(0.5 if scheme.bits <= 4 else 0.95, 1.05, _STEPS).tolist()


def _symmetric(weight: Tensor, importance: Tensor, start: Tensor, scheme: WeightScheme) -> Tensor:
    half = scheme.zero
    magnitude = weight.abs().amax(dim=1, keepdim=True).clamp_(min=SMALLEST)
    weighted = importance * weight
    best = torch.full_like(start, -1.0)
    scales = start.clone()
    codes, rounded, product = (torch.empty_like(weight) for _ in range(3))
    for target in _ranges(scheme):
        torch.mul(weight, target / magnitude, out=rounded)
        rounded.round_()
        # The same rounding serves both signs; only the clipping differs.
        for low, high, sign in ((-half, half - 1, 1.0), (1 - half, half, -1.0)):
            torch.clamp(rounded, low, high, out=codes)
            _keep_best(weighted, importance, codes, product, best, scales, sign)
    found = storable(scales)
    return torch.where(_worse(weight, importance, start, found, None, scheme), start, found)


def _keep_best(
    weighted: Tensor, importance: Tensor, codes: Tensor, product: Tensor, best: Tensor, scales: Tensor, sign: float
) -> None:
    """With codes c, the best scale is s = sum(h w c) / sum(h c c), and it removes sum(h w c)**2 / sum(h c c) of the
    error sum(h w w). If ``codes`` are those of the mirrored weight, the stored scale is negative."""
    torch.mul(weighted, codes, out=product)
    along = product.sum(dim=1)
    torch.mul(importance, codes, out=product).mul_(codes)
    norm = product.sum(dim=1)
    gain = along * along / norm
    better = gain > best  # NaN (no code but zero) is never better
    torch.where(better, gain, best, out=best)
    # A mirrored weight's codes mirror too: the pair (-s, -c) dequantizes to the same values.
    torch.where(better, sign * along / norm, scales, out=scales)


def _asymmetric(
    weight: Tensor, importance: Tensor, start: Tensor, start_zeros: Tensor, scheme: WeightScheme
) -> tuple[Tensor, Tensor]:
    low, high = torch.aminmax(weight, dim=1)
    low, high = low.clamp(max=0), high.clamp(min=0)
    weighted = importance * weight
    best = torch.full_like(start, -1.0)
    scales, zeros = start.clone(), start_zeros.clone()
    codes, rounded, product = (torch.empty_like(weight) for _ in range(3))
    for share in _shares(scheme):
        candidate = ((high - low) * (share / scheme.max_code)).clamp_(min=SMALLEST)
        middle = zero_points(low * share, candidate, scheme)
        torch.div(weight, candidate[:, None], out=rounded)
        rounded.round_()
        # Shifting the window of codes by one serves groups whose two ends differ in importance.
        for shift in (-1.0, 0.0, 1.0):
            zero = (middle + shift).clamp_(0, scheme.max_code)
            torch.maximum(rounded, -zero[:, None], out=codes)
            torch.minimum(codes, (scheme.max_code - zero)[:, None], out=codes)
            before = best.clone()
            _keep_best(weighted, importance, codes, product, best, scales, 1.0)
            torch.where(best > before, zero, zeros, out=zeros)
    chosen = storable(scales)
    worse = _worse(weight, importance, start, chosen, (start_zeros, zeros), scheme)
    return torch.where(worse, start, chosen), torch.where(worse, start_zeros, zeros)


def _worse(
    weight: Tensor,
    importance: Tensor,
    start: Tensor,
    found: Tensor,
    zeros: tuple[Tensor, Tensor] | None,
    scheme: WeightScheme,
) -> Tensor:
    """Where the found scale has more error than min-max: float16 rounding or a degenerate group can cause that."""
    before, after = zeros if zeros is not None else (None, None)
    return _error(weight, importance, found, after, scheme) > _error(weight, importance, start, before, scheme)


def _error(
    weight: Tensor, importance: Tensor, scales: Tensor, zeros: Tensor | None, scheme: WeightScheme
) -> Tensor:
    offset = float(scheme.zero) if zeros is None else zeros[:, None]
    codes = encode(weight, scales[:, None], offset, scheme.max_code)
    return (codes.sub_(offset).mul_(scales[:, None]).sub_(weight).square_().mul_(importance)).sum(dim=1)
