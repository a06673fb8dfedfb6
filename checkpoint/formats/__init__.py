"""The on-disk formats by name, and which of them a configuration or a specification calls for."""

from __future__ import annotations

if not __name__.startswith("qserve."):
    raise ImportError(f"import this package as qserve.checkpoint.formats, not as {__name__}")

from collections.abc import Mapping
from typing import Any

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats.awq import AWQ
from qserve.checkpoint.formats.bitsandbytes import BitsAndBytes
from qserve.checkpoint.formats.compressed_tensors import CompressedTensors
from qserve.checkpoint.formats.format import Format
from qserve.checkpoint.formats.fp8 import FP8
from qserve.checkpoint.formats.gguf import GGUFBlocks
from qserve.checkpoint.formats.gptq import GPTQ
from qserve.checkpoint.formats.hqq import HQQ
from qserve.checkpoint.formats.modelopt import ModelOpt
from qserve.checkpoint.formats.mxfp4 import MXFP4
from qserve.checkpoint.formats.quark import Quark
from qserve.checkpoint.spec import QuantSpec, WeightScheme

GPTQ_V1, GPTQ_V2, COMPRESSED_TENSORS, GGUF = GPTQ("gptq"), GPTQ("gptq_v2"), CompressedTensors(), GGUFBlocks()
FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        GPTQ_V1, GPTQ_V2, AWQ(), COMPRESSED_TENSORS, FP8(), GGUF, MXFP4(), BitsAndBytes(), HQQ(), ModelOpt(), Quark()
    )
}


def format_named(name: str) -> Format:
    """Raises ``UsageError`` for a name that is not known."""
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of(config: Mapping[str, Any]) -> Format:
    """The format of a ``quantization_config``; raises ``CheckpointError`` for one we do not read."""
    method = config.get("quant_method", "gptq")
    if method == "gptq":
        method = "marlin" if config.get("is_marlin_format") else config.get("checkpoint_format") or "gptq"
        if method not in ("gptq", "gptq_v2"):
            raise CheckpointError(f"GPTQ checkpoint_format {method!r} is not supported; supported: gptq, gptq_v2")
    elif method == "squeezellm":
        raise CheckpointError("SqueezeLLM is not supported: its files are pickles, with a table of numbers for each "
                              "channel and a sparse part; quantize the original model")  # fmt: skip
    elif not isinstance(method, str) or method == "gptq_v2" or method not in FORMATS:
        known = ", ".join(name for name in FORMATS if name != "gptq_v2")
        raise CheckpointError(f"quant_method {method!r} is not supported; qserve reads {known}")
    return FORMATS[method]


def default_format(spec: QuantSpec) -> Format:
    """The format where none was asked for: GPTQ, which most loaders read, if it can express ``spec``."""
    if any(scheme.scale_bits or scheme.grid.real_zeros for scheme in _schemes(spec).values()):
        return GGUF
    if GPTQ_V1.limit(spec, schemes := _schemes(spec), shapes := dict.fromkeys(schemes, (32, 32))) is None:
        return GPTQ_V1
    if spec.act_order and GPTQ_V2.limit(spec, schemes, shapes) is None:
        return GPTQ_V2
    return COMPRESSED_TENSORS


def _schemes(spec: QuantSpec) -> dict[str, WeightScheme]:
    """Every scheme of ``spec``, each under the name of a module that has it."""
    return {"model.layers.0": spec.weights, **spec.overrides}
