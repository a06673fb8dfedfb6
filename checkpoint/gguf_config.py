"""From GGUF metadata to the ``config.json`` that Hugging Face would have.

A setting that transformers' model of the architecture cannot express is refused, so nothing runs with a wrong one. What
the file does not say is what transformers takes where nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import FAMILIES, Experts, Family, Gguf
from qserve.checkpoint.gguf_keys import Facts, Shapes
from qserve.checkpoint.gguf_reader import MAX_TENSORS

ROPE_FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
Read = Callable[[str], Tensor]
Row = tuple[str, Family, Gguf]
"""A model type, its family, and how files store it."""
SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers of the gates of experts."""


def config_of(metadata: Mapping[str, Any], shapes: Shapes, read: Read) -> dict[str, Any]:
    """The content of ``config.json``. ``shapes`` maps GGUF tensor names to shapes (outermost first), ``read``
    gives one tensor. Raises ``CheckpointError`` naming the key or tensor at fault."""
    facts = Facts(str(metadata.get("general.architecture")), metadata, shapes)
    model_type, family, gguf = _family(facts)
    hidden, heads = facts.count("embedding_length"), facts.count("attention.head_count")
    kv_heads = facts.count("attention.head_count_kv", heads)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads do not divide into {kv_heads} key/value heads")
    if "token_embd.weight" not in shapes:
        raise CheckpointError("the tensor token_embd.weight is missing")
    rotated = facts.count("rope.dimension_count", 0)
    head_dim = rotated if family.latent else _head_dim(facts, family, hidden // heads, rotated)
    # A model of nothing but experts need not say how wide a plain feed-forward would be.
    inner = facts.count("expert_feed_forward_length", 0) or None if family.gated else 4 * hidden
    eps = "attention.layer_norm_epsilon" if family.layer_norm else "attention.layer_norm_rms_epsilon"
    said: dict[str, Any] = {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": facts.count("feed_forward_length", inner),
        "num_hidden_layers": facts.count("block_count") - facts.count("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family.latent else kv_heads,
        "max_position_embeddings": facts.count("context_length"),
        "rms_norm_eps": facts.number(eps),
        "tie_word_embeddings": "output.weight" not in shapes,
        **_biases(family, model_type, facts, gguf),
    }
    if family.latent:
        said |= _latent(facts, rotated)
    elif not family.layer_norm or head_dim * heads != hidden:
        said["head_dim"] = head_dim
    if family.qk_norm_asked:
        said["use_qk_norm"] = facts.has("blk.0.attn_q_norm.weight")
    if family.modules(said).positions is None:
        said |= _rotation(facts, read, family, head_dim, rotated)
        if gguf.untruncated:
            scaling = said.setdefault("rope_scaling", {"rope_type": "default"})
            scaling |= {"truncate": False} if scaling["rope_type"] == "yarn" else {}
        if gguf.rotates_by_kind:
            full = {"rope_type": "default", **said.pop("rope_scaling", {}), "rope_theta": said["rope_theta"]}
            base = facts.number("rope.freq_base_swa", said["rope_theta"])
            window = {"rope_type": "default", "rope_theta": base}
            said["rope_parameters"] = {"full_attention": full, "sliding_attention": window}
    if family.sliding:
        said |= _windows(facts, family, said["num_hidden_layers"])
    return {
        "architectures": [_class_name(model_type)],
        "model_type": model_type,
        "torch_dtype": "bfloat16" if (family.one_plus and not family.layer_norm) or family.sinks else "float16",
        **{gguf.names.get(key, key): value for key, value in said.items()},
        **(_experts(facts, family.experts, gguf) if family.experts else {}),
        **gguf.says(facts),
        **_token_ids(metadata),
    }


def _head_dim(facts: Facts, family: Family, hidden_by_heads: int, rotated: int) -> int:
    whole = hidden_by_heads if family.partial_rotary else rotated or hidden_by_heads
    head_dim = facts.count("attention.key_length", whole)
    if not head_dim or facts.count("attention.value_length", head_dim) != head_dim:
        raise CheckpointError("heads whose keys and values differ in size are not supported")
    return head_dim


def _latent(facts: Facts, rotated: int) -> dict[str, Any]:
    """The sizes of latent attention. Newer files give those of the cache under the keys that older ones have for
    heads."""
    names = ("attention.key_length", "attention.value_length")
    key, value = (facts.count(f"{name}_mla", facts.count(name)) for name in names)
    if not 0 < rotated < key:
        raise CheckpointError(f"heads of {key} with a rotary part of {rotated} are not supported")
    return {
        "kv_lora_rank": facts.count("attention.kv_lora_rank"),
        "q_lora_rank": facts.count("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
    }


def in_llamas_keys(config: Mapping[str, Any]) -> tuple[dict[str, Any], Family]:
    """``config`` with what its family writes under other keys than Llama's, and the family."""
    family = FAMILIES[config["model_type"]]
    return {**config, **family.keys(config)}, family


def _family(facts: Facts) -> Row:
    """The model type of the file. Several share an architecture: with or without experts, and a window."""
    known = [(name, family, family.gguf) for name, family in FAMILIES.items() if family.gguf is not None]
    if not (rows := [row for row in known if row[2].architecture == facts.architecture]):
        supported = ", ".join(sorted({gguf.architecture for _, _, gguf in known}))
        raise CheckpointError(f"GGUF architecture {facts.architecture!r} is not supported; supported: {supported}")
    experts = facts.count("expert_count", 0) > 0
    if not (rows := [row for row in rows if (row[1].experts is not None) == experts]):
        kind = "with" if experts else "without"
        raise CheckpointError(f"a {facts.architecture} GGUF model {kind} experts is not supported")
    if experts:
        rows = _gated(facts, rows)
    pre = facts.metadata.get("tokenizer.ggml.pre")
    rows = [row for row in rows if row[2].pre == pre] or [row for row in rows if row[2].pre is None]
    shared = facts.count("expert_shared_feed_forward_length", 0) > 0
    window = facts.count("attention.sliding_window", 0) > 0
    rows = [row for row in rows if row[1].experts is None or bool(row[1].experts.shared_inner) == shared] or rows
    return next((row for row in rows if bool(row[1].sliding) == window), rows[0])


def _gated(facts: Facts, rows: list[Row]) -> list[Row]:
    """Those whose experts have the file's gates. Older files do not say which; then only a sigmoid has biases."""
    gate = facts.count("expert_gating_func", 0)
    if gate not in (0, SOFTMAX, SIGMOID):
        raise CheckpointError(
            f"{facts.architecture}.expert_gating_func is {gate}; known are 1 (softmax) and 2 (sigmoid)"
        )
    sigmoid = gate == SIGMOID if gate else any(name.endswith("exp_probs_b.bias") for name in facts.shapes)
    found = [row for row in rows if row[1].experts is not None and row[1].experts.sigmoid == sigmoid]
    if gate and not found:
        kind = "sigmoid" if sigmoid else "softmax"
        raise CheckpointError(f"a {facts.architecture} GGUF model whose experts have {kind} gates is not supported")
    return found or rows


def _class_name(model_type: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # slow to import

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _biases(family: Family, model_type: str, facts: Facts, gguf: Gguf) -> dict[str, bool]:
    """The keys of the configuration for the biases that the family leaves open."""
    qkv = any(facts.has(f"blk.0.{name}.bias") for name in ("attn_q", "attn_qkv"))
    out, mlp = (facts.has(f"blk.0.{name}.bias") for name in ("attn_output", "ffn_up"))
    wrong = any(
        wanted not in (None, found)
        for wanted, found in ((family.qkv_bias, qkv), (family.out_bias, out), (family.mlp_bias, mlp))
    )
    if (family.experts is None and wrong) or (family.qkv_bias is None and family.out_bias is None and qkv != out):
        raise CheckpointError(f"the biases of this {model_type} GGUF model are not those of the architecture")
    said = {"attention_bias": qkv} if family.qkv_bias is None else {}
    if family.mlp_bias is None:
        said["mlp_bias"] = mlp
    if len({gguf.names.get(key, key) for key in said}) < len(set(said)) and len(set(said.values())) > 1:
        raise CheckpointError(f"some linears of this {model_type} GGUF model have biases and some have none")
    return said


def _windows(facts: Facts, family: Family, layers: int) -> dict[str, Any]:
    window = facts.count("attention.sliding_window", 0)
    if not window:
        every = {"layer_types": ["full_attention"] * _bounded(layers)} if family.sliding > 1 else {}
        return {} if family.window_asked else {"sliding_window": None, **every}
    if family.window_asked:
        return {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    if family.sliding == 1:
        return {"sliding_window": window}
    inside = facts.windows(_bounded(layers), family.sliding)
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in inside],
    }


def _bounded(layers: int) -> int:
    """Each layer has tensors in the file, of which there are not so many."""
    return min(layers, MAX_TENSORS)


def _experts(facts: Facts, experts: Experts, gguf: Gguf) -> dict[str, Any]:
    said: dict[str, Any] = {
        experts.count[0]: facts.count("expert_count"),
        experts.top_k: facts.count("expert_used_count"),
        experts.inner: facts.count("expert_feed_forward_length", facts.count("feed_forward_length", 0)),
    }
    if experts.shared_inner:
        said[experts.shared_inner] = facts.count("expert_shared_feed_forward_length")
    if experts.shared_count:
        said[experts.shared_count] = facts.count("expert_shared_count", 0)
    if experts.dense_layers:
        said[experts.dense_layers] = facts.count("leading_dense_block_count", 0)
    if experts.renormalize is None:
        said["norm_topk_prob"] = facts.flag("expert_weights_norm", gguf.renormalized)
    elif facts.flag("expert_weights_norm", experts.renormalize) != experts.renormalize:
        raise CheckpointError(
            f"{facts.architecture}.expert_weights_norm is {not experts.renormalize}, which no model of its type has"
        )
    if experts.scale:
        said[experts.scale] = facts.number("expert_weights_scale", 1.0)
    if experts.groups:
        said["n_group"] = facts.count("expert_group_count", 1)
        said["topk_group"] = facts.count("expert_group_used_count", 1)
    return said


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            ids[name] = _token_id(key, value)
    # An answer also ends with the end of a turn, where the model has a token for it.
    turn = metadata.get("tokenizer.ggml.eot_token_id")
    if turn is not None and _token_id("eot", turn) != ids.get("eos_token_id"):
        ids["eos_token_id"] = [ids["eos_token_id"], turn] if "eos_token_id" in ids else turn
    return ids


def _token_id(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"tokenizer.ggml.{key}_token_id must be one number that counts, not {value!r}")
    return value


def _rotation(facts: Facts, read: Read, family: Family, head_dim: int, rotated: int) -> dict[str, Any]:
    said: dict[str, Any] = {"rope_theta": facts.number("rope.freq_base", 10000.0)}
    if rotated and rotated != head_dim:
        if not family.partial_rotary or rotated > head_dim or rotated % 2:
            raise CheckpointError(f"heads of {head_dim} with a rotary part of {rotated} are not supported")
        exact = int(head_dim * (rotated / head_dim)) == rotated
        said["partial_rotary_factor"] = (rotated if exact else rotated + 0.5) / head_dim
    elif family.partial_rotary:
        said["partial_rotary_factor"] = 1.0
    if scaling := _rope_scaling(facts, read, said["rope_theta"], head_dim, family):
        said["rope_scaling"] = scaling
    return said


def _rope_scaling(facts: Facts, read: Read, theta: float, head_dim: int, family: Family) -> dict[str, Any] | None:
    kind = facts.word("rope.scaling.type", "none")
    factor = facts.number("rope.scaling.factor", 1.0)
    original = facts.count("rope.scaling.original_context_length", 0)
    if facts.has(ROPE_FACTORS):
        return llama3_scaling(read(ROPE_FACTORS), theta, head_dim, original or 8192)
    if facts.has(LONG) and facts.has(SHORT):
        long, short = ([float(f"{value:.7g}") for value in read(name).tolist()] for name in (LONG, SHORT))
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        if original:
            scaling["original_max_position_embeddings"] = original
        for name, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if value := facts.number(f"rope.scaling.{name}", 0.0):
                scaling[ours] = float(value)
        if everywhere := facts.number("rope.scaling.yarn_log_multiplier", 0.0):
            if family.latent:  # llama.cpp keeps a tenth, and takes both factors for the same
                everywhere = float(f"{10 * everywhere:.6g}")
            scaling |= {"mscale": everywhere if family.latent else 1.0, "mscale_all_dim": everywhere}
        if growth := facts.number("attention.temperature_scale", 0.0):
            if not family.scaled_queries:
                raise CheckpointError(f"{facts.architecture}.attention.temperature_scale is not supported")
            scaling["llama_4_scaling_beta"] = growth
        # llama.cpp's factor multiplies YaRN's own temperature; transformers' replaces it.
        if (gain := facts.number("rope.scaling.attn_factor", 1.0)) != 1.0:
            scaling["attention_factor"] = gain * (0.1 * math.log(factor) + 1.0)
        return scaling
    raise CheckpointError(f"rope scaling {kind!r} in a GGUF file is not supported")


def llama3_factors(theta: float, head_dim: int, factor: float, original: int,
                   low: float = 1.0, high: float = 4.0) -> Tensor:
    """float32 [head_dim / 2]: what Llama 3.1 divides each rotary frequency by.

    Wavelengths shorter than original/high stay, those longer than original/low are divided by ``factor``, and
    between them 1/divisor goes linearly in original/wavelength.
    """
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    blend = ((original * frequency / (2 * math.pi) - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 / ((1.0 - blend) / factor + blend)).to(torch.float32)


def llama3_scaling(stored: Tensor, theta: float, head_dim: int, original: int) -> dict[str, Any]:
    """``rope_scaling`` of rope type llama3 for the stored divisors (float32 [head_dim / 2]).

    GGUF keeps the divisors, not the rule that made them. The rule is derived again, and its divisors are compared.
    """
    if stored.numel() != head_dim // 2:
        raise CheckpointError(f"{ROPE_FACTORS} has {stored.numel()} elements for heads of {head_dim}")
    factor = round(float(stored.max()), 4)
    rule = llama3_factors(theta, head_dim, factor, original)
    if not torch.allclose(rule, stored.flatten().to(torch.float32), rtol=1e-3):
        raise CheckpointError(f"{ROPE_FACTORS} does not follow the rule of Llama 3; it is not supported")
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": original}
