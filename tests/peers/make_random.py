"""A random 4-bit model in the shape of a large one: ``make_random.py SHAPE OUT``.

OUT/w4 is a GPTQ checkpoint in groups of 64. OUT/Q4_0.gguf has the same weights, for llama.cpp: a group of 64 is two
blocks of Q4_0 with the same scale. It is written where the ``gguf`` package is installed, but not of latent attention.
Embeddings and head have 16 bits in the checkpoint and 8 bits in the file. The matrices of one size hold the same rows,
turned further for each, so that a model of gigabytes is made in as long as it takes to write. ``gpt-oss-20b`` is
OUT/w4 in OpenAI's own layout: experts in MXFP4, all else in bfloat16.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.checkpoint.writer import CheckpointWriter

SCHEME = WeightScheme(4, 64)
FORM = FORMATS["gptq"]
COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "eos_token_id": 0}
ATTENTION = {"num_attention_heads": 32, "head_dim": 128, "rope_theta": 1e6, "attention_bias": False}
QWEN3_MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        **COMMON, **ATTENTION, **QWEN3_MOE, "num_hidden_layers": 4, "vocab_size": 4096, "hidden_size": 2048,
        "moe_intermediate_size": 768, "intermediate_size": 6144,
    },
    "qwen3-8b": {
        **COMMON, **ATTENTION, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8,
        "num_hidden_layers": 36, "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        **COMMON, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "rope_theta": 1e4,
        "max_position_embeddings": 16384, "attention_bias": False, "num_attention_heads": 16, "num_key_value_heads": 16,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_experts": 64, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 0, "topk_method": "greedy", "routed_scaling_factor": 1.0, "num_hidden_layers": 4,
        "vocab_size": 4096, "hidden_size": 2048, "moe_intermediate_size": 1408, "intermediate_size": 10944,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


GPT_OSS: dict[str, Any] = {
    **COMMON, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "max_position_embeddings": 131072,
    "num_hidden_layers": 4, "vocab_size": 4096, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2, "attention_bias": True,
    "swiglu_limit": 7.0, "rope_theta": 150000.0, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """A weight [out, in] of each format: GPTQ's parts, whose last dimension is the outputs but for ``g_idx``, and the
    bytes of Q4_0 [out, bytes]."""

    parts: dict[str, Tensor]
    blocks: Tensor


@cache
def pack(out: int, inp: int) -> Packed:
    codes = torch.randint(0, 16, (out, inp), dtype=torch.uint8)
    scales = ((0.75 + 0.5 * torch.rand(out, inp // 64)) / (4.6 * inp**0.5)).half()
    pairs = codes.view(out, inp // 32, 2, 16)  # of the 32 numbers of a block the first 16 are in the low nibbles
    nibbles = pairs[:, :, 0] | pairs[:, :, 1] << 4
    halves = scales.repeat_interleave(2, 1).view(torch.uint8).view(out, inp // 32, 2)
    parts = FORM.pack(QuantizedWeight(SCHEME, codes, scales.float()))
    return Packed(parts, torch.cat([halves, nibbles], -1).view(out, -1))


def packed(out: int, inp: int, turn: int) -> Packed:
    """The same rows, each ``turn`` places further."""
    made = pack(out, inp)
    parts = {name: part if name == "g_idx" else part.roll(turn, -1) for name, part in made.parts.items()}
    return Packed(parts, made.blocks.roll(turn, 0))


def linears(config: dict[str, Any]) -> Iterator[tuple[str, str, int, int, int]]:
    """(module of a layer, its name in a GGUF, expert or -1, out, in), the experts of one name behind each other."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if latent := config.get("kv_lora_rank"):
        plain, rotated, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        attention = [
            ("q_proj", "", heads * (plain + rotated), width), ("kv_a_proj_with_mqa", "", latent + rotated, width),
            ("kv_b_proj", "", heads * (plain + value), latent), ("o_proj", "", width, heads * value),
        ]  # fmt: skip
    else:
        dim, kv = config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
        attention = [
            ("q_proj", "attn_q", heads * dim, width), ("k_proj", "attn_k", kv, width), ("v_proj", "attn_v", kv, width),
            ("o_proj", "attn_output", width, heads * dim),
        ]  # fmt: skip
    for name, short, out, inp in attention:
        yield f"self_attn.{name}", short, -1, out, inp
    count = config.get("num_experts", 0)
    inner = config["moe_intermediate_size" if count else "intermediate_size"]
    for name in ("gate", "up", "down"):
        out, inp = (width, inner) if name == "down" else (inner, width)
        for e in range(count):
            yield f"mlp.experts.{e}.{name}_proj", f"ffn_{name}_exps", e, out, inp
        if not count:
            yield f"mlp.{name}_proj", f"ffn_{name}", -1, out, inp
        if shared := config.get("n_shared_experts"):
            sizes = (width, shared * inner) if name == "down" else (shared * inner, width)
            yield f"mlp.shared_experts.{name}_proj", "", -1, *sizes


def make(config: dict[str, Any], out: Path, file: Path | None = None) -> None:
    """The checkpoint ``out``, and ``file`` with the same weights."""
    torch.manual_seed(0)
    width, dim, count = config["hidden_size"], config.get("head_dim", 0), config.get("num_experts", 0)
    gguf = GGUF(file, config) if file else None
    ignored = tuple(f"model.layers.{i}.mlp.gate" for i in range(config["num_hidden_layers"]) if count)
    spec = QuantSpec("rtn", SCHEME, ignored=("lm_head", *ignored))
    with CheckpointWriter(out, format=FORM) as writer:
        for name, short in (("model.embed_tokens", "token_embd"), ("lm_head", "output")):
            table = (torch.randn(config["vocab_size"], width) / width**0.5).bfloat16()
            writer.put(f"{name}.weight", table)
            if gguf:
                gguf.put(short, table, "Q8_0")
        writer.put("model.norm.weight", torch.ones(width).bfloat16())
        if gguf:
            gguf.put("output_norm", torch.ones(width))
        writer.commit("ends")
        for i in range(config["num_hidden_layers"]):
            layer, block, experts = f"model.layers.{i}", f"blk.{i}", []
            norms = {"input_layernorm": ("attn_norm", width), "post_attention_layernorm": ("ffn_norm", width),
                     "self_attn.q_norm": ("attn_q_norm", dim), "self_attn.k_norm": ("attn_k_norm", dim)}
            if "kv_lora_rank" in config:
                norms = {**dict(list(norms.items())[:2]), "self_attn.kv_a_layernorm": ("", config["kv_lora_rank"])}
            dense = {name: (short, torch.ones(size)) for name, (short, size) in norms.items()}
            if count:
                dense["mlp.gate"] = ("ffn_gate_inp", torch.randn(count, width) / width**0.5)
            for name, (short, tensor) in dense.items():
                writer.put(f"{layer}.{name}.weight", tensor.bfloat16())
                if gguf:
                    gguf.put(f"{block}.{short}", tensor.bfloat16())
            for turn, (name, short, expert, rows, columns) in enumerate(linears(config)):
                made = packed(rows, columns, 7 * turn + i)
                for part, tensor in made.parts.items():
                    writer.put(f"{layer}.{name}.{part}", tensor)
                experts.append(made.blocks)
                if expert in (-1, count - 1):
                    if gguf:
                        gguf.put(f"{block}.{short}", torch.stack(experts) if count > 1 and expert >= 0 else experts[0],
                                 "Q4_0")
                    experts = []
            writer.commit(layer)
        writer.put_json("config.json", {**config, "quantization_config": FORM.config_of(spec)})
        writer.finish()
    save_tokenizer(out, config["vocab_size"])
    if gguf:
        gguf.finish()


def save_tokenizer(out: Path, size: int) -> None:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0").save_pretrained(out)


def make_gpt_oss(config: dict[str, Any], out: Path) -> None:
    """The checkpoint ``out``; all layers have the same weights."""
    torch.manual_seed(0)
    width, experts, heads, dim = (config[key] for key in (
        "hidden_size", "num_local_experts", "num_attention_heads", "head_dim"
    ))  # fmt: skip
    keys = config["num_key_value_heads"] * dim
    layer = {"self_attn.sinks": torch.randn(heads).bfloat16()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        layer[f"{name}.weight"] = torch.ones(width).bfloat16()
    shapes = {"q_proj": (heads * dim, width), "k_proj": (keys, width), "v_proj": (keys, width),
              "o_proj": (width, heads * dim)}  # fmt: skip
    named = {f"self_attn.{name}": shape for name, shape in shapes.items()} | {"mlp.router": (experts, width)}
    for name, (rows, columns) in named.items():
        layer[f"{name}.weight"] = (torch.randn(rows, columns) / columns**0.5).bfloat16()
        layer[f"{name}.bias"] = torch.zeros(rows).bfloat16()
    for name, rows, columns in (("gate_up_proj", 2 * config["intermediate_size"], width),
                                ("down_proj", width, config["intermediate_size"])):  # fmt: skip
        layer[f"mlp.experts.{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16)).byte()
        layer[f"mlp.experts.{name}_scales"] = torch.randint(118, 121, (experts, rows, columns // 32)).byte()
        layer[f"mlp.experts.{name}_bias"] = torch.zeros(experts, rows).bfloat16()
    tensors = {"model.norm.weight": torch.ones(width).bfloat16()}
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = (torch.randn(config["vocab_size"], width) / width**0.5).bfloat16()
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model-ends.safetensors", {"format": "pt"})
    index = dict.fromkeys(tensors, "model-ends.safetensors")
    for i in range(config["num_hidden_layers"]):
        file, part = f"model-{i}.safetensors", {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
        save_file(part, out / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}), encoding="utf-8")
    save_tokenizer(out, config["vocab_size"])


class GGUF:
    """What llama.cpp loads, with a vocabulary that only has as many tokens as the model."""

    def __init__(self, file: Path, config: dict[str, Any]) -> None:
        import gguf

        self._gguf = gguf
        architecture = {"qwen3": "qwen3", "qwen3_moe": "qwen3moe"}[config["model_type"]]
        self._writer = writer = gguf.GGUFWriter(str(file), architecture, use_temp_file=True)
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        if "num_experts" in config:
            writer.add_expert_count(config["num_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
        writer.add_token_types([1] * config["vocab_size"])
        writer.add_token_merges(["t 1"])
        writer.add_eos_token_id(config["eos_token_id"])

    def put(self, name: str, tensor: Tensor, kind: str = "F32") -> None:
        """``tensor``: numbers, or the bytes of Q4_0."""
        of_kind = self._gguf.GGMLQuantizationType[kind]
        array = tensor.numpy() if kind == "Q4_0" else tensor.float().numpy()
        if kind == "Q8_0":
            array = self._gguf.quants.quantize(array, of_kind)
        self._writer.add_tensor(f"{name}.weight", array, raw_dtype=None if kind == "F32" else of_kind)

    def finish(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=(*SHAPES, "gpt-oss-20b"))
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.shape == "gpt-oss-20b":
        return make_gpt_oss(GPT_OSS, options.out / "w4")
    shape = SHAPES[options.shape]
    file = options.out / "Q4_0.gguf" if importlib.util.find_spec("gguf") and "kv_lora_rank" not in shape else None
    make(shape, options.out / "w4", file)


if __name__ == "__main__":
    main()
