"""Round to nearest: every weight on its own, with searched scales.

Knows one weight; does not know the layers around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize import scales as scale_search
from qserve.quantize.layer import Quantized, output_error, pack_codes


def quantize(weight: Tensor, stats: LayerStats | None, scheme: WeightScheme, *, fallback: str = "") -> Quantized:
    """Round ``weight`` float32 [out, in] to ``scheme``.

    With ``stats`` the scales minimize the error weighted by the Hessian's diagonal, without the plain error.
    The group size must divide ``in``. ``fallback`` is a reason to report.
    """
    out, inp = weight.shape
    width = scheme.group_width(inp)
    usable = stats is not None and stats.finite()
    importance = stats.diagonal if stats is not None and usable else torch.ones(inp)
    grouped = weight.reshape(-1, width)
    by_group = importance.reshape(1, -1, width).expand(out, -1, -1).reshape(-1, width)
    scales, zeros = scale_search.search(grouped, by_group, scheme)
    offset: Tensor | float = float(scheme.zero) if zeros is None else zeros[:, None]
    codes = scale_search.encode(grouped, scales[:, None], offset, scheme.max_code)
    change = (codes - offset).mul_(scales[:, None]).sub_(grouped).reshape(out, inp)
    error, energy = output_error(weight, change, stats)
    packed = pack_codes(
        codes.reshape(out, inp), scales.reshape(out, -1), None if zeros is None else zeros.reshape(out, -1), scheme
    )
    dead = int((importance == 0).sum()) if usable else 0
    return Quantized(packed, error, energy, dead_inputs=dead, fallback=fallback)
