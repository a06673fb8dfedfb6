"""Families with LayerNorm, parallel blocks, plain feed-forwards, learned positions or names of their own: small and
random, against the logits of plain transformers in float32."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.hf import HFDirectory
from qserve.kernels import native, registry
from qserve.runtime.models.config import DecoderConfig, decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from qserve.runtime.sampling import SamplingParams
from tests.runtime.models.test_decoder import QUANTIZED, quantize, run_chunks, save_random
from tests.runtime.test_engine import finish, make_engine

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "initializer_range": 0.15, "init_std": 0.15,
}  # fmt: skip
GPT = {"vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.15}
ODD = {**GPT, "vocab_size": 89, "n_embd": 45, "n_layer": 2, "n_head": 5, "n_positions": 47, "n_inner": 77}
NARROW = {"hidden_size": 42, "num_attention_heads": 3}  # heads of 14
INNER = {"intermediate_size": 112}
COHERE: dict[str, Any] = {**SIZES, **INNER, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}
COHERE["eos_token_id"] = 2
FALCON = {**SIZES, "bias": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("cohere", {**COHERE, "logit_scale": 0.25}),
    "cohere-odd": ("cohere", {**COHERE, **NARROW, "num_key_value_heads": 3, "intermediate_size": 51,
                              "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 3.0}),
    "cohere-qk-norm": ("cohere", {**COHERE, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**COHERE, "sliding_window": 9, "sliding_window_pattern": 2, "logit_scale": 0.7}),
    "cohere2-odd": ("cohere2", {**COHERE, **NARROW, "num_key_value_heads": 1, "num_hidden_layers": 5,
                                "attention_bias": True, "sliding_window": 5}),
    "starcoder2": ("starcoder2", {**SIZES, **INNER, "num_key_value_heads": 2, "sliding_window": 9}),
    "starcoder2-odd": ("starcoder2", {**SIZES, **NARROW, "intermediate_size": 51, "num_key_value_heads": 1,
                                      "use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"}),
    "falcon-multi-query": ("falcon", {**FALCON, "tie_word_embeddings": False}),
    "falcon-odd": ("falcon", {**SIZES, **NARROW, "ffn_hidden_size": 51}),
    "falcon-heads": ("falcon", {**FALCON, "multi_query": False, "parallel_attn": False}),
    "falcon-new": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-new-one-norm": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2,
                                       "num_ln_in_parallel_attn": 1, "activation": "relu"}),
    "gpt_neox": ("gpt_neox", {**SIZES, **INNER}),
    "gpt_neox-sequential": ("gpt_neox", {**SIZES, **NARROW, "intermediate_size": 51, "use_parallel_residual": False,
                                         "rotary_pct": 0.6, "tie_word_embeddings": True, "attention_bias": False}),
    "phi": ("phi", {**SIZES, **INNER, "num_key_value_heads": 2}),
    "phi-odd": ("phi", {**SIZES, **NARROW, "num_key_value_heads": 3, "intermediate_size": 51,
                        "partial_rotary_factor": 0.6}),
    "stablelm": ("stablelm", {**SIZES, **INNER, "num_key_value_heads": 2, "use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {**SIZES, **NARROW, "intermediate_size": 51, "num_key_value_heads": 1,
                                       "use_parallel_residual": True, "partial_rotary_factor": 0.6}),
    "olmo": ("olmo", {**SIZES, **INNER, "num_key_value_heads": 2}),
    "olmo-odd": ("olmo", {**SIZES, **NARROW, "intermediate_size": 51, "num_key_value_heads": 1,
                          "attention_bias": True, "tie_word_embeddings": True}),
    "nemotron": ("nemotron", {**SIZES, **INNER, "num_key_value_heads": 2, "attention_bias": True}),
    "nemotron-odd": ("nemotron", {**SIZES, **NARROW, "intermediate_size": 51, "num_key_value_heads": 1, "head_dim": 18,
                                  "mlp_bias": True, "partial_rotary_factor": 0.34}),
    "jais2": ("jais2", {**SIZES, **INNER, "num_key_value_heads": 2}),
    "jais2-odd": ("jais2", {**SIZES, **NARROW, "intermediate_size": 51, "num_key_value_heads": 1, "head_dim": 18,
                            "attention_bias": False, "mlp_bias": False}),
    "stablelm-qk-norm": ("stablelm", {**SIZES, **INNER, "num_key_value_heads": 2, "qk_layernorm": True}),
    "opt": ("opt", {**SIZES, "ffn_dim": 112}),
    "opt-odd": ("opt", {**SIZES, "hidden_size": 45, "num_attention_heads": 5, "max_position_embeddings": 47,
                        "ffn_dim": 77, "tie_word_embeddings": False, "enable_bias": False}),
    "gpt2": ("gpt2", GPT),
    "gpt2-odd": ("gpt2", {**ODD, "tie_word_embeddings": False, "scale_attn_weights": False}),
    "gpt_neo": ("gpt_neo", {**SIZES, "intermediate_size": 112, "window_size": 9, "num_layers": 3, "num_heads": 4,
                            "attention_types": [[["global", "local", "local"], 1]]}),
    "gpt_neo-odd": ("gpt_neo", {**SIZES, "hidden_size": 45, "num_hidden_layers": 2, "num_attention_heads": 5,
                                "window_size": 5, "attention_types": [[["local"], 2]],
                                "max_position_embeddings": 47}),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "gpt_bigcode-odd": ("gpt_bigcode", {**ODD, "multi_query": False}),
    "gptj": ("gptj", {**GPT, "rotary_dim": 8}),
    "gptj-odd": ("gptj", {**GPT, "n_embd": 42, "n_head": 3, "n_inner": 51, "rotary_dim": 6}),
}  # fmt: skip


def load(
    path: Path,
    kernels: str,
    change: Callable[[DecoderConfig], DecoderConfig] = lambda config: config,
    kv_dtype: torch.dtype = torch.float32,
) -> Decoder:
    source = HFDirectory(path)
    config = change(decoder_config(source.config, "small"))
    limits = DecoderLimits(max_tokens=40, max_logits=40, max_positions=47, num_blocks=48)
    return Decoder(source, config, registry.make(kernels), limits, kv_dtype=kv_dtype)


def prompt(model: torch.nn.Module) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (40,), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, kernels: str, tmp_path: Path) -> None:
    if kernels == "native" and native.missing():
        pytest.skip(str(native.missing()))
    model = save_random(*CASES[case], tmp_path)
    tokens = prompt(model)
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
    decoder = load(tmp_path, kernels)
    found = [run_chunks(decoder, tokens.tolist(), chunks) for chunks in ([40], [17, 1, 22], [1] * 40)]
    for got in found:
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        assert kernels == "reference" or torch.equal(got, found[0])  # batch-invariant


def family(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(config, family=replace(config.family, **changes))


def modules(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(config, modules=replace(config.modules, **changes))


def of(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(config, **changes)


def multipliers(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(config, multipliers=replace(config.multipliers, **changes))


WITHOUT: dict[str, tuple[str, Callable[[DecoderConfig], DecoderConfig]]] = {
    "one plus the weight": ("nemotron", family(one_plus=False)),
    "the square of ReLU": ("nemotron", of(activation="relu")),
    "means": ("cohere", family(layer_norm=False)),
    "local layers": ("gpt_neo", of(windows=(0, 0, 0))),
    "means without weights": ("olmo", family(layer_norm=False)),
    "norms of heads": ("cohere-qk-norm", family(qk_norm=None)),
    "norms of heads, each its own": ("stablelm-qk-norm", family(qk_norm=None)),
    "neighbouring pairs": ("cohere", modules(interleaved=False)),
    "partial neighbouring pairs": ("gptj", modules(interleaved=False)),
    "logit scale": ("cohere", multipliers(logits=1.0)),
    "windows": ("cohere2", of(windows=(0, 0, 0))),
    "layers that do not rotate": ("cohere2", of(rotated=(True, True, True))),
    "biases of norms": ("starcoder2", family(norm_bias=False)),
    "a window in all layers": ("starcoder2", of(windows=(0, 0, 0))),
    "GELU": ("starcoder2", of(activation="relu")),
    "ReLU": ("opt", of(activation="gelu")),
    "erf": ("gpt_neox", of(activation="gelu_tanh")),
    "groups of rows": ("falcon-new", modules(grouped=False)),
    "rows by head": ("gpt_neox", modules(grouped=False)),
    "one residual for both": ("gpt_neox", of(parallel=False)),
    "one residual for both, two norms": ("falcon-new", of(parallel=False)),
    "two residuals": ("stablelm", of(parallel=True)),
    "positions": ("gpt2", modules(positions=None)),
    "the offset of positions": ("opt", modules(position_offset=1, positions="shifted")),
    "scores as they are": ("gpt2-odd", multipliers(attention=None)),
}


@pytest.mark.parametrize("what", WITHOUT)
def test_logits_are_others_without(what: str, tmp_path: Path) -> None:
    case, change = WITHOUT[what]
    model = save_random(*CASES[case], tmp_path)
    tokens = prompt(model).tolist()
    if what == "the offset of positions":
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["shifted.weight"] = tensors["model.decoder.embed_positions.weight"][:-1].clone()
        save_file(tensors, tmp_path / "model.safetensors")
    have, others = (run_chunks(load(tmp_path, "reference", each), tokens, [40]) for each in (of(), change))
    assert (have - others).abs().max() > 1e-3


@pytest.mark.parametrize("scheme", QUANTIZED)
@pytest.mark.parametrize("case", ["cohere", "falcon-new", "gpt_neox", "opt", "gpt2", "gptj"])
def test_quantized_logits_are_those_of_transformers(case: str, scheme: str, tmp_path: Path) -> None:
    """With the weights as they were rounded."""
    model = save_random(*CASES[case], tmp_path)
    quantize(model, tmp_path, QUANTIZED[scheme])
    tokens = prompt(model)
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
    got = run_chunks(load(tmp_path / "quantized", "reference"), tokens.tolist(), [17, 1, 22])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    if native.missing() is None:
        decoder = load(tmp_path / "quantized", "native")
        found = [run_chunks(decoder, tokens.tolist(), chunks) for chunks in ([40], [17, 1, 22], [1] * 40)]
        assert all(torch.equal(each, found[0]) for each in found)
        assert (found[0] - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("falcon-odd", {"alibi": True}, "alibi True"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm True"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False"),
        ("opt", {"word_embed_proj_dim": 32}, "project_in True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(case: str, changes: dict[str, Any], message: str) -> None:
    kind, keys = CASES[case]
    with pytest.raises(CheckpointError, match=message):
        decoder_config({"model_type": kind, **keys, **changes}, "small")


def test_older_names_are_read(tmp_path: Path) -> None:
    """GPT-2 as its first checkpoints are: without the name of the body, with masks."""
    model = save_random(*CASES["gpt2"], tmp_path)
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(tmp_path / "model.safetensors").items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = HFDirectory(tmp_path)
    assert source.has("transformer.h.0.attn.c_attn.bias") and not any(n.endswith(".attn.bias") for n in source.names())
    tokens = prompt(model)
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
    torch.testing.assert_close(run_chunks(load(tmp_path, "reference"), tokens.tolist(), [40]), want, rtol=0, atol=1e-4)


def test_what_a_model_can_compute_is_not_read(tmp_path: Path) -> None:
    """GPT-NeoX as Pythia's checkpoints are: with the output layer's old name, masks and frequencies."""
    save_random(*CASES["gpt_neox"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("lm_head", "embed_out"): tensor for name, tensor in stored.items()}
    wanted = {name.replace("embed_out", "lm_head") for name in tensors}
    old = {"bias": torch.ones(1, 1, 8, 8), "masked_bias": torch.tensor(-1e9), "rotary_emb.inv_freq": torch.ones(2)}
    more = {f"gpt_neox.layers.0.attention.{name}": tensor for name, tensor in old.items()}
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    assert set(HFDirectory(tmp_path).names()) == wanted


def test_the_centre_of_keys_lies_in_the_order_of_their_elements(tmp_path: Path) -> None:
    """Cohere rotates neighbours. In a layer that does not rotate, keys lie around their bias: far from zero, but close
    to a centre that is that bias."""
    model = save_random("cohere2", {**COHERE, "attention_bias": True, "sliding_window_pattern": 2}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor([0.05]) for i in range(3) for x in "kv"}
    bias = tensors["model.layers.1.self_attn.k_proj.bias"]
    bias += 20 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(3))
    tensors["model.layers.1.self_attn.k_center"] = bias.view(2, 16).clone()
    save_file(tensors, tmp_path / "model.safetensors")
    tokens, dtypes = prompt(model).tolist(), (torch.float32, torch.int8)
    exact, int8 = (run_chunks(load(tmp_path, "reference", kv_dtype=dtype), tokens, [40]) for dtype in dtypes)
    assert (int8 - exact).norm() < 0.1 * exact.norm()


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("case", ["cohere2", "gpt_neox", "gpt2-odd"])
def test_the_same_request_gives_the_same_bits(case: str, tiny_model: Path, tmp_path: Path) -> None:
    kind, keys = CASES[case]
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    save_random(kind, {**keys, "vocab_size": 320}, tmp_path)
    tokens = torch.randint(3, 300, (30,), generator=torch.Generator().manual_seed(7)).tolist()
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

    def logits(others: int, **config: int) -> torch.Tensor:
        engine, recorder = make_engine(tmp_path, **config)
        for i in range(others):
            engine.submit(f"other{i}", tokens[i:][: 5 + 4 * i], SamplingParams(max_tokens=3 + i, seed=i))
        engine.submit("mine", tokens, greedy)
        finish(engine)
        return torch.stack(recorder.rows["mine"])

    alone = logits(0)
    assert torch.equal(logits(5, max_num_batched_tokens=11, max_num_seqs=6), alone)
