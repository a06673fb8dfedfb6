"""Rows of a packed embedding, dequantized as they are looked up: one program per piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton.launch import at

BLOCK = 512


@triton.jit
def embed_kernel(
    ids_ptr, codes_ptr, scales_ptr, zeros_ptr, out_ptr,
    SCALE: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(ids_ptr + row).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    groups = source * GROUPS + columns // GROUP
    codes = tl.load(codes_ptr + source * WIDTH + columns, mask=inside).to(tl.float32)
    if zeros_ptr is not None:
        codes -= tl.load(zeros_ptr + groups, mask=inside, other=0).to(tl.float32)
    else:
        codes -= ZERO
    x = codes * tl.load(scales_ptr + groups, mask=inside, other=0.0)
    if SCALE != 1.0:
        x *= SCALE
    tl.store(out_ptr + row * WIDTH + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


def embed(ids: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, zero: int, group: int, out: Tensor,
          rows: int, scale: float = 1.0) -> None:  # fmt: skip
    """out[r] = (codes[ids[r]] - zeros) * scales * scale for r < rows; codes uint8, or float8_e4m3fn with a ``zero`` of
    0; scales float32 and zeros uint8 per ``group`` columns."""
    width = out.shape[1]
    assert codes.dtype in (torch.uint8, torch.float8_e4m3fn)
    at(embed_kernel, (rows, triton.cdiv(width, BLOCK)))(
        ids, codes, scales, zeros, out, scale, zero, group, scales.shape[1], width, BLOCK, num_warps=4
    )
