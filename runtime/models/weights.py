"""``Weights``: the tensors of a checkpoint for the builders of operations, with their shapes checked."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.quantized_weight import QuantizedWeight, take_rows
from qserve.checkpoint.source import ModelSource

Weight = Tensor | QuantizedWeight


class Weights:
    """The weights of ``source``. Raises ``CheckpointError``, naming the tensor, if it is missing or misshapen."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._quantized = frozenset(source.linears())

    def has(self, module: str) -> bool:
        """Whether ``module`` has a weight of its own."""
        return module in self._quantized or self.source.has(f"{module}.weight")

    def is_quantized(self, module: str) -> bool:
        return module in self._quantized

    def linear(
        self, module: str, out: int, inp: int, *, rows: Tensor | None = None, transposed: bool = False
    ) -> tuple[Weight, Tensor | None]:
        """The weight [out, in] of a linear without its bias, and the bias [out]. ``rows`` int64 [out] puts the outputs
        in another order; ``transposed``: a dense weight is stored [in, out]."""
        if module in self._quantized:
            packed = self._read_linear(module)
            if (packed.out_features, packed.in_features) != (out, inp):
                raise CheckpointError(
                    f"{self.source.name}: {module} is {packed.out_features}x{packed.in_features}, "
                    f"the configuration says {out}x{inp}"
                )
            packed = packed if rows is None else take_rows(packed, rows)
            return replace(packed, bias=None), packed.bias
        shape = (inp, out) if transposed else (out, inp)
        weight = self.tensor(f"{module}.weight", *shape)
        if transposed:
            weight = weight.T.contiguous()
        bias = self.tensor(f"{module}.bias", out) if self.source.has(f"{module}.bias") else None
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        return weight, bias

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A dense tensor, contiguous."""
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.source.name}: {name} is {tuple(tensor.shape)}, the configuration says {shape}"
            )
        return tensor.contiguous()

    def _read(self, name: str) -> Tensor:
        return self.source.tensor(name)

    def _read_linear(self, module: str) -> QuantizedWeight:
        packed = self.source.linear(module)
        packed.check()
        return packed


class Headers(Weights):
    """The same without the numbers: tensors of the meta device, from headers alone. This does not see groups that are
    out of order."""

    def _read(self, name: str) -> Tensor:
        return torch.empty(self.source.shape(name), dtype=self.source.dtype(), device="meta")

    def _read_linear(self, module: str) -> QuantizedWeight:
        spec = self.source.spec
        assert spec is not None
        scheme = spec.scheme_of(module) or spec.weights
        out, inp = self.source.shape(module)[:2]
        scales = torch.empty(out, scheme.groups(inp), device="meta")
        zeros = None if scheme.symmetric else torch.empty(scales.shape, dtype=torch.uint8, device="meta")
        codes = torch.empty(out, inp, dtype=torch.uint8, device="meta")
        bias = torch.empty(out, device="meta") if self._stores(f"{module}.bias") else None
        return QuantizedWeight(scheme, codes, scales, zeros, bias=bias, activations=spec.activations_of(module))

    def _stores(self, part: str) -> bool:
        try:
            return bool(self.source.shape(part))
        except CheckpointError:
            return False
