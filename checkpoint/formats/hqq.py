"""The HQQ format in safetensors, as hqq's ``HQQLinear`` and transformers write it (Badri and Shaji, "Half-Quadratic
Quantization of Large Machine Learning Models", 2023).

W is [out, in], cut into rows of one group each, n = out * in / group_size; the parts of one linear that are read are
    W_q      uint8 [n * bits / 8, group_size]  a byte holds the codes of rows i, i + n / 2 (4 bits) or i, i + n / 4, ...
             (2 bits), the first in the highest bits; in 3 bits int32 [ceil(n / 10), group_size], an integer holds rows
             i, i + ceil(n / 10), ..., the first in bits 27 to 29. Of any dtype with the same bytes where
             ``view_as_float`` was asked for
    scale    [n, 1]      float16, bfloat16 or float32
    zero     [n, 1]      a real number of the same dtype; W = (code - zero) * scale, each step rounded to that dtype
    shape    int64 [2]   out, in
    nbits, group_size, axis, quant_scale, quant_zero  one integer each
    bias     [out]       only where the linear has one
transformers tells of them in ``quantization_config``. hqq's own ``save_to_safetensors`` writes none: there each linear
alone tells, and ``stored_config`` asks it.
Groups along the output (``axis`` 0) are refused: the inputs of a group here are of one output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats.format import bias_from, method_of, names_from, require, scheme_from
from qserve.checkpoint.formats.read_only import ReadOnlyFormat
from qserve.checkpoint.grid import AFFINE
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme

_CODES = "W_q"
_SCHEME = ("nbits", "group_size", "axis")
_NUMBERS = (*_SCHEME, "quant_scale", "quant_zero")
_UNUSED = (
    "packing", "unpack_view_dtype", "view_as_float", "compute_dtype", "offload_meta", "encoded_state_dict",
    "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def stored_config(names: Iterable[str], read: Callable[[str], Tensor]) -> dict[str, Any] | None:
    """The ``quantization_config`` that hqq leaves out, from the tensors ``names`` of a model; None where none of them
    is in HQQ. Raises ``CheckpointError`` where a linear does not tell its scheme."""
    modules = [name.removesuffix(f".{_CODES}") for name in names if name.endswith(f".{_CODES}")]
    if not modules:
        return None
    given = {module: {part: _number(read(f"{module}.{part}")) for part in _SCHEME} for module in modules}
    return {
        "quant_method": "hqq",
        "quant_config": {module: {"weight_quant_params": params} for module, params in given.items()},
    }


@dataclass(frozen=True)
class HQQ(ReadOnlyFormat):
    """A ``Format``."""

    name: str = "hqq"
    parts: tuple[str, ...] = (_CODES, "scale", "zero", "shape", "bias", *_NUMBERS, *_UNUSED)
    marks: tuple[str, ...] = (_CODES,)
    symmetric_zeros: bool = False

    def spec_of(self, config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
        """``quant_config`` is of all modules, or of each by the end of its name, as ``skip_modules`` are; the numbers
        of layers may be left out of it."""
        given = config.get("quant_config")
        if not isinstance(given, dict) or not given:
            raise CheckpointError("HQQ configuration: quant_config must be an object")
        common = _scheme(given) if "weight_quant_params" in given else None
        each = {} if common else {end: _scheme(own) for end, own in given.items() if own is not None}
        weights = common or next(iter(each.values()), None)
        if weights is None:
            raise CheckpointError("HQQ configuration: quant_config quantizes nothing")
        skipped = set(names_from("HQQ", "skip_modules", config.get("skip_modules")))
        ignored, overrides = [], {}
        for module in dict.fromkeys(("lm_head", *modules)):
            own = next((each[end] for end in _ends(module) if end in each), common)
            if own is None or any(end in skipped for end in _ends(module)):
                ignored.append(module)
            elif own != weights:
                overrides[module] = own
        return QuantSpec(method_of(config, "hqq"), weights, overrides=overrides, ignored=tuple(ignored))

    def unpack(
        self, parts: Mapping[str, Tensor], scheme: WeightScheme, activations: ActivationScheme | None = None
    ) -> QuantizedWeight:
        out, inp = _shape(require(parts, "shape"))
        width = scheme.group_width(inp)
        expected = {"nbits": scheme.bits, "group_size": width, "axis": 1, "quant_scale": 0, "quant_zero": 0}
        for name, number in expected.items():
            if name in parts and (found := _number(parts[name])) != number:
                raise CheckpointError(f"{name} is {found}, expected {number}")
        if inp % width:
            raise CheckpointError(f"groups of {width} do not divide its input of {inp}")
        rows = out * inp // width
        scales, zeros = require(parts, "scale"), require(parts, "zero")
        if scales.dtype != zeros.dtype or zeros.dtype not in _DTYPES or {scales.numel(), zeros.numel()} != {rows}:
            raise CheckpointError(f"scale and zero are {scales.dtype} {list(scales.shape)} and {zeros.dtype} "
                                  f"{list(zeros.shape)}, expected {rows} floats of one dtype each")  # fmt: skip
        codes = _unpack(require(parts, _CODES), scheme.bits, rows, width).view(out, inp)
        weight = QuantizedWeight(
            scheme, codes, scales.float().view(out, -1), zeros.view(out, -1), bias=bias_from(parts, out)
        )
        weight.check()
        return weight

    def shape(
        self, scheme: WeightScheme, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[int, int]:
        return _shape(read("shape"))


def _ends(module: str) -> Iterator[str]:
    """``model.layers.0.mlp.up_proj``, ``layers.0.mlp.up_proj``, ...; then the same without numbers."""
    parts = module.split(".")
    for names in (parts, [part for part in parts if not part.isdecimal()]):
        for start in range(len(names)):
            yield ".".join(names[start:])


def _scheme(given: object) -> WeightScheme:
    params = given.get("weight_quant_params") if isinstance(given, dict) else None
    if not isinstance(params, dict):
        raise CheckpointError("HQQ configuration: weight_quant_params must be an object")
    if params.get("axis") != 1:
        raise CheckpointError(f"HQQ configuration: groups along axis {params.get('axis')} are not supported; quantize "
                              "the model again with axis=1")  # fmt: skip
    size = -1 if params.get("group_size") is None else params["group_size"]
    return scheme_from("HQQ", bits=params.get("nbits"), group_size=size, symmetric=False, dtype=AFFINE.name)


def _number(stored: Tensor) -> int:
    """-1 for what is no integer."""
    return int(stored) if stored.numel() == 1 and not stored.is_floating_point() else -1


def _shape(stored: Tensor) -> tuple[int, int]:
    sizes = [] if stored.is_floating_point() else stored.flatten()[:3].tolist()
    if len(sizes) != 2 or min(sizes) < 1:
        raise CheckpointError(f"shape is {sizes}, expected two sizes")
    return int(sizes[0]), int(sizes[1])


def _unpack(packed: Tensor, bits: int, rows: int, width: int) -> Tensor:
    """uint8 [rows, width]."""
    dtype, count = (torch.int32, 10) if bits == 3 else (torch.uint8, 8 // bits)
    stored, height = packed.flatten().view(torch.uint8), -(-rows // count)
    if len(stored) != height * width * dtype.itemsize:
        raise CheckpointError(f"{_CODES} has {len(stored)} bytes, {rows} groups of {width} at {bits} bits have "
                              f"{height * width * dtype.itemsize}")  # fmt: skip
    words = stored.view(dtype).view(height, width)
    fields = [(words >> bits * (count - 1 - i)) & ((1 << bits) - 1) for i in range(count)]
    return torch.cat(fields)[:rows].to(torch.uint8)
