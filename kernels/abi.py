"""``csrc/qserve.h`` as ctypes sees it: its structures and the numbers of its enumerations. Knows nothing of torch's
tensors but their dtypes."""

from __future__ import annotations

import ctypes as C
from typing import Any

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
U8, U4, F8, I8 = 3, 4, 5, 6
KV_DTYPES = {**DTYPES, torch.float8_e4m3fn: F8, torch.int8: I8}


def _struct(name: str, pointers: str, ints: str = "", floats: str = "") -> type[C.Structure]:
    fields: list[tuple[str, Any]] = [(field, C.c_void_p) for field in pointers.split()]
    fields += [(field, C.c_int32) for field in ints.split()]
    fields += [(field, C.c_float) for field in floats.split()]
    return type(name, (C.Structure,), {"_fields_": fields})


Embed = _struct("Embed", "table scales zeros out", "width dtype group zero")
RMSNorm = _struct("RMSNorm", "x weight out", "width", "eps")
Linear = _struct(
    "Linear",
    "x out weight scales zeros bias norm permutation",
    "k n x_width out_stride dtype scale_dtype group act_dtype act_span act_group zero accumulate silu",
    "input_scale eps",
)
RopeKV = _struct(
    "RopeKV",
    "qkv cosine sine q_norm k_norm k_scale v_scale k_center k_cache v_cache",
    "heads kv_heads head_dim rotary_dim kv_dtype",
    "eps",
)
Attention = _struct(
    "Attention", "qkv k_scale v_scale out k_cache v_cache", "heads kv_heads head_dim kv_dtype window", "scale"
)
SiluMul = _struct("SiluMul", "gate_up out", "width")
Gather = _struct("Gather", "x out", "width")
Argmax = _struct("Argmax", "x out", "width")
LogSoftmax = _struct("LogSoftmax", "x", "width")
BODIES = (Embed, RMSNorm, Linear, RopeKV, Attention, SiluMul, Gather, Argmax, LogSoftmax)
"""In the order of ``qs_op_kind``."""


class _Union(C.Union):
    _fields_ = [(body.__name__, body) for body in BODIES]


class Op(C.Structure):
    _fields_ = [("kind", C.c_int32), ("rows", C.c_int32), ("of", _Union)]


Step = _struct(
    "Step", "token_ids positions slots logit_rows seq_start block_tables", "tokens logits sequences table_stride"
)
ScaleSearch = _struct("ScaleSearch", "weight importance ranges scales zeros", "width period steps zero max_code")
Sweep = _struct("Sweep", "weight upper scales zeros order codes", "inputs outputs width zero max_code")
Moment = _struct("Moment", "left right out", "height width count dtype upper", "keep gain")


class Pack(C.Structure):
    _fields_ = [
        *((field, C.c_void_p) for field in ("rows", "packed", "absmax", "abssum")),
        ("stride", C.c_int64),
        *((field, C.c_int32) for field in ("count", "width", "dtype", "to", "turned")),
    ]


class Heads(C.Structure):
    _fields_ = [("at", C.c_void_p), *((field, C.c_int64) for field in ("batch", "head", "token", "dtype"))]


class Causal(C.Structure):
    _fields_ = [
        *((field, Heads) for field in ("queries", "keys", "values")),
        ("out", C.c_void_p),
        *((field, C.c_int32) for field in ("heads", "kv_heads", "tokens", "head_dim", "dtype")),
        ("scale", C.c_float),
    ]


class Product(C.Structure):
    _fields_ = [
        *((field, C.c_void_p) for field in ("x", "weight", "bias", "out")),
        ("stride", C.c_int64),
        *((field, C.c_int32) for field in ("rows", "inputs", "outputs")),
    ]


def operation(body: C.Structure, *, of_logits: bool) -> Op:
    """``body`` as an operation on the rows of a step, or on its logit rows."""
    made = Op(kind=BODIES.index(type(body)), rows=int(of_logits))
    setattr(made.of, type(body).__name__, body)
    return made
