"""Shapes from configurations, against the modules of transformers; and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import FAMILIES
from qserve.evals.planner import catalog
from qserve.evals.planner.family import shape_of

TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DELTA: dict[str, Any] = {
    "head_dim": 32, "linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "num_hidden_layers": 5,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "moe_intermediate_size": 48, "n_routed_experts": 6, "n_shared_experts": 2,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}
OTHERS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "smollm3": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 32, "head_dim": 24},
    "qwen3": {"head_dim": 32, "attention_bias": True},
    "gemma": {"head_dim": 32, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 32, "sliding_window": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 32, "num_hidden_layers": 7},
    "vaultgemma": {"head_dim": 32, "sliding_window": 32},
    "hyperclovax": {"attention_bias": True, "mlp_bias": True},
    "ministral": {"head_dim": 24, "sliding_window": 32},
    "ministral3": {"head_dim": 24},
    "arcee": {"mlp_bias": True, "attention_bias": True},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32, "attention_bias": False},
    "helium": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "ernie4_5": {"head_dim": 32, "use_bias": True},
    "jais2": {"attention_bias": False},
    "seed_oss": {"head_dim": 32},
    "cwm": {"head_dim": 32, "sliding_window": 32, "num_hidden_layers": 7},
    "olmo2": {"attention_bias": True},
    "olmo3": {"sliding_window": 32, "num_hidden_layers": 7},
    "exaone4": {"sliding_window": 32, "num_hidden_layers": 7},
    "cohere2": {"sliding_window": 32, "num_hidden_layers": 9},
    "starcoder2": {"sliding_window": 32, "use_bias": False},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80, "bias": True},
    "gpt_neox": {"attention_bias": False},
    "cohere": {"use_qk_norm": True},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "nemotron": {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "opt": {"ffn_dim": 80},
    "gpt_neo": {
        "window_size": 32, "attention_types": [[["global", "local", "local"], 1]], "num_layers": 3, "num_heads": 4,
    },
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 56, "mlp_only_layers": [1]},
    "qwen3_moe": {**EXPERTS, "head_dim": 32, "decoder_sparse_step": 2},
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 56, "mlp_only_layers": [1]},
    "qwen3_5_text": {**DELTA, "attention_bias": True},
    "qwen3_5_moe_text": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 56, "full_attention_interval": 2},
    "glm4_moe": {**LATENT, "head_dim": 32, "use_qk_norm": True},
    "dots1": {**LATENT, "head_dim": 32},
    "olmoe": {**EXPERTS, "attention_bias": True},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32},
    "granitemoeshared": {"shared_intermediate_size": 56},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 32},
    "deepseek_v2": {**LATENT, "attention_bias": True},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "minicpm3": {**LATENT, "v_head_dim": None, "mlp_bias": True},
    "youtu": {**LATENT, "q_lora_rank": None, "attention_bias": True},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_module(family: str, tied: bool) -> None:
    keys = {**TINY, **OTHERS.get(family, {})}
    config = AutoConfig.for_model(family, **keys, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    written = json.loads(config.to_json_string(use_diff=False))
    shape = shape_of(written, family)
    stored = {id(parameter): parameter.numel() for parameter in model.parameters()}
    # A buffer to the module, a tensor like any other to the checkpoint.
    stored |= {id(buffer): buffer.numel() for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    assert shape.parameters == sum(stored.values())
    assert shape.tied is tied and shape.active_parameters <= shape.parameters
    kinds = written.get("layer_types")
    if kinds is not None and "sliding_attention" in kinds:
        without = shape_of({key: value for key, value in written.items() if key != "layer_types"}, family)
        assert shape.windows == tuple(32 if kind == "sliding_attention" else 0 for kind in kinds) == without.windows


def test_a_key_that_is_no_head_of_its_own_is_not_cached() -> None:
    def kind(**keys: int) -> tuple[str, int]:
        shape = shape_of({**TINY, "model_type": "llama", **keys}, "it")
        return shape.attention, shape.kv_bytes_per_token(2)

    assert kind(num_key_value_heads=4) == ("MHA", 2 * 4 * 16 * 3 * 2)
    assert kind(num_key_value_heads=2) == ("GQA", 2 * 2 * 16 * 3 * 2)
    assert kind(num_key_value_heads=1) == ("MQA", 2 * 1 * 16 * 3 * 2)
    latent = shape_of({**TINY, **LATENT, "model_type": "deepseek_v3"}, "it")
    assert (latent.attention, latent.kv_bytes_per_token(2)) == ("MLA", (24 + 8) * 3 * 2)


def test_a_window_caps_what_a_request_holds_and_looks_at() -> None:
    windowed = shape_of({**TINY, "model_type": "gemma2", "head_dim": 32, "sliding_window": 32}, "it")
    assert windowed.windows == (32, 0, 32)
    assert windowed.kv_bytes(100, 2) == windowed.kv_width * 2 * (32 + 112 + 32)
    assert windowed.kv_bytes(20, 2) == windowed.kv_width * 2 * 3 * 32  # whole blocks
    pairs = sum(min(i + 1, window or 100) for window in windowed.windows for i in range(100))
    assert windowed.looked_at(100) == pairs


def test_a_state_counts_once_however_long_a_request_is() -> None:
    config = {**TINY, **DELTA, "model_type": "qwen3_5_text", "num_hidden_layers": 8}
    hybrid = shape_of(config, "it")
    assert hybrid.windows == (0, 0) and hybrid.kv_bytes_per_token(2) == 2 * 2 * 2 * 32 * 2
    assert hybrid.state_bytes == 6 * 4 * (3 * (2 * 3 * 8 + 6 * 12) + 6 * 8 * 12)
    assert hybrid.kv_bytes(160, 2) == 160 * hybrid.kv_bytes_per_token(2) + hybrid.state_bytes
    assert hybrid.looked_at(10) == 2 * 55
    for kinds in (["linear_attention"] * 8, ["full_attention"] * 3, ["mamba"] * 8):
        with pytest.raises(CheckpointError, match=r"full attention|layer_types"):
            shape_of({**config, "layer_types": kinds}, "it")


def test_bytes_of_weights_hold_scales_and_zero_points() -> None:
    from qserve.checkpoint.spec import WeightScheme

    shape = shape_of({**TINY, "model_type": "llama"}, "it")
    packed = {"qkv": (128, 64), "o": (64, 64), "gate_up": (160, 64), "down": (64, 80)}
    bits = sum(rows * columns * 4 + rows * -(-columns // 64) * (16 + 4) for rows, columns in packed.values())
    floats = 2 * 96 * 64 + (2 * 3 + 1) * 64
    assert shape.weight_bytes(WeightScheme(4, 64)) == 3 * bits / 8 + 2 * floats
    assert shape.weight_bytes(None) == 2 * shape.parameters


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SPARSE = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size_mlp": 112, "head_dim": 16}


@pytest.mark.parametrize(
    ("outer", "family", "more"),
    [
        ("gemma3", "gemma3_text", {"head_dim": 32, "sliding_window": 32}),
        ("mistral3", "mistral", {"head_dim": 24, "tie_word_embeddings": False}),
        ("llama4", "llama4_text", {**SPARSE, "interleave_moe_layer_step": 2, "num_hidden_layers": 5}),
        ("llama4", "llama4_text", {**SPARSE, "interleave_moe_layer_step": 1, "attention_bias": True}),
    ],
)
def test_the_text_part_of_a_nested_configuration(outer: str, family: str, more: dict[str, Any]) -> None:
    text = AutoConfig.for_model(family, **{**TINY, **more})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    written = {"model_type": outer, "vision_config": VISION, "text_config": json.loads(text.to_json_string(False))}
    shape = shape_of(written, "it")
    assert shape.parameters == sum({id(each): each.numel() for each in model.parameters()}.values())
    assert (shape.family, shape.part_of) == (family, outer)
    quantized = shape_of({**written, "quantization_config": {"quant_method": "awq"}}, "it")
    assert quantized.stored_as == "awq" and quantized.parameters == shape.parameters


def test_what_a_nested_configuration_leaves_out_is_as_transformers_has_it() -> None:
    # As published: sizes that are the family's own are not written.
    written = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 7, "model_type": "gemma3_text"}
    full = json.loads(AutoConfig.for_model(**written).to_json_string(use_diff=False))
    assert shape_of({"model_type": "gemma3", "text_config": written}, "it") == shape_of(
        {"model_type": "gemma3", "text_config": full}, "it"
    )


def test_llama_4_looks_back_within_chunks_where_it_rotates() -> None:
    keys = {**TINY, **SPARSE, "model_type": "llama4_text", "num_hidden_layers": 8, "attention_chunk_size": 64}
    written = json.loads(AutoConfig.for_model(**keys).to_json_string(use_diff=False))
    kinds = [64 if kind == "chunked_attention" else 0 for kind in written["layer_types"]]
    assert list(shape_of(written, "it").windows) == kinds == list(shape_of(keys, "it").windows)
    assert kinds.count(0) == 2


@pytest.mark.parametrize(
    "text", [{"hidden_size": 64}, {"model_type": "mamba2"}, {"model_type": "x", "text_config": {}}]
)
def test_a_text_part_that_is_not_known_is_refused(text: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="whose arithmetic is not known"):
        shape_of({"model_type": "some_vl", "text_config": text}, "it")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba2"}, "type 'mamba2', whose arithmetic is not known; known are llama, mistral"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, not '64'"),
        ({"hidden_size": True}, "hidden_size must be a whole number, not True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -2}, "num_hidden_layers must be a whole number, not -2"),
        ({"vocab_size": 10**30}, "vocab_size must be a whole number"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3 key heads"),
        ({"num_attention_heads": 7}, "a hidden size of 64 is no multiple of 7 heads"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "3 exceeds the 2 experts"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 2}, "mlp_only_layers is not a list"),
        ({"model_type": "gpt_neo", "attention_types": [3]}, "not a valid gpt_neo configuration"),
        ({"model_type": "gptj", "n_embd": "64", "n_head": 4, "rotary_dim": 8}, "not a valid gptj configuration"),
        ({"model_type": "gemma2", "layer_types": ["linear_attention"] * 3}, "layer_types"),
    ],
)
def test_what_cannot_be_counted_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        shape_of({**TINY, "model_type": "llama", "num_key_value_heads": None, **change}, "it")


def test_a_model_is_a_name_a_directory_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**TINY, "model_type": "llama", "quantization_config": {"quant_method": "gptq"}}))
    by_directory, by_file = catalog.model(str(path.parent)), catalog.model(str(path))
    assert by_directory == by_file and by_directory.name == "mine" and by_directory.stored_as == "gptq"
    assert catalog.model("Llama-3-8B").name == "llama-3-8b"
    with pytest.raises(CheckpointError, match=r"no known shape: llama-2-7b, .*gpt-3-175b"):
        catalog.model(str(tmp_path / "nothing"))
    path.write_text("[1, 2]")
    with pytest.raises(CheckpointError, match="is no JSON object"):
        catalog.model(str(path))
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        catalog.model(str(path))
