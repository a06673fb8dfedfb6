"""The CPU kernels in C: finds the library, describes operations to it, runs programs. See ``csrc/qserve.h``."""

from __future__ import annotations

import ctypes as C
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from qserve.checkpoint.errors import CapacityError
from qserve.checkpoint.packed import PackedWeight
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
from qserve.kernels.prepack import float8_tiles, float_tiles, int_tiles, is_expanded
from qserve.kernels.threads import default_threads

Isa = Literal["scalar", "avx2", "avx512"]
ISAS: tuple[Isa, ...] = ("scalar", "avx2", "avx512")

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_U8, _U4, _F8, _I8 = 3, 4, 5, 6
_KV_DTYPES = {torch.float32: 0, torch.float16: 1, torch.float8_e4m3fn: _F8, torch.int8: _I8}
_MAX_INT_GROUP = 65536  # inputs that an int32 sum holds


def _struct(name: str, pointers: str, ints: str = "", floats: str = "") -> type[C.Structure]:
    fields: list[tuple[str, Any]] = [(field, C.c_void_p) for field in pointers.split()]
    fields += [(field, C.c_int32) for field in ints.split()]
    fields += [(field, C.c_float) for field in floats.split()]
    return type(name, (C.Structure,), {"_fields_": fields})


_Embed = _struct("Embed", "table scales zeros out", "width dtype group zero")
_RMSNorm = _struct("RMSNorm", "x weight out", "width", "eps")
_Linear = _struct(
    "Linear",
    "x out weight scales zeros bias permutation",
    "k n x_width out_stride dtype group act_dtype act_span act_group zero accumulate",
    "input_scale",
)
_RopeKV = _struct(
    "RopeKV",
    "qkv cosine sine q_norm k_norm k_scale v_scale k_center k_cache v_cache",
    "heads kv_heads head_dim rotary_dim kv_dtype",
    "eps",
)
_Attention = _struct(
    "Attention", "qkv k_scale v_scale out k_cache v_cache", "heads kv_heads head_dim kv_dtype window", "scale"
)
_SiluMul = _struct("SiluMul", "gate_up out", "width")
_Gather = _struct("Gather", "x out", "width")
_Argmax = _struct("Argmax", "x out", "width")
_LogSoftmax = _struct("LogSoftmax", "x", "width")


class _Union(C.Union):
    _fields_ = [
        ("embed", _Embed),
        ("rmsnorm", _RMSNorm),
        ("linear", _Linear),
        ("rope_kv", _RopeKV),
        ("attention", _Attention),
        ("silu_mul", _SiluMul),
        ("gather", _Gather),
        ("argmax", _Argmax),
        ("log_softmax", _LogSoftmax),
    ]


_ScaleSearch = _struct(
    "ScaleSearch", "weight importance ranges scales zeros", "width period steps zero max_code"
)
_KINDS = [field[0] for field in _Union._fields_]


class _Op(C.Structure):
    _fields_ = [("kind", C.c_int32), ("rows", C.c_int32), ("of", _Union)]


_Step = _struct(
    "Step",
    "token_ids positions slots logit_rows seq_start block_tables",
    "tokens logits sequences table_stride",
)


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
    loaded.qs_pool_create.argtypes = [C.c_int32]
    loaded.qs_pool_destroy.restype = None
    loaded.qs_pool_destroy.argtypes = [C.c_void_p]
    loaded.qs_scratch_bytes.restype = C.c_int64
    loaded.qs_scratch_bytes.argtypes = [C.c_void_p, C.c_int32, C.c_int32, C.c_int32]
    loaded.qs_run.argtypes = [C.c_void_p, C.c_int32, C.c_void_p, C.c_void_p, C.c_void_p, C.c_int32]
    loaded.qs_peak_products.restype = C.c_int64
    loaded.qs_peak_products.argtypes = [C.c_int64, C.c_int32]
    loaded.qs_peak_read.restype = C.c_int64
    loaded.qs_peak_read.argtypes = [C.c_void_p, C.c_int64]
    loaded.qs_search_scales.argtypes = [C.c_void_p, C.c_int64, C.c_int64, C.c_int32]
    if loaded.qs_op_size() != C.sizeof(_Op):
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


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError("the C kernels need contiguous tensors")
    return tensor.data_ptr()


class _Pool:
    """Threads that sleep when there is nothing to do, and end with the executor."""

    def __init__(self, threads: int) -> None:
        self._library = library()
        self.threads = threads
        self.arena = Arena()
        self.handle = self._library.qs_pool_create(threads)
        if not self.handle:
            raise CapacityError(f"cannot start {threads} threads: use a smaller --threads")

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
        self._described: list[_Op] = []

    def add(self, ops: Sequence[Op]) -> None:
        self._described += [self._describe(op) for op in ops]
        self._count = len(self._described)
        self._ops = (_Op * self._count)(*self._described)
        needed = self._library.qs_scratch_bytes(self._ops, self._count, self._max_rows, self._pool.threads)
        self._scratch = torch.empty(needed + 64, dtype=torch.uint8)
        self._aligned = -(-self._scratch.data_ptr() // 64) * 64

    def run(self, step: Step) -> None:
        described = _Step(
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
        return _address(tensor)

    def _keep_weight(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._hold(self._pool.arena.keep(tensor))

    def _hold_rows(self, tensor: Tensor) -> int:
        """The address of a matrix whose rows are contiguous, but may lie apart."""
        if tensor.stride(1) != 1:
            raise ValueError("the C kernels need contiguous rows")
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _describe(self, op: Op) -> _Op:
        hold = self._hold
        match op:
            case Embed():
                body: Any = self._embed(op)
            case RMSNorm():
                weight = hold(op.weight.float().contiguous())
                body = _RMSNorm(hold(op.x), weight, hold(op.out), op.x.shape[1], op.eps)
            case Linear():
                body = self._linear(op)
            case RopeKV():
                norms = [None if w is None else hold(w.float().contiguous()) for w in (op.q_norm, op.k_norm)]
                body = _RopeKV(
                    hold(op.qkv), hold(op.cosine), hold(op.sine), *norms, hold(op.k_scale), hold(op.v_scale),
                    hold(op.k_center), hold(op.k_cache), hold(op.v_cache),
                    op.heads, op.kv_heads, op.head_dim, 2 * op.cosine.shape[1], _KV_DTYPES[op.k_cache.dtype], op.eps,
                )  # fmt: skip
            case Attention():
                body = _Attention(
                    hold(op.qkv), hold(op.k_scale), hold(op.v_scale), hold(op.out), hold(op.k_cache), hold(op.v_cache),
                    op.heads, op.kv_heads, op.head_dim, _KV_DTYPES[op.k_cache.dtype], op.window, op.scale,
                )  # fmt: skip
            case SiluMul():
                body = _SiluMul(hold(op.gate_up), hold(op.out), op.out.shape[1])
            case Gather():
                body = _Gather(hold(op.x), hold(op.out), op.x.shape[1])
            case Argmax():
                body = _Argmax(hold(op.x), hold(op.out), op.x.shape[1])
            case LogSoftmax():
                body = _LogSoftmax(hold(op.x), op.x.shape[1])
        kind = [_Embed, _RMSNorm, _Linear, _RopeKV, _Attention, _SiluMul, _Gather, _Argmax, _LogSoftmax].index(
            type(body)
        )
        described = _Op(kind=kind, rows=int(getattr(op, "rows", "tokens") == "logits"))
        setattr(described.of, _KINDS[kind], body)
        return described

    def _linear(self, op: Linear) -> C.Structure:
        hold, keep = self._hold, self._keep_weight
        bias = None if op.bias is None else hold(op.bias.float().contiguous())
        common: dict[str, Any] = {
            "x": hold(op.x),
            "out": self._hold_rows(op.out),
            "bias": bias,
            "n": op.out.shape[1],
            "x_width": op.x.shape[1],
            "out_stride": op.out.stride(0),
            "accumulate": int(op.accumulate),
        }
        packed = isinstance(op.weight, PackedWeight)
        shape = (op.weight.out_features, op.weight.in_features) if packed else tuple(op.weight.shape)  # type: ignore[union-attr]
        if shape != (op.out.shape[1], op.x.shape[1]):  # the C side trusts these numbers
            raise ValueError(f"a weight of {shape} does not map {op.x.shape[1]} inputs to {op.out.shape[1]} outputs")
        if not isinstance(op.weight, PackedWeight):
            weight = float_tiles(op.weight)
            return _Linear(weight=keep(weight), k=op.weight.shape[1], dtype=_DTYPES[weight.dtype], **common)
        scheme, activations = op.weight.scheme, op.weight.activations
        common["input_scale"] = op.weight.input_scale or 0.0
        if scheme.dtype == "int" and not is_expanded(scheme, activations):
            tiles = int_tiles(op.weight)
            return _Linear(
                # In this order: what is fetched ahead at the end of the weights before are these scales.
                scales=keep(tiles.scales),
                zeros=keep(tiles.zeros),
                weight=keep(tiles.weight),
                permutation=keep(tiles.permutation),
                k=tiles.k,
                dtype=_U4 if tiles.bits == 4 else _U8,
                group=tiles.group,
                act_dtype=_I8,
                act_span=tiles.act_span,
                act_group=tiles.act_group,
                zero=tiles.zero,
                **common,
            )
        inp = op.weight.in_features
        if activations is not None:
            common["act_dtype"] = _F8 if activations.dtype == "fp8" else _I8
            common["act_span"] = activations.group_size if activations.granularity == "group" else inp
        if scheme.dtype == "int":
            return _Linear(weight=keep(float_tiles(op.weight.dequantize())), k=inp, dtype=0, **common)
        codes, scales = float8_tiles(op.weight)
        group = scheme.group_width(inp)
        return _Linear(weight=keep(codes), scales=keep(scales), k=inp, dtype=_F8, group=group, **common)

    def _embed(self, op: Embed) -> C.Structure:
        table, width = op.table, op.out.shape[1]
        if isinstance(table, Tensor):
            return _Embed(table=self._hold(table), out=self._hold(op.out), width=width, dtype=_DTYPES[table.dtype])
        return _Embed(
            table=self._hold(table.codes),
            scales=self._hold(table.scales),
            zeros=self._hold(table.zeros),
            out=self._hold(op.out),
            width=width,
            dtype=_F8 if table.scheme.dtype == "fp8" else _U8,
            group=table.scheme.group_width(width),
            zero=table.scheme.zero,
        )


def _unsupported(weight: PackedWeight) -> str | None:
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


def search_scales(
    weight: Tensor,
    importance: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    ranges: Sequence[float],
    *,
    zero: int,
    max_code: int,
    threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """Replace ``scales`` float32 [rows] and ``zeros`` (the same, or None where every code of 0 is ``zero``) by better
    ones for ``weight`` float32 [rows, width]; ``importance`` float32 [period, width], that of row r is r % period.
    What the search is: ``qs_scale_search`` in ``csrc/qserve.h``."""
    rows, width = weight.shape
    candidates = torch.tensor(ranges, dtype=torch.float32)
    described = _ScaleSearch(
        weight=_address(weight), importance=_address(importance), ranges=_address(candidates),
        scales=_address(scales), zeros=_address(zeros), width=width, period=len(importance), steps=len(candidates),
        zero=zero, max_code=max_code,
    )  # fmt: skip
    level = ISAS.index(isa or best_isa())
    # A thread starts in the time in which so many weights are searched, about.
    threads = threads or min(default_threads(), max(1, weight.numel() >> 15))
    parts = min(threads, max(1, rows))
    run_part, size = library().qs_search_scales, -(-rows // parts)

    def run(first: int) -> int:
        status: int = run_part(C.byref(described), first, min(size, rows - first), level)
        return status

    with ThreadPoolExecutor(parts) if parts > 1 else nullcontext() as pool:  # ctypes lets go of the interpreter's lock
        if any((pool.map if pool else map)(run, range(0, rows, size))):
            raise RuntimeError(f"this machine cannot run the {ISAS[level]} kernels")


class NativeExecutor:
    """The C kernels on ``threads`` threads. A row's result does not depend on the rest of the batch."""

    name = "native"
    batch_invariant = True
    asynchronous = False
    placement = HOST

    def __init__(self, threads: int | None = None, isa: Isa | None = None) -> None:
        self.threads = threads or default_threads()
        self.isa: Isa = isa or best_isa()
        self._pool = _Pool(self.threads)

    def supports(self, op: Op) -> str | None:
        if isinstance(op, Attention) and (op.head_dim % 16 or op.head_dim > 256):
            return f"head_dim {op.head_dim} is not a multiple of 16 up to 256"
        if isinstance(op, Embed):
            if isinstance(op.table, PackedWeight):
                return "embeddings with groups out of order have no C kernel" if op.table.g_idx is not None else None
            return None if op.table.dtype in _DTYPES else f"embeddings in {op.table.dtype} have no C kernel"
        if isinstance(op, Linear):
            if isinstance(op.weight, PackedWeight):
                return _unsupported(op.weight)
            return None if op.weight.dtype in _DTYPES else f"weights in {op.weight.dtype} have no C kernel"
        if isinstance(op, RopeKV | Attention):
            if op.k_cache.dtype not in _KV_DTYPES:
                return f"a KV cache in {op.k_cache.dtype} has no C kernel"
            if op.k_cache.dtype in SCALED_KV and (op.k_scale is None or op.v_scale is None):
                return f"a KV cache in {op.k_cache.dtype} needs scales"
        return None

    def program(self, max_rows: int) -> _NativeProgram:
        return _NativeProgram(self._pool, max_rows, self.isa)
