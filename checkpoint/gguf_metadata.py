"""``metadata_of``: what a GGUF file says of a model, from its configuration.

It is the inverse of ``gguf_config``, which reads what this writes: a configuration that does not come back is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.families import FAMILIES, Experts, Family, Gguf, transformers_config
from qserve.checkpoint.gguf_config import LONG, ROPE_FACTORS, SHORT, SIGMOID, SOFTMAX, config_of, llama3_factors
from qserve.checkpoint.gguf_keys import Shapes

_UNSAID = ("architectures", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "model_type", "multi_query")
"""Keys of a configuration that do not change what the model computes, or are compared by what follows from them."""

_COMPARED = ("hidden_act", "layer_types", "rope_parameters", "no_rope_layers")
"""Keys that change it, and of which files say nothing."""


def writable(config: Mapping[str, Any], name: str) -> tuple[Family, Gguf]:
    """The family of ``config`` and how files store it. Raises ``UsageError`` for one that is not written."""
    kind = str(config.get("model_type"))
    family = FAMILIES.get(kind)
    if family is None or family.gguf is None:
        raise UsageError(f"{name} is of type {kind}, of which llama.cpp's files are not known")
    special = {"latent attention": family.latent, "attention sinks": family.sinks}
    if has := [what for what, there in special.items() if there]:
        raise UsageError(f"{name} has {has[0]}: GGUF files of such models are read, but not written")
    return family, family.gguf


def metadata_of(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The keys of the model, and the tensors that belong to them rather than to its weights (factors of rotations,
    float32). Raises ``UsageError`` for a model that GGUF files are not written of."""
    family, gguf = writable(config, name)
    hf = _completed(config, name)
    hidden, heads = int(hf.hidden_size), int(hf.num_attention_heads)
    head_dim = int(hf.head_dim)
    said: dict[str, Any] = {
        "vocab_size": int(hf.vocab_size),
        "context_length": int(hf.max_position_embeddings),
        "embedding_length": hidden,
        "block_count": int(hf.num_hidden_layers),
        "feed_forward_length": int(hf.intermediate_size),
        "attention.head_count": heads,
        "attention.head_count_kv": int(getattr(hf, "num_key_value_heads", None) or heads),
        "attention.layer_norm_epsilon" if family.layer_norm else "attention.layer_norm_rms_epsilon":
            float(hf.rms_norm_eps),
    }  # fmt: skip
    if head_dim * heads != hidden or config.get("head_dim"):
        said |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    tensors: dict[str, Tensor] = {}
    if family.modules(config).positions is None:
        rotation, tensors = _rotation(hf, family, gguf, head_dim)
        said |= rotation
    if family.sliding:
        said |= _windows(hf, family)
    if family.experts is not None:
        said |= _experts(hf, family.experts)
    said |= _SAYS.get(gguf.architecture, lambda hf: {})(hf)
    return {f"{gguf.architecture}.{key}": value for key, value in said.items()}, tensors


def check_read_back(
    config: Mapping[str, Any], metadata: Mapping[str, Any], shapes: Shapes, tensors: Mapping[str, Tensor], name: str
) -> None:
    """Raise ``UsageError`` where the metadata would be read as another model than that of ``config``."""
    family, gguf = writable(config, name)
    try:
        found = config_of(metadata, shapes, lambda tensor: tensors[tensor])
    except CheckpointError as error:
        raise UsageError(f"{name} cannot be written as GGUF: {error}") from None
    read, wanted = (_completed(each, name) for each in (found, config))
    if found["model_type"] != config["model_type"]:
        raise UsageError(f"{name} cannot be written as GGUF: it would be read as {found['model_type']}")
    ours = {own: llamas for llamas, own in gguf.names.items() if llamas in family.keys(wanted.to_dict())}
    keys = [ours.get(key, key) for key in found if key not in _UNSAID]
    for key in dict.fromkeys((*keys, *_COMPARED, *family.served)):
        has = getattr(wanted, key, None)
        if not _alike(getattr(read, key, None), has):
            raise UsageError(f"{name} cannot be written as GGUF, whose metadata do not hold its {key} ({has!r})")


def _completed(config: Mapping[str, Any], name: str) -> Any:
    """With what is left unsaid where it follows from the rest."""
    hf = transformers_config(config, name)
    if not getattr(hf, "head_dim", None):
        hf.head_dim = hf.hidden_size // hf.num_attention_heads
    if getattr(hf, "partial_rotary_factor", None) is None:
        hf.partial_rotary_factor = 1.0
    return hf


def _alike(a: Any, b: Any) -> bool:
    """Numbers are stored as float32."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = {key for key in (*a, *b) if (a.get(key) is not None) or (b.get(key) is not None)}
        return all(_alike(a.get(key), b.get(key)) for key in keys)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) <= 1e-5 * max(abs(a), abs(b))
    return bool(a == b) or not (a or b)


def _rotation(hf: Any, family: Family, gguf: Gguf, head_dim: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    rope = dict(hf.rope_parameters)
    said: dict[str, Any] = {}
    if "full_attention" in rope:
        if "sliding_attention" in rope:
            said["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = dict(rope["full_attention"])
    theta, kind = float(rope["rope_theta"]), rope.get("rope_type", "default")
    partial = rope.get("partial_rotary_factor", 1.0) if family.partial_rotary else 1.0
    said |= {"rope.freq_base": theta, "rope.dimension_count": int(head_dim * partial)}
    if kind == "default":
        return said, {}
    if kind == "longrope":
        factors = {LONG: rope["long_factor"], SHORT: rope["short_factor"]}
        original = int(hf.original_max_position_embeddings)
        grown = max(1.0, hf.max_position_embeddings / original)
        gain = rope.get("attention_factor") or math.sqrt(1 + math.log(grown) / math.log(original))
        said["rope.scaling.attn_factor"] = float(gain)
        return said, {name: torch.tensor(values, dtype=torch.float32) for name, values in factors.items()}
    original = rope.get("original_max_position_embeddings") or 0
    if kind == "llama3":
        said["rope.scaling.original_context_length"] = int(original)
        rule = llama3_factors(
            theta, head_dim, rope["factor"], int(original), rope["low_freq_factor"], rope["high_freq_factor"]
        )
        return said, {ROPE_FACTORS: rule}
    if kind not in ("linear", "yarn"):
        raise UsageError(f"GGUF files have no rope scaling of type {kind!r}")
    said |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        said |= {"rope.scaling.original_context_length": int(original)} if original else {}
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"),
                             ("yarn_log_multiplier", "mscale_all_dim")):  # fmt: skip
            said |= {f"rope.scaling.{theirs}": float(rope[ours])} if rope.get(ours) else {}
        growth = rope.get("llama_4_scaling_beta")
        said |= {"attention.temperature_scale": float(growth)} if growth else {}
    return said, {}


def _windows(hf: Any, family: Family) -> dict[str, Any]:
    window = getattr(hf, "sliding_window", None)
    if not window or (family.window_asked and not getattr(hf, "use_sliding_window", False)):
        return {}
    said: dict[str, Any] = {"attention.sliding_window": int(window)}
    inside = [kind == "sliding_attention" for kind in getattr(hf, "layer_types", None) or ()]
    if family.sliding > 1 and inside != [(i + 1) % family.sliding != 0 for i in range(len(inside))]:
        said["attention.sliding_window_pattern"] = np.array(inside)
    return said


def _experts(hf: Any, experts: Experts) -> dict[str, Any]:
    def number(key: str | None) -> int:
        return int(getattr(hf, key, None) or 0) if key else 0

    said: dict[str, Any] = {
        "expert_count": next(number(key) for key in experts.count if hasattr(hf, key)),
        "expert_used_count": number(experts.top_k),
        "expert_feed_forward_length": number(experts.inner),
        "expert_gating_func": SIGMOID if experts.sigmoid else SOFTMAX,
    }
    if experts.shared_inner:
        said["expert_shared_feed_forward_length"] = number(experts.shared_inner)
    if experts.shared_count:
        said["expert_shared_count"] = number(experts.shared_count)
    if experts.dense_layers:
        said["leading_dense_block_count"] = number(experts.dense_layers)
    renormalized = experts.renormalize
    said["expert_weights_norm"] = bool(hf.norm_topk_prob) if renormalized is None else renormalized
    if experts.scale:
        said["expert_weights_scale"] = float(getattr(hf, experts.scale))
    if experts.groups:
        said |= {"expert_group_count": number("n_group") or 1, "expert_group_used_count": number("topk_group") or 1}
    return said


def _granite(hf: Any) -> dict[str, Any]:
    return {
        "embedding_scale": float(hf.embedding_multiplier), "residual_scale": float(hf.residual_multiplier),
        "attention.scale": float(hf.attention_multiplier), "logit_scale": float(hf.logits_scaling),
    }  # fmt: skip


def _cohere(hf: Any) -> dict[str, Any]:
    return {"logit_scale": float(hf.logit_scale)}


def _gemma(hf: Any) -> dict[str, Any]:
    caps = {key: getattr(hf, key, None) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {key: float(cap) for key, cap in caps.items() if cap}


def _parallel(hf: Any) -> dict[str, Any]:
    return {"use_parallel_residual": bool(hf.use_parallel_residual)}


def _phi3(hf: Any) -> dict[str, Any]:
    return {"rope.scaling.original_context_length": int(hf.original_max_position_embeddings)}


def _olmo(hf: Any) -> dict[str, Any]:
    return {"attention.clamp_kqv": float(hf.clip_qkv)} if hf.clip_qkv else {}


def _delta(hf: Any) -> dict[str, Any]:
    """Layers attend at a fixed interval. A position has three axes, alike for text, which share the rotated pairs."""
    full = [layer for layer, kind in enumerate(hf.layer_types) if kind == "full_attention"]
    rotated = int(hf.head_dim * hf.rope_parameters.get("partial_rotary_factor", 1.0))
    pairs = rotated // 2
    shared = [(pairs + 2 - axis) // 3 for axis in range(3)]
    sections = [*(hf.rope_parameters.get("mrope_section") or shared), 0][:4]
    heads = int(hf.linear_num_value_heads)
    return {
        "ssm.conv_kernel": int(hf.linear_conv_kernel_dim), "ssm.state_size": int(hf.linear_key_head_dim),
        "ssm.group_count": int(hf.linear_num_key_heads), "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * int(hf.linear_value_head_dim),
        "full_attention_interval": full[0] + 1 if full else len(hf.layer_types) + 1,
        "rope.dimension_sections": np.array(sections, np.int32),
    }  # fmt: skip


_SAYS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "granite": _granite, "granitemoe": _granite, "command-r": _cohere, "cohere2": _cohere, "gemma2": _gemma,
    "gemma3": _gemma, "gptneox": _parallel, "stablelm": _parallel, "phi3": _phi3, "olmo": _olmo,
    "qwen35": _delta, "qwen35moe": _delta, "qwen3next": _delta,
}  # fmt: skip
"""What files of an architecture say that others do not: the inverses of ``Gguf.says``."""

