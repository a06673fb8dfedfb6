"""The CPU kernels in C: finds the library, describes operations to it, runs programs. See ``csrc/qserve.h``."""

from __future__ import annotations

import ctypes as C
import platform
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from qserve.checkpoint.errors import CapacityError
from qserve.checkpoint.grid import AFFINE, BNB_FP4, E2M1, E4M3, INTEGERS, NF4, TRELLIS
from qserve.checkpoint.packed_codes import Packed, PackedCodes
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import abi
from qserve.kernels.arena import Arena
from qserve.kernels.code_tiles import LANES
from qserve.kernels.executor import HOST, Step
from qserve.kernels.fusion import FusedLinear, fuse
from qserve.kernels.kv_cache import PACKED_HEADS
from qserve.kernels.ops import (
    PACKED_KV,
    SCALED_KV,
    Attention,
    Cast,
    CausalConv,
    Embed,
    Experts,
    GatedDelta,
    HeadLinear,
    HeadNorm,
    LatentAttention,
    LatentKV,
    LayerNorm,
    Linear,
    Lora,
    Op,
    PositionEmbed,
    RMSNorm,
    RopeKV,
    Route,
)
from qserve.kernels.prepack import is_expanded, tile_bytes
from qserve.kernels.ranks import RankLost, Ranks
from qserve.kernels.reference import Fallback
from qserve.kernels.threads import cpu_ranges, default_threads, require_cpus, share
from qserve.kernels.tiled import (
    TiledEmbed,
    TiledExperts,
    TiledHeadLinear,
    TiledLinear,
    TiledLora,
    as_floats,
    tile_embed,
    tile_experts,
    tile_head_linear,
    tile_linear,
    tile_lora,
)

Isa = Literal["scalar", "avx2", "avx512", "neon", "avxvnni", "amx"]
ISAS: tuple[Isa, ...] = ("scalar", "avx2", "avx512", "neon", "avxvnni", "amx")

_GRIDS = (INTEGERS, E4M3, E2M1, NF4, BNB_FP4, AFFINE, TRELLIS)
_MAX_INT_GROUP = 65536  # inputs that an int32 sum holds
_MAX_WIDE_GROUP = 248  # the same with numbers of two bytes
_TILED = (TiledEmbed, TiledLinear, TiledExperts, TiledLora, TiledHeadLinear)
_WIDEST_LATENT = 640  # with its rotated key
_MAX_CONV, _MAX_KEY_DIM = 8, 256  # of the delta rule
_DECLARED = {abi.name_of(op): op for op in (*get_args(Op), *_TILED)}  # the tiled ones come last


def library_path() -> Path | None:
    """The path of the compiled library beside this file, or None where the install had no compiler."""
    path = Path(__file__).with_name(f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
    return path if path.exists() else None


@cache
def library() -> C.CDLL:
    """The C kernels, with the types of their functions. Raises ``OSError`` where there are none."""
    path = library_path()
    if path is None:
        raise OSError("the C kernels were not built")
    loaded = C.CDLL(str(path))
    try:
        _declare(loaded)
        fits = agrees(loaded)
    except AttributeError:  # it lacks a function
        fits = False
    if not fits:
        raise OSError(f"{path.name} was built from other sources: reinstall qserve")
    return loaded


def _declare(loaded: C.CDLL) -> None:
    loaded.qs_pool_create.restype = C.c_void_p
    loaded.qs_pool_create.argtypes = [C.c_int32, C.c_void_p]
    loaded.qs_pool_destroy.restype = None
    loaded.qs_pool_destroy.argtypes = [C.c_void_p]
    loaded.qs_scratch_bytes.restype = C.c_int64
    loaded.qs_scratch_bytes.argtypes = [C.c_void_p, C.c_int32, C.c_int32, C.c_int32]
    loaded.qs_run.argtypes = [C.c_void_p, C.c_int32, C.c_void_p, C.c_void_p, C.c_void_p, C.c_int32]
    loaded.qs_meet.argtypes = loaded.qs_arrive.argtypes = [C.c_void_p]
    loaded.qs_await.argtypes = [C.c_void_p, C.c_int32, C.c_int32]
    loaded.qs_peak_products.restype = C.c_int64
    loaded.qs_peak_products.argtypes = [C.c_int64, C.c_int32]
    loaded.qs_peak_read.restype = C.c_int64
    loaded.qs_peak_read.argtypes = [C.c_void_p, C.c_int64]
    rounding = (loaded.qs_search_scales, loaded.qs_choose_scales, loaded.qs_sweep_chunks, loaded.qs_trellis_panels,
                loaded.qs_draw_rows)  # fmt: skip
    products = (loaded.qs_pack_panels, loaded.qs_add_moment, loaded.qs_attend_causal, loaded.qs_multiply)
    at_load = (loaded.qs_tile_codes, loaded.qs_round_rows)
    for shared in (*rounding, *products, *at_load):
        shared.argtypes = [C.c_void_p, C.c_int64, C.c_int64, C.c_int32]


def agrees(loaded: C.CDLL) -> bool:
    """Whether a library declares operations and steps as this package does. One that was built before either changed
    would compute something else, without an error."""
    loaded.qs_op_name.restype = C.c_char_p
    named = _named(loaded)
    if not named.keys() <= _DECLARED.keys() or not hasattr(loaded, "qs_step_size"):
        return False
    sizes = loaded.qs_op_size(), loaded.qs_step_size()
    return sizes == (C.sizeof(abi.operation(named, _DECLARED)), C.sizeof(abi.structure(Step)))


def _named(loaded: C.CDLL) -> dict[str, int]:
    found: dict[str, int] = {}
    while name := loaded.qs_op_name(len(found)):
        found[name.decode()] = len(found)
    return found


@cache
def kinds() -> dict[str, int]:
    """The operations that have a C kernel, by name, with their numbers. ``OSError`` where there is no library."""
    return _named(library())


@cache
def _operation() -> type[C.Structure]:
    return abi.operation(kinds(), _DECLARED)


def missing() -> str | None:
    """None where the library loads, else the reason and the remedy."""
    if library_path() is None:
        return "the C kernels were not built (no compiler at install time): install gcc and reinstall qserve"
    try:
        library()
    except OSError as error:
        return f"the C kernels do not load: {error}"
    return None


def serves(tensor: Tensor) -> bool:
    """Whether these kernels compute on ``tensor``: it is in the memory of the CPU, and they were built."""
    return tensor.device.type == "cpu" and missing() is None


def best_isa() -> Isa:
    return ISAS[int(library().qs_best_isa())]


def available() -> tuple[Isa, ...]:
    """The ISAs that this machine has; empty where there is no library."""
    return () if missing() else tuple(isa for i, isa in enumerate(ISAS) if library().qs_has_isa(i))


def not_run() -> tuple[Isa, ...]:
    """The ISAs that the library has kernels for but this machine cannot run; empty where there is no library."""
    on_arm = platform.machine() in ("aarch64", "arm64")
    compiled = ("scalar", "neon") if on_arm else tuple(isa for isa in ISAS if isa != "neon")
    return () if missing() else tuple(isa for isa in ISAS if isa in compiled and isa not in available())


def address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError("the C kernels need contiguous tensors")
    return tensor.data_ptr()


def run_pieces(
    kernel: C._NamedFuncPointer, op: C.Structure, pieces: int, threads: int | None = None, isa: Isa | None = None
) -> None:
    """Compute ``op`` by a kernel that takes a range of its ``pieces``; ``threads`` share them."""
    level = ISAS.index(isa or best_isa())

    def part(first: int, count: int) -> int:
        status: int = kernel(C.byref(op), first, count, level)
        return status

    results = share(part, pieces, threads)
    if -2 in results:
        raise MemoryError("no memory for what the C kernels compute in")
    if any(results):
        raise RuntimeError(f"this machine cannot run the {ISAS[level]} kernels")


def tile_codes(stored: Tensor | Packed, order: Tensor | None, out: Tensor, *, threads: int | None = None) -> None:
    """``tile_codes_reference`` in C, from wherever the codes lie."""
    bits = stored.bits if isinstance(stored, PackedCodes) else 8
    if not isinstance(stored, PackedCodes):  # bytes are words of four codes, where rows begin words
        codes = stored if isinstance(stored, Tensor) else stored.unpack()
        stored = F.pad(codes, (0, -codes.shape[1] % 4)).contiguous()
        stored = PackedCodes((stored.view(torch.int32),), 8, stored.shape[1])
    outputs, inputs = stored.shape
    k = inputs if order is None else len(order)
    addresses, strides, nibbles = stored.table()
    places = None if order is None else order.to(torch.int32)
    op = abi.Tiling(
        words=address(addresses), strides=address(strides), nibbles=address(nibbles), order=address(places),
        tiles=address(out), outputs=outputs, inputs=inputs, k=k, bits=bits,
        dtype=abi.U4 if out.shape[1] * 8 == k else abi.U8,
    )  # fmt: skip
    run_pieces(library().qs_tile_codes, op, len(out), threads)


def meeting(ranks: Ranks) -> Callable[[], None]:
    """What returns when all ``ranks`` have called it, and raises ``RankLost`` where one has ended."""
    described, qs_meet = abi.describe(ranks, Tensor.data_ptr), library().qs_meet

    def meet(kept: Tensor = ranks.counters) -> None:
        if qs_meet(C.byref(described)):
            raise RankLost

    return meet


def handing_on(ranks: Ranks) -> tuple[Callable[[], None], Callable[[int], None]]:
    """``Ranks.arrive``, and ``Ranks.wait_for`` the rank before this one; the first follows the last."""
    described, loaded = abi.describe(ranks, Tensor.data_ptr), library()
    before = (ranks.rank - 1) % ranks.size

    def arrive(kept: Tensor = ranks.counters) -> None:
        loaded.qs_arrive(C.byref(described))

    def wait(turn: int) -> None:
        if loaded.qs_await(C.byref(described), before, turn):
            raise RankLost

    return arrive, wait


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
        """``step`` as its C structure. It is kept, because usually two programs run one after the other for a step."""
        if step is not self._step:
            self._step, self._described = step, abi.describe(step, Tensor.data_ptr)
        return self._described

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.qs_pool_destroy(self.handle)


class _NativeProgram:
    """Operations as C structures, with fallbacks between them where there is no kernel. Keeps every tensor alive whose
    address it gave away."""

    def __init__(self, executor: NativeExecutor, max_rows: int) -> None:
        self._library = library()
        self._executor = executor
        self._pool = executor.pool
        self._max_rows = max_rows
        self._isa = ISAS.index(executor.isa)
        self._keep: list[Tensor] = []
        self._described: list[C.Structure] = []
        self._fallbacks: list[tuple[int, Fallback]] = []  # each before the operation of C with that number

    def add(self, ops: Sequence[Op]) -> None:
        for op in fuse(ops, self._has_kernel):
            if isinstance(op, FusedLinear) or self._has_kernel(op):
                self._described.append(self._describe(op))
            else:
                self._fallbacks.append((len(self._described), Fallback(op, invariant=True)))
        count, size = len(self._described), C.sizeof(_operation())
        self._ops = (_operation() * count)(*self._described)
        needed = self._library.qs_scratch_bytes(self._ops, count, self._max_rows, self._pool.threads)
        self._scratch = torch.empty(needed + 64, dtype=torch.uint8)
        self._aligned = -(-self._scratch.data_ptr() // 64) * 64
        # Runs of C operations as (fallback to compute before them, address, number).
        self._runs: list[tuple[Fallback | None, int, int]] = []
        breaks = [(0, None), *self._fallbacks, (count, None)]
        for (begin, fallback), (end, _) in pairwise(breaks):
            self._runs.append((fallback, C.addressof(self._ops) + begin * size, end - begin))

    def run(self, step: Step) -> None:
        described = self._pool.describe(step)
        for fallback, ops, count in self._runs:
            if fallback is not None:
                fallback.run(step)
            if count:
                self._run(described, ops, count)

    def _run(self, step: C.Structure, ops: int, count: int) -> None:
        status = self._library.qs_run(ops, count, C.byref(step), self._pool.handle, self._aligned, self._isa)
        if status == -2:
            raise MemoryError("no memory for a step of the C kernels")
        if status == -3:
            raise RankLost
        if status:
            raise RuntimeError(f"this machine cannot run the {ISAS[self._isa]} kernels")

    def _has_kernel(self, op: Op) -> bool:
        return self._executor.supports(op) is None

    def _hold(self, tensor: Tensor) -> int:
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _describe(self, op: Op | FusedLinear) -> C.Structure:
        """``op`` as ``qs_op``."""
        rows = op.linear.rows if isinstance(op, FusedLinear) else getattr(op, "rows", "tokens")
        body = abi.describe(self._as_read(op), self._hold)
        name = type(body).__name__
        described: Any = _operation()(kind=kinds()[name], rows=int(rows == "logits"))
        setattr(described.body, name, body)
        return described  # type: ignore[no-any-return]

    def _as_read(self, op: Op | FusedLinear) -> object:
        """``op`` with its weights as the kernels read them."""
        match op:
            case FusedLinear():
                return tile_linear(op, self._pool.arena.take, tile_codes)
            case Embed():
                return tile_embed(op)
            case Experts():
                return tile_experts(op, self._pool.arena.take, tile_codes)
            case Lora():
                return tile_lora(op)
            case Route() if op.bias is not None:
                return replace(op, bias=op.bias.float().contiguous())
            case HeadLinear():
                return tile_head_linear(op, self._pool.arena.take)
            case LatentKV():
                return replace(op, norm=op.norm.float().contiguous())
            case RMSNorm() | HeadNorm():
                return replace(op, weight=op.weight.float().contiguous())
            case LayerNorm():
                return replace(op, weight=op.weight.float().contiguous(), bias=as_floats(op.bias))
            case RopeKV():
                return replace(op, q_norm=as_floats(op.q_norm), k_norm=as_floats(op.k_norm))
        return op


def _most_inputs(scheme: WeightScheme) -> int:
    """Inputs whose products with weights an int32 holds the sum of."""
    return _MAX_WIDE_GROUP if scheme.grid in (NF4, BNB_FP4) else _MAX_INT_GROUP


def _unsupported(weight: Tensor | QuantizedWeight) -> str | None:
    """Why no kernel multiplies ``weight``, or None."""
    if isinstance(weight, Tensor):
        return None if weight.dtype in abi.FLOATS else f"weights in {weight.dtype} have no C kernel"
    scheme, activations = weight.scheme, weight.activations
    if scheme.grid not in _GRIDS:
        return f"{scheme} weights have no C kernel"
    if weight.g_idx is not None and scheme.grid is E4M3:
        return "fp8 weights with groups out of order have no C kernel"
    if activations is not None and activations.grid is E2M1 and (not scheme.grid.exact or weight.g_idx is not None):
        return f"{scheme} weights with inputs in {activations.dtype} have no C kernel"
    if is_expanded(scheme, activations) or scheme.grid is E4M3 or activations is None:
        return None
    if activations.granularity == "group":
        if weight.g_idx is not None:
            return "weights with groups out of order have no C kernel where the input is rounded in groups"
        if activations.group_size % 8:
            return f"inputs rounded in groups of {activations.group_size} have no C kernel: it takes multiples of 8"
    elif (width := scheme.group_width(weight.in_features)) > (most := _most_inputs(scheme)):
        return f"a sum of {width} products overflows int32: at most {most} inputs share a scale"
    return None


class NativeExecutor:
    """The C kernels on ``threads`` threads. A row's result does not depend on the rest of the batch.

    ``cpus``: one thread is pinned to each. The first is for the thread that calls ``run``, for the time of the call.
    Raises ``CapacityError`` where the threads cannot be started, or not on these CPUs.
    """

    name = "native"
    batch_invariant = True
    asynchronous = False
    warm_sizes: Sequence[int] = ()
    placement = HOST

    def __init__(self, threads: int | None = None, isa: Isa | None = None, cpus: Sequence[int] | None = None) -> None:
        if cpus is not None:
            require_cpus(cpus)
        self.threads = len(cpus) if cpus is not None else threads or default_threads()
        self.cpus = cpus
        self.isa: Isa = isa or best_isa()
        self.pool = _Pool(self.threads, cpus)

    def supports(self, op: Op) -> str | None:
        if abi.name_of(type(op)) not in kinds():
            return f"{abi.name_of(type(op))} has no C kernel"
        if isinstance(op, Attention) and op.head_dim > 256:
            return f"a head_dim of {op.head_dim} has no C kernel: at most 256"
        if isinstance(op, Embed):
            if isinstance(op.table, QuantizedWeight):
                if op.table.scheme.grid not in (INTEGERS, E4M3):
                    return f"embeddings as {op.table.scheme} have no C kernel"
                return "embeddings with groups out of order have no C kernel" if op.table.g_idx is not None else None
            return None if op.table.dtype in abi.FLOATS else f"embeddings in {op.table.dtype} have no C kernel"
        if isinstance(op, Cast) and op.out.dtype != torch.float32:
            return f"a cast to {op.out.dtype} has no C kernel"
        if isinstance(op, PositionEmbed) and op.table.dtype not in abi.FLOATS:
            return f"embeddings in {op.table.dtype} have no C kernel"
        if isinstance(op, Linear):
            return _unsupported(op.weight)
        if isinstance(op, Experts):
            if op.activated.shape[1] % LANES:
                return f"experts of {op.activated.shape[1]} numbers have no C kernel: it takes multiples of {LANES}"
            return next((reason for weight in (*op.gate_up, *op.down) if (reason := _unsupported(weight))), None)
        if isinstance(op, HeadLinear | LatentKV | LatentAttention):
            held = op.weight if isinstance(op, HeadLinear) else op.cache
            if isinstance(op, LatentAttention) and op.width > _WIDEST_LATENT:
                return f"a latent of {op.width} has no C kernel: at most {_WIDEST_LATENT}"
            return None if held.dtype in abi.FLOATS else f"{abi.name_of(type(op))} in {held.dtype} has no C kernel"
        if isinstance(op, CausalConv) and op.width > _MAX_CONV:
            return f"a convolution of {op.width} tokens has no C kernel: at most {_MAX_CONV}"
        if isinstance(op, GatedDelta) and op.key_dim > _MAX_KEY_DIM:
            return f"keys of {op.key_dim} numbers have no C kernel: at most {_MAX_KEY_DIM}"
        if isinstance(op, RopeKV | Attention):
            if op.kv_dtype not in abi.DTYPES:
                return f"a KV cache in {op.kv_dtype} has no C kernel"
            if op.kv_dtype == PACKED_KV and op.head_dim % PACKED_HEADS:
                return f"heads of {op.head_dim} in 4 bits have no C kernel: it takes multiples of {PACKED_HEADS}"
            if op.k_cache.dtype in SCALED_KV and (op.k_scale is None or op.v_scale is None):
                return f"a KV cache in {op.k_cache.dtype} needs scales"
        return None

    def packed_bytes(self, scheme: WeightScheme, activations: ActivationScheme | None, out: int, inp: int) -> int:
        return tile_bytes(scheme, activations, out, inp)

    def program(self, max_rows: int) -> _NativeProgram:
        return _NativeProgram(self, max_rows)
