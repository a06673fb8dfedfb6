"""Which neighbouring operations the C kernels compute as one: a norm with the products that read it, a product with the
activation of its outputs, or with their soft cap. The intermediate values are then never written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile

import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight, take_rows
from qserve.kernels.code_tiles import LANES
from qserve.kernels.ops import Activation, LayerNorm, Linear, Op, RMSNorm, SoftCap


@dataclass(frozen=True)
class FusedLinear:
    """``linear`` of its input normed by ``norm``, its outputs through ``activation`` or ``soft_cap``. If the activation
    is gated, the rows of the weight and of the bias alternate: 16 of the gate projection, 16 of the up projection."""

    linear: Linear
    norm: RMSNorm | LayerNorm | None = None
    activation: Activation | None = None
    soft_cap: SoftCap | None = None


def fuse(ops: Sequence[Op], has_kernel: Callable[[Op], bool] = lambda op: True) -> list[Op | FusedLinear]:
    """``ops`` in order, with neighbours fused where possible. An operation without a kernel stays as it is."""
    fused: list[Op | FusedLinear] = []
    norm: RMSNorm | LayerNorm | None = None
    for i, op in enumerate(ops):
        previous = fused[-1] if fused else None
        if isinstance(op, Linear) and has_kernel(op):
            fused.append(FusedLinear(op, norm if norm and norm.out is op.x else None))
            continue
        norm = None  # its products follow it directly
        if not has_kernel(op):
            fused.append(op)
        elif isinstance(op, RMSNorm | LayerNorm) and _is_for_products(op, ops[i + 1 :], has_kernel):
            norm = op
        elif isinstance(op, Activation | SoftCap) and isinstance(previous, FusedLinear) and _follows(op, previous):
            fused[-1] = _with(previous, op)
        else:
            fused.append(op)
    return fused


def _is_for_products(norm: RMSNorm | LayerNorm, behind: Sequence[Op], has_kernel: Callable[[Op], bool]) -> bool:
    """Whether only products read what ``norm`` writes, and they follow directly, before its input changes."""

    def is_product(op: Op) -> bool:
        return isinstance(op, Linear) and op.x is norm.out and op.out is not norm.x and has_kernel(op)

    if isinstance(norm, RMSNorm) and norm.accumulate:
        return False
    products = list(takewhile(is_product, behind))
    for op in behind[len(products) :]:
        if any(getattr(op, field.name) is norm.out for field in fields(op) if field.name != "out"):
            return False
        if getattr(op, "out", None) is norm.out:
            break
    return bool(products)


def _follows(op: Activation | SoftCap, product: FusedLinear) -> bool:
    """Whether ``op`` reads what ``product`` writes, and is the first to."""
    linear = product.linear
    if product.activation or product.soft_cap or linear.accumulate or op.width % LANES:
        return False
    return op.x is linear.out and (isinstance(op, Activation) or op.rows == linear.rows)


def _with(product: FusedLinear, op: Activation | SoftCap) -> FusedLinear:
    if isinstance(op, SoftCap):
        return replace(product, soft_cap=op)
    linear = _alternating(product.linear) if op.gated else product.linear
    return replace(product, linear=linear, activation=op)


def _alternating(linear: Linear) -> Linear:
    bias = None if linear.bias is None else alternate(linear.bias)
    return replace(linear, weight=alternating(linear.weight), bias=bias)


def alternating(weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
    """``weight`` of gates, then their factors, with the order of rows that a gated ``FusedLinear`` needs."""
    if isinstance(weight, Tensor):
        return alternate(weight)
    return take_rows(weight, alternate(torch.arange(weight.out_features)))


def alternate(rows: Tensor) -> Tensor:
    """Rows of gates, then of their factors, in the order of ``alternating``."""
    return rows.reshape(2, -1, LANES, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)
