"""From GGUF metadata to the ``config.json`` Hugging Face would have, and from its tensor names to theirs.

A setting that transformers' model of the architecture cannot express is refused, so nothing runs with a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import FAMILIES, Family

Shapes = Mapping[str, tuple[int, ...]]

ROPE_FACTORS = "rope_freqs.weight"
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str | None:
    """``blk.0.attn_q.weight`` -> ``model.layers.0.self_attn.q_proj.weight``; None for an unknown name."""
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}"
        block = stem.split(".")
        if len(block) == 3 and block[0] == "blk" and block[1].isdigit() and block[2] in _BLOCK:
            return f"model.layers.{block[1]}.{_BLOCK[block[2]]}.{kind}"
    return None


def config_of(metadata: Mapping[str, Any], shapes: Shapes, read: Callable[[str], Tensor]) -> dict[str, Any]:
    """The content of ``config.json``. ``shapes`` maps GGUF tensor names to shapes (outermost first), ``read``
    gives one tensor. Raises ``CheckpointError`` naming the key or tensor at fault."""
    architecture = metadata.get("general.architecture")
    known = [(name, family, family.gguf) for name, family in FAMILIES.items() if family.gguf is not None]
    if not (candidates := [row for row in known if row[2].architecture == architecture]):
        supported = ", ".join(dict.fromkeys(gguf.architecture for _, _, gguf in known))
        raise CheckpointError(f"GGUF architecture {architecture!r} is not supported; supported: {supported}")

    def key(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise CheckpointError(f"the GGUF metadata lacks {architecture}.{name}")
        if isinstance(value, (str, list)) and name != "rope.scaling.type":
            raise CheckpointError(f"{architecture}.{name} must be one number, not {value!r}")
        return value

    if key("expert_count", 0):
        raise CheckpointError("mixture-of-experts GGUF models are not supported")
    hidden, heads = int(key("embedding_length")), int(key("attention.head_count"))
    kv_heads = int(key("attention.head_count_kv", heads))
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads do not divide into {kv_heads} key/value heads")
    rope_dims = int(key("rope.dimension_count", 0))
    head_dim = int(key("attention.key_length", rope_dims or hidden // heads))
    if int(key("attention.value_length", head_dim)) != head_dim or (rope_dims or head_dim) != head_dim:
        raise CheckpointError("heads whose keys, values and rotary part differ in size are not supported")
    if "token_embd.weight" not in shapes:
        raise CheckpointError("the tensor token_embd.weight is missing")
    window = int(key("attention.sliding_window", 0))
    alike = [row for row in candidates if bool(row[1].sliding) == bool(window)]
    model_type, family, gguf = (alike or candidates)[0]
    config: dict[str, Any] = {
        "architectures": [gguf.class_name],
        "model_type": model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": int(key("feed_forward_length")),
        "num_hidden_layers": int(key("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(key("context_length")),
        # Stored as float32: 1e-05 comes back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{key('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": float(f"{key('rope.freq_base', 10000.0):.7g}"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "torch_dtype": "float16",
        **_biases(family, model_type, shapes),
        **_token_ids(metadata),
    }
    if window:
        config["sliding_window"] = window
        if family.window_asked:
            config |= {"use_sliding_window": True, "max_window_layers": 0}
    scaling = _rope_scaling(key, shapes, read, config)
    if scaling:
        config["rope_scaling"] = scaling
    _check_tensors(config, family, shapes)
    return config


def _biases(family: Family, model_type: str, shapes: Shapes) -> dict[str, bool]:
    """The keys of the configuration for the biases that the family leaves open."""
    qkv, out = "blk.0.attn_q.bias" in shapes, "blk.0.attn_output.bias" in shapes
    mlp = "blk.0.ffn_gate.bias" in shapes
    expected = (family.qkv_bias, family.out_bias, family.mlp_bias)
    fits = all(wanted in (None, found) for wanted, found in zip(expected, (qkv, out, mlp)))
    if not fits or (family.qkv_bias is None and qkv != out):
        raise CheckpointError(f"the biases of this {model_type} GGUF model are not those of the architecture")
    said = {"attention_bias": qkv} if family.qkv_bias is None else {}
    return said if family.mlp_bias is not None else {**said, "mlp_bias": mlp}


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            ids[name] = int(value)
    # An answer also ends with the end of a turn, where the model has a token for it.
    turn = metadata.get("tokenizer.ggml.eot_token_id")
    if turn is not None and int(turn) != ids.get("eos_token_id"):
        ids["eos_token_id"] = [ids["eos_token_id"], int(turn)] if "eos_token_id" in ids else int(turn)
    return ids


def _rope_scaling(key: Callable[..., Any], shapes: Shapes, read: Callable[[str], Tensor],
                  config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = str(key("rope.scaling.type", "none"))
    factor = float(key("rope.scaling.factor", 1.0))
    original = int(key("rope.scaling.original_context_length", 0))
    if ROPE_FACTORS in shapes:
        return llama3_scaling(read(ROPE_FACTORS), config, original or 8192)
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        if original:
            scaling["original_max_position_embeddings"] = original
        for name, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if value := float(key(f"rope.scaling.{name}", 0.0)):
                scaling[ours] = value
        # llama.cpp's factor multiplies YaRN's own temperature; transformers' replaces it.
        if (gain := float(key("rope.scaling.attn_factor", 1.0))) != 1.0:
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


def llama3_scaling(stored: Tensor, config: Mapping[str, Any], original: int) -> dict[str, Any]:
    """``rope_scaling`` of rope type llama3 for the stored divisors (float32 [head_dim / 2]).

    GGUF keeps the divisors, not the rule that made them. The rule is derived again, and its divisors are compared.
    """
    factor = round(float(stored.max()), 4)
    rule = llama3_factors(config["rope_theta"], config["head_dim"], factor, original)
    if rule.shape != stored.shape or not torch.allclose(rule, stored.to(torch.float32), rtol=1e-3):
        raise CheckpointError(f"{ROPE_FACTORS} does not follow the rule of Llama 3; it is not supported")
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": original}


def _check_tensors(config: Mapping[str, Any], family: Family, shapes: Shapes) -> None:
    """Check that every tensor the model needs is there with its shape, and none that it would ignore."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "ffn_norm": (hidden,),
        "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }
    if family.qk_norm:
        block |= {"attn_q_norm": (dim,), "attn_k_norm": (dim,)}
    biased = []
    if family.qkv_bias or config.get("attention_bias"):
        biased += ["attn_q", "attn_k", "attn_v"]
    if config.get("attention_bias"):
        biased.append("attn_output")
    if config.get("mlp_bias"):
        biased += ["ffn_gate", "ffn_up", "ffn_down"]
    top: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config["vocab_size"], hidden), "output_norm.weight": (hidden,)
    }
    if not config["tie_word_embeddings"]:
        top["output.weight"] = (config["vocab_size"], hidden)
    of_block = {f"{name}.weight": shape for name, shape in block.items()}
    of_block |= {f"{name}.bias": block[name][:1] for name in biased}

    def wanted() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from top.items()
        for layer in range(config["num_hidden_layers"]):
            yield from ((f"blk.{layer}.{name}", shape) for name, shape in of_block.items())

    # It stops at the first missing tensor, so a file that claims a billion blocks is refused at once.
    found = {ROPE_FACTORS}
    for name, shape in wanted():
        if name not in shapes:
            raise CheckpointError(f"the tensor {name} is missing; fetch or convert the file again")
        if shapes[name] != shape:
            raise CheckpointError(f"the tensor {name} has shape {shapes[name]}, expected {shape}")
        found.add(name)
    if extra := sorted(set(shapes) - found):
        raise CheckpointError(f"the tensor {extra[0]} is unknown to the architecture {config['model_type']}")
