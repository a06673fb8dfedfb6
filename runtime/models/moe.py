"""The operations of a mixture of experts: the router, its choice, and the experts it chose."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.modules import Modules
from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows
from qserve.kernels.ops import Experts, Linear, Op, Placement, Route
from qserve.runtime.models.moe_config import MoeConfig
from qserve.runtime.models.weights import Weight, Weights


@dataclass(frozen=True)
class MoeBuffers:
    """The buffers that the experts of a decoder write.

    logits                     [tokens, experts] float32
    experts, weights           [tokens, top_k] int32 and float32
    gate_up, activated, parts  [tokens * top_k, …]: those of ``Experts``
    shared_gate_up, shared_activated, shared_gate  [tokens, …]: of the feed-forward that every token takes
    """

    logits: Tensor
    experts: Tensor
    weights: Tensor
    gate_up: Tensor
    activated: Tensor
    parts: Tensor
    shared_gate_up: Tensor
    shared_activated: Tensor
    shared_gate: Tensor

    @classmethod
    def allocate(cls, config: MoeConfig, hidden: int, placement: Placement, tokens: int) -> MoeBuffers:
        def room(rows: int, width: int, dtype: torch.dtype = placement.activations) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=placement.device)

        choices, inner = tokens * config.top_k, config.inner
        return cls(
            logits=room(tokens, config.count, torch.float32),
            experts=room(tokens, config.top_k, torch.int32),
            weights=room(tokens, config.top_k, torch.float32),
            gate_up=room(choices, 2 * inner),
            activated=room(choices, inner),
            parts=room(choices, hidden),
            shared_gate_up=room(tokens, 2 * config.shared),
            shared_activated=room(tokens, config.shared),
            shared_gate=room(tokens, 1),
        )

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))


def routed(
    config: MoeConfig, modules: Modules, weights: Weights, layer: str, x: Tensor, out: Tensor, buffers: MoeBuffers
) -> list[Op]:
    """What the experts of ``layer`` that a token of ``x`` chooses add to ``out``."""
    hidden = x.shape[1]
    router, router_bias = weights.linear(f"{layer}.{modules.router}", config.count, hidden)
    bias = None
    if config.score_bias:
        name = f"{layer}.{modules.score_bias}"
        bias = weights.tensor(name, *weights.source.shape(name)).flatten().float()  # some store it as a row
        if len(bias) != config.count:
            raise CheckpointError(
                f"{weights.source.name}: {layer} has {len(bias)} score biases for {config.count} experts"
            )
    gate_up, down = _read(config, modules, weights, layer, hidden)
    return [
        Linear(x, router, buffers.logits, router_bias),
        Route(
            buffers.logits, buffers.experts, buffers.weights, bias, config.sigmoid, config.renormalize, config.groups,
            config.top_groups, config.group_best, config.scale,
        ),
        Experts(
            x, gate_up, down, buffers.experts, buffers.weights, buffers.gate_up, buffers.activated, buffers.parts, out,
            accumulate=True,
        ),
    ]  # fmt: skip


def _read(
    config: MoeConfig, modules: Modules, weights: Weights, layer: str, hidden: int
) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Gate and up projection of each expert as one weight, and its down projection."""
    count, inner = config.count, config.inner
    stacked_up, stacked_down = (f"{layer}.{name}" for name in modules.stacked)
    if weights.source.has(stacked_up):
        up = weights.tensor(stacked_up, count, 2 * inner, hidden)
        return up.unbind(), weights.tensor(stacked_down, count, hidden, inner).unbind()
    gate_up, down = [], []
    for e in range(count):
        expert = f"{layer}.{modules.experts}.{e}"
        names = [f"{expert}.{name}" for name in modules.expert_up]
        gate_up.append(_joined([_read_linear(weights, name, inner, hidden) for name in names], expert))
        down.append(_read_linear(weights, f"{expert}.{modules.expert_down}", hidden, inner))
    for each in (gate_up, down):
        if len(set(map(_kind, each))) > 1:
            raise CheckpointError(
                f"{weights.source.name}: the experts of {layer} are stored in different ways; all of a layer must be "
                "quantized alike"
            )
    return tuple(gate_up), tuple(down)


def _read_linear(weights: Weights, module: str, out: int, inp: int) -> Weight:
    weight, bias = weights.linear(module, out, inp)
    if bias is not None:
        raise CheckpointError(f"{weights.source.name}: {module} has a bias, which no served expert has")
    return weight


def _joined(parts: list[Weight], expert: str) -> Weight:
    dense = [part for part in parts if isinstance(part, Tensor)]
    packed = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(dense) == len(parts) and len({part.dtype for part in dense}) == 1:
        return torch.cat(dense)
    try:
        if len(packed) == len(parts):
            return concat_rows(packed)
    except ValueError:
        pass
    raise CheckpointError(f"the gate and up projections of {expert} must be quantized alike, they share one product")


def _kind(weight: Weight) -> object:
    return weight.dtype if isinstance(weight, Tensor) else (weight.scheme, weight.activations, weight.zeros is None)
