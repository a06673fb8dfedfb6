"""The bitsandbytes format as transformers writes it: 4 bits in NF4 (Dettmers et al., arXiv 2305.14314) or in FP4, which
is not e2m1, and the 8 bits of LLM.int8 (Dettmers et al., arXiv 2208.07339).

W is [out, in]. In 4 bits it is flattened row by row, n = out * in; the parts of one linear are
    weight            uint8 [n / 2, 1]    two codes a byte, the first in the **high** four bits
    absmax            f32 [n / 64]        the scale of each block of 64, or its code, uint8, where scales are nested
    quant_map         f32 [16]            the number of each code
    nested_absmax     f32 [n / 64 / 256]  the scale of each block of 256 scales
    nested_quant_map  f32 [256]           the number of each code of a scale
    quant_state       uint8               a JSON object: quant_type, blocksize, shape, nested_blocksize, nested_offset
    bias              [out]               only where the linear has one
A nested scale is nested_quant_map[absmax] * nested_absmax + nested_offset. Files call all but weight and bias
``weight.X``, and the state ``weight.quant_state.bitsandbytes__nf4``; ``name_parts`` gives them the names above.

In 8 bits the parts are
    weight            int8 [out, in]      W = weight * SCB / 127
    SCB               f32 [out]           the largest magnitude of each row
    weight_format     uint8, one value    0 where rows follow each other; not in every file
How bitsandbytes rounds the input of a product (``llm_int8_threshold``) is no property of the weights and is not taken
over.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats.format import bias_from, method_of, names_from, require
from qserve.checkpoint.formats.read_only import ReadOnlyFormat
from qserve.checkpoint.grid import BNB_FP4, NF4
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme

T = TypeVar("T")
_BLOCK = 64
_GRIDS = {"nf4": NF4, "fp4": BNB_FP4}
"""The grid of each ``quant_type``."""
_CHANNEL = WeightScheme(8, -1)
_PART = re.compile(r"(.+)\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state)(\.bitsandbytes__\w+)?")


def name_parts(stored: Mapping[str, T]) -> dict[str, T]:
    """``stored``, with every part of a packed module under ``module.part``."""
    found = {}
    for name, tensor in stored.items():
        match = _PART.fullmatch(name)
        found[name if match is None else f"{match[1]}.{match[2]}"] = tensor
    return found


@dataclass(frozen=True)
class BitsAndBytes(ReadOnlyFormat):
    """A ``Format``."""

    name: str = "bitsandbytes"
    parts: tuple[str, ...] = (
        "weight", "absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state", "SCB", "weight_format",
        "bias",
    )
    marks: tuple[str, ...] = ("quant_state", "SCB")
    symmetric_zeros: bool = False

    def spec_of(self, config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
        """``llm_int8_skip_modules`` names parts of module names."""
        four, eight = config.get("load_in_4bit") is True, config.get("load_in_8bit") is True
        if four == eight:
            raise CheckpointError(f"bitsandbytes: {'both' if four else 'neither'} of load_in_4bit and load_in_8bit "
                                  f"{'are' if four else 'is'} true; one must be")  # fmt: skip
        kind = config.get("bnb_4bit_quant_type", "fp4")
        if four and (not isinstance(kind, str) or kind not in _GRIDS):
            raise CheckpointError(f"bitsandbytes: 4 bits of type {kind!r} are not supported; nf4 and fp4 are")
        scheme = WeightScheme(4, _BLOCK, dtype=_GRIDS[kind].name) if four else _CHANNEL
        skipped = names_from("bitsandbytes", "llm_int8_skip_modules", config.get("llm_int8_skip_modules"))
        ignored = [module for module in dict.fromkeys(("lm_head", *modules))
                   if any(f".{part}." in f".{module}." for part in skipped or ['lm_head'])]  # fmt: skip
        return QuantSpec(method_of(config, "unknown"), scheme, ignored=tuple(ignored))

    def unpack(
        self, parts: Mapping[str, Tensor], scheme: WeightScheme, activations: ActivationScheme | None = None
    ) -> QuantizedWeight:
        if ("SCB" in parts) != (scheme == _CHANNEL):
            stored = 8 if "SCB" in parts else 4
            raise CheckpointError(f"it is stored in {stored} bits, the configuration says {scheme.bits}")
        if scheme == _CHANNEL:
            return _unpack_int8(parts)
        state = _state(require(parts, "quant_state", torch.uint8))
        (out, inp), grid = state["shape"], _GRIDS[state["quant_type"]]
        if grid is not scheme.grid:
            raise CheckpointError(f"quant_state says {state['quant_type']}, but the configuration says {scheme}")
        packed = require(parts, "weight", torch.uint8).flatten()
        if 2 * len(packed) != out * inp:
            raise CheckpointError(f"weight has {2 * len(packed)} codes, its shape {[out, inp]} needs {out * inp}")
        assert grid.codebook is not None
        if not torch.equal(require(parts, "quant_map", torch.float32), torch.tensor(grid.codebook)):
            raise CheckpointError(f"quant_map holds other numbers than those of {state['quant_type']}")
        scales = _scales(parts, state)
        if scales.numel() != out * inp // _BLOCK:
            raise CheckpointError(f"absmax has {scales.numel()} scales for {out * inp} codes")
        codes = torch.stack([packed >> 4, packed & 15], -1).view(out, inp)
        weight = QuantizedWeight(scheme, codes, scales.view(out, -1), bias=bias_from(parts, out))
        weight.check()
        return weight

    def shape(
        self, scheme: WeightScheme, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[int, int]:
        if "SCB" in shapes:
            out, inp = shapes["weight"]
        else:
            out, inp = _state(read("quant_state"))["shape"]
        return out, inp


def _unpack_int8(parts: Mapping[str, Tensor]) -> QuantizedWeight:
    weight, largest = require(parts, "weight", torch.int8, 2), require(parts, "SCB", torch.float32)
    out = len(weight)
    if largest.numel() != out:
        raise CheckpointError(f"SCB has {largest.numel()} numbers for {out} rows")
    if "weight_format" in parts and bool((parts["weight_format"] != 0).any()):
        raise CheckpointError("weight_format says that its rows are interleaved for a GPU: save the model again with "
                              "bitsandbytes 0.45 or later")  # fmt: skip
    codes = weight.view(torch.uint8) ^ 128  # plus 128
    # By the reciprocal, as bitsandbytes does.
    unpacked = QuantizedWeight(_CHANNEL, codes, largest.view(-1, 1) * (1 / 127), bias=bias_from(parts, out))
    unpacked.check()
    return unpacked


def _state(stored: Tensor) -> dict[str, Any]:
    """The JSON object, checked. Blocks must end where rows do."""
    try:
        state = json.loads(bytes(stored.tolist()))
        shape = [int(size) for size in state["shape"]]
        kind, size, nested = str(state["quant_type"]), state["blocksize"], state.get("nested_blocksize", 1)
        offset = float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError("quant_state is not what bitsandbytes writes") from None
    if kind not in _GRIDS or size != _BLOCK or len(shape) != 2 or min(shape) < 1 or shape[1] % _BLOCK:
        what = f"{kind} {shape} in blocks of {size}"
        raise CheckpointError(f"{what}: nf4 and fp4 with rows of whole blocks of {_BLOCK} are read")
    if type(nested) is not int or nested < 1 or not math.isfinite(offset):
        raise CheckpointError(f"quant_state says nested_blocksize {nested!r} and nested_offset {offset}")
    return {"quant_type": kind, "shape": shape, "nested_blocksize": nested, "nested_offset": offset}


def _scales(parts: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """float32 [blocks]."""
    absmax = require(parts, "absmax").flatten()
    if absmax.dtype != torch.uint8:
        return absmax.float()
    numbers = require(parts, "nested_quant_map", torch.float32).flatten()
    of_blocks = require(parts, "nested_absmax", torch.float32).flatten()
    if len(numbers) != 256 or len(of_blocks) != -(-len(absmax) // state["nested_blocksize"]):
        raise CheckpointError(f"nested scales are {len(numbers)} numbers and {len(of_blocks)} scales of scales")
    spread = of_blocks.repeat_interleave(state["nested_blocksize"])[: len(absmax)]
    return numbers[absmax.int()] * spread + float(state["nested_offset"])
