"""``Unpacked``: a model with packed weights, as if these were stored in its 16-bit dtype."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qserve.checkpoint.calibration_record import CalibrationRecord
from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats.format import Format
from qserve.checkpoint.grid import Grid
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.spec import QuantSpec, WeightScheme

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def is_in(source: ModelSource, *grids: Grid) -> bool:
    """Whether every packed weight is of one of ``grids``, and nothing was calibrated here: so are models published in
    fp8 (DeepSeek, Qwen), in MXFP4 (GPT-OSS), in bitsandbytes' 4 bits and in HQQ."""
    if source.spec is None or source.calibration is not None:
        return False
    schemes = [source.spec.scheme_of(module) for module in source.linears()]
    return bool(schemes) and all(scheme is not None and scheme.grid in grids for scheme in schemes)


class Unpacked:
    """``source`` without packed weights. One is dequantized whenever it is read."""

    spec: QuantSpec | None = None
    format: Format | None = None
    card: QualityCard | None = None
    calibration: CalibrationRecord | None = None

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.path, self.name, self.part_of = source.path, source.name, source.part_of
        self.config = {key: value for key, value in source.config.items() if key != "quantization_config"}
        self._packed = source.linears()
        self.stored_in = "" if source.spec is None else source.spec.weights.grid.name
        self._weights = {f"{module}.weight": module for module in self._packed}
        self._biases = {f"{module}.bias": module for module in self._packed if self._stores(f"{module}.bias")}

    def _stores(self, name: str) -> bool:
        """Whether ``name`` is a part of a packed module."""
        try:
            return not self._source.has(name) and bool(self._source.shape(name))
        except CheckpointError:
            return False

    def names(self) -> list[str]:
        return [*self._source.names(), *self._weights, *self._biases]

    def linears(self) -> list[str]:
        return []

    def has(self, name: str) -> bool:
        return name in self._weights or name in self._biases or self._source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._weights.get(name, name))

    def nbytes(self, name: str) -> int:
        if name in self._weights or name in self._biases:
            return math.prod(self.shape(name)) * self.dtype().itemsize
        return self._source.nbytes(name)

    def keeps_float32(self, name: str) -> bool:
        return self._source.has(name) and self._source.keeps_float32(name)

    def tensor(self, name: str, rows: range | None = None) -> Tensor:
        found: Tensor | None = None
        if name in self._weights:
            found = self._source.linear(self._weights[name]).dequantize()
        elif name in self._biases:
            found = self._source.linear(self._biases[name]).bias
        if found is None:
            return self._source.tensor(name, rows)
        return (found if rows is None else found[rows.start : rows.stop]).to(self.dtype())

    def stored(self, module: str) -> QuantizedWeight:
        """A packed weight as it is, for inputs that are not rounded."""
        return replace(self._source.linear(module), activations=None, input_scale=None)

    def scheme_of(self, module: str) -> WeightScheme | None:
        """How the weight of ``module`` is stored, None where it is in floating point."""
        spec = self._source.spec
        return None if spec is None or f"{module}.weight" not in self._weights else spec.scheme_of(module)

    def linear(self, module: str) -> QuantizedWeight:
        raise CheckpointError(f"{self.name} has no packed linear {module}")

    def dtype(self) -> torch.dtype:
        return self._source.dtype()

    def stored_bytes(self) -> int:
        return self._source.stored_bytes()

    def parameters(self) -> int:
        return self._source.parameters()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._source.tokenizer()

    def save_tokenizer(self, out: Path) -> None:
        self._source.save_tokenizer(out)

    def generation_config(self) -> dict[str, Any]:
        return self._source.generation_config()

    def sha256(self) -> str:
        return self._source.sha256()

    def verify(self) -> None:
        self._source.verify()
