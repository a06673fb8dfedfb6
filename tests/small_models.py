"""``small``: a configuration of each causal language model of transformers, as small as its class allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WIDTHS = dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size"), 64)
LAYERS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2
)
HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4
)
INNER = dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 96)
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
SMALL: dict[str, Any] = {
    **WIDTHS, **LAYERS, **HEADS, **INNER, **EXPERTS,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 256, "n_positions": 256,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_k": 2, "shared_expert_intermediate_size": 32,
    "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
"""Keys that a configuration may have, under its own name or that of its ``attribute_map``."""
LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": None}
PER_LAYER: dict[str, Any] = {
    "per_layer_config": {1: {"head_dim": 32}}, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 32},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT,
    "dots1": {"head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"per_layer_config": {}},
    "dots3_note_text": {"per_layer_config": {}},
    "falcon_h1": {"time_step_limit": [0.0, 9.0]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128},
    "gemma4": {"text_config": PER_LAYER},
    "gemma4_text": PER_LAYER,
    "gemma4_unified": {"text_config": PER_LAYER},
    "gemma4_unified_text": PER_LAYER,
    "glm4_moe_lite": LATENT,
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 32},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        **LATENT, "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2, "head_dim": 16,
        "qk_head_dim": 32, "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minicpm3": LATENT,
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "nemotron_h": {"time_step_limit": [0.0, 9.0]},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "youtu": LATENT,
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a type needs besides; None leaves a key out."""


def small(kind: str) -> PretrainedConfig:
    """A decoder, where the type may be an encoder too."""
    whole = AutoConfig.for_model(kind)
    values = _shrunk(whole)
    for key, value in OVERRIDES.get(kind, {}).items():
        if value is None:
            values.pop(key, None)
        else:
            values[key] = {**values[key], **value} if key in whole.sub_configs else value
    config = AutoConfig.for_model(kind, **values)
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    return config


def _shrunk(config: PretrainedConfig) -> dict[str, Any]:
    values = config.to_dict()
    layers = next((values[key] for key in LAYERS if isinstance(values.get(key), int)), 0)
    kept = _kept([value for value in values.values() if isinstance(value, list) and len(value) == layers], layers)
    for key, value in values.items():
        if isinstance(value, list) and len(value) == layers > 1:
            values[key] = [value[i] for i in kept]
    for name, value in SMALL.items():
        key = config.attribute_map.get(name, name)
        if values.get(key) is not None:
            values[key] = len(kept) if name in LAYERS else value
    for key in config.sub_configs:
        if isinstance(values.get(key), dict):
            values[key] = _shrunk(getattr(config, key))
    for key in ("model_type", "transformers_version"):
        values.pop(key, None)
    return values


def _kept(lists: list[list[Any]], layers: int) -> list[int]:
    """Layers among which every kind of a layer is, and at least two."""
    first = {values.index(value) for values in lists for value in values if isinstance(value, str | int)}
    return sorted(sorted(first)[:4] if len(first) > 1 else {0, layers - 1} if layers > 1 else {0, 1})


def save_small(config: PretrainedConfig, path: Path, seed: int = 0) -> PreTrainedModel:
    """Random weights in ``path``, and the model that transformers reads from there. Biases and norms count too."""
    torch.manual_seed(seed)
    owner = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])
    config._attn_implementation = "eager"
    text = config.get_text_config(decoder=True) if config.sub_configs else config
    text._attn_implementation = "eager"
    model = owner(text if isinstance(text, owner.config_class) else config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.08)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.tie_weights()
    model.save_pretrained(path)
    config.save_pretrained(path)
    read: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    )
    return read.eval()
