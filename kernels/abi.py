"""The structures of ``csrc/qserve.h`` for ctypes: operations, offline kernels, and the numbers of the enumerations.

The structure of an operation follows from its dataclass. ``tests/kernels/test_abi.py`` compares every offset and size
with the C compiler's.
"""

from __future__ import annotations

import ctypes as C
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from qserve.kernels.ops import PACKED_KV, Function

U8, U4, F8, I8, TRELLIS, F4 = 3, 4, 5, 6, 7, 8
FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DTYPES = {**FLOATS, torch.uint8: U8, PACKED_KV: U4, torch.float8_e4m3fn: F8, torch.int8: I8}
FUNCTIONS: dict[str, int] = {function: i for i, function in enumerate(get_args(Function), 1)}  # 0 is none

_C_TYPES: dict[Any, Any] = {
    Tensor: C.c_void_p, int: C.c_int32, bool: C.c_int32, torch.dtype: C.c_int32, float: C.c_float,
}  # fmt: skip
_ORDER = (C.c_void_p, C.c_int32, C.c_float)


def name_of(operation: type) -> str:
    """The operation's name in C: ``RopeKV`` -> ``rope_kv``. A class that holds tiles has the name without ``Tiled``."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", operation.__name__.removeprefix("Tiled"))
    return words.lower()


@cache
def structure(declared: type) -> type[C.Structure]:
    """The C structure of a dataclass: its fields, then its properties, by name. Structures come first, then pointers,
    integers and floats, each in the order of declaration. ``rows`` is left out, for ``qs_op`` has it, and ``split`` and
    ``own``, for ranks that run C share memory."""
    hints = get_type_hints(declared)
    properties = [name for name, value in vars(declared).items() if isinstance(value, property)]
    hints |= {name: get_type_hints(vars(declared)[name].fget)["return"] for name in properties}
    names = [field.name for field in fields(declared) if field.name not in ("rows", "split", "own")] + properties
    typed = [(name, _c_type(hints[name])) for name in names]
    typed.sort(key=lambda field: _ORDER.index(field[1]) if field[1] in _ORDER else -1)
    return type(name_of(declared), (C.Structure,), {"_fields_": typed})


def _c_type(hint: Any) -> Any:
    if hint == Function:
        return C.c_int32
    (kind,) = {arg for arg in get_args(hint) or (hint,) if arg is not type(None)}
    if isinstance(kind, type) and is_dataclass(kind):
        return structure(kind)
    return _C_TYPES[kind]


def describe(declared: object, address: Callable[[Tensor], int]) -> C.Structure:
    """``declared`` as its C structure; ``address`` gives the address of each of its tensors.

    Raises ``ValueError`` for a tensor that is not contiguous. Where a tensor has a stride among the fields
    (``out_stride`` for ``out``), its rows may lie apart.
    """
    kind: Any = type(declared)
    made = structure(kind)()
    for name, _ in made._fields_:  # type: ignore[misc]
        value = getattr(declared, name)
        if isinstance(value, Tensor):
            apart = value.stride(-1) == 1 and hasattr(declared, f"{name}_stride")
            if not apart and not value.is_contiguous():
                raise ValueError("the C kernels need contiguous tensors")
            value = address(value)
        elif isinstance(value, torch.dtype):
            value = DTYPES[value]
        elif isinstance(value, str):
            value = FUNCTIONS[value]
        elif is_dataclass(value):
            value = describe(value, address)
        setattr(made, name, value)
    return made


def operation(kinds: Mapping[str, int], declared: Mapping[str, type]) -> type[C.Structure]:
    """``qs_op``: one of the operations that the library names, with its number. ``declared`` maps names to classes."""
    bodies = [(name, structure(declared[name])) for name in kinds]
    union = type("body", (C.Union,), {"_fields_": bodies})
    return type("op", (C.Structure,), {"_fields_": [("kind", C.c_int32), ("rows", C.c_int32), ("body", union)]})


def _struct(name: str, pointers: str, ints: str = "", floats: str = "") -> type[C.Structure]:
    typed: list[tuple[str, Any]] = [(field, C.c_void_p) for field in pointers.split()]
    typed += [(field, C.c_int32) for field in ints.split()]
    typed += [(field, C.c_float) for field in floats.split()]
    return type(name, (C.Structure,), {"_fields_": typed})


ScaleSearch = _struct("scale_search", "weight importance ranges scales zeros", "width period steps zero max_code")
ScaleChoice = _struct("scale_choice", "weight importance candidates scales", "width period steps")
RowSampling = _struct("row_sampling", "rows point temperature top_p min_p top_k tokens", "vocab")
Sweep = _struct("sweep", "weight aims upper scales zeros order codes", "inputs outputs width zero max_code e2m1")
TrellisSweep = _struct("trellis_sweep", "weight aims upper scales order symbols", "inputs outputs width bits")
Tiling = _struct("tiling", "words strides nibbles order tiles", "outputs inputs k bits dtype")
Rounding = _struct("rounding", "weight codes scales", "inputs width dtype")
Moment = _struct("moment", "left right out", "height width count dtype upper", "keep gain")


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
