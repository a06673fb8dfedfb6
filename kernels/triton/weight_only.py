"""Integer weights times inputs in floating point: W4A16, W8A16, and 2, 3 and 6 bits in their fields.

A 16-bit word holds one field of 4 or 8 bits for each of its planes: field j of word i belongs to input
``j * SLICE + i`` of a block of ``16 / BITS * SLICE`` inputs. So each plane is a slice of K, words reach the registers
of the matrix unit as float16 would, and every thread unpacks what it multiplies: nothing is shuffled. The integers are
exact in the product; a group's sum is scaled after it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.kernels import ops
from qserve.kernels.triton import dequantize, trellis
from qserve.kernels.triton.dense import multiply
from qserve.kernels.triton.finish import finish
from qserve.kernels.triton.grouped import NOT_GROUPED, Grouping, grouped_rows
from qserve.kernels.triton.inputs import gather_columns
from qserve.kernels.triton.launch import at
from qserve.kernels.triton.prepack import PAD_N, PAD_STREAMS, dense_planes, planes, round_up
from qserve.kernels.triton.target import Target, takes_ptx, target
from qserve.kernels.triton.tuning.configs import BUCKETS, SPLIT_ROWS, Config, bucket_of, resolve
from qserve.kernels.triton.tuning.tuned import choose, left_out
from qserve.kernels.triton.unpack import e2m1, half, unit, unpack
from qserve.kernels.triton.workspace import Workspace

_FOR_FOUR_STAGES = 96 << 10
"""Bytes of shared memory, with room for everything beside the copies."""
MOST_PLACES = 2**31 - 2**24
"""Places of the inputs of a launch, without those that a tile has behind its rows."""


@triton.jit(do_not_specialize=["rows", "blocks", "splits"])
def weight_only_kernel(
    x, weight, scales, zeros, bias, out, partial, arrived, tiles, order,
    rows, n, k, stride_x, stride_out, padded_n, blocks, splits,
    ZERO: tl.constexpr, BITS: tl.constexpr, SLICE: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PTX: tl.constexpr, EACH: tl.constexpr, TOP_K: tl.constexpr, SORTED_X: tl.constexpr,
):  # fmt: skip
    """out [rows, n] = x [rows, k] times weight [n, k] transposed.

    weight  int16 [blocks, padded_n, SLICE]
    scales  by group of GROUP inputs (0: all) and output; in words of 32 bits, so that they are copied asynchronously.
            SCALES "pairs": float16, two groups to a word; "zeros": float16 below and the zero point above, in the
            type of x; "float": float32, with ``zeros`` float32 where ZERO is -1
    BITS of 16: a word is a number in the type of x, and has no scale. ZERO of -2: fields are e2m1 numbers
    SWAP puts the weights on the left of the product, where the matrix unit of sm_90 takes them from registers.
    EACH > 0: the weights of all experts, EACH outputs of each; ``grouped_rows`` says which rows are whose
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    BLOCK_K: tl.constexpr = 16 // BITS * SLICE
    PRECISION: tl.constexpr = "tf32x3" if PTX else "ieee"
    # The inputs summed before a scale is due: a group, or the block where a group is wider.
    SUM: tl.constexpr = BLOCK_K if (GROUP == 0) or (GROUP > BLOCK_K) else GROUP
    tile, split = tl.program_id(0), tl.program_id(1)
    if EACH > 0:
        tiles_m = tl.num_programs(0) // tl.cdiv(n, BLOCK_N)
        expert = tl.load(tiles + (tile % tiles_m) * 3)
        if expert < 0:
            return
        x_rows, ms = grouped_rows(tiles, order, tile % tiles_m, rows, BLOCK_M, TOP_K, SORTED_X)
        w_begin = expert * EACH
    else:
        tiles_m = tl.cdiv(rows, BLOCK_M)
        ms = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
        x_rows = ms
        w_begin = 0
    ns = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_ns = w_begin + ns
    ks = tl.arange(0, SLICE)
    first = split * blocks // splits
    last = (split + 1) * blocks // splits
    seen = ms < rows
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        w_at = w_ns[:, None] * SLICE + ks[None, :]
        x_at = x_rows[None, :] * stride_x + ks[:, None]
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        w_at = w_ns[None, :] * SLICE + ks[:, None]
        x_at = x_rows[:, None] * stride_x + ks[None, :]
    if GROUP == 0 and ZERO == -1:
        zero_n = tl.load(zeros + w_ns).to(DTYPE)
    for block in tl.range(first, last, num_stages=STAGES):
        word = tl.load(weight + block * (padded_n * SLICE) + w_at)
        for part in tl.static_range(BLOCK_K // SUM):
            if GROUP != 0:
                group = (block * BLOCK_K + part * SUM) // GROUP
                if SCALES == "pairs":
                    if part % 2 == 0:
                        packed = tl.load(scales + (group // 2) * padded_n + w_ns)
                    scale = half(packed, part % 2, tl.float16).to(tl.float32)
                elif SCALES == "zeros":
                    packed = tl.load(scales + group * padded_n + w_ns)
                    scale = half(packed, 0, tl.float16).to(tl.float32)
                    zero_n = half(packed, 1, DTYPE)
                else:
                    scale = tl.load(scales + group * padded_n + w_ns)
                    if ZERO == -1:
                        zero_n = tl.load(zeros + group * padded_n + w_ns).to(DTYPE)
            if ZERO == -1:
                zero = zero_n[:, None] if SWAP else zero_n[None, :]
            else:
                zero = tl.full((1, 1), ZERO, DTYPE)
            acc = total if GROUP == 0 else tl.zeros_like(total)
            for step in tl.static_range(SUM // SLICE):
                at = block * BLOCK_K + part * SUM + step * SLICE
                mask = seen[None, :] if SWAP else seen[:, None]
                if not EVEN_K:
                    inside = at + ks < k
                    mask = mask & (inside[:, None] if SWAP else inside[None, :])
                slice_x = tl.load(x + at + x_at, mask=mask, other=0.0)
                if BITS == 16:
                    slice_w = word
                elif ZERO == -2:
                    slice_w = e2m1(word, part * (SUM // SLICE) + step, DTYPE)
                else:
                    slice_w = unpack(word, zero, part * (SUM // SLICE) + step, BITS, DTYPE, PTX)
                if SWAP:
                    acc = tl.dot(slice_w, slice_x, acc, input_precision=PRECISION)
                else:
                    acc = tl.dot(slice_x, slice_w, acc, input_precision=PRECISION)
            if GROUP == 0:
                total = acc
            else:
                total += acc * (scale[:, None] if SWAP else scale[None, :])
    if SWAP:
        total = tl.trans(total)
    if BITS < 16:
        if ZERO != -2:
            total *= unit(DTYPE)
        if GROUP == 0:
            total *= tl.load(scales + w_ns)[None, :]
    finish(total, out, bias, partial, arrived, tile, split, ms, ns, rows, n, stride_out, padded_n,
           splits, HAS_BIAS, ACCUMULATE, SPLIT)  # fmt: skip


def default(rows: int, bits: int, group: int, gpu: Target, invariant: bool = False) -> Config:
    """A safe default: no spills, and fits the shared memory of the smallest GPU. ``group`` 0 is all inputs.
    ``invariant``: the same instruction for every number of rows; ``rows`` is at most 32. With wgmma it is near what was
    measured best on an H200."""
    if rows <= 16:
        # The scales of many groups fit the registers of few outputs; the assembler of some parks them all the same.
        narrow = 0 < group <= 32 and gpu.architecture not in ("sm_89", "sm_100")
        stages = 4 if gpu.shared_bytes >= _FOR_FOUR_STAGES else 3
        return Config(16, 64 if narrow or "wgmma" in gpu.features else 128, warps=4, stages=stages)
    if "wgmma" in gpu.features and not invariant:
        if rows <= 32:
            return Config(32, 64, warps=4, stages=3, swap=True)
        return Config(64, 64, warps=4, stages=2, swap=True, splits=1 if rows > SPLIT_ROWS else 0)
    if rows <= 32:
        # Sums of two groups to a block are separate: half the warps have twice the registers each.
        return Config(32, 128, warps=4 if bits == 4 and group >= 128 else 8, stages=3)
    # Like that of sm_90, this matrix unit reads one side from registers without a detour.
    swap = "tcgen05" in gpu.features
    return Config(64, 128, warps=8, stages=2, swap=swap, splits=1 if rows > SPLIT_ROWS else 0)


def most_rows(x: Tensor) -> int:
    """Rows of one launch: the kernel counts places of x in 32 bits, because 64 bits would take twice the registers."""
    return max(1, MOST_PLACES // max(1, x.stride(0)))


class WeightOnly:
    """A product with integer weights and inputs in floating point, made ready.

    With ``experts`` the weight holds those of as many experts, one behind another, each padded to ``PAD_N`` outputs; it
    may be dense, and ``run_grouped`` is what runs.
    """

    def __init__(self, op: ops.Linear, memory: Workspace, batch_invariant: bool, experts: int = 0) -> None:
        device = memory.device
        self.op, self.memory, self.invariant = op, memory, batch_invariant
        self.n = op.out.shape[1]
        if isinstance(op.weight, QuantizedWeight):
            self.planes = planes(op.weight, op.x.dtype, device)
        else:
            self.planes = dense_planes(op.weight, op.x.dtype, device)
        self.padded_n = self.planes.padded_n
        self.bias = None if op.bias is None else op.bias.to(device)
        self.gpu = gpu = target(device)
        if experts:
            self.each = self.padded_n // experts
            return
        self.dequantizes = op.x.dtype != torch.float32 and "dequantize" not in left_out(gpu)
        self.configs = {bucket: self.config_for(min(bucket, len(op.x)), gpu, batch_invariant) for bucket in BUCKETS}
        gathered = 0 if self.planes.order is None else len(op.x) * self.planes.k
        self.gathered = memory.take("gathered", gathered, op.x.dtype)
        self.configure({})

    def configure(self, configs: dict[int, Config]) -> None:
        """Use ``configs`` for these buckets of rows in place of the earlier choice."""
        self.configs |= configs
        self.partial, self.arrived = self.memory.splits(self.configs, len(self.op.x), self.planes.padded_n)
        # Taken now, so that it counts as memory in use; kept only from the first use on, at the widest product's size.
        self.dequantized: Tensor | None = None
        if any(config.kernel == "dequantize" for config in self.configs.values()):
            self._dequantized()

    def config_for(self, rows: int, gpu: Target, batch_invariant: bool) -> Config:
        """If ``batch_invariant``: the same instruction, order and parts of K for every number of rows."""
        held = self.planes
        fewest = dequantize.FEWEST_ROWS if held.places is None else trellis.fewest_rows(gpu)

        def usual(rows: int) -> Config:
            if self.dequantizes and rows >= fewest and not batch_invariant:
                return dequantize.CONFIG
            return self._default(rows, gpu, batch_invariant)

        if batch_invariant:
            multiple = PAD_N if held.places is None else PAD_STREAMS
            outputs = held.padded_n if self.op.whole is None else round_up(self.op.whole, multiple)
            least = resolve(usual(1), 1, outputs, held.blocks, gpu.sms)
            return replace(usual(min(rows, 32)), splits=least.splits)
        dtype = str(self.op.x.dtype).removeprefix("torch.")
        kernel = "weight_only" if held.places is None else "trellis"
        self.key = f"{kernel} {dtype} bits={held.bits} group={held.group} {held.scales_kind} n={self.n} k={held.k}"
        found = choose(self.key, rows, gpu, usual, self.fits)
        return resolve(found, rows, held.padded_n, held.blocks, gpu.sms)

    @property
    def swaps(self) -> bool:
        """Whether a configuration may swap the sides of the product."""
        return self.planes.places is None

    def for_many(self) -> list[Config]:
        """Other configurations that may compute many rows here."""
        return [dequantize.CONFIG] if self.dequantizes else []

    def fits(self, config: Config) -> bool:
        """Whether this product can use ``config``."""
        if config.swap and not self.swaps:
            return False
        return self.padded_n % config.block_n == 0 and (config.kernel == "tiles" or config in self.for_many())

    def run(self, rows: int) -> None:
        held, config = self.planes, self.configs[bucket_of(rows)]
        x = self.op.x
        if held.order is not None:
            x = self.gathered[: rows * held.k].view(rows, held.k)
            gather_columns(self.op.x, held.order, x, rows)
        if config.kernel == "dequantize":
            self._multiply_dequantized(x[:rows])
            return
        step = SPLIT_ROWS if config.splits > 1 else most_rows(x)
        for start in range(0, rows, step):
            self._launch(x[start:], self.op.out[start:], min(step, rows - start), config)

    def config_grouped(self, rows: int) -> Config:
        """For about ``rows`` rows of an expert."""
        most = 32 if self.invariant else 64
        return replace(self._default(min(rows, most), self.gpu, self.invariant), splits=1)

    def _default(self, rows: int, gpu: Target, invariant: bool) -> Config:
        if self.planes.places is not None:
            return trellis.default(rows, gpu, invariant)
        return default(rows, self.planes.bits, self.planes.group, gpu, invariant)

    def run_grouped(self, rows: int, grouping: Grouping, config: Config) -> None:
        """The ``rows`` of x for the experts that ``grouping`` names."""
        self._launch(self.op.x, self.op.out, grouping.choices, config, grouping)

    def _dequantized(self) -> Tensor:
        """Memory for the part of a weight that is dequantized at a time."""
        held = self.planes
        elements = dequantize.outputs_at_a_time(held, self.n) * held.blocks * held.block_k
        return self.memory.take("dequantized", elements, self.op.x.dtype)

    def _multiply_dequantized(self, x: Tensor) -> None:
        if self.dequantized is None:
            self.dequantized = self._dequantized()
        step, bias = dequantize.outputs_at_a_time(self.planes, self.n), self.bias
        for first in range(0, self.n, step):
            last = min(first + step, self.n)
            weight = dequantize.dequantize(self.planes, self.dequantized, first, last)
            part = None if bias is None else bias[first:last]
            multiply(x, weight, part, self.op.out[: len(x), first:last], self.op.accumulate)

    def _launch(
        self, x: Tensor, out: Tensor, rows: int, config: Config, grouping: Grouping | None = None
    ) -> None:
        held = self.planes
        memory: tuple[Tensor | None, ...]
        if grouping is None:
            tiles = -(-rows // config.block_m) * (held.padded_n // config.block_n)
            memory, kind = (self.partial, self.arrived, None, None), NOT_GROUPED
        else:
            tiles = grouping.most * -(-self.n // config.block_n)
            memory, kind = (None, None, grouping.tiles, grouping.order), grouping.constants(self.each)
        constants: dict[str, object] = {
            "BITS": held.bits, "SLICE": held.slice, "GROUP": held.group, "HAS_BIAS": self.bias is not None,
            "ACCUMULATE": self.op.accumulate, "EVEN_K": held.k == held.blocks * held.block_k,
            "SPLIT": config.splits > 1, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.stages,
            "PTX": takes_ptx(x.device), **kind, "num_warps": config.warps, "num_stages": config.stages,
        }  # fmt: skip
        bias, strides = out if self.bias is None else self.bias, (x.stride(0), out.stride(0))
        if held.places is not None:
            at(trellis.trellis_kernel, (tiles, config.splits))(
                x, held.words, held.places, held.scales, bias, out, *memory,
                rows, self.n, held.k, *strides, held.padded_n, held.words.shape[1], held.blocks, config.splits,
                **constants,
            )  # fmt: skip
            return
        at(weight_only_kernel, (tiles, config.splits))(
            x, held.words, held.scales, held.scales if held.zeros is None else held.zeros, bias, out, *memory,
            rows, self.n, held.k, *strides, held.padded_n, held.blocks, config.splits,
            ZERO=held.zero, SCALES=held.scales_kind, SWAP=config.swap, **constants,
        )  # fmt: skip
