"""Products of e4m3 weights and e4m3 inputs for many rows: cuBLAS, behind ``torch._scaled_mm``.

Scales by output and by token are applied by the product itself, in float32, before it rounds. So is a bias in the type
of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.kernels import ops
from qserve.kernels.triton.target import Target
from qserve.kernels.triton.tuning.configs import Config

CONFIG = Config(16, 16, warps=1, stages=1, splits=1, kernel="scaled_mm")
"""cuBLAS chooses its own tiles."""
FEWEST_ROWS = 256
"""From here on an H200 has 1,300 TFLOP/s with it, 1,000 with the persistent kernel."""
_MULTIPLE = 16


def supports(op: ops.Linear, weights: torch.dtype, groups: int, gpu: Target) -> str | None:
    """None, or why ``op`` cannot be computed so. ``weights``: the dtype in which they are held; ``groups``: inputs that
    share a scale, of either side, or 0 for all."""
    if not {"wgmma", "tcgen05"} & gpu.features:
        return f"scales by row are for sm_90 and newer, not {gpu.architecture}"
    if weights != torch.float8_e4m3fn or groups:
        return "it is for e4m3 numbers with scales by output and token"
    if op.out.shape[1] % _MULTIPLE:
        return f"{op.out.shape[1]} outputs: they must be a multiple of {_MULTIPLE}"
    if op.accumulate:
        return None if op.out.dtype == torch.float32 else f"it does not add to {op.out.dtype}"
    if op.out.dtype != torch.bfloat16 or not op.out.is_contiguous():
        return "it writes whole rows of bfloat16"
    return None


def is_default(op: ops.Linear, rows: int, gpu: Target) -> bool:
    """Whether it is faster than the other kernels unless a measurement says otherwise. Sums that are added to ``out``
    pass through memory once more."""
    return rows >= FEWEST_ROWS and "wgmma" in gpu.features and not op.accumulate


def multiply(
    codes: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor,
    sums: Tensor | None,
) -> None:  # fmt: skip
    """out [rows, n] = ``codes`` [rows, k] times ``weight`` [n, k] transposed, times ``x_scales`` [rows, 1] and
    ``scales`` [1, n], plus ``bias`` [n]. Where ``sums`` float32 [rows, n] is given, they are added to ``out``."""
    target = out if sums is None else sums
    torch._scaled_mm(
        codes, weight.t(), scale_a=x_scales, scale_b=scales, out_dtype=target.dtype, out=target,
        bias=None if bias is None or sums is not None else bias.to(out.dtype),
    )  # fmt: skip
    if sums is not None:
        out += sums
        if bias is not None:
            out += bias
