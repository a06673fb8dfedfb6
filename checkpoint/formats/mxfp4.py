"""The mxfp4 format, in which OpenAI publishes GPT-OSS: experts in MXFP4, everything else in bfloat16.

The experts of a layer lie together; W is [out, in], in groups of 32
    X_blocks  uint8 [experts, out, groups, 16]  e2m1 codes of neighbouring inputs, the first in the low four bits
    X_scales  uint8 [experts, out, groups]      e8m0: 2 ** (value - 127), 255 is NaN
    X_bias    [experts, out]
``split_experts`` gives each expert modules and parts of its own, as every other format has. The codes are those of the
OCP Microscaling Formats specification, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats.format import bias_from, method_of, require
from qserve.checkpoint.formats.read_only import ReadOnlyFormat
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.safetensors_index import StoredTensor
from qserve.checkpoint.spec import MXFP4 as SCHEME
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme
from qserve.checkpoint.words import pack_words, unpack_words

_PARTS = ("blocks", "scales", "bias")


def split_experts(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """``stored``, with the tensors of stacked experts (``experts.X_blocks``) as those of each expert
    (``experts.0.X.blocks``)."""
    stacks = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    whole = {f"{stack}_{part}": (stack, part) for stack in stacks for part in _PARTS}
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if name not in whole:
            found[name] = tensor
            continue
        stack, part = whole[name]
        parent, _, leaf = stack.rpartition(".")
        count, *shape = tensor.shape
        size = tensor.nbytes // max(1, count)
        for e in range(count):
            one = replace(tensor, shape=tuple(shape), offset=tensor.offset + e * size, nbytes=size)
            found[f"{parent}.{e}.{leaf}.{part}"] = one
    return found


def read_e2m1(packed: Tensor) -> Tensor:
    """uint8 [out, in / 2], two codes each, the first in the low four bits -> uint8 [out, in]."""
    if packed.shape[1] % 4:
        raise CheckpointError(f"{packed.shape[1]} bytes of codes in a row: they must be a multiple of 4")
    return unpack_words(packed.contiguous().view(torch.int32), 4, 2 * packed.shape[1])


def read_e8m0(scales: Tensor) -> Tensor:
    """uint8 -> float32: a power of two. The code of NaN becomes infinity, which no weight may have."""
    bits = scales.int()
    return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)


def write_e2m1(codes: Tensor) -> Tensor:
    """The inverse of ``read_e2m1``, for rows of whole groups."""
    return pack_words(codes, 4).view(torch.uint8)


def write_e8m0(scales: Tensor) -> Tensor:
    """The inverse of ``read_e8m0``; raises ``CheckpointError`` for a scale that is no power of two."""
    found = torch.frexp(scales).exponent.add(126).clamp(0, 254).to(torch.uint8)
    if not torch.equal(read_e8m0(found), scales):
        raise CheckpointError("a scale is no power of two, which MXFP4 and MXFP8 need")
    return found


@dataclass(frozen=True)
class MXFP4(ReadOnlyFormat):
    """A ``Format``."""

    name: str = "mxfp4"
    parts: tuple[str, ...] = _PARTS
    marks: tuple[str, ...] = ("blocks",)
    symmetric_zeros: bool = False

    def spec_of(self, config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
        """Experts are packed, whatever ``modules_to_not_convert`` lists of other modules."""
        ignored = [module for module in dict.fromkeys(("lm_head", *modules)) if ".experts." not in module]
        return QuantSpec(method=method_of(config, "unknown"), weights=SCHEME, ignored=tuple(ignored))

    def unpack(
        self, parts: Mapping[str, Tensor], scheme: WeightScheme, activations: ActivationScheme | None = None
    ) -> QuantizedWeight:
        blocks, scales = require(parts, "blocks", torch.uint8, 3), require(parts, "scales", torch.uint8, 2)
        if blocks.shape[:2] != scales.shape or blocks.shape[2] != 16:
            raise CheckpointError(f"blocks are {list(blocks.shape)} for scales of {list(scales.shape)}")
        weight = QuantizedWeight(
            scheme, read_e2m1(blocks.flatten(1)), read_e8m0(scales), bias=bias_from(parts, len(blocks))
        )
        weight.check()
        return weight

    def shape(
        self, scheme: WeightScheme, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[int, int]:
        out, groups, size = shapes["blocks"]
        return out, groups * size * 2
