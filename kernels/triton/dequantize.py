"""Integer weights as floating point, for products with so many rows that cuBLAS is faster than unpacking in the kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton import trellis
from qserve.kernels.triton.launch import at
from qserve.kernels.triton.prepack import Planes
from qserve.kernels.triton.target import takes_ptx
from qserve.kernels.triton.tuning.configs import Config
from qserve.kernels.triton.unpack import e2m1, half, unit, unpack

CONFIG = Config(16, 32, warps=4, stages=1, splits=1, kernel="dequantize")
"""A program writes a block of K of this many outputs; the product itself is cuBLAS's."""
FEWEST_ROWS = 513
"""Counted, not measured. To read 0.52 bytes of a 4-bit weight and write 2 takes 0.59 ps at 4.3 TB/s, to multiply it by
a row 2.5 fs at 790 TFLOP/s: dequantizing first adds 45 % to 512 rows, 23 % to 1,024, 11 % to 2,048, 6 % to 4,096.
Unpacking beside the product has 794 instructions to issue in each 1,024 clocks of the matrix unit of sm_90, however
many rows there are: it adds between nothing, where all of that overlaps, and 78 %. A GPU's tuned data may say otherwise
for the rows of any bucket."""
MOST = 1 << 28
"""Weights that are dequantized at a time: 512 MiB. All of any product in the layers of an 8B model, half of the widest
of a 70B one."""


@triton.jit
def dequantize_kernel(
    weight, scales, zeros, out, padded_n, first, last, stride_out,
    ZERO: tl.constexpr, BITS: tl.constexpr, SLICE: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """out [last - first, stride_out] = outputs ``first`` to ``last``; the other arguments are those of
    ``weight_only_kernel``, k padded. A weight is its integer times its scale, rounded once."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    PLANES: tl.constexpr = 16 // BITS
    block = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ns = first + rows
    mine = ns < last
    ks = tl.arange(0, SLICE)
    at = weight + block.to(tl.int64) * padded_n * SLICE
    word = tl.load(at + ns[:, None] * SLICE + ks[None, :], mask=mine[:, None], other=0)
    for plane in tl.static_range(PLANES):
        column = (block * PLANES + plane) * SLICE
        group = 0 if GROUP == 0 else column // GROUP
        if SCALES == "pairs":
            packed = tl.load(scales + group // 2 * padded_n + ns, mask=mine, other=0)
            scale = tl.where(group % 2 == 0, half(packed, 0, tl.float16), half(packed, 1, tl.float16)).to(tl.float32)
        elif SCALES == "zeros":
            packed = tl.load(scales + group * padded_n + ns, mask=mine, other=0)
            scale = half(packed, 0, tl.float16).to(tl.float32)
            zero = half(packed, 1, DTYPE)[:, None]
        else:
            scale = tl.load(scales + group * padded_n + ns, mask=mine, other=0.0)
            if ZERO == -1:
                zero = tl.load(zeros + group * padded_n + ns, mask=mine, other=0.0).to(DTYPE)[:, None]
        if ZERO != -1:
            zero = tl.full((1, 1), ZERO, DTYPE)
        if ZERO == -2:
            value = e2m1(word, plane, DTYPE).to(tl.float32) * scale[:, None]
        else:
            value = unpack(word, zero, plane, BITS, DTYPE, PTX).to(tl.float32) * (unit(DTYPE) * scale)[:, None]
        place = rows[:, None].to(tl.int64) * stride_out + (column + ks)[None, :]
        tl.store(out + place, value.to(DTYPE), mask=mine[:, None])


def outputs_at_a_time(planes: Planes, outputs: int) -> int:
    """How many of ``outputs`` are dequantized at a time before their product: about equal parts, at most ``MOST``."""
    parts = -(-planes.padded_n * planes.blocks * planes.block_k // MOST)
    return min(outputs, -(-outputs // parts // 256) * 256) if parts > 1 else outputs


def dequantize(planes: Planes, memory: Tensor, first: int, last: int) -> Tensor:
    """Outputs ``first`` to ``last`` as [last - first, k] in ``memory``, of the type of x."""
    width = planes.blocks * planes.block_k
    out = memory[: (last - first) * width].view(last - first, width)
    if planes.places is not None:
        trellis.dequantize(planes, out, first, last)
        return out[:, : planes.k]
    at(dequantize_kernel, (planes.blocks, -(-(last - first) // CONFIG.block_n)))(
        planes.words, planes.scales, planes.scales if planes.zeros is None else planes.zeros, out,
        planes.padded_n, first, last, width,
        ZERO=planes.zero, BITS=planes.bits, SLICE=planes.slice, GROUP=planes.group, SCALES=planes.scales_kind,
        BLOCK_N=CONFIG.block_n, PTX=takes_ptx(memory.device), num_warps=CONFIG.warps,
    )  # fmt: skip
    return out[:, : planes.k]
