"""``Buffers``: what the operations of a decoder write, and its rotations."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from qserve.kernels.executor import Placement
from qserve.runtime.models.config import DecoderConfig
from qserve.runtime.models.delta_net import DeltaBuffers
from qserve.runtime.models.latent import LatentBuffers
from qserve.runtime.models.moe import MoeBuffers
from qserve.runtime.models.rope import query_scale, rope_tables
from qserve.runtime.parallel.group import RankGroup


@dataclass(frozen=True)
class Buffers:
    """The buffers that the operations of a decoder write, and its rotations.

    x           [tokens, hidden_size] float32: the residual stream, divided by the family's residual multiplier
    sublayer    [tokens, hidden_size] float32: the output of a sublayer, where a norm follows
    normed, qkv, attended, gate_up, activated, gathered  [tokens, …]
    last        [rows, hidden_size] float32: the residual stream of the rows whose logits are wanted
    states      [rows, hidden_size]: the same behind the last norm
    logits      [rows, vocab_size] float32
    greedy      [rows] int32
    moe         the buffers of experts, None in models without
    latent      those of latent attention, which has no qkv
    delta       those of gated delta nets, None in models without
    gates       [tokens, …]: of heads, in families that have them
    heads       queries and keys of all ranks, where norms are of all heads together: [tokens, …] of each, and of both
    rotations   cosine and sine, float32 [positions, rotary_dim / 2], for each of the ``rope_kinds``
    q_scale     float32 [positions], or None
    hidden      [tokens, hidden_size] float32: copies of x as it is before some layers, where they are asked for

    Of qkv, gates and gate_up a rank has its own columns. All ranks share x, sublayer, attended, activated, and logits,
    or each has its own; then attended and activated have the rank's own columns, too, and gathered is memory for all.
    """

    x: Tensor
    sublayer: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    gate_up: Tensor
    activated: Tensor
    gathered: Tensor
    last: Tensor
    states: Tensor
    logits: Tensor
    greedy: Tensor
    moe: MoeBuffers | None
    latent: LatentBuffers | None
    delta: DeltaBuffers | None
    gates: Tensor
    heads: tuple[Tensor, Tensor, Tensor]
    rotations: dict[str | None, tuple[Tensor, Tensor]]
    q_scale: Tensor | None
    hidden: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        config: DecoderConfig,
        placement: Placement,
        *,
        tokens: int,
        rows: int,
        positions: int,
        group: RankGroup | None = None,
        hidden_layers: int = 0,
    ) -> Buffers:
        """``hidden_layers``: of how many the input is asked for."""
        device, dtype = placement.device, placement.activations
        hidden, inner = config.hidden_size, config.intermediate_size
        group = group or RankGroup()
        queries, keys = group.shard.heads(config.num_attention_heads, config.num_key_value_heads)
        own_inner = len(group.shard.part(inner))
        shared_inner = config.moe.shared if config.moe else 0
        states = config.delta.values if config.delta else 0
        rows = rows if group.stage.is_last else 0

        def activations(count: int, width: int) -> Tensor:
            return torch.empty(count, width, dtype=dtype, device=device)

        def shared(count: int, width: int, kind: torch.dtype = dtype) -> Tensor:
            return group.empty(count, width, dtype=kind, device=device)

        def rotation(kind: str | None) -> tuple[Tensor, Tensor]:
            cosine, sine = rope_tables(config, kind, positions)
            return cosine.to(device), sine.to(device)

        scale = query_scale(config, positions)
        gate_up = activations(tokens, 2 * own_inner if config.family.gated else own_inner)
        in_place = not config.family.gated and (group.shard.size == 1 or group.apart)
        divided = tokens if config.family.qk_norm == "all" and group.shard.size > 1 else 0
        behind = config.modules.attention_out_norm or config.modules.mlp_out_norm
        return cls(
            x=shared(tokens, hidden, torch.float32),
            sublayer=shared(tokens if behind else 0, hidden, torch.float32),
            normed=activations(tokens, hidden),
            qkv=activations(tokens, 0 if config.latent else (len(queries) + 2 * len(keys)) * config.head_dim),
            attended=shared(tokens, len(queries) * config.value_dim if group.apart else config.attended_size),
            gate_up=gate_up,
            activated=gate_up if in_place else shared(tokens, own_inner if group.apart else inner),
            gathered=activations(tokens, max(config.attended_size, inner, shared_inner, states) if group.apart else 0),
            last=torch.empty(rows, hidden, device=device),
            states=activations(rows, hidden),
            logits=shared(rows, config.vocab_size, torch.float32).zero_(),  # a classifier leaves them so
            greedy=torch.empty(rows, dtype=torch.int32, device=device),
            moe=MoeBuffers.allocate(config.moe, hidden, placement, tokens, group) if config.moe else None,
            latent=LatentBuffers.allocate(config.latent, len(queries), placement, tokens) if config.latent else None,
            delta=DeltaBuffers.allocate(config.delta, placement, tokens, group) if config.delta else None,
            gates=activations(tokens, len(queries) * config.head_dim if config.family.gated_heads else 0),
            heads=(
                shared(divided, config.q_size), shared(divided, config.kv_size),
                activations(divided, config.q_size + config.kv_size),
            ),
            rotations={kind: rotation(kind) for kind in set(config.rope_kinds)},
            q_scale=None if scale is None else scale.to(device),
            hidden=tuple(torch.empty(tokens, hidden, device=device) for _ in range(hidden_layers)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of activations and logits."""
        held = {id(x := getattr(self, field.name)): x for field in fields(self) if field.name != "q_scale"}
        parts = Tensor | MoeBuffers | LatentBuffers | DeltaBuffers
        own = sum(buffer.nbytes for buffer in held.values() if isinstance(buffer, parts))
        return own + sum(buffer.nbytes for buffer in (*self.hidden, *self.heads))
