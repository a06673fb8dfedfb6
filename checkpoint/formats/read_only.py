"""``ReadOnlyFormat``: the half of a ``Format`` that writes, where a format is read alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats.format import Schemes, Shapes
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import QuantSpec, WeightScheme


class ReadOnlyFormat:
    """``name``: of the format."""

    name: str

    def limit(self, spec: QuantSpec, schemes: Schemes, shapes: Shapes) -> str | None:
        return self._advice(spec.weights)

    def config_of(self, spec: QuantSpec) -> dict[str, Any]:
        raise UsageError(self._advice(spec.weights))

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        raise CheckpointError(self._advice(weight.scheme))

    def _advice(self, scheme: WeightScheme) -> str:
        return f"the {self.name} format is read, not written: choose another for {scheme}"
