"""The operations of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

All heads make keys and values from one latent vector of a token, by products of their own. Those are absorbed: queries
go through the product of the keys, and what attention gathers goes through that of the values. The cache then holds the
latent and the rotated key alone, and prompts and decodes are computed alike, so that their bits agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.kernels.executor import Placement
from qserve.kernels.ops import HeadLinear, LatentAttention, LatentKV, Op, RMSNorm
from qserve.runtime.models.config import DecoderConfig
from qserve.runtime.models.latent_config import LatentConfig
from qserve.runtime.models.row_order import Orders, element_order, part_of
from qserve.runtime.models.weights import Weights

NORM_EPS = 1e-6
"""The epsilon of the norms of both latents, whatever the configuration says of other norms."""

Product = Callable[[str, Sequence[str], Sequence[int], Tensor, Tensor, Orders], list[Op]]
"""(layer, linears, their outputs, input, out, orders of the outputs) -> the operations of these linears."""


@dataclass(frozen=True)
class LatentBuffers:
    """The buffers that latent attention writes, in the names of ``LatentConfig``. Heads are those of this rank; latents
    are whole.

    q_latent   [tokens, q_rank] float32, and q_normed, both of width 0 where there is no such latent
    q          [tokens, heads * (nope + rope)]
    kv         [tokens, rank + rope] float32
    absorbed   [tokens, heads * (rank + rope)]: the queries of the latent and of the rotated key
    gathered   [tokens, heads * rank]
    """

    q_latent: Tensor
    q_normed: Tensor
    q: Tensor
    kv: Tensor
    absorbed: Tensor
    gathered: Tensor

    @classmethod
    def allocate(cls, latent: LatentConfig, heads: int, placement: Placement, tokens: int) -> LatentBuffers:
        def room(width: int, dtype: torch.dtype = placement.activations) -> Tensor:
            return torch.empty(tokens, width, dtype=dtype, device=placement.device)

        return cls(
            q_latent=room(latent.q_rank, torch.float32),
            q_normed=room(latent.q_rank),
            q=room(heads * (latent.nope + latent.rope)),
            kv=room(latent.width, torch.float32),
            absorbed=room(heads * latent.width),
            gathered=room(heads * latent.rank),
        )

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))


def latent_attention(
    config: DecoderConfig, weights: Weights, layer: str, x: Tensor, buffers: LatentBuffers, attended: Tensor,
    cache: Tensor, rotation: tuple[Tensor, Tensor], product: Product, queries: range,
) -> list[Op]:
    """The attention of ``layer`` from its normed input ``x`` to ``attended`` [tokens, heads * value], before the linear
    behind it. ``queries``: the heads that are computed here; every rank has the whole latents."""
    latent, modules, heads = config.latent, config.modules, len(queries)
    assert latent is not None
    rank, nope, rope = latent.rank, latent.nope, latent.rope
    order = element_order(config, rope)
    of_head = torch.cat([torch.arange(nope), nope + order])
    of_queries = (torch.tensor(queries)[:, None] * (nope + rope) + of_head).flatten()
    of_kv = torch.cat([torch.arange(rank), rank + order])
    ops: list[Op] = []
    read, name = x, modules.qkv[0]
    if latent.q_rank:
        read, name = buffers.q_normed, modules.q_b
        norm = weights.tensor(f"{layer}.{modules.q_a_norm}.weight", latent.q_rank)
        ops += product(layer, [modules.q_a], [latent.q_rank], x, buffers.q_latent, [None])
        ops.append(RMSNorm(buffers.q_latent, norm, buffers.q_normed, NORM_EPS))
    all_queries = config.num_attention_heads * (nope + rope)
    ops += product(layer, [name], [all_queries], read, buffers.q, [of_queries])
    ops += product(layer, [modules.kv_a], [latent.width], x, buffers.kv, [of_kv])

    norm = weights.tensor(f"{layer}.{modules.kv_a_norm}.weight", rank)
    keys, values = _kv_b(weights, f"{layer}.{modules.kv_b}", config.num_attention_heads, queries, latent)
    q = buffers.q.view(-1, heads, nope + rope).split([nope, rope], -1)
    absorbed = buffers.absorbed.view(-1, heads, latent.width).split([rank, rope], -1)
    return [
        *ops,
        HeadLinear(q[0], keys, absorbed[0]),
        LatentKV(buffers.kv, norm, q[1], absorbed[1], *rotation, cache, NORM_EPS),
        LatentAttention(buffers.absorbed, buffers.gathered, cache, heads, config.attention_scale),
        HeadLinear(buffers.gathered.view(-1, heads, rank), values, attended.view(-1, heads, latent.value)),
    ]


def _kv_b(
    weights: Weights, module: str, heads: int, queries: range, latent: LatentConfig
) -> tuple[Tensor, Tensor]:
    """For each of ``queries`` among ``heads`` the product from a query to the latent [queries, rank, nope], which is
    that of the keys transposed, and from the latent to a value [queries, value, rank]. What is packed is dequantized:
    its scales are for the latent as input."""
    both = latent.nope + latent.value
    own = part_of(heads * both, range(queries.start * both, queries.stop * both))
    weight, _ = weights.linear(module, heads * both, latent.rank, rows=own)
    dense = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
    keys, values = dense.view(len(queries), both, latent.rank).split([latent.nope, latent.value], 1)
    return keys.transpose(1, 2).contiguous(), values.contiguous()
