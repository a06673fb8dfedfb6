"""``Format``: how a quantized model lies on disk, and what the formats have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any, Protocol

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import INT4_KV, ActivationScheme, KVScheme, QuantSpec, WeightScheme

Shapes = Mapping[str, tuple[int, int]]
"""Module -> (out, in)."""
Schemes = Mapping[str, WeightScheme]

# Loaders fuse these siblings into one linear and look for one scheme under the fused name.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# It is printed, so it must be a short name and not just any text of a file.
_METHOD = re.compile(r"[a-z0-9][a-z0-9+_-]{0,31}")
_EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "word_embeddings", "tok_embeddings")


class Format(Protocol):
    """One on-disk format. A packed module is stored as ``module.part`` tensors and a configuration in JSON.

    name             what ``--format`` calls it
    parts            suffixes of every tensor that may belong to a packed module
    marks            some of ``parts``: a packed module has exactly one of them, a dense module none
    symmetric_zeros  whether zero points are stored even where they are all the same
    """

    @property
    def name(self) -> str: ...
    @property
    def parts(self) -> tuple[str, ...]: ...
    @property
    def marks(self) -> tuple[str, ...]: ...
    @property
    def symmetric_zeros(self) -> bool: ...

    def limit(self, spec: QuantSpec, schemes: Schemes, shapes: Shapes) -> str | None:
        """Why the format cannot hold these modules (one line, naming the module), or None."""
        ...

    def config_of(self, spec: QuantSpec) -> dict[str, Any]:
        """The ``quantization_config`` of ``spec``; raises ``UsageError`` where the format cannot express it."""
        ...

    def spec_of(self, config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
        """Read a ``quantization_config``; its patterns are resolved against ``modules``, the names of the model's
        linears. Raises ``CheckpointError`` for fields that make no sense or are not supported."""
        ...

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors of one module by part; raises ``CheckpointError`` where the format cannot hold it."""
        ...

    def unpack(
        self, parts: Mapping[str, Tensor], scheme: WeightScheme, activations: ActivationScheme | None = None
    ) -> QuantizedWeight:
        """The inverse of ``pack``; raises ``CheckpointError`` where a part is missing or contradicts ``scheme``."""
        ...

    def shape(
        self, scheme: WeightScheme, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[int, int]:
        """(out, in) of a module from the shapes of its parts; where they do not tell, ``read`` fetches a part of a few
        bytes."""
        ...


def is_embedding(module: str) -> bool:
    """Whether ``module`` only looks up rows, without a matrix product."""
    return module.rpartition(".")[2] in _EMBEDDINGS


def meta_of(spec: QuantSpec) -> dict[str, Any]:
    """The part of a ``quantization_config`` that other readers ignore."""
    meta: dict[str, Any] = {"quantizer": [f"qserve:{metadata.version('qserve-llm')}"], "method": spec.method}
    return meta | ({"kv_cache_dtype": INT4_KV.dtype} if spec.kv_cache == INT4_KV else {})


def kv_cache_of(config: Mapping[str, Any]) -> KVScheme | None:
    """The cache that ``meta_of`` recorded: one without static scales, of which other readers need not know."""
    meta = config.get("meta")
    return INT4_KV if isinstance(meta, dict) and meta.get("kv_cache_dtype") == INT4_KV.dtype else None


def method_of(config: Mapping[str, Any], default: str) -> str:
    """The method that ``meta_of`` recorded, or ``default`` for files of other writers."""
    meta = config.get("meta")
    found = meta.get("method") if isinstance(meta, dict) else None
    return found if isinstance(found, str) and _METHOD.fullmatch(found) else default


def scheme_from(what: str, **fields: Any) -> WeightScheme:
    """A ``WeightScheme`` from what a file says; raises ``CheckpointError`` naming the format ``what``."""
    for name, value in fields.items():
        expected = {"symmetric": bool, "dtype": str}.get(name, int)
        if type(value) is not expected:
            raise CheckpointError(f"{what} configuration: {name} is {value!r}, expected {expected.__name__}")
    try:
        return WeightScheme(**fields)
    except UsageError as error:
        raise CheckpointError(f"{what} configuration: {error}") from None


def pattern_from(what: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(f"{what} configuration: pattern {text!r} is invalid ({error})") from None


def names_from(what: str, field: str, value: object) -> list[str]:
    """A list of strings, [] for null."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{what} configuration: {field} must be a list of names")
    return value


def require(parts: Mapping[str, Tensor], name: str, dtype: torch.dtype | None = None, dim: int | None = None) -> Tensor:
    """The part ``name``; raises ``CheckpointError`` where it is missing or of another dtype or rank."""
    if name not in parts:
        raise CheckpointError(f"{name} is missing")
    part = parts[name]
    if (dtype is not None and part.dtype != dtype) or (dim is not None and part.dim() != dim):
        kind = str(dtype or part.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name} must be {kind}{'' if dim is None else f' of rank {dim}'}, not {part.dtype} {list(part.shape)}"
        )
    return part


def bias_from(parts: Mapping[str, Tensor], out: int) -> Tensor | None:
    """float32 [out], or None where the module has no bias."""
    if "bias" not in parts:
        return None
    bias = parts["bias"].to(torch.float32)
    if tuple(bias.shape) != (out,):
        raise CheckpointError(f"bias is {tuple(bias.shape)}, expected {(out,)}")
    return bias


def spread(scale: Tensor, scheme: WeightScheme, out: int, inp: int) -> Tensor:
    """The canonical float32 [out, groups] of a stored scale, whose rows may stand for blocks of outputs."""
    height = scheme.row_height(out)
    blocks, groups = -(-out // height), scheme.groups(inp)
    if not scale.is_floating_point() or scale.numel() != blocks * groups:
        raise CheckpointError(f"the scale is {scale.dtype} {list(scale.shape)}, expected floats {[blocks, groups]}")
    return scale.to(torch.float32).reshape(blocks, groups).repeat_interleave(height, 0)[:out].contiguous()


def one_number(parts: Mapping[str, Tensor], name: str) -> float:
    """The value of a part that holds a single float."""
    part = require(parts, name)
    if part.numel() != 1 or not part.is_floating_point():
        raise CheckpointError(f"{name} is {part.dtype} {list(part.shape)}, expected one float")
    return float(part)


def half(tensor: Tensor, what: str) -> Tensor:
    """``tensor`` rounded to float16; raises ``CheckpointError`` where that overflows."""
    rounded = tensor.to(torch.float16)
    if not bool(torch.isfinite(rounded).all()):
        raise CheckpointError(f"{what} does not fit float16")
    return rounded


def narrowest(tensor: Tensor) -> Tensor:
    """float32 ``tensor`` in the first of float16, bfloat16 and float32 that holds every value exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = tensor.to(dtype)
        if torch.equal(narrow.to(torch.float32), tensor):
            return narrow
    return tensor
