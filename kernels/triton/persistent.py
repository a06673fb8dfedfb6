"""Products of 8-bit weights and 8-bit inputs for many rows: one program on each multiprocessor, fed by the copy engine.

Tiles come as boxes of tensor descriptors (TMA): no thread computes addresses, and what lies outside reads as zero.
Tiles are taken by short columns, one column after another, so that tiles computed at once share their operands in the
cache. The loop over tiles and the loop over blocks of K are one, so that the copies for the next tile begin during the
last steps of this one. The product is that of ``eight_bit_kernel``, in the same order of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qserve.checkpoint.grid import INTEGERS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.kernels.triton.launch import at
from qserve.kernels.triton.target import Target
from qserve.kernels.triton.tuning.configs import Config

BLOCK_K = 128
"""Inputs to a step: a line of 128 bytes, and the most that e4m3 products of sm_90 may sum before float32 takes over."""
COLUMN = 8
"""Tiles of rows that are computed side by side before the next tile of outputs."""
FEWEST_ROWS = 257
"""Below that there are too few tiles to keep every multiprocessor busy."""
_WIDE_ROWS = 513
"""From here on tiles of 256 outputs fill the GPU: they read a quarter less of the second cache for each product."""


@triton.jit(do_not_specialize=["rows", "blocks", "programs"])
def persistent_kernel(
    x, weight, x_scales, scales, bias, out,
    rows, n, padded_n, blocks, stride_out, x_groups, programs,
    GROUP: tl.constexpr, X_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    EXACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART_N: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """out [rows, n] = (x [rows, k] times weight [padded_n, k] transposed), both of int8 or both of e4m3, scaled.

    x         descriptor of boxes [BLOCK_M, BLOCK_K]; ``weight`` of boxes [PART_N, BLOCK_K]
    x_scales  float32 [rows, x_groups]; ``scales`` float32 [groups, padded_n]; a group size of 0 is all inputs, and
              with groups all PART_N outputs of a box have one scale

    A step's product is a sum of its own, waited for and added to the others in float32, unless the matrix unit's sums
    are EXACT and no scale is due. PART_N outputs of a tile are multiplied at a time, so that the registers hold one
    such sum beside the total, and one sum is added while the matrix unit computes the next.
    """
    SUMS: tl.constexpr = tl.int32 if x.dtype == tl.int8 else tl.float32
    PARTS: tl.constexpr = BLOCK_N // PART_N
    BLOCK_K: tl.constexpr = x.block_shape[1]
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(padded_n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=True):
        top = tile // (COLUMN * tiles_n) * COLUMN
        height = min(tiles_m - top, COLUMN)
        within = tile % (COLUMN * tiles_n)
        first_m = (top + within % height) * BLOCK_M
        first_n = within // height * BLOCK_N
        ms = first_m + tl.arange(0, BLOCK_M)
        totals = (tl.zeros((BLOCK_M, PART_N), SUMS),) * PARTS
        for block in range(blocks):
            block_x = x.load([first_m, block * BLOCK_K])
            if X_GROUP != 0:
                scale = tl.load(x_scales + ms * x_groups + block * BLOCK_K // X_GROUP, mask=ms < rows, other=0.0)
            sums = ()
            for part in tl.static_range(PARTS):
                part_n = first_n + part * PART_N
                block_w = weight.load([part_n, block * BLOCK_K])
                if EXACT and GROUP == 0 and X_GROUP == 0:
                    sums += (tl.dot(block_x, block_w.T, totals[part], out_dtype=SUMS),)  # type: ignore[assignment]
                elif GROUP == 0 and X_GROUP == 0:
                    sums += (totals[part] + tl.dot(block_x, block_w.T),)  # type: ignore[assignment]
                else:
                    each = scale if X_GROUP != 0 else tl.full((BLOCK_M,), 1.0, tl.float32)
                    if GROUP != 0:
                        at = block * BLOCK_K // GROUP * padded_n + part_n
                        each *= tl.load(scales + at, mask=part_n < padded_n, other=0.0)
                    product = tl.dot(block_x, block_w.T)
                    sums += (tl.fma(product, tl.broadcast_to(each[:, None], product.shape), totals[part]),)  # type: ignore[assignment]
            totals = sums
        for part in tl.static_range(PARTS):
            part_n = first_n + part * PART_N
            # By quarters, so that the previous output and the stored values pass through few registers.
            halves = tl.split(tl.permute(tl.reshape(totals[part], (BLOCK_M, 2, PART_N // 2)), (0, 2, 1)))
            for half in tl.static_range(2):
                ns = part_n + half * (PART_N // 2) + tl.arange(0, PART_N // 2)
                _store(halves[half], x_scales, scales, bias, out, ms, ns, rows, n, stride_out,
                       GROUP, X_GROUP, HAS_BIAS, ACCUMULATE)  # fmt: skip


@triton.jit
def _store(
    total, x_scales, scales, bias, out, ms, ns, rows, n, stride_out,
    GROUP: tl.constexpr, X_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Scale sums [ms, ns], add the bias and the previous output, and store them."""
    total = total.to(tl.float32)
    if GROUP == 0:
        total *= tl.load(scales + ns, mask=ns < n, other=0.0)[None, :]
    if X_GROUP == 0:
        total *= tl.load(x_scales + ms, mask=ms < rows, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + ns, mask=ns < n, other=0.0).to(tl.float32)[None, :]
    at = out + ms[:, None].to(tl.int64) * stride_out + ns[None, :]
    mine = (ms < rows)[:, None] & (ns < n)[None, :]
    if ACCUMULATE:
        total += tl.load(at, mask=mine, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=mine)


def runs(gpu: Target) -> bool:
    """Whether the GPU has TMA, and a matrix unit that reads both sides from shared memory."""
    return "tma" in gpu.features and bool({"wgmma", "tcgen05"} & gpu.features)


def supports(weight: QuantizedWeight, block_k: int, gpu: Target) -> str | None:
    """None, or why this kernel does not multiply by ``weight`` in steps of ``block_k`` inputs."""
    assert weight.activations is not None
    scheme, (out, inp) = weight.scheme, weight.stored.shape
    if not runs(gpu):
        return f"it is for sm_90, sm_100 and sm_103, not {gpu.architecture}"
    if block_k != BLOCK_K:
        return f"groups of {block_k}: its steps are {BLOCK_K} inputs"
    if scheme.groups(inp) > 1 and scheme.row_height(out) % BLOCK_K:
        return "each output has scales of its own by groups"
    if weight.activations.grid is INTEGERS:
        if "tcgen05" in gpu.features:
            return "integers have no fast matrix unit there"
        if scheme.groups(inp) > 1 or weight.activations.group_size > 0:
            return "sums of integers by groups pass through a slow conversion"
    return None


def default(rows: int, padded_n: int, grouped: bool) -> Config:
    """A default without spills. ``grouped``: with scales by groups, whose tiles leave no registers for more outputs."""
    wide = rows >= _WIDE_ROWS and padded_n % 256 == 0 and not grouped
    return Config(128, 256 if wide else 128, warps=8, stages=3, splits=1, kernel="persistent")


def configs(padded_n: int, grouped: bool) -> list[Config]:
    """All configurations worth timing; none of them spills."""
    shapes = [(128, 128, 8, 3), (64, 128, 4, 3)] if grouped else [(128, 128, 8, 3)]
    if padded_n % 256 == 0 and not grouped:
        shapes += [(128, 256, 8, 3), (128, 256, 8, 4)]
    return [Config(m, n, warps, stages, splits=1, kernel="persistent") for m, n, warps, stages in shapes]


def part_n(config: Config, grouped: bool) -> int:
    """Outputs multiplied at a time: half a tile, or a whole small tile with scales by groups."""
    return config.block_n if grouped and config.block_n <= 128 else config.block_n // 2


def exact(integers: bool, gpu: Target) -> bool:
    """Whether the matrix unit sums a product's terms with full precision: that of int32, or of float32."""
    return integers or "tcgen05" in gpu.features


def residents(config: Config, grouped: bool) -> int:
    """Programs that share a multiprocessor: as many as its registers hold."""
    if grouped:
        return 2 if config.block_m == 64 else 1
    return 2 if config.block_n == 128 else 1


def most_registers(config: Config, grouped: bool) -> int | None:
    """A register limit for each thread, where the compiler would take slightly too many for two programs."""
    return 128 if residents(config, grouped) == 2 and config.warps == 8 else None


def multiply(
    codes: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, config: Config,
    *, n: int, group: int, x_group: int, accumulate: bool, gpu: Target,
) -> None:  # fmt: skip
    """out [rows, n] from ``codes`` [rows, k] and ``weight`` [padded_n, k], both contiguous; group 0 is all inputs."""
    (rows, k), padded_n = codes.shape, len(weight)
    part = part_n(config, group + x_group > 0)
    tiles = -(-rows // config.block_m) * -(-padded_n // config.block_n)
    programs = min(tiles, gpu.sms * residents(config, group + x_group > 0))
    at(persistent_kernel, (programs, 1))(
        TensorDescriptor(codes, [rows, k], [k, 1], [config.block_m, BLOCK_K]),
        TensorDescriptor(weight, [padded_n, k], [k, 1], [part, BLOCK_K]),
        x_scales, scales, out if bias is None else bias, out,
        rows, n, padded_n, k // BLOCK_K, out.stride(0), x_scales.shape[1], programs,
        GROUP=group, X_GROUP=x_group, HAS_BIAS=bias is not None, ACCUMULATE=accumulate,
        EXACT=exact(codes.dtype == torch.int8, gpu),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, PART_N=part, COLUMN=COLUMN,
        num_warps=config.warps, num_stages=config.stages, maxnreg=most_registers(config, group + x_group > 0),
    )  # fmt: skip
