"""Products of 8-bit weights and 8-bit inputs: INT8 with exact sums in int32, and FP8 (e4m3) with sums in float32.

Scales by token and output are applied to the whole sum; scales by groups of inputs, of either side, to the sum of
each group. Integers of at most 4 bits are e4m3 numbers too, so FP8 inputs multiply them exactly.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from qserve.checkpoint.grid import E4M3, INTEGERS, TRELLIS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import ops
from qserve.kernels.triton import persistent, scaled_mm
from qserve.kernels.triton.finish import finish
from qserve.kernels.triton.grouped import NOT_GROUPED, Grouping, grouped_rows
from qserve.kernels.triton.inputs import WIDEST_ROW, Rounded, gather_columns, round_groups, round_rows
from qserve.kernels.triton.launch import at
from qserve.kernels.triton.prepack import PAD_N, by_group, round_up, slots
from qserve.kernels.triton.target import NEEDED, Target, target
from qserve.kernels.triton.tuning.configs import BUCKETS, SPLIT_ROWS, Config, bucket_of, resolve
from qserve.kernels.triton.tuning.tuned import choose, left_out
from qserve.kernels.triton.workspace import Workspace

WIDEST_BLOCK = 128
"""Inputs to a step: the most that e4m3 products of sm_90 may sum before float32 takes over."""
NARROWEST_BLOCK = 32
WIDEST_GROUP = 2048
"""Inputs that may share a dynamic scale, where they are not a whole token."""


@triton.jit(do_not_specialize=["rows", "blocks", "splits"])
def eight_bit_kernel(
    x, x_scales, weight, scales, bias, out, partial, arrived, tiles, order,
    rows, n, stride_x, stride_out, padded_n, blocks, splits, x_groups,
    GROUP: tl.constexpr, X_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EACH: tl.constexpr, TOP_K: tl.constexpr, SORTED_X: tl.constexpr,
):  # fmt: skip
    """out [rows, n] = (x [rows, k] times weight [padded_n, k] transposed), both of int8 or both of e4m3, scaled.

    ``x_scales`` float32 [rows, x_groups]; ``scales`` float32 [groups, padded_n]; a group size of 0 is all inputs.
    EACH > 0: as in ``weight_only_kernel``.
    """
    INTEGER: tl.constexpr = x.dtype.element_ty == tl.int8
    SUMS: tl.constexpr = tl.int32 if INTEGER else tl.float32
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
    ks = tl.arange(0, BLOCK_K)
    first = split * blocks // splits
    last = (split + 1) * blocks // splits
    seen = ms < rows
    xs = x + x_rows[:, None].to(tl.int64) * stride_x + ks[None, :]
    weights = weight + w_ns[None, :].to(tl.int64) * stride_x + ks[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUMS)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        block_x = tl.load(xs + block * BLOCK_K, mask=seen[:, None], other=0.0)
        block_w = tl.load(weights + block * BLOCK_K)
        if GROUP == 0 and X_GROUP == 0:
            if INTEGER:
                acc = tl.dot(block_x, block_w, acc, out_dtype=tl.int32)
            else:
                acc = tl.dot(block_x, block_w, acc, max_num_imprecise_acc=BLOCK_K)
        else:
            if INTEGER:
                part = tl.dot(block_x, block_w, out_dtype=tl.int32).to(tl.float32)
            else:
                part = tl.dot(block_x, block_w, max_num_imprecise_acc=BLOCK_K)
            if GROUP != 0:
                part *= tl.load(scales + (block * BLOCK_K // GROUP) * padded_n + w_ns)[None, :]
            if X_GROUP != 0:
                at = x_scales + x_rows * x_groups + block * BLOCK_K // X_GROUP
                part *= tl.load(at, mask=seen, other=0.0)[:, None]
            total += part
    if GROUP == 0 and X_GROUP == 0:
        total = acc.to(tl.float32)
    if GROUP == 0:
        total *= tl.load(scales + w_ns)[None, :]
    if X_GROUP == 0:
        total *= tl.load(x_scales + x_rows, mask=seen, other=0.0)[:, None]
    finish(total, out, bias, partial, arrived, tile, split, ms, ns, rows, n, stride_out, padded_n,
           splits, HAS_BIAS, ACCUMULATE, SPLIT)  # fmt: skip


def supports(weight: QuantizedWeight, gpu: Target) -> str | None:
    """None, or why these kernels do not multiply by ``weight``, whose inputs are rounded to 8 bits."""
    scheme, activations = weight.scheme, weight.activations
    assert activations is not None
    if activations.grid is E4M3:
        if "fp8" not in gpu.features:
            return f"FP8 products need {NEEDED['fp8']}, not {gpu.architecture}"
        if scheme.grid is not E4M3 and scheme.max_code > 15:
            return f"{scheme} weights with FP8 inputs: e4m3 holds integers of at most 4 bits"
    else:
        if scheme.grid is E4M3:
            return "FP8 weights with int8 inputs"
        if scheme.bits == 8 and not scheme.symmetric:
            return "asymmetric 8 bit weights with int8 inputs"
    if block_k(scheme, activations, weight.in_features) < NARROWEST_BLOCK:
        return f"{scheme} weights with {activations} inputs: groups must be multiples of {NARROWEST_BLOCK}"
    size = activations.group_size
    if size > 0 and (size & (size - 1) or size > WIDEST_GROUP):
        return f"{activations} inputs: groups must be a power of two up to {WIDEST_GROUP}"
    if size > 0 and weight.g_idx is not None:
        return f"{activations} inputs of a weight with reordered groups"
    return None


def block_k(scheme: WeightScheme, activations: ActivationScheme, inp: int) -> int:
    """Inputs to a step: a power of two that divides the groups of both sides."""
    groups = gcd(max(scheme.group_size, 0), max(activations.group_size, 0))
    if scheme.groups(inp) == 1:
        groups = max(activations.group_size, 0)
    return gcd(groups, WIDEST_BLOCK)


def held_bytes(scheme: WeightScheme, activations: ActivationScheme, out: int, inp: int) -> int:
    """Bytes of a weight [out, in] as ``EightBit`` holds it, without an order of inputs."""
    step = block_k(scheme, activations, inp)
    return -(-out // PAD_N) * PAD_N * (-(-inp // step) * step + 4 * scheme.groups(inp))


def default(rows: int, grouped: bool, gpu: Target) -> Config:
    """A safe default: no spills, and fits the shared memory of the smallest GPU. ``grouped``: with scales by groups."""
    if rows <= 16:
        return Config(16, 128, warps=4, stages=4)
    if rows <= 32:
        return Config(32, 128, warps=4, stages=4)
    if rows <= SPLIT_ROWS and grouped and "tcgen05" in gpu.features:
        return Config(64, 64, warps=4, stages=3)  # sums of groups are separate and pass through registers
    if rows <= 128:
        return Config(64, 128, warps=8, stages=3)
    return Config(128, 128, warps=8, stages=3, splits=1 if rows > SPLIT_ROWS else 0)


class EightBit:
    """A product of 8-bit weights and inputs, made ready. Weights of fewer bits are held in 8. ``experts``: as in
    ``WeightOnly``."""

    def __init__(self, op: ops.Linear, memory: Workspace, batch_invariant: bool, experts: int = 0) -> None:
        weight = op.weight
        assert isinstance(weight, QuantizedWeight) and weight.activations is not None
        device = memory.device
        self.op, self.memory, self.activations, self.invariant = op, memory, weight.activations, batch_invariant
        self.dtype = torch.float8_e4m3fn if self.activations.grid is E4M3 else torch.int8
        self.n, self.block_k = op.out.shape[1], block_k(weight.scheme, self.activations, weight.in_features)
        groups = weight.scheme.groups(weight.in_features)
        self.group = 0 if groups == 1 else weight.scheme.group_size
        self.x_group = max(self.activations.group_size, 0)
        order = slots(weight, self.group)
        self.order = None if order is None else order.to(device, torch.int32)
        values = _values(weight, self.dtype, order, device)
        width = -(-values.shape[1] // self.block_k) * self.block_k
        self.padded_n = -(-weight.out_features // PAD_N) * PAD_N
        self.k, self.blocks = width, width // self.block_k
        padding = (0, width - values.shape[1], 0, self.padded_n - weight.out_features)
        self.weight = F.pad(values.view(torch.int8), padding).contiguous().view(self.dtype)
        self.scales = by_group(weight.scales, self.padded_n, 1 if groups == 1 else groups).to(device)
        self.bias = None if op.bias is None else op.bias.to(device)
        gpu = target(device)
        self.gpu = gpu
        self.persistent = persistent.supports(weight, self.block_k, gpu) is None
        self.persistent &= "persistent" not in left_out(gpu)
        self.scaled_mm = scaled_mm.supports(op, self.dtype, self.group + self.x_group, gpu) is None
        self.scaled_mm &= "scaled_mm" not in left_out(gpu)
        self.x_groups = -(-width // self.x_group) if self.x_group else 1
        rows = len(op.x)
        codes = memory.take("codes", rows * width, self.dtype)[: rows * width].view(rows, width)
        scales = memory.take("x scales", rows * self.x_groups, torch.float32)[: rows * self.x_groups]
        self.rounded = Rounded(codes, scales.view(rows, self.x_groups), weight.input_scale)
        self._rounds = True
        self.gathered = memory.take("gathered", 0 if order is None else len(op.x) * len(order), op.x.dtype)
        if experts:
            self.each = self.padded_n // experts
            return
        self.configs = {bucket: self.config_for(min(bucket, len(op.x)), gpu, batch_invariant) for bucket in BUCKETS}
        self.configure({})

    def configure(self, configs: dict[int, Config]) -> None:
        """Use ``configs`` for these buckets of rows in place of the earlier choice."""
        self.configs |= configs
        self.partial, self.arrived = self.memory.splits(self.configs, len(self.op.x), self.padded_n)
        # Taken now, so that it counts as memory in use.
        self.sums: Tensor | None = None
        if self.op.accumulate and any(config.kernel == "scaled_mm" for config in self.configs.values()):
            rows = len(self.op.x)
            self.sums = self.memory.take("partial", rows * self.n, torch.float32)[: rows * self.n].view(rows, self.n)

    def config_for(self, rows: int, gpu: Target, batch_invariant: bool) -> Config:
        """If ``batch_invariant``: the same instruction, order and parts of K for every number of rows."""
        grouped = self.group + self.x_group > 0

        def usual(rows: int) -> Config:
            if self.scaled_mm and scaled_mm.is_default(self.op, rows, gpu) and not batch_invariant:
                return scaled_mm.CONFIG
            if self.persistent and rows >= persistent.FEWEST_ROWS and not batch_invariant:
                return persistent.default(rows, self.padded_n, grouped)
            return default(rows, grouped, gpu)

        if batch_invariant:
            outputs = self.padded_n if self.op.whole is None else round_up(self.op.whole, PAD_N)
            least = resolve(usual(1), 1, outputs, self.blocks, gpu.sms)
            return replace(least, block_m=16 if rows <= 16 else 32)
        self.key = f"eight_bit {self.activations.dtype} group={self.group},{self.x_group} n={self.n} k={self.k}"
        found = choose(self.key, rows, gpu, usual, self.fits)
        return resolve(found, rows, self.padded_n, self.blocks, gpu.sms)

    def for_many(self) -> list[Config]:
        """Other configurations that may compute many rows here."""
        found = persistent.configs(self.padded_n, self.group + self.x_group > 0) if self.persistent else []
        return [*found, scaled_mm.CONFIG] if self.scaled_mm else found

    def fits(self, config: Config) -> bool:
        """Whether this product can use ``config``."""
        return self.padded_n % config.block_n == 0 and (config.kernel == "tiles" or config in self.for_many())

    def take_rounded(self) -> Rounded | None:
        """Where the kernel that makes the input is to leave it rounded, from now on. None where it cannot round: inputs
        are rounded by groups or in another order, or a row is too wide."""
        if self.x_group or self.order is not None or self.k > WIDEST_ROW:
            return None
        self._rounds = False
        return self.rounded

    def round(self, rows: int) -> None:
        x = self.op.x
        if self.order is not None:
            x = self.gathered[: rows * len(self.order)].view(rows, -1)
            gather_columns(self.op.x, self.order, x, rows)
        if self.x_group:
            round_groups(x, self.rounded.codes, self.rounded.scales, rows, self.x_group)
        else:
            round_rows(x, self.rounded, rows)

    def config_grouped(self, rows: int) -> Config:
        """For about ``rows`` rows of an expert."""
        most = 32 if self.invariant else 64
        return replace(default(min(rows, most), self.group + self.x_group > 0, self.gpu), splits=1)

    def run_grouped(self, rows: int, grouping: Grouping, config: Config) -> None:
        """The ``rows`` of x for the experts that ``grouping`` names."""
        if self._rounds:
            self.round(rows)
        self._launch(self.rounded.codes, self.rounded.scales, self.op.out, grouping.choices, config, grouping)

    def run(self, rows: int) -> None:
        config, codes, scales = self.configs[bucket_of(rows)], self.rounded.codes, self.rounded.scales
        if self._rounds:
            self.round(rows)
        if config.kernel == "persistent":
            persistent.multiply(
                codes[:rows], scales[:rows], self.weight, self.scales, self.bias, self.op.out[:rows], config,
                n=self.n, group=self.group, x_group=self.x_group, accumulate=self.op.accumulate, gpu=self.gpu,
            )  # fmt: skip
            return
        if config.kernel == "scaled_mm":
            scaled_mm.multiply(
                codes[:rows], scales[:rows], self.weight[: self.n], self.scales[:, : self.n], self.bias,
                self.op.out[:rows], None if self.sums is None else self.sums[:rows],
            )  # fmt: skip
            return
        step = SPLIT_ROWS if config.splits > 1 else rows
        for start in range(0, rows, step):
            self._launch(codes[start:], scales[start:], self.op.out[start:], min(step, rows - start), config)

    def _launch(
        self, codes: Tensor, x_scales: Tensor, out: Tensor, rows: int, config: Config, grouping: Grouping | None = None
    ) -> None:
        memory: tuple[Tensor | None, ...]
        if grouping is None:
            tiles = -(-rows // config.block_m) * (self.padded_n // config.block_n)
            memory, kind = (self.partial, self.arrived, None, None), NOT_GROUPED
        else:
            tiles = grouping.most * -(-self.n // config.block_n)
            memory, kind = (None, None, grouping.tiles, grouping.order), grouping.constants(self.each)
        at(eight_bit_kernel, (tiles, config.splits))(
            codes, x_scales, self.weight, self.scales, out if self.bias is None else self.bias, out, *memory,
            rows, self.n, self.k, out.stride(0), self.padded_n, self.blocks, config.splits, self.x_groups,
            GROUP=self.group, X_GROUP=self.x_group, HAS_BIAS=self.bias is not None, ACCUMULATE=self.op.accumulate,
            SPLIT=config.splits > 1, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=self.block_k,
            STAGES=config.stages, **kind, num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip


def _values(weight: QuantizedWeight, dtype: torch.dtype, order: Tensor | None, device: torch.device) -> Tensor:
    """The weight [out, k] without its scales, exactly, in ``dtype``; inputs in ``order``, and 0 where order is -1."""
    codes = weight.codes.to(device)
    if weight.scheme.grid in (INTEGERS, TRELLIS):
        zeros: Tensor | int = weight.scheme.zero
        if weight.zeros is not None:
            zeros = weight.zeros.to(device, torch.int16)[:, weight.group_of_input().to(device)]
        codes = (codes.to(torch.int16) - zeros).to(dtype).view(torch.uint8)
    if order is not None:
        order = order.to(device)
        codes = torch.where(order < 0, 0, codes[:, order.clamp_min(0)])
    return codes
