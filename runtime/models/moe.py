"""The operations of a mixture of experts: the router, its choice, and the experts it chose."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.modules import Modules
from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows
from qserve.kernels.executor import Placement
from qserve.kernels.ops import Experts, ExpertSum, Linear, Op, Route
from qserve.kernels.ranks import ALONE
from qserve.runtime.models.moe_config import MoeConfig
from qserve.runtime.models.weights import Weight, Weights
from qserve.runtime.parallel.group import RankGroup


@dataclass(frozen=True)
class MoeBuffers:
    """The buffers that the experts of a decoder write.

    logits                     [tokens, experts] float32
    experts, weights           [tokens, top_k] int32 and float32
    gate_up, activated, parts  [tokens * top_k, …]: those of ``Experts``
    terms                      [tokens, top_k * hidden] float32: those of ``ExpertSum``, where ranks exchange them
    shared_gate_up, shared_activated, shared_gate  [tokens, …]: of the feed-forward that every token takes

    All ranks share parts and shared_activated, or each has its own; of shared_gate_up a rank has its own columns, and
    of shared_activated, too, where that is its own.
    """

    logits: Tensor
    experts: Tensor
    weights: Tensor
    gate_up: Tensor
    activated: Tensor
    parts: Tensor
    terms: Tensor
    shared_gate_up: Tensor
    shared_activated: Tensor
    shared_gate: Tensor

    @classmethod
    def allocate(
        cls, config: MoeConfig, hidden: int, placement: Placement, tokens: int, group: RankGroup
    ) -> MoeBuffers:
        def shared(rows: int, width: int) -> Tensor:
            return group.empty(rows, width, dtype=placement.activations, device=placement.device)

        def room(rows: int, width: int, dtype: torch.dtype = placement.activations) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=placement.device)

        choices, inner = tokens * config.top_k, config.inner
        own_shared = len(group.shard.part(config.shared))
        return cls(
            logits=room(tokens, config.count, torch.float32),
            experts=room(tokens, config.top_k, torch.int32),
            weights=room(tokens, config.top_k, torch.float32),
            gate_up=room(choices, 2 * inner),
            activated=room(choices, inner),
            parts=shared(choices, hidden),
            terms=room(tokens if _exchanges_terms(group) else 0, config.top_k * hidden, torch.float32),
            shared_gate_up=room(tokens, 2 * own_shared),
            shared_activated=shared(tokens, own_shared if group.apart else config.shared),
            shared_gate=room(tokens, 1),
        )

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))


def routed(
    config: MoeConfig, modules: Modules, weights: Weights, layer: str, x: Tensor, out: Tensor, buffers: MoeBuffers,
    group: RankGroup,
) -> list[Op]:
    """What the experts of ``layer`` that a token of ``x`` chooses add to ``out``. Each rank has some experts, whole.

    Where ranks gather, each then has the whole sum; where they reduce, ``out`` has what its own experts add, and only
    the first rank's ``out`` what was there before. ``RankGroup.reduce`` follows."""
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
    own = group.shard.part(config.count, 1)
    read = _read(config, modules, weights, layer, hidden, own)
    exchanges = _exchanges_terms(group)
    ops: list[Op] = [
        Linear(x, router, buffers.logits, router_bias),
        Route(
            buffers.logits, buffers.experts, buffers.weights, bias, config.sigmoid, config.renormalize, config.groups,
            config.top_groups, config.group_best, config.scale,
        ),
        Experts(
            x, read.gate_up, read.down, buffers.experts, buffers.weights, buffers.gate_up, buffers.activated,
            buffers.parts, out, accumulate=group.is_first or not group.reduces, function=config.function,
            gate_up_bias=read.gate_up_bias, down_bias=read.down_bias, ranks=ALONE if group.apart else group.ranks,
            total=config.count, first=own.start, terms=buffers.terms if exchanges else None,
        ),
    ]  # fmt: skip
    if exchanges:
        ops += [*group.reduce(buffers.terms), ExpertSum(buffers.terms, buffers.weights, out, accumulate=True)]
    return ops


def _exchanges_terms(group: RankGroup) -> bool:
    """Whether ranks send each other what every expert computed: no other sum has the bits of a single rank."""
    return group.apart and not group.reduces


@dataclass(frozen=True)
class _Read:
    """Gate and up projection of each expert as one weight [2 * inner, hidden], its down projection, and their biases
    float32 [experts, …] where experts have them."""

    gate_up: tuple[Weight, ...]
    down: tuple[Weight, ...]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def _read(
    config: MoeConfig, modules: Modules, weights: Weights, layer: str, hidden: int, own: range
) -> _Read:
    """The weights of the experts ``own``."""
    order = None
    if modules.alternating:  # all gates, then all of up
        order = torch.arange(2 * config.inner).view(-1, 2).T.flatten()
    stacked_up, stacked_down = (f"{layer}.{name}" for name in modules.stacked)
    if not weights.source.has(stacked_up):
        return _read_one_by_one(config, modules, weights, layer, hidden, own, order)
    gate_up, gate_up_bias = _read_stacked(config, modules, weights, stacked_up, 2 * config.inner, hidden, own)
    down, down_bias = _read_stacked(config, modules, weights, stacked_down, hidden, config.inner, own)
    if order is not None:
        gate_up = [weight[order] for weight in gate_up]
        gate_up_bias = None if gate_up_bias is None else gate_up_bias[:, order]
    return _Read(tuple(gate_up), tuple(down), gate_up_bias, down_bias)


def _read_stacked(
    config: MoeConfig, modules: Modules, weights: Weights, name: str, out: int, inp: int, own: range
) -> tuple[list[Tensor], Tensor | None]:
    shape = (inp, out) if modules.stacked_transposed else (out, inp)
    rows = None if len(own) == config.count else own
    each = list(weights.tensor(name, config.count, *shape, rows=rows).unbind())
    bias = weights.tensor(f"{name}_bias", config.count, out, rows=rows).float() if config.biases else None
    return [weight.T for weight in each] if modules.stacked_transposed else each, bias


def _read_one_by_one(
    config: MoeConfig, modules: Modules, weights: Weights, layer: str, hidden: int, own: range, order: Tensor | None
) -> _Read:
    """``order``: of the outputs of a joined gate and up projection."""
    gate_up, down, gate_up_bias, down_bias = [], [], [], []
    rows = 2 * config.inner // len(modules.expert_up)
    for e in own:
        expert = f"{layer}.{modules.experts}.{e}"
        ups = [weights.linear(f"{expert}.{name}", rows, hidden, rows=order) for name in modules.expert_up]
        last, last_bias = weights.linear(f"{expert}.{modules.expert_down}", hidden, config.inner)
        biases = [bias for _, bias in [*ups, (last, last_bias)] if bias is not None]
        if len(biases) != (len(ups) + 1) * config.biases:
            says = "lacks a bias" if config.biases else "has a bias, which no expert of its type has"
            raise CheckpointError(f"{weights.source.name}: {expert} {says}")
        gate_up.append(_joined([weight for weight, _ in ups], expert))
        down.append(last)
        if config.biases:
            gate_up_bias.append(torch.cat(biases[:-1]))
            down_bias.append(biases[-1])
    for each in (gate_up, down):
        if len(set(map(_kind, each))) > 1:
            raise CheckpointError(
                f"{weights.source.name}: the experts of {layer} are stored in different ways; all of a layer must be "
                "quantized alike"
            )
    return _Read(
        tuple(gate_up),
        tuple(down),
        torch.stack(gate_up_bias).float() if gate_up_bias else None,
        torch.stack(down_bias).float() if down_bias else None,
    )


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
