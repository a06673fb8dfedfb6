"""The operations of a gated delta net between its projections: the convolution and the recurrence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.checkpoint.modules import Modules
from qserve.kernels.executor import Placement
from qserve.kernels.ops import CausalConv, GatedDelta, Op
from qserve.runtime.models.delta_config import DeltaConfig
from qserve.runtime.models.weights import Weights


@dataclass(frozen=True)
class DeltaBuffers:
    """projected  [tokens, DeltaConfig.projected]: the outputs of the projections
    out        [tokens, DeltaConfig.values]: the input of the last one
    """

    projected: Tensor
    out: Tensor

    @classmethod
    def allocate(cls, config: DeltaConfig, placement: Placement, tokens: int) -> DeltaBuffers:
        made = (
            torch.empty(tokens, width, dtype=placement.activations, device=placement.device)
            for width in (config.projected, config.values)
        )
        return cls(*made)

    @property
    def nbytes(self) -> int:
        return self.projected.nbytes + self.out.nbytes


def recurrence(
    config: DeltaConfig, modules: Modules, weights: Weights, layer: str, buffers: DeltaBuffers, conv: Tensor,
    state: Tensor, eps: float,
) -> list[Op]:
    """From ``projected`` to ``out``. ``conv`` and ``state``: those of ``DeltaConfig.state``, for each slot."""
    module = f"{layer}.{modules.delta}"
    kernel = weights.tensor(f"{module}.conv1d.weight", config.convolved, 1, config.width)
    rate, bias = (weights.tensor(f"{module}.{name}", config.heads).float() for name in ("A_log", "dt_bias"))
    norm = weights.tensor(f"{module}.norm.weight", config.value_dim).float()
    return [
        CausalConv(buffers.projected[:, : config.convolved], kernel[:, 0].float().T.contiguous(), conv),
        GatedDelta(buffers.projected, buffers.out, -rate.exp(), bias, norm, state, config.key_heads, eps),
    ]
