"""The CPU kernels in C: finds the library, describes operations to it, runs programs. See ``csrc/qserve.h``."""

from __future__ import annotations

import ctypes as C
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from qserve.checkpoint.errors import CapacityError
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import abi
from qserve.kernels.fusion import FusedLinear, fuse
from qserve.kernels.ops import (
    HOST,
    SCALED_KV,
    Argmax,
    Attention,
    Embed,
    Gather,
    Linear,
    LogSoftmax,
    Op,
    RMSNorm,
    RopeKV,
    SiluMul,
    Step,
)
from qserve.kernels.pages import Arena
from qserve.kernels.prepack import float8_tiles, float_tiles, int_tiles, is_expanded, tile_bytes
from qserve.kernels.threads import cpu_ranges, default_threads, require_cpus, share

Isa = Literal["scalar", "avx2", "avx512", "neon", "avxvnni"]
ISAS: tuple[Isa, ...] = ("scalar", "avx2", "avx512", "neon", "avxvnni")

_MAX_INT_GROUP = 65536  # inputs that an int32 sum holds


def library_path() -> Path | None:
    """Where the compiled library lies beside this file, or None where the install had no compiler."""
    path = Path(__file__).with_name(f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
    return path if path.exists() else None


@cache
def library() -> C.CDLL:
    """The C kernels, with the types of their functions. Raises ``OSError`` where there are none."""
    path = library_path()
    if path is None:
        raise OSError("the C kernels were not built")
    loaded = C.CDLL(str(path))
    loaded.qs_pool_create.restype = C.c_void_p
    loaded.qs_pool_create.argtypes = [C.c_int32, C.c_void_p]
    loaded.qs_pool_destroy.restype = None
    loaded.qs_pool_destroy.argtypes = [C.c_void_p]
    loaded.qs_scratch_bytes.restype = C.c_int64
    loaded.qs_scratch_bytes.argtypes = [C.c_void_p, C.c_int32, C.c_int32, C.c_int32]
    loaded.qs_run.argtypes = [C.c_void_p, C.c_int32, C.c_void_p, C.c_void_p, C.c_void_p, C.c_int32]
    loaded.qs_peak_products.restype = C.c_int64
    loaded.qs_peak_products.argtypes = [C.c_int64, C.c_int32]
    loaded.qs_peak_read.restype = C.c_int64
    loaded.qs_peak_read.argtypes = [C.c_void_p, C.c_int64]
    rounding = (loaded.qs_search_scales, loaded.qs_sweep_chunks)
    products = (loaded.qs_pack_panels, loaded.qs_add_moment, loaded.qs_attend_causal, loaded.qs_multiply)
    for shared in (*rounding, *products):
        shared.argtypes = [C.c_void_p, C.c_int64, C.c_int64, C.c_int32]
    if loaded.qs_op_size() != C.sizeof(abi.Op):
        raise OSError(f"{path.name} was built from other sources: reinstall qserve")
    return loaded


def missing() -> str | None:
    """None where the library loads, else the reason and the remedy."""
    if library_path() is None:
        return "the C kernels were not built (no compiler at install time): install gcc and reinstall qserve"
    try:
        library()
    except OSError as error:
        return f"the C kernels do not load: {error}"
    return None


def best_isa() -> Isa:
    return ISAS[int(library().qs_best_isa())]


def available() -> tuple[Isa, ...]:
    """The ISAs that this machine has; none where there is no library."""
    return () if missing() else tuple(isa for i, isa in enumerate(ISAS) if library().qs_has_isa(i))


def address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError("the C kernels need contiguous tensors")
    return tensor.data_ptr()


def run_pieces(
    kernel: C._NamedFuncPointer, op: C.Structure, pieces: int, threads: int | None = None, isa: Isa | None = None
) -> None:
    """Compute ``op`` by a kernel that does any of its ``pieces``, shared among ``threads``."""
    level = ISAS.index(isa or best_isa())

    def part(first: int, count: int) -> int:
        status: int = kernel(C.byref(op), first, count, level)
        return status

    results = share(part, pieces, threads)
    if -2 in results:
        raise MemoryError("no memory for what the C kernels compute in")
    if any(results):
        raise RuntimeError(f"this machine cannot run the {ISAS[level]} kernels")


class _Pool:
    """Threads that sleep when there is nothing to do, and end with the executor."""

    def __init__(self, threads: int, cpus: Sequence[int] | None) -> None:
        self._library = library()
        self.threads = threads
        self.arena = Arena()
        self._step: Step | None = None  # the last one described
        self.handle = self._library.qs_pool_create(threads, None if cpus is None else (C.c_int32 * threads)(*cpus))
        if not self.handle:
            where, option = ("", "threads") if cpus is None else (f" on the CPUs {cpu_ranges(cpus)}", "cpu-list")
            raise CapacityError(f"cannot start {threads} threads{where}: use a smaller --{option}")

    def describe(self, step: Step) -> C.Structure:
        """Mostly two programs run for a step, one after the other."""
        if step is not self._step:
            self._step, self._described = step, abi.Step(
                token_ids=step.token_ids.data_ptr(),
                positions=step.positions.data_ptr(),
                slots=step.slots.data_ptr(),
                logit_rows=step.logit_rows.data_ptr(),
                seq_start=step.seq_start.data_ptr(),
                block_tables=step.block_tables.data_ptr(),
                tokens=len(step.token_ids),
                logits=len(step.logit_rows),
                sequences=len(step.seq_start) - 1,
                table_stride=step.block_tables.shape[1],
            )
        return self._described

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.qs_pool_destroy(self.handle)


class _NativeProgram:
    """Operations as C structures. Keeps alive every tensor whose address it gave away."""

    def __init__(self, pool: _Pool, max_rows: int, isa: Isa) -> None:
        self._library = library()
        self._pool = pool
        self._max_rows = max_rows
        self._isa = ISAS.index(isa)
        self._keep: list[Tensor] = []
        self._described: list[abi.Op] = []

    def add(self, ops: Sequence[Op]) -> None:
        self._described += [self._describe(op) for op in fuse(ops)]
        self._count = len(self._described)
        self._ops = (abi.Op * self._count)(*self._described)
        needed = self._library.qs_scratch_bytes(self._ops, self._count, self._max_rows, self._pool.threads)
        self._scratch = torch.empty(needed + 64, dtype=torch.uint8)
        self._aligned = -(-self._scratch.data_ptr() // 64) * 64

    def run(self, step: Step) -> None:
        described = self._pool.describe(step)
        status = self._library.qs_run(
            self._ops, self._count, C.byref(described), self._pool.handle, self._aligned, self._isa
        )
        if status == -2:
            raise MemoryError("no memory for a step of the C kernels")
        if status:
            raise RuntimeError(f"this machine cannot run the {ISAS[self._isa]} kernels")

    def _hold(self, tensor: Tensor | None) -> int | None:
        if tensor is not None:
            self._keep.append(tensor)
        return address(tensor)

    def _keep_weight(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._hold(self._pool.arena.keep(tensor))

    def _hold_rows(self, tensor: Tensor) -> int:
        """The address of a matrix whose rows are contiguous, but may lie apart."""
        if tensor.stride(1) != 1:
            raise ValueError("the C kernels need contiguous rows")
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _describe(self, op: Op | FusedLinear) -> abi.Op:
        hold = self._hold
        match op:
            case FusedLinear():
                return abi.operation(self._linear(op), of_logits=op.linear.rows == "logits")
            case Embed():
                body: C.Structure = self._embed(op)
            case RMSNorm():
                weight = hold(op.weight.float().contiguous())
                body = abi.RMSNorm(hold(op.x), weight, hold(op.out), op.x.shape[1], op.eps)
            case RopeKV():
                norms = [None if w is None else hold(w.float().contiguous()) for w in (op.q_norm, op.k_norm)]
                body = abi.RopeKV(
                    hold(op.qkv), hold(op.cosine), hold(op.sine), *norms, hold(op.k_scale), hold(op.v_scale),
                    hold(op.k_center), hold(op.k_cache), hold(op.v_cache), op.heads, op.kv_heads, op.head_dim,
                    2 * op.cosine.shape[1], abi.KV_DTYPES[op.k_cache.dtype], op.eps,
                )  # fmt: skip
            case Attention():
                body = abi.Attention(
                    hold(op.qkv), hold(op.k_scale), hold(op.v_scale), hold(op.out), hold(op.k_cache), hold(op.v_cache),
                    op.heads, op.kv_heads, op.head_dim, abi.KV_DTYPES[op.k_cache.dtype], op.window, op.scale,
                )  # fmt: skip
            case SiluMul():
                body = abi.SiluMul(hold(op.gate_up), hold(op.out), op.out.shape[1])
            case Gather():
                body = abi.Gather(hold(op.x), hold(op.out), op.x.shape[1])
            case Argmax():
                body = abi.Argmax(hold(op.x), hold(op.out), op.x.shape[1])
            case LogSoftmax():
                body = abi.LogSoftmax(hold(op.x), op.x.shape[1])
            case Linear():
                raise AssertionError("every product is a fused one")
        return abi.operation(body, of_logits=getattr(op, "rows", "tokens") == "logits")

    def _linear(self, fused: FusedLinear) -> C.Structure:
        hold, keep, op, norm = self._hold, self._keep_weight, fused.linear, fused.norm
        x, out = norm.x if norm else op.x, fused.silu.out if fused.silu else op.out
        common: dict[str, Any] = {
            "x": hold(x),
            "out": self._hold_rows(out),
            "bias": None if op.bias is None else hold(op.bias.float().contiguous()),
            "n": op.out.shape[1],
            "x_width": x.shape[1],
            "out_stride": out.stride(0),
            "accumulate": int(op.accumulate),
            "silu": int(fused.silu is not None),
            "norm": None if norm is None else hold(norm.weight.float().contiguous()),
            "eps": norm.eps if norm else 0.0,
        }
        packed = isinstance(op.weight, QuantizedWeight)
        shape = (op.weight.out_features, op.weight.in_features) if packed else tuple(op.weight.shape)  # type: ignore[union-attr]
        if shape != (op.out.shape[1], op.x.shape[1]):  # the C side trusts these numbers
            raise ValueError(f"a weight of {shape} does not map {op.x.shape[1]} inputs to {op.out.shape[1]} outputs")
        if not isinstance(op.weight, QuantizedWeight):
            weight = float_tiles(op.weight)
            return abi.Linear(weight=keep(weight), k=op.weight.shape[1], dtype=abi.DTYPES[weight.dtype], **common)
        scheme, activations = op.weight.scheme, op.weight.activations
        common["input_scale"] = op.weight.input_scale or 0.0
        if scheme.dtype == "int" and not is_expanded(scheme, activations):
            tiles = int_tiles(op.weight)
            return abi.Linear(
                # In this order: what is fetched ahead at the end of the weights before are these scales.
                scales=keep(tiles.scales),
                zeros=keep(tiles.zeros),
                weight=keep(tiles.weight),
                permutation=keep(tiles.permutation),
                scale_dtype=abi.DTYPES[tiles.scales.dtype],
                k=tiles.k,
                dtype=abi.U4 if tiles.bits == 4 else abi.U8,
                group=tiles.group,
                act_dtype=abi.I8,
                act_span=tiles.act_span,
                act_group=tiles.act_group,
                zero=tiles.zero,
                **common,
            )
        inp = op.weight.in_features
        if activations is not None:
            common["act_dtype"] = abi.F8 if activations.dtype == "fp8" else abi.I8
            common["act_span"] = activations.group_size if activations.granularity == "group" else inp
        if scheme.dtype == "int":
            return abi.Linear(weight=keep(float_tiles(op.weight.dequantize())), k=inp, dtype=0, **common)
        codes, scales = float8_tiles(op.weight)
        group = scheme.group_width(inp)
        return abi.Linear(weight=keep(codes), scales=keep(scales), k=inp, dtype=abi.F8, group=group, **common)

    def _embed(self, op: Embed) -> C.Structure:
        table, width = op.table, op.out.shape[1]
        if isinstance(table, Tensor):
            dtype = abi.DTYPES[table.dtype]
            return abi.Embed(table=self._hold(table), out=self._hold(op.out), width=width, dtype=dtype)
        return abi.Embed(
            table=self._hold(table.codes),
            scales=self._hold(table.scales),
            zeros=self._hold(table.zeros),
            out=self._hold(op.out),
            width=width,
            dtype=abi.F8 if table.scheme.dtype == "fp8" else abi.U8,
            group=table.scheme.group_width(width),
            zero=table.scheme.zero,
        )


def _unsupported(weight: QuantizedWeight) -> str | None:
    """Why no kernel multiplies ``weight``, or None."""
    scheme, activations = weight.scheme, weight.activations
    if weight.g_idx is not None and scheme.dtype == "fp8":
        return "fp8 weights with groups out of order have no C kernel"
    if is_expanded(scheme, activations) or scheme.dtype == "fp8" or activations is None:
        return None
    if activations.granularity == "group":
        if weight.g_idx is not None:
            return "weights with groups out of order have no C kernel where the input is rounded in groups"
        if activations.group_size % 8:
            return f"inputs rounded in groups of {activations.group_size} have no C kernel: it takes multiples of 8"
    elif scheme.group_width(weight.in_features) > _MAX_INT_GROUP:
        return f"a sum of {weight.in_features} products overflows int32: at most {_MAX_INT_GROUP} inputs share a scale"
    return None


class NativeExecutor:
    """The C kernels on ``threads`` threads. A row's result does not depend on the rest of the batch.

    ``cpus``: one thread is pinned to each; the first is that of the thread that runs a program, while it does.
    Raises ``CapacityError`` where threads cannot be had, or not there.
    """

    name = "native"
    batch_invariant = True
    asynchronous = False
    warm_sizes: Sequence[int] = ()
    placement = HOST

    def __init__(
        self, threads: int | None = None, isa: Isa | None = None, cpus: Sequence[int] | None = None
    ) -> None:
        if cpus is not None:
            require_cpus(cpus)
        self.threads = len(cpus) if cpus is not None else threads or default_threads()
        self.cpus = cpus
        self.isa: Isa = isa or best_isa()
        self._pool = _Pool(self.threads, cpus)

    def supports(self, op: Op) -> str | None:
        if isinstance(op, Attention) and (op.head_dim % 16 or op.head_dim > 256):
            return f"head_dim {op.head_dim} is not a multiple of 16 up to 256"
        if isinstance(op, Embed):
            if isinstance(op.table, QuantizedWeight):
                return "embeddings with groups out of order have no C kernel" if op.table.g_idx is not None else None
            return None if op.table.dtype in abi.DTYPES else f"embeddings in {op.table.dtype} have no C kernel"
        if isinstance(op, Linear):
            if isinstance(op.weight, QuantizedWeight):
                return _unsupported(op.weight)
            return None if op.weight.dtype in abi.DTYPES else f"weights in {op.weight.dtype} have no C kernel"
        if isinstance(op, RopeKV | Attention):
            if op.k_cache.dtype not in abi.KV_DTYPES:
                return f"a KV cache in {op.k_cache.dtype} has no C kernel"
            if op.k_cache.dtype in SCALED_KV and (op.k_scale is None or op.v_scale is None):
                return f"a KV cache in {op.k_cache.dtype} needs scales"
        return None

    def packed_bytes(self, scheme: WeightScheme, activations: ActivationScheme | None, out: int, inp: int) -> int:
        return tile_bytes(scheme, activations, out, inp)

    def program(self, max_rows: int) -> _NativeProgram:
        return _NativeProgram(self._pool, max_rows, self.isa)
