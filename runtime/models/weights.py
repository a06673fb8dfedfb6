"""``Weights``: the tensors of a checkpoint for the builders of operations, with their shapes checked."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.quantized_weight import QuantizedWeight, take_inputs, take_rows
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
        self, module: str, out: int, inp: int, *, rows: Tensor | None = None, inputs: range | None = None,
        transposed: bool = False,
    ) -> tuple[Weight, Tensor | None]:
        """The weight [out, in] of a linear without its bias, and the bias [out]. ``rows`` int64: these outputs alone,
        in this order. Of a dense weight no others are read if they follow each other. ``inputs``: these columns alone.
        ``transposed``: a dense weight is stored [in, out].

        Raises ``CheckpointError`` where ``inputs`` cut groups of a packed weight.
        """
        if module in self._quantized:
            packed = self._read_linear(module)
            if (packed.out_features, packed.in_features) != (out, inp):
                raise CheckpointError(
                    f"{self.source.name}: {module} is {packed.out_features}x{packed.in_features}, "
                    f"the configuration says {out}x{inp}"
                )
            packed = packed if rows is None else take_rows(packed, rows)
            packed = packed if inputs is None else take_inputs(packed, inputs)
            return replace(packed, bias=None), packed.bias
        shape = (inp, out) if transposed else (out, inp)
        part = None if rows is None or transposed else _consecutive(rows)
        weight = self.tensor(f"{module}.weight", *shape, rows=part)
        if transposed:
            weight = weight.T.contiguous()
        bias = self.tensor(f"{module}.bias", out) if self.source.has(f"{module}.bias") else None
        if rows is not None:
            weight, bias = weight if part else weight[rows], None if bias is None else bias[rows]
        if inputs is not None:
            weight = weight[:, inputs.start : inputs.stop].contiguous()
        return weight, bias

    def tensor(self, name: str, *shape: int, rows: range | None = None) -> Tensor:
        """A dense tensor of this ``shape``, contiguous; ``rows``: those alone, of its first dimension."""
        tensor = self._read(name, rows)
        found = tuple(tensor.shape) if rows is None else (self.source.shape(name)[0], *tensor.shape[1:])
        if found != shape:
            raise CheckpointError(f"{self.source.name}: {name} is {found}, the configuration says {shape}")
        return tensor.contiguous()

    def _read(self, name: str, rows: range | None) -> Tensor:
        return self.source.tensor(name) if rows is None else self.source.tensor(name, rows)

    def _read_linear(self, module: str) -> QuantizedWeight:
        return self.source.linear(module)


def _consecutive(rows: Tensor) -> range | None:
    """``rows`` as a range, where each follows the one before."""
    first = int(rows[0])
    return range(first, first + len(rows)) if torch.equal(rows, torch.arange(first, first + len(rows))) else None


class Headers(Weights):
    """The same without the numbers: tensors of the meta device, from headers alone. This does not see groups that are
    out of order."""

    def _read(self, name: str, rows: range | None) -> Tensor:
        return torch.empty(self.source.shape(name), dtype=self.source.dtype(), device="meta")

    def _read_linear(self, module: str) -> QuantizedWeight:
        spec = self.source.spec
        assert spec is not None
        scheme = spec.scheme_of(module) or spec.weights
        out, inp = self.source.shape(module)[:2]
        scales = torch.empty(out, scheme.groups(inp), device="meta")
        kind = torch.float32 if scheme.grid.real_zeros else torch.uint8
        zeros = None if scheme.symmetric else torch.empty(scales.shape, dtype=kind, device="meta")
        codes = torch.empty(out, inp, dtype=torch.uint8, device="meta")
        bias = torch.empty(out, device="meta") if self._stores(f"{module}.bias") else None
        return QuantizedWeight(scheme, codes, scales, zeros, bias=bias, activations=spec.activations_of(module))

    def _stores(self, part: str) -> bool:
        try:
            return bool(self.source.shape(part))
        except CheckpointError:
            return False
