"""``LatentConfig``: the widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig


@dataclass(frozen=True)
class LatentConfig:
    """The parts of queries, keys and values. Names are those of transformers' configurations, and short here.

    Attributes:
        rank: numbers of a token's latent vector (``kv_lora_rank``), from which all heads make keys and values.
        q_rank: the same of queries (``q_lora_rank``); 0 where they come from the stream itself.
        nope: numbers of a query or key that come from the latent (``qk_nope_head_dim``).
        rope: numbers that are rotated, in keys the same for all heads (``qk_rope_head_dim``).
        value: numbers of a value (``v_head_dim``).
    """

    rank: int
    q_rank: int
    nope: int
    rope: int
    value: int

    @property
    def width(self) -> int:
        """Numbers that the cache keeps of a token."""
        return self.rank + self.rope


def latent_config(hf: PretrainedConfig) -> LatentConfig:
    return LatentConfig(
        rank=hf.kv_lora_rank,
        q_rank=hf.q_lora_rank or 0,
        nope=hf.qk_nope_head_dim,
        rope=hf.qk_rope_head_dim,
        value=hf.v_head_dim,
    )
