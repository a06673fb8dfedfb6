"""``QuantizedWeight``: the one canonical form of a quantized weight.

On-disk formats convert to and from it; kernels prepack from it at load. It knows no format and no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.packed_codes import Packed, PackedCodes, join
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.checkpoint.trellis import PackedTrellis


@dataclass(frozen=True)
class QuantizedWeight:
    """W[o, i] = (number(codes[o, i]) - zeros[o, g(i)]) * scales[o, g(i)]. The scheme's grid gives the number: for
    integers the code itself, for fp8 the e4m3 number of that byte, for fp4 the e2m1 number of those four bits. Grids
    without zero points subtract nothing.

    stored       the codes [out, in], each in [0, 2**bits): uint8, or packed as a checkpoint holds them
    codes        uint8 [out, in]; packed ones are unpacked when they are first read, and held so from then on, but for
                 trellises
    scales       float32 [out, groups]; where the scheme shares a scale among outputs, their rows repeat it
    zeros        uint8 [out, groups], or None for a symmetric scheme (zero = 2**(bits-1)); floats where the grid has
                 real ones: then each step of ``dequantize`` is rounded to their dtype
    g_idx        int32 [in], the group of each input feature, or None for consecutive groups
    bias         float32 [out], or None
    activations  how the input of the product is rounded, or None where it is not
    input_scale  the scale of the input, where ``activations`` has a static one
    global_scale what NVFP4 multiplies scales by, so that they are e4m3 numbers, where that is known
    """

    scheme: WeightScheme
    stored: Tensor | Packed
    scales: Tensor
    zeros: Tensor | None = None
    g_idx: Tensor | None = None
    bias: Tensor | None = None
    activations: ActivationScheme | None = None
    input_scale: float | None = None
    global_scale: float | None = None

    @property
    def codes(self) -> Tensor:
        if isinstance(self.stored, PackedTrellis):  # it stays: codes do not tell the streams
            return self.stored.unpack()
        if isinstance(self.stored, PackedCodes):
            object.__setattr__(self, "stored", self.stored.unpack())
        assert isinstance(self.stored, Tensor)
        return self.stored

    @property
    def out_features(self) -> int:
        return int(self.stored.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.stored.shape[1])

    def check(self) -> None:
        """Raise ``CheckpointError`` where shapes, dtypes or values contradict the scheme."""
        out, inp = self.stored.shape
        groups = self.scheme.groups(inp)
        if isinstance(self.stored, Tensor):
            self._check_codes(self.stored)
        elif self.stored.bits != self.scheme.bits:
            raise CheckpointError(f"codes are packed in {self.stored.bits} bits, the scheme says {self.scheme.bits}")
        if tuple(self.scales.shape) != (out, groups):
            raise CheckpointError(f"scales are {tuple(self.scales.shape)}, expected {(out, groups)}")
        if not all(map(isfinite, torch.aminmax(self.scales))):
            raise CheckpointError("a scale is NaN or infinite")
        if self.zeros is None and not self.scheme.symmetric:
            raise CheckpointError("an asymmetric weight needs zero points")
        if self.zeros is not None and tuple(self.zeros.shape) != (out, groups):
            raise CheckpointError(f"zeros are {tuple(self.zeros.shape)}, expected {(out, groups)}")
        real = self.scheme.grid.real_zeros
        if self.zeros is not None and real and not bool(torch.isfinite(self.zeros).all()):
            raise CheckpointError("a zero point is NaN or infinite")
        if self.zeros is not None and not real and int(self.zeros.max()) > self.scheme.max_code:
            raise CheckpointError(f"a zero exceeds the {self.scheme.max_code} of {self.scheme.bits} bits")
        if self.g_idx is not None and (
            tuple(self.g_idx.shape) != (inp,) or int(self.g_idx.min()) < 0 or int(self.g_idx.max()) >= groups
        ):
            raise CheckpointError(f"g_idx must hold {inp} group numbers below {groups}")

        height = self.scheme.row_height(out)
        if height != 1 and not torch.equal(self.scales, self.block_scales().repeat_interleave(height, 0)[:out]):
            raise CheckpointError(f"scales differ within blocks of {height} outputs that share one")
        static = self.activations is not None and not self.activations.dynamic
        if static != (self.input_scale is not None):
            raise CheckpointError("a static activation scheme needs an input scale, and only it")
        if self.input_scale is not None and not 0 < self.input_scale < float("inf"):
            raise CheckpointError(f"the input scale is {self.input_scale}, it must be positive and finite")
        if self.g_idx is not None and int(self.g_idx.bincount().max()) > self.scheme.group_width(inp):
            raise CheckpointError(f"g_idx puts more than {self.scheme.group_width(inp)} inputs into one group")

    def _check_codes(self, codes: Tensor) -> None:
        if codes.dtype != torch.uint8:
            raise CheckpointError(f"codes must be uint8, not {codes.dtype}")
        nan = self.scheme.grid.nan
        if nan is not None and bool(((codes & 0x7F) == nan).any()):
            raise CheckpointError(f"an {self.scheme.dtype} weight is NaN")
        if int(codes.max()) > self.scheme.max_code:
            raise CheckpointError(f"a code exceeds the {self.scheme.max_code} of {self.scheme.bits} bits")

    def group_of_input(self) -> Tensor:
        """int64 [in]: the group that scales each input feature."""
        if self.g_idx is not None:
            return self.g_idx.to(torch.int64)
        return torch.arange(self.in_features, device=self.scales.device) // self.scheme.group_width(self.in_features)

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same weight in the memory of ``device``."""
        zeros, g_idx, bias = (None if t is None else t.to(device) for t in (self.zeros, self.g_idx, self.bias))
        stored, scales = self.stored.to(device), self.scales.to(device)
        return replace(self, stored=stored, scales=scales, zeros=zeros, g_idx=g_idx, bias=bias)

    def block_scales(self) -> Tensor:
        """float32 [ceil(out / rows), groups]: each scale once."""
        return self.scales[:: self.scheme.row_height(self.out_features)].contiguous()

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        group = self.group_of_input()
        # In place: for the largest linears each buffer is a quarter of a gigabyte.
        numbers = self.scheme.grid.numbers(self.codes)
        if self.scheme.grid.real_zeros:
            assert self.zeros is not None
            dtype = self.zeros.dtype
            return numbers.to(dtype).sub_(self.zeros[:, group]).mul_(self.scales.to(dtype)[:, group]).float()
        if self.zeros is not None:
            numbers.sub_(self.zeros.to(torch.float32)[:, group])
        elif self.scheme.grid.zero_points:
            numbers.sub_(float(self.scheme.zero))
        return numbers.mul_(self.scales[:, group])


def concat_rows(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Stack weights that share an input (q, k, v) into one fused weight [sum of out, in].

    Raises ``ValueError`` where the schemes or the groups of inputs differ; the caller then keeps them apart.
    """
    first = parts[0]
    for part in parts[1:]:
        same_groups = (part.g_idx is None) == (first.g_idx is None) and (
            part.g_idx is None or first.g_idx is None or torch.equal(part.g_idx, first.g_idx)
        )
        same_inputs = part.activations == first.activations and part.input_scale == first.input_scale
        same_scheme = replace(part.scheme, rows=1) == replace(first.scheme, rows=1)
        if not (same_scheme and part.in_features == first.in_features and same_groups and same_inputs):
            raise ValueError("these weights cannot be fused: their schemes differ")
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat([torch.zeros(p.out_features) if p.bias is None else p.bias for p in parts])
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([torch.full_like(p.scales, p.scheme.zero).to(torch.uint8) if p.zeros is None
                           else p.zeros for p in parts])
    return QuantizedWeight(
        scheme=replace(first.scheme, rows=1),  # the rows that shared a scale may no longer form whole blocks
        stored=join([p.stored for p in parts]),
        scales=torch.cat([p.scales for p in parts]),
        zeros=zeros,
        g_idx=first.g_idx,
        bias=bias,
        activations=first.activations,
        input_scale=first.input_scale,
    )


def take_rows(weight: QuantizedWeight, rows: Tensor) -> QuantizedWeight:
    """The outputs ``rows`` (int64) of ``weight``, in their order."""
    return replace(
        weight,
        scheme=replace(weight.scheme, rows=1),  # the rows that shared a scale may no longer form whole blocks
        stored=weight.stored[rows],
        scales=weight.scales[rows],
        zeros=None if weight.zeros is None else weight.zeros[rows],
        bias=None if weight.bias is None else weight.bias[rows],
    )


def in_order(weight: QuantizedWeight) -> QuantizedWeight:
    """``weight``, without its ``g_idx`` if that only names consecutive groups."""
    if weight.g_idx is None:
        return weight
    plain = replace(weight, g_idx=None)
    return plain if torch.equal(plain.group_of_input(), weight.group_of_input()) else weight


def take_inputs(weight: QuantizedWeight, inputs: range) -> QuantizedWeight:
    """The terms of ``weight`` that these inputs give: whole groups, or a part of the only one.

    Raises ``CheckpointError`` where they cut a group, or where groups do not follow the order of inputs.
    """
    scheme, whole = weight.scheme, weight.in_features
    width = scheme.group_width(whole)
    if weight.g_idx is not None or not all(scheme.can_cut(whole, at) for at in (inputs.start, inputs.stop)):
        raise CheckpointError(f"inputs {inputs.start} to {inputs.stop} are not whole groups of {width} inputs")
    part = slice(inputs.start // width, -(-inputs.stop // width))
    return replace(
        weight,
        stored=_columns(weight, inputs),
        scales=weight.scales[:, part].contiguous(),
        zeros=None if weight.zeros is None else weight.zeros[:, part].contiguous(),
        g_idx=None,
    )


def _columns(weight: QuantizedWeight, inputs: range) -> Tensor | PackedTrellis:
    part = slice(inputs.start, inputs.stop)
    if isinstance(weight.stored, PackedTrellis):  # an input has streams of its own
        return replace(weight.stored, streams=weight.stored.streams[:, part].contiguous())
    return weight.codes[:, part].contiguous()
