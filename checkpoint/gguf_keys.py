"""``Facts``: the metadata and the shapes of a GGUF file, checked; and what the configurations of some families say of
them that others do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qserve.checkpoint.errors import CheckpointError

MAX_COUNT = 1 << 31
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Facts:
    """Keys of the metadata below the name of ``architecture``, and the shapes of the stored tensors (outermost first).
    A missing key without a default, and a value of another kind, raise ``CheckpointError`` naming the key."""

    architecture: str
    metadata: Mapping[str, Any]
    shapes: Shapes

    def number(self, name: str, default: float | None = None) -> float:
        """Numbers are stored as float32: 1e-05 comes back as 9.999999747378752e-06."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise CheckpointError(f"{self.architecture}.{name} must be one number, not {_short(value)}")
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def count(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_COUNT:
            raise CheckpointError(f"{self.architecture}.{name} must be one number that counts, not {_short(value)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.architecture}.{name} must be true or false, not {_short(value)}")
        return value

    def word(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.architecture}.{name} must be a word, not {_short(value)}")
        return value

    def windows(self, layers: int, period: int) -> list[bool]:
        """For each layer whether it has a window. All have one but every ``period``-th, where the file says nothing; it
        may say another period, or list them."""
        name = "attention.sliding_window_pattern"
        value = self._value(name, period)
        if isinstance(value, int):
            every = self.count(name, period)
            return [every == 0 or (i + 1) % every != 0 for i in range(layers)]
        listed = value.tolist() if hasattr(value, "tolist") else []
        if len(listed) != layers:
            raise CheckpointError(f"{self.architecture}.{name} must list {layers} layers, not say {_short(value)}")
        return [bool(item) for item in listed]

    @property
    def layers(self) -> int:
        """Blocks of the model, without those that predict more tokens; no more than there are tensors, of which each
        block has some."""
        return min(self.count("block_count") - self.count("nextn_predict_layers", 0), len(self.shapes))

    def has(self, tensor: str) -> bool:
        return tensor in self.shapes

    def _value(self, name: str, default: Any) -> Any:
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise CheckpointError(f"the GGUF metadata lacks {self.architecture}.{name}")
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def none(facts: Facts) -> dict[str, Any]:
    return {}


def granite(facts: Facts) -> dict[str, Any]:
    return {
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "attention_multiplier": facts.number("attention.scale"),
        "logits_scaling": facts.number("logit_scale", 1.0),
    }


def cohere(facts: Facts) -> dict[str, Any]:
    return {"logit_scale": facts.number("logit_scale")}


def gemma2(facts: Facts) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _scalar(facts, 46),
    }


def gemma3(facts: Facts) -> dict[str, Any]:
    """The base of the rotation in layers with a window is only in newer files; it is the same in all of them."""
    return {
        "final_logit_softcapping": facts.number("final_logit_softcapping", 0.0) or None,
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _scalar(facts, 62),
    }


def _scalar(facts: Facts, largest: int) -> float:
    """Scores are divided by its root: the size of a head, but in the model with ``largest`` layers, as llama.cpp has
    it."""
    if facts.count("block_count") == largest:
        return facts.count("embedding_length") // facts.count("attention.head_count")
    return facts.count("attention.key_length")


def falcon(facts: Facts) -> dict[str, Any]:
    heads, kv_heads = facts.count("attention.head_count"), facts.count("attention.head_count_kv", 1)
    two_norms = facts.has("blk.0.attn_norm_2.weight")
    new = two_norms or 1 < kv_heads < heads
    return {
        "new_decoder_architecture": new, "multi_query": kv_heads == 1, "parallel_attn": True, "alibi": False,
        "num_ln_in_parallel_attn": 2 if two_norms else 1 if new else None,
    }  # fmt: skip


def gpt_neox(facts: Facts) -> dict[str, Any]:
    return {"use_parallel_residual": facts.flag("use_parallel_residual", True)}


def stablelm(facts: Facts) -> dict[str, Any]:
    """Its key says True for all models. A parallel block has one norm."""
    return {"use_parallel_residual": not facts.has("blk.0.ffn_norm.weight")}


def phi3(facts: Facts) -> dict[str, Any]:
    return {
        "original_max_position_embeddings":
        facts.count("rope.scaling.original_context_length", facts.count("context_length"))
    }  # fmt: skip


def olmo(facts: Facts) -> dict[str, Any]:
    return {"clip_qkv": facts.number("attention.clamp_kqv", 0.0) or None}


def gpt_bigcode(facts: Facts) -> dict[str, Any]:
    return {"multi_query": facts.count("attention.head_count_kv", 1) == 1}


def deepseek_v2(facts: Facts) -> dict[str, Any]:
    grouped = facts.count("expert_group_count", 1) > 1
    return {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def glm4_moe_lite(facts: Facts) -> dict[str, Any]:
    """The configuration lists which layers have experts."""
    dense = facts.count("leading_dense_block_count", 0)
    return {"mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(facts.layers)]}


def qwen3_next(facts: Facts) -> dict[str, Any]:
    """Gated delta nets, in all layers but every fourth where the file says no other number."""
    heads, key_heads = facts.count("ssm.time_step_rank"), facts.count("ssm.group_count")
    values, every = facts.count("ssm.inner_size"), facts.count("full_attention_interval", 4)
    if not key_heads or not heads or heads % key_heads or values % heads or not every:
        raise CheckpointError(
            f"{values} values of {heads} linear heads over {key_heads} key heads, every layer {every} attending, are "
            "not supported"
        )
    return {
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
        "linear_key_head_dim": facts.count("ssm.state_size"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": values // heads,
        "layer_types": ["linear_attention" if (i + 1) % every else "full_attention" for i in range(facts.layers)],
    }
