"""Each family that llama.cpp writes as GGUF: a small random model, written with llama.cpp's transformations, which are
written here once more, and read back. The logits are those of plain transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qserve.checkpoint import gguf_keys
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import FAMILIES
from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.gguf_keys import Facts
from qserve.kernels import native, registry
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from tests.runtime.models.test_decoder import run_chunks

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT: dict[str, Any] = {"vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
GPT |= {"initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2}
MULTIPLIERS = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 6.0,
}  # fmt: skip
GRANITE_SCALES = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.3, "logit_scale": 6.0}
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
GLM_MOE = {
    **MOE, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_shared_experts": 2,
}  # fmt: skip
GLM_SAYS = {
    "expert_count": 6, "expert_used_count": 3, "expert_group_count": 3, "expert_group_used_count": 2,
    "leading_dense_block_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_shared_count": 2,
    "expert_feed_forward_length": 32,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}  # fmt: skip
LATENT_SAYS = {
    "attention.q_lora_rank": 32, "attention.kv_lora_rank": 32, "attention.head_count_kv": 1, "attention.key_length": 48,
    "attention.value_length": 32, "attention.key_length_mla": 48, "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
}  # fmt: skip
LONG, SHORT = [float(n) for n in range(1, 9)], [1 + n / 10 for n in range(8)]
LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]
PATTERN = [False, True, True]
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 0.5, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
YARN_SAYS = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_log_multiplier": 0.5, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
    "attention.temperature_scale": 0.1,
}  # fmt: skip

LATENT_YARN = {key: value for key, value in YARN.items() if key != "llama_4_scaling_beta"} | {"mscale": 0.5}
LATENT_YARN_SAYS = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_log_multiplier": 0.05,
}  # fmt: skip
OSS = {
    "head_dim": 32, "sliding_window": 7, "num_local_experts": 5, "num_experts_per_tok": 2, "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}  # fmt: skip
OSS_YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "truncate": False,
}  # fmt: skip
OSS_SAYS = {
    "rope.dimension_count": 32, "attention.sliding_window": 7, "expert_count": 5, "expert_used_count": 2,
    "expert_feed_forward_length": 96,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
}  # fmt: skip
DELTA_SAYS = {
    "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0], "full_attention_interval": 4,
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 192,
}  # fmt: skip
DELTA_MOE = {
    **DELTA, **MOE, "num_experts": 5, "shared_expert_intermediate_size": 64, "initializer_range": 0.1,
}  # fmt: skip
DELTA_MOE_SAYS = {
    **DELTA_SAYS, "expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 64,
}  # fmt: skip

# Model type, llama.cpp's architecture, changes of the configuration, and what the file says besides what all say.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "mistral": ("mistral", "llama", {"sliding_window": 7}, {"attention.sliding_window": 7}),
    "mixtral": ("mixtral", "llama", {"num_local_experts": 5}, {"expert_count": 5, "expert_used_count": 2}),
    "qwen2": ("qwen2", "qwen2", {}, {}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}, {}),
    "phi3": ("phi3", "phi3", {"sliding_window": 9}, {"attention.sliding_window": 9}),
    "phi3-long": (
        "phi3", "phi3",
        {"rope_scaling": {"rope_type": "longrope", "long_factor": LONG, "short_factor": SHORT},
         "original_max_position_embeddings": 32},
        {"rope.scaling.original_context_length": 32},
    ),
    "granite": ("granite", "granite", MULTIPLIERS, GRANITE_SCALES),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 5}, {}),
    "cohere": ("cohere", "command-r", {"logit_scale": 0.25}, {"logit_scale": 0.25}),
    "cohere-qk-norm": ("cohere", "command-r", {"logit_scale": 0.25, "use_qk_norm": True}, {"logit_scale": 0.25}),
    "cohere2": (
        "cohere2", "cohere2", {"logit_scale": 0.7, "sliding_window": 7, "num_hidden_layers": 5},
        {"logit_scale": 0.7, "attention.sliding_window": 7},
    ),
    "starcoder2": ("starcoder2", "starcoder2", {}, {}),
    "starcoder2-no-biases": ("starcoder2", "starcoder2", {"use_bias": False}, {}),
    "falcon": ("falcon", "falcon", {}, {"attention.head_count_kv": 1}),
    "falcon-new": (
        "falcon", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        {"attention.head_count_kv": 2},
    ),
    "falcon-one-norm": (
        "falcon", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"attention.head_count_kv": 2},
    ),
    "gpt_neox": (
        "gpt_neox", "gptneox", {"num_key_value_heads": 4}, {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "gpt_neox-sequential": (
        "gpt_neox", "gptneox", {"num_key_value_heads": 4, "use_parallel_residual": False, "rotary_pct": 0.5},
        {"rope.dimension_count": 8, "use_parallel_residual": False},
    ),
    "phi": ("phi", "phi2", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": 8}),
    "stablelm": (
        "stablelm", "stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
        {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "stablelm-parallel": (
        "stablelm", "stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.25},
        {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "olmo": ("olmo", "olmo", {}, {}),
    "nemotron": (
        "nemotron", "nemotron", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": 8},
    ),
    "jais2": ("jais2", "jais2", {}, {}),
    "gpt2": ("gpt2", "gpt2", GPT, {}),
    "gpt_bigcode": ("gpt_bigcode", "starcoder", GPT, {"attention.head_count_kv": 1}),
    "ministral3": ("ministral3", "mistral3", {"head_dim": 32, "rope_parameters": YARN}, YARN_SAYS),
    "arcee": ("arcee", "arcee", {}, {}),
    "seed_oss": ("seed_oss", "seed_oss", {"head_dim": 32}, {}),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "olmo3": (
        "olmo3", "olmo2", {"sliding_window": 7, "layer_types": LAYERS},
        {"attention.sliding_window": 7, "attention.sliding_window_pattern": PATTERN, "rope.freq_base_swa": 500000.0},
    ),
    "exaone4": (
        "exaone4", "exaone4", {"head_dim": 32, "sliding_window": 7, "layer_types": LAYERS},
        {"attention.sliding_window": 7, "attention.sliding_window_pattern": PATTERN},
    ),
    "exaone4-full": (
        "exaone4", "exaone4", {"head_dim": 16, "sliding_window": None, "layer_types": ["full_attention"] * 3}, {},
    ),
    "glm": ("glm", "chatglm", {"head_dim": 32}, {"rope.dimension_count": 16, "attention.key_length": 32}),
    "glm4": ("glm4", "glm4", {"head_dim": 32}, {"rope.dimension_count": 16}),
    "ernie4_5": ("ernie4_5", "ernie4_5", {"head_dim": 32}, {}),
    "gemma": ("gemma", "gemma", {"head_dim": 32}, {}),
    "gemma2": (
        "gemma2", "gemma2",
        {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 3.0},
        {"attention.sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3_text", "gemma3",
        {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 32, "num_hidden_layers": 7, "rope_theta": 5000.0,
         "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"attention.sliding_window": 7, "rope.freq_base": 5000.0, "rope.freq_base_swa": 100.0,
         "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "qwen2_moe": (
        "qwen2_moe", "qwen2moe", {**MOE, "num_experts": 5, "shared_expert_intermediate_size": 64},
        {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 32,
         "expert_shared_feed_forward_length": 64},
    ),
    "qwen3_moe": (
        "qwen3_moe", "qwen3moe", {**MOE, "num_experts": 5, "norm_topk_prob": True, "head_dim": 32},
        {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "glm4_moe": (
        "glm4_moe", "glm4moe", {**GLM_MOE, "use_qk_norm": True, "head_dim": 32},
        {**GLM_SAYS, "rope.dimension_count": 16},
    ),
    "dots1": ("dots1", "dots1", {**GLM_MOE, "head_dim": 32}, GLM_SAYS),
    "olmoe": ("olmoe", "olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32},
              {"expert_count": 5, "expert_used_count": 2}),
    "minimax_m2": (
        "minimax_m2", "minimax-m2",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16, "intermediate_size": 32},
        {"expert_count": 5, "expert_used_count": 2, "rope.dimension_count": 16, "expert_feed_forward_length": 32},
    ),
    "granitemoe": (
        "granitemoe", "granitemoe", {**MULTIPLIERS, "num_local_experts": 5, "num_experts_per_tok": 2},
        {**GRANITE_SCALES, "expert_count": 5, "expert_used_count": 2},
    ),
    "granitemoeshared": (
        "granitemoeshared", "granitemoe",
        {**MULTIPLIERS, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
        {**GRANITE_SCALES, "expert_count": 5, "expert_used_count": 2, "expert_shared_feed_forward_length": 64},
    ),
    "deepseek_v2": (
        "deepseek_v2", "deepseek2",
        {**LATENT, **GLM_MOE, "norm_topk_prob": False, "topk_method": "group_limited_greedy"},
        {**LATENT_SAYS, **GLM_SAYS, "expert_weights_norm": False, "expert_gating_func": 1},
    ),
    "deepseek_v2-lite": (
        "deepseek_v2", "deepseek2",
        {**LATENT, **GLM_MOE, "q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1,
         "rope_parameters": LATENT_YARN},
        {**{key: value for key, value in {**LATENT_SAYS, **GLM_SAYS}.items()
            if "q_lora" not in key and "norm" not in key and "group" not in key and "_mla" not in key},
         **LATENT_YARN_SAYS, "attention.head_count_kv": 4},
    ),
    "deepseek_v3": (
        "deepseek_v3", "deepseek2", {**LATENT, **GLM_MOE, "rope_parameters": LATENT_YARN},
        {**LATENT_SAYS, **GLM_SAYS, **LATENT_YARN_SAYS, "expert_gating_func": 2},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite", "deepseek2", {**LATENT, **GLM_MOE, "mlp_layer_types": ["dense", "dense", "sparse"]},
        {**LATENT_SAYS, **GLM_SAYS, "leading_dense_block_count": 2, "tokenizer.ggml.pre": "glm4"},
    ),
    "youtu": (
        "youtu", "deepseek2", {**LATENT, "tie_word_embeddings": True},
        {**LATENT_SAYS, "leading_dense_block_count": 3, "expert_feed_forward_length": 96},
    ),
    "gpt_oss": ("gpt_oss", "gpt-oss", OSS, OSS_SAYS),
    "gpt_oss-yarn": (
        "gpt_oss", "gpt-oss", {**OSS, "rope_parameters": OSS_YARN},
        {**OSS_SAYS, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 16},
    ),
    "qwen3_5": ("qwen3_5_text", "qwen35", DELTA, DELTA_SAYS),
    "qwen3_5-pairs": (
        "qwen3_5_text", "qwen35", {**DELTA, "linear_num_value_heads": 2, "tie_word_embeddings": True},
        {**DELTA_SAYS, "ssm.time_step_rank": 2, "ssm.inner_size": 64},
    ),
    "qwen3_next": ("qwen3_next", "qwen3next", DELTA_MOE, DELTA_MOE_SAYS),
    "qwen3_next-older": ("qwen3_next", "qwen3next", DELTA_MOE, DELTA_MOE_SAYS),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen35moe", DELTA_MOE, DELTA_MOE_SAYS),
}  # fmt: skip
OLDER = {"deepseek_v2-lite", "qwen3_next-older"}
"""Cases of older files, in which linears are whole that newer ones hold in two."""
ROTATES_NEIGHBOURS = {"llama", "granite", "smollm3", "olmo", "mistral3", "arcee", "granitemoe"}
"""Architectures whose queries and keys lie in another order than in transformers."""
ADDS_ONE = {"gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next"}
LAYER_NORM_EPS = {
    "command-r", "cohere2", "starcoder2", "falcon", "gptneox", "phi2", "stablelm", "olmo", "nemotron", "jais2", "gpt2",
    "starcoder",
}  # fmt: skip


def random_model(kind: str, changes: dict[str, Any], path: Path) -> tuple[Any, dict[str, Tensor]]:
    """A model of transformers whose matrices Q8_0 holds exactly, and its tensors as its checkpoint names them."""
    torch.manual_seed(0)
    base = {} if changes is GPT else SMALL
    config = AutoConfig.for_model(kind, **{**base, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    transposed = kind == "gpt2"
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if not parameter.is_floating_point():
                continue
            if name.endswith("bias") or "norm" in name or (parameter.dim() == 1 and "rotary" not in name):
                parameter += 0.3 * torch.randn_like(parameter)
            elif parameter.dim() > 1 and "conv1d" not in name:
                turned = transposed and parameter.dim() == 2 and ("c_" in name)
                turned = turned or (kind == "gpt_oss" and parameter.dim() == 3)
                rows = parameter.mT if turned else parameter
                exact = gguf.quants.dequantize(gguf.quants.quantize(rows.numpy(), Kind.Q8_0), Kind.Q8_0)
                exact = torch.from_numpy(exact)
                parameter.copy_(exact.mT if turned else exact)
    model.save_pretrained(path)
    return model, load_file(path / "model.safetensors")


def neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Row i and row i + dim / 2 of a head, one after the other."""
    dim = tensor.shape[0] // heads
    order = [h * dim + half * dim // 2 + i for h in range(heads) for i in range(dim // 2) for half in (0, 1)]
    return tensor[torch.tensor(order)]


def ungrouped(tensor: Tensor, heads: int, kv_heads: int) -> Tensor:
    """All queries, then all keys, then all values, of groups of one key head each."""
    group, dim = heads // kv_heads, tensor.shape[0] // (heads + 2 * kv_heads)
    rows = list(tensor.split(dim))
    wide = group + 2
    places = [g * wide + i for g in range(kv_heads) for i in range(group)]
    places += [g * wide + group for g in range(kv_heads)] + [g * wide + group + 1 for g in range(kv_heads)]
    return torch.cat([rows[place] for place in places])


def tiled(tensor: Tensor, config: Any, name: str) -> Tensor:
    """The value heads of a gated delta net as llama.cpp has them: those first of their key heads, then the second."""
    if name == "out_proj":
        return tiled(tensor.T, config, "").T
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    first = 2 * key_heads * config.linear_key_head_dim if name in ("in_proj_qkv", "conv1d") else 0
    rows = tensor[first:].split((len(tensor) - first) // heads)
    order = [k * (heads // key_heads) + j for j in range(heads // key_heads) for k in range(key_heads)]
    return torch.cat([tensor[:first], *(rows[v] for v in order)])


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with GPT-OSS's experts apart, each weight [out, in]."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        experts, inside, linear = name.partition(".experts.")
        for e, one in enumerate(tensor) if inside else ():
            place = f"{experts}.experts.{e}.{linear.removesuffix('_bias')}"
            found |= {f"{place}.bias": one} if linear.endswith("_bias") else {f"{place}.weight": one.T}
        if not inside:
            found[name] = tensor
    return found


def as_llama_cpp(
    architecture: str, config: Any, tensors: dict[str, Tensor], *, older: bool = False
) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint as llama.cpp's converter writes them, or wrote: ``older``."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    if architecture == "falcon":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    tied = config.tie_word_embeddings
    stacks: dict[str, dict[int, Tensor]] = {}
    written: dict[str, np.ndarray] = {}

    def put(name: str, tensor: Tensor) -> None:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        written[found] = np.ascontiguousarray(tensor.float().numpy().squeeze())

    for name, tensor in tensors.items():
        parts = name.split(".")
        if name == "lm_head.weight" and tied:
            continue
        if found := re.fullmatch(r"(.*\.)(experts\.|norms\.)(\d+)\.(.*)", name):
            before, kind, number, rest = found.groups()
            stacks.setdefault(before + kind.replace("norms.", "") + rest, {})[int(number)] = tensor
            continue
        if "kv_b_proj" in parts and not older:
            heads_of = tensor.view(heads, -1, config.kv_lora_rank)
            keys, values = heads_of[:, : config.qk_nope_head_dim], heads_of[:, config.qk_nope_head_dim :]
            put(name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2))
            put(name.replace("kv_b_proj", "v_b_proj"), values)
            continue
        if architecture in ROTATES_NEIGHBOURS and ("q_proj" in parts or "k_proj" in parts):
            tensor = neighbours(tensor, heads if "q_proj" in parts else kv_heads)
        if "query_key_value" in parts:
            tensor = ungrouped(tensor, heads, kv_heads)
        if architecture == "gpt2" and parts[-2].startswith("c_") and parts[-1] == "weight":
            tensor = tensor.T
        if "linear_attn" in parts:
            part = parts[parts.index("linear_attn") + 1]
            if part == "in_proj_qkvz" and not older:
                key_heads, key = config.linear_num_key_heads, config.linear_key_head_dim
                value = config.linear_num_value_heads // key_heads * config.linear_value_head_dim
                of_heads = tensor.view(key_heads, -1, tensor.shape[1]).split([key, key, value, value], 1)
                q, k, v, z = (rows.flatten(0, 1) for rows in of_heads)
                put(name.replace("qkvz", "qkv"), torch.cat([q, k, v]))
                put(name.replace("qkvz", "z"), z)
                continue
            if architecture != "qwen3next" and part != "norm":
                tensor = tiled(tensor, config, part)
            tensor = -tensor.exp() if part == "A_log" else tensor
            name = name.replace("dt_bias", "dt_proj.bias")
        elif architecture in ADDS_ONE and name.endswith("norm.weight"):
            tensor = tensor + 1
        if name.endswith("e_score_correction_bias"):
            name = name.replace("_bias", ".bias")
        if architecture == "gpt-oss" and "experts" in parts:
            block, part = f"blk.{parts[2]}.ffn", "bias" if name.endswith("bias") else "weight"
            rows = tensor if part == "bias" else tensor.mT
            halves = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if "gate_up" in name else {"down": rows}
            for half, rows in halves.items():
                written[f"{block}_{half}_exps.{part}"] = np.ascontiguousarray(rows.numpy())
            continue
        if name.endswith("input_linear.weight"):
            block, kind = f"blk.{parts[2]}", "exps" if tensor.dim() == 3 else "shexp"
            for half, rows in zip(("gate", "up"), tensor.chunk(2, dim=-2)):
                written[f"{block}.ffn_{half}_{kind}.weight"] = np.ascontiguousarray(rows.numpy())
            continue
        put(f"{name}.weight" if name.endswith("sinks") else name, tensor)
    for name, stacked in stacks.items():
        put(name, torch.stack([stacked[i] for i in range(len(stacked))]))
    return written


def write(
    path: Path, architecture: str, config: Any, arrays: dict[str, np.ndarray], says: dict[str, Any],
    kind: Kind = Kind.Q8_0, *, vocabulary: dict[str, Any] | None = None, experts: Kind | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    inner = getattr(config, "ffn_hidden_size" if architecture == "falcon" else "intermediate_size", None)
    common: dict[str, Any] = {
        "context_length": config.max_position_embeddings, "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size, "attention.head_count": config.num_attention_heads,
        "feed_forward_length": inner or 4 * config.hidden_size,
    }  # fmt: skip
    if architecture == "qwen35moe":  # it has no other feed-forward than experts
        del common["feed_forward_length"]
    if architecture in LAYER_NORM_EPS:
        eps = next((getattr(config, key) for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
                    if hasattr(config, key)), 1e-5)
        common["attention.layer_norm_epsilon"] = eps
    else:
        common["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if hasattr(config, "num_key_value_heads"):
        common["attention.head_count_kv"] = config.num_key_value_heads
    if getattr(config, "head_dim", None) and architecture not in ("falcon", "deepseek2"):
        common |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    rope = getattr(config, "rope_parameters", None) or {}
    whole = rope.get("full_attention", rope)
    if "rope_theta" in whole:
        common["rope.freq_base"] = whole["rope_theta"]
    if rope.get("rope_type") == "longrope":
        arrays = {
            **arrays, "rope_factors_long.weight": np.array(LONG, np.float32),
            "rope_factors_short.weight": np.array(SHORT, np.float32),
        }  # fmt: skip
    said = {**common, **says}
    keys = {key if key.startswith("tokenizer.") else f"{architecture}.{key}": value for key, value in said.items()}
    for key, value in {**keys, **(vocabulary or {})}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, (list, np.ndarray)):
            writer.add_array(key, list(value) if isinstance(value, list) else value.tolist())
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, array in arrays.items():
        if experts is not None and name.endswith("_exps.weight"):
            writer.add_tensor(name, gguf.quants.quantize(array, experts), raw_dtype=experts)
            continue
        turned = "attn_k_b" in name  # rows in blocks are not those of the model, so Q8_0 is not exact
        plain = turned or "norm" in name or name.endswith("bias") or kind is Kind.F32
        if array.ndim >= 2 and not plain and array.shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    kind, architecture, changes, says = CASES[case]
    model, tensors = random_model(kind, changes, tmp_path)
    arrays = as_llama_cpp(architecture, model.config, tensors, older=case in OLDER)
    source = GGUFFile(write(tmp_path / "m.gguf", architecture, model.config, arrays, says))
    assert source.config["model_type"] == kind
    tensors = FAMILIES[kind].modules(source.config).named_as_transformers(tensors)
    tensors = one_by_one(tensors) if kind == "gpt_oss" else tensors
    assert set(source.names()) == set(tensors) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    for name in source.names():
        assert source.shape(name) == tuple(tensors[name].shape) or source.tensor(name).numel() == 1, name
        torch.testing.assert_close(source.tensor(name), tensors[name].float(), rtol=0, atol=1e-6, msg=name)
    config = decoder_config(source.config, "small")
    limits = DecoderLimits(max_tokens=40, max_logits=40, max_positions=64, num_blocks=64, num_states=1)
    kernels = "reference" if native.missing() else "native"
    decoder = Decoder(source, config, registry.make(kernels), limits, kv_dtype=torch.float32)
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(7))
    want = model(tokens[None]).logits[0]
    torch.testing.assert_close(run_chunks(decoder, tokens.tolist(), [40]), want, rtol=0, atol=1e-4)

    packed = source.packed()
    assert packed.parameters() == source.parameters() and (len(packed.linears()) > 3) == (kind != "gpt2")  # transposed
    for module in packed.linears():
        name, weight = f"{module}.weight", packed.linear(module)
        assert packed.shape(module) == source.shape(name) and not packed.has(name)
        assert torch.equal(weight.dequantize(), source.tensor(name)), name
        assert (weight.bias is not None) == source.has(f"{module}.bias")
    decoder = Decoder(packed, config, registry.make(kernels), limits, kv_dtype=torch.float32)
    found = run_chunks(decoder, tokens.tolist(), [40])
    assert not decoder.fallbacks or kernels == "reference"
    assert ((found - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.1  # inputs are rounded


def test_every_family_with_a_gguf_row_has_a_case() -> None:
    rows = {name for name, family in FAMILIES.items() if family.gguf is not None}
    assert rows == {kind for kind, _, _, _ in CASES.values()}
    assert {family.gguf.architecture for family in FAMILIES.values() if family.gguf} == {
        architecture for _, architecture, _, _ in CASES.values()
    }


def test_experts_are_read_one_by_one(tmp_path: Path) -> None:
    kind, architecture, changes, says = CASES["qwen3_moe"]
    model, tensors = random_model(kind, changes, tmp_path)
    arrays = as_llama_cpp(architecture, model.config, tensors)
    source = GGUFFile(write(tmp_path / "m.gguf", architecture, model.config, arrays, says))
    read = []
    whole = source._bytes
    source._bytes = lambda start, nbytes: read.append(nbytes) or whole(start, nbytes)  # type: ignore[method-assign]
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert source.tensor(name).shape == (32, 64) and read == [32 * 64 // 32 * 34]
    arrays["blk.0.ffn_up_exps.weight"] = arrays["blk.0.ffn_up_exps.weight"][:3]
    with pytest.raises(CheckpointError, match=r"ffn_up_exps.weight holds 3 experts of 5"):
        GGUFFile(write(tmp_path / "few.gguf", architecture, model.config, arrays, says))


@torch.no_grad()
def test_experts_of_gpt_oss_in_mxfp4_stay_as_they_are(tmp_path: Path) -> None:
    kind, architecture, changes, says = CASES["gpt_oss-yarn"]
    model, tensors = random_model(kind, changes, tmp_path)
    for name in (name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))):
        rows = np.ascontiguousarray(tensors[name].mT.numpy())
        rounded = gguf.quants.dequantize(gguf.quants.quantize(rows, Kind.MXFP4), Kind.MXFP4)
        tensors[name] = torch.from_numpy(rounded).mT
        model.get_parameter(name).copy_(tensors[name])
    arrays = as_llama_cpp(architecture, model.config, tensors)
    path = write(tmp_path / "m.gguf", architecture, model.config, arrays, says, experts=Kind.MXFP4)
    source = GGUFFile(path)
    assert source.format is not None and source.format.name == "mxfp4" and source.spec is not None
    assert len(source.linears()) == 3 * 5 * 2 and not any(".experts." in name for name in source.names())
    apart = one_by_one(tensors)
    for module in source.linears():
        weight = source.linear(module)
        assert source.shape(module) == tuple(weight.codes.shape) and source.spec.scheme_of(module) == weight.scheme
        assert torch.equal(weight.dequantize(), apart[f"{module}.weight"])
        assert weight.bias is not None and torch.equal(weight.bias, apart[f"{module}.bias"])
    assert source.parameters() == sum(tensor.numel() for tensor in tensors.values())
    limits = DecoderLimits(max_tokens=40, max_logits=40, max_positions=64, num_blocks=48)
    config = decoder_config(source.config, "small")
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(7))
    want = model(tokens[None]).logits[0]
    decoder = Decoder(source, config, registry.make("reference"), limits, kv_dtype=torch.float32)
    torch.testing.assert_close(run_chunks(decoder, tokens.tolist(), [40]), want, rtol=0, atol=1e-4)
    if native.missing() is None:  # the products round their inputs
        decoder = Decoder(source, config, registry.make("native"), limits, kv_dtype=torch.float32)
        found = run_chunks(decoder, tokens.tolist(), [40])
        assert not decoder.fallbacks and ((found - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.02

    content = bytearray(path.read_bytes())
    content[source._tensors["blk.0.ffn_up_exps.weight"].start] = 255  # the scale that is no number
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m.gguf: model.layers.0.mlp.experts.0.gate_up_proj: a scale is NaN"):
        GGUFFile(path).linear("model.layers.0.mlp.experts.0.gate_up_proj")


def test_gate_and_up_of_experts_that_are_stored_as_one(tmp_path: Path) -> None:
    kind, architecture, changes, says = CASES["qwen3_5_moe"]
    model, tensors = random_model(kind, changes, tmp_path)
    arrays = as_llama_cpp(architecture, model.config, tensors)
    for i in range(4):
        halves = [arrays.pop(f"blk.{i}.ffn_{half}_exps.weight") for half in ("gate", "up")]
        arrays[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate(halves, 1)
    source = GGUFFile(write(tmp_path / "m.gguf", architecture, model.config, arrays, says))
    assert set(source.names()) == set(tensors)
    for name in (name for name in tensors if ".experts." in name):
        torch.testing.assert_close(source.tensor(name), tensors[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("key", "value"), [("ssm.group_count", 4), ("ssm.group_count", 0), ("ssm.time_step_rank", 0),
                       ("ssm.inner_size", 100), ("full_attention_interval", 0)],
)  # fmt: skip
def test_gated_delta_nets_whose_sizes_contradict_each_other_are_refused(key: str, value: int) -> None:
    metadata = {"qwen35.block_count": 4, **{f"qwen35.{name}": said for name, said in DELTA_SAYS.items()}}
    with pytest.raises(CheckpointError, match="linear heads over"):
        gguf_keys.qwen3_next(Facts("qwen35", {**metadata, f"qwen35.{key}": value}, {}))


def test_blocks_that_predict_more_tokens_are_left_out(tmp_path: Path) -> None:
    kind, architecture, changes, says = CASES["glm4_moe"]
    model, tensors = random_model(kind, changes, tmp_path)
    arrays = as_llama_cpp(architecture, model.config, tensors)
    arrays["blk.3.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    more = {**says, "block_count": 4, "nextn_predict_layers": 1}
    source = GGUFFile(write(tmp_path / "m.gguf", architecture, model.config, arrays, more))
    assert source.config["num_hidden_layers"] == 3 and len(source.names()) == len(tensors)


@pytest.mark.parametrize("architecture", ["mamba", "gptj", "bert", "deepseek", "opt", "nonsense"])
def test_what_is_not_read_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=f"architecture '{architecture}' is not supported; supported: arcee"):
        GGUFFile(tmp_path / "m.gguf")


def test_layers_with_a_window() -> None:
    def windows(says: Any) -> list[bool]:
        metadata = {} if says is None else {"gemma3.attention.sliding_window_pattern": says}
        return Facts("gemma3", metadata, {}).windows(6, 3)

    assert windows(None) == [True, True, False] * 2
    assert windows(2) == [True, False] * 3
    assert windows(1) == [False] * 6
    assert windows(np.array([True, False, False, False, False, True])) == [True] + [False] * 4 + [True]
    for wrong in (np.array([True]), "LLLG", -1):
        with pytest.raises(CheckpointError, match="sliding_window_pattern must"):
            windows(wrong)


@pytest.mark.parametrize(
    ("says", "message"),
    [({"expert_gating_func": 3}, "expert_gating_func is 3; known are 1"),
     ({"expert_weights_norm": True}, "expert_weights_norm is True, which no model of its type has"),
     ({"attention.temperature_scale": 0.1}, "temperature_scale is not supported"),
     ({"rope.dimension_count": 48}, "heads of 48 with a rotary part of 48")],
)  # fmt: skip
def test_latent_attention_that_transformers_cannot_express_is_refused(
    says: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kind, architecture, changes, usual = CASES["deepseek_v2-lite"]
    model, tensors = random_model(kind, changes, tmp_path)
    arrays = as_llama_cpp(architecture, model.config, tensors)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(write(tmp_path / "m.gguf", architecture, model.config, arrays, {**usual, **says}))
