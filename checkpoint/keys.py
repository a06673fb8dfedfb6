"""Configurations in the keys of Llama's: what a family writes under keys of its own, and what it leaves unsaid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
"""The content of a config.json, with or without what transformers would add."""
Names = Mapping[str, str]
"""Keys of a family's configuration by Llama's."""

GEMMA2: Names = {"hidden_act": "hidden_activation"}
LAYER_NORM: Names = {"rms_norm_eps": "layer_norm_eps"}
GPT_NEOX: Names = {**LAYER_NORM, "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
NEMOTRON: Names = {"rms_norm_eps": "norm_eps"}
ERNIE4_5: Names = {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
STARCODER2: Names = {**ERNIE4_5, "rms_norm_eps": "norm_epsilon"}
STABLELM: Names = {**LAYER_NORM, "attention_bias": "use_qkv_bias", "use_qk_norm": "qk_layernorm"}
FALCON: Names = {
    "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation", "num_key_value_heads": "num_kv_heads",
    "attention_bias": "bias", "mlp_bias": "bias", "intermediate_size": "ffn_hidden_size",
}  # fmt: skip
OPT: Names = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
GPT2: Names = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions", "intermediate_size": "n_inner", "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}  # fmt: skip
GPT_NEO: Names = {
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function", "sliding_window": "window_size", "intermediate_size": "intermediate_size",
}  # fmt: skip


def gemma2(config: Config) -> dict[str, Any]:
    return _renamed(config, GEMMA2)


def attention_biased(config: Config) -> dict[str, Any]:
    """A missing ``attention_bias`` means that there is one."""
    return {"attention_bias": config.get("attention_bias", True)}


def ernie4_5(config: Config) -> dict[str, Any]:
    return _renamed(config, ERNIE4_5)


def deepseek_v2(config: Config) -> dict[str, Any]:
    """Groups count only for one way of choosing experts."""
    return {} if config.get("topk_method") == "group_limited_greedy" else {"n_group": None, "topk_group": None}


def glm4_moe_lite(config: Config) -> dict[str, Any]:
    """``mlp_layer_types`` says which layers have experts; all but the first where it says nothing."""
    kinds = config.get("mlp_layer_types") or ["dense"]
    return {"mlp_only_layers": [layer for layer, kind in enumerate(kinds) if kind == "dense"]}


def cwm(config: Config) -> dict[str, Any]:
    """The first of every four layers attends to everything."""
    layers = config.get("num_hidden_layers")
    if config.get("layer_types") is not None or not isinstance(layers, int):
        return {}
    return {"layer_types": ["sliding_attention" if i % 4 else "full_attention" for i in range(layers)]}


def qwen3_next(config: Config) -> dict[str, Any]:
    """The last of every four layers attends, the others are gated delta nets. A quarter of each head is rotated."""
    layers, every = config.get("num_hidden_layers"), config.get("full_attention_interval", 4)
    if config.get("layer_types") is not None or not isinstance(layers, int) or not isinstance(every, int) or every < 1:
        return {}
    return {"layer_types": ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]}


def qwen3_5_moe(config: Config) -> dict[str, Any]:
    """All layers have experts, so no width of a plain feed-forward is said."""
    return {"intermediate_size": config.get("moe_intermediate_size"), **qwen3_next(config)}


def cohere(config: Config) -> dict[str, Any]:
    return _renamed(config, LAYER_NORM)


def cohere2(config: Config) -> dict[str, Any]:
    """Only layers with a window rotate queries and keys."""
    window = config.get("sliding_window") is not None
    rotated = [window and kind == "sliding_attention" for kind in config.get("layer_types") or ()]
    return {**cohere(config), "no_rope_layers": rotated}


def starcoder2(config: Config) -> dict[str, Any]:
    return {"attention_bias": True, "mlp_bias": True, **_renamed(config, STARCODER2)}


def olmo(config: Config) -> dict[str, Any]:
    return {"rms_norm_eps": 1e-5}


def nemotron(config: Config) -> dict[str, Any]:
    return _renamed(config, NEMOTRON)


def jais2(config: Config) -> dict[str, Any]:
    biases = {key: config.get(key, True) for key in ("attention_bias", "mlp_bias")}
    return {**biases, **_renamed(config, LAYER_NORM)}


def stablelm(config: Config) -> dict[str, Any]:
    return _renamed(config, STABLELM)


def phi(config: Config) -> dict[str, Any]:
    return _renamed(config, LAYER_NORM)


def gpt_neox(config: Config) -> dict[str, Any]:
    said = {"attention_bias": True, "use_parallel_residual": True, **config}
    said["num_key_value_heads"] = config.get("num_attention_heads")
    return {key: said[key] for key in ("attention_bias", "use_parallel_residual", "num_key_value_heads")} | phi(config)


def falcon(config: Config) -> dict[str, Any]:
    """One key head with ``multi_query``; ``num_kv_heads`` counts only in the new architecture."""
    new = bool(config.get("new_decoder_architecture", False))
    keys = _renamed(config, FALCON)
    if not new:
        multi_query = config.get("multi_query", True)
        keys["num_key_value_heads"] = 1 if multi_query else config.get("num_attention_heads")
    norms = config.get("num_ln_in_parallel_attn")
    keys["num_ln_in_parallel_attn"] = (2 if norms is None else norms) if new else 1
    keys["use_parallel_residual"] = new or bool(config.get("parallel_attn", True))
    return _inner(config, keys)


def opt(config: Config) -> dict[str, Any]:
    biases = config.get("enable_bias", True)
    keys = _renamed(config, OPT)
    projected = config.get("word_embed_proj_dim") not in (None, config.get("hidden_size"))
    return {
        **keys, "num_key_value_heads": config.get("num_attention_heads"), "rms_norm_eps": 1e-5,
        "attention_bias": biases, "mlp_bias": biases, "project_in": projected,
    }  # fmt: skip


def gpt2(config: Config) -> dict[str, Any]:
    keys = _renamed(config, GPT2)
    return _inner(config, {**keys, "num_key_value_heads": keys.get("num_attention_heads")})


def gpt_neo(config: Config) -> dict[str, Any]:
    """``attention_types`` lists kinds of layers, and how often the list repeats."""
    keys = _renamed(config, GPT_NEO)
    listed = [kind for kinds, times in config.get("attention_types") or () for kind in list(kinds) * times]
    if listed:
        keys["layer_types"] = ["sliding_attention" if kind == "local" else "full_attention" for kind in listed]
    return _inner(config, {**keys, "num_key_value_heads": keys.get("num_attention_heads")})


def gpt_bigcode(config: Config) -> dict[str, Any]:
    keys = gpt2(config)
    return {**keys, "num_key_value_heads": 1} if config.get("multi_query", True) else keys


def gptj(config: Config) -> dict[str, Any]:
    """``rotary_dim`` counts elements of a head."""
    keys, rotated = gpt2(config), config.get("rotary_dim")
    hidden, heads = keys.get("hidden_size"), keys.get("num_attention_heads")
    if rotated and hidden and heads:  # half an element more, so that no rounding of the quotient loses one
        factor = (rotated + 0.5) * heads / hidden
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}
    return keys


def _inner(config: Config, keys: dict[str, Any]) -> dict[str, Any]:
    """A feed-forward of four hidden sizes where none is said."""
    hidden = keys.get("hidden_size", config.get("hidden_size"))
    if keys.get("intermediate_size") is None and isinstance(hidden, int):
        keys["intermediate_size"] = 4 * hidden
    return keys


def _renamed(config: Config, names: Names) -> dict[str, Any]:
    return {name: config[own] for name, own in names.items() if own in config}
