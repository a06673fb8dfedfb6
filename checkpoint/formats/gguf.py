"""Linears in the blocks of llama.cpp's files, on the way to one: ``qserve convert`` writes the file of this directory.

The parts of one linear are
    qblocks  uint8 [out, bytes of a row]  the blocks of a row in turn, as ``gguf_packed`` describes them
    bias     [out]                        only where the linear has one
``quantization_config`` names the ``type`` of most linears and in ``types`` those of others, by llama.cpp's names.
No other reader knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats.format import Schemes, Shapes, bias_from, meta_of, method_of, names_from, require
from qserve.checkpoint.gguf_blocks import block_type, pack_blocks
from qserve.checkpoint.gguf_packed import KINDS, unpacked
from qserve.checkpoint.gguf_schemes import GGUF_SCHEMES
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme

_BLOCKS = "qblocks"


def _kind_of(scheme: WeightScheme) -> GGMLQuantizationType:
    """Unlike ``block_type`` none that holds more than ``scheme``: it would not come back as what it was."""
    for kind, blocks in KINDS.items():
        if blocks.scheme == scheme:
            return kind
    raise CheckpointError(f"no block of llama.cpp's holds {scheme}; use --scheme Q4_K_M, or 4, 5 or 8 --bits with "
                          "--group-size 32")  # fmt: skip


def _scheme_named(name: object) -> WeightScheme:
    if not isinstance(name, str) or name not in GGUF_SCHEMES:
        raise CheckpointError(f"GGUF configuration: the type {name!r} is not supported")
    return GGUF_SCHEMES[name]


@dataclass(frozen=True)
class GGUFBlocks:
    """A ``Format``."""

    name: str = "gguf"
    parts: tuple[str, ...] = (_BLOCKS, "bias")
    marks: tuple[str, ...] = (_BLOCKS,)
    symmetric_zeros: bool = False

    def limit(self, spec: QuantSpec, schemes: Schemes, shapes: Shapes) -> str | None:
        if spec.activations is not None or spec.kv_cache is not None:
            return "GGUF files hold quantized weights only"
        for module, scheme in schemes.items():
            try:
                _kind_of(scheme)
                block_type(scheme, shapes[module][1])
            except CheckpointError as error:
                return f"{module}: {error}"
        return None

    def config_of(self, spec: QuantSpec) -> dict[str, Any]:
        try:
            usual, types = _kind_of(spec.weights), {name: _kind_of(scheme) for name, scheme in spec.overrides.items()}
        except CheckpointError as error:
            raise UsageError(str(error)) from None
        return {
            "quant_method": self.name,
            "type": usual.name,
            "types": {module: kind.name for module, kind in types.items()},
            "modules_to_not_convert": list(spec.ignored),
            "meta": meta_of(spec),
        }

    def spec_of(self, config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
        types = config.get("types")
        if not isinstance(types, dict):
            raise CheckpointError("GGUF configuration: types must be an object")
        ignored = names_from("GGUF", "modules_to_not_convert", config.get("modules_to_not_convert"))
        overrides = {module: _scheme_named(name) for module, name in types.items()}
        weights = _scheme_named(config.get("type"))
        return QuantSpec(method_of(config, "unknown"), weights, overrides=overrides, ignored=tuple(ignored))

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The bias is stored as it is."""
        _kind_of(weight.scheme)
        if weight.activations is not None:
            raise CheckpointError(f"GGUF blocks hold weights only, not inputs that are {weight.activations}")
        parts = {_BLOCKS: torch.from_numpy(pack_blocks(weight))}
        return parts if weight.bias is None else parts | {"bias": weight.bias}

    def unpack(
        self, parts: Mapping[str, Tensor], scheme: WeightScheme, activations: ActivationScheme | None = None
    ) -> QuantizedWeight:
        blocks, kind = require(parts, _BLOCKS, torch.uint8, 2), _kind_of(scheme)
        size = GGML_QUANT_SIZES[kind][1]
        if blocks.shape[1] % size:
            raise CheckpointError(f"{_BLOCKS} has rows of {blocks.shape[1]} bytes, blocks of {kind.name} have {size}")
        codes, scales, zeros = unpacked(kind, blocks.contiguous().numpy(), len(blocks), size)
        weight = QuantizedWeight(
            scheme, codes.contiguous(), scales.contiguous(), zeros, bias=bias_from(parts, len(blocks))
        )
        weight.check()
        return weight

    def shape(
        self, scheme: WeightScheme, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[int, int]:
        numbers, size = GGML_QUANT_SIZES[_kind_of(scheme)]
        out, nbytes = shapes[_BLOCKS]
        return out, nbytes // size * numbers
