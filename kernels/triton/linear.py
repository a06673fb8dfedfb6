"""Linear products on the GPU: which kernel serves a weight, and that kernel made ready."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from qserve.checkpoint.grid import E2M1, E4M3, INTEGERS, TRELLIS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import ops
from qserve.kernels.triton import eight_bit
from qserve.kernels.triton.dense import multiply
from qserve.kernels.triton.prepack import field_bits, plane_bytes
from qserve.kernels.triton.target import Target
from qserve.kernels.triton.weight_only import WeightOnly
from qserve.kernels.triton.workspace import Workspace

MOST_WORDS = 2**31 - 2**24  # places are counted in 32 bits, padding included


class Product(Protocol):
    """A product made ready. ``run`` waits for nothing, and what it allocates comes from the pool of the CUDA graph that
    captures it."""

    def run(self, rows: int) -> None:
        """``op.out[:rows]`` from ``op.x[:rows]``."""
        ...


class DensePrepared:
    """A weight in floating point: cuBLAS."""

    def __init__(self, op: ops.Linear, device: torch.device) -> None:
        assert isinstance(op.weight, Tensor)
        self.op = op
        self.weight = op.weight.to(device, op.x.dtype)
        self.bias = None if op.bias is None else op.bias.to(device, op.out.dtype)

    def run(self, rows: int) -> None:
        multiply(self.op.x[:rows], self.weight, self.bias, self.op.out[:rows], self.op.accumulate)


def with_finer_inputs(op: ops.Op) -> ops.Op:
    """``op``, but inputs that would be rounded to four bits stay as they are: no kernel here does it."""
    match op:
        case ops.Linear():
            return replace(op, weight=_unrounded(op.weight))
        case ops.Experts():
            up, down = (tuple(map(_unrounded, weights)) for weights in (op.gate_up, op.down))
            return replace(op, gate_up=up, down=down)
    return op


def _unrounded(weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
    if isinstance(weight, Tensor) or weight.activations is None or weight.activations.grid is not E2M1:
        return weight
    return replace(weight, activations=None, input_scale=None)


def supports(weight: Tensor | QuantizedWeight, gpu: Target) -> str | None:
    """None, or why no kernel here multiplies by ``weight`` on ``gpu``."""
    if isinstance(weight, Tensor):
        return None
    if weight.scheme.grid not in (INTEGERS, E4M3, E2M1, TRELLIS):
        return f"{weight.scheme} weights"
    if weight.activations is not None and weight.scheme.grid is E2M1:
        return f"{weight.scheme} weights whose inputs are rounded"
    if weight.activations is not None:
        return eight_bit.supports(weight, gpu)
    if weight.scheme.grid is E4M3:
        return "FP8 weights whose inputs are not rounded to FP8"
    words = weight.out_features * weight.in_features * field_bits(weight.scheme) // 16
    if words >= MOST_WORDS:
        return f"a weight of {words:,} words of 16 bits: {MOST_WORDS:,} are the most that the kernel counts"
    return None


def packed_bytes(scheme: WeightScheme, activations: ActivationScheme | None, out: int, inp: int) -> int:
    """Bytes, at most, of a packed weight [out, in] as its product holds it, without an order of inputs."""
    if activations is None or activations.grid is E2M1:
        return plane_bytes(scheme, out, inp)
    return eight_bit.held_bytes(scheme, activations, out, inp)


def prepare(op: ops.Linear, memory: Workspace, batch_invariant: bool = False) -> Product:
    """``op`` made ready on the device of ``memory``, where ``op.x`` and ``op.out`` already live. All workspace is taken
    from ``memory`` now. Other products made ready with ``memory`` share it, so they must not overlap with this one.

    ``batch_invariant``: a row's result is bitwise the same in every batch, which costs speed at many rows.
    """
    made: WeightOnly | eight_bit.EightBit | DensePrepared
    if isinstance(op.weight, QuantizedWeight):
        kernel = WeightOnly if op.weight.activations is None else eight_bit.EightBit
        made = kernel(op, memory, batch_invariant)
    else:
        made = DensePrepared(op, memory.device)
    made.op = replace(op, weight=torch.empty(0))  # else the original weight would stay in memory too
    return made
