"""The operations of a gated delta net between its projections: the convolution and the recurrence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.checkpoint.modules import Modules
from qserve.kernels.executor import Placement
from qserve.kernels.ops import CausalConv, GatedDelta, Op
from qserve.runtime.models.delta_config import DeltaConfig, places
from qserve.runtime.models.weights import Weights
from qserve.runtime.parallel.group import RankGroup
from qserve.runtime.parallel.shard import Shard


@dataclass(frozen=True)
class DeltaBuffers:
    """projected  [tokens, DeltaConfig.projected]: the outputs of the projections, of this rank's heads
    out        [tokens, DeltaConfig.values]: the input of the last one. All ranks share it, or each has its own columns
    """

    projected: Tensor
    out: Tensor

    @classmethod
    def allocate(cls, config: DeltaConfig, placement: Placement, tokens: int, group: RankGroup) -> DeltaBuffers:
        dtype, device, own = placement.activations, placement.device, config.part(group.shard)
        values = own.values if group.apart else config.values
        return cls(
            torch.empty(tokens, own.projected, dtype=dtype, device=device),
            group.empty(tokens, values, dtype=dtype, device=device),
        )

    @property
    def nbytes(self) -> int:
        return self.projected.nbytes + self.out.nbytes


def recurrence(
    config: DeltaConfig, shard: Shard, modules: Modules, weights: Weights, layer: str, projected: Tensor, out: Tensor,
    conv: Tensor, state: Tensor, eps: float,
) -> list[Op]:
    """The heads of a rank, from ``projected`` to its columns ``out``. ``conv`` and ``state``: those of
    ``DeltaConfig.state`` of its part, for each slot."""
    module, part, own = f"{layer}.{modules.delta}", config.part(shard), config.own(shard)
    kernel = weights.tensor(f"{module}.conv1d.weight", config.convolved, 1, config.width)[places(own[:3])]
    heads = own[-1][1]
    rate, bias = (
        weights.tensor(f"{module}.{name}", config.heads)[heads.start : heads.stop].float()
        for name in ("A_log", "dt_bias")
    )
    norm = weights.tensor(f"{module}.norm.weight", config.value_dim).float()
    return [
        CausalConv(projected[:, : part.convolved], kernel[:, 0].float().T.contiguous(), conv),
        GatedDelta(projected, out, -rate.exp(), bias, norm, state, part.key_heads, eps),
    ]
