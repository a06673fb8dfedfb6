"""Each family of the native decoder, small and random, against the logits of plain transformers in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import Multipliers
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.modules import GLM, GLM4, Modules
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.checkpoint.writer import CheckpointWriter
from qserve.kernels import native, registry
from qserve.kernels.executor import Step
from qserve.quantize import fp8, rtn
from qserve.runtime.models.config import DecoderConfig, decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits, missing_kernels

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ORIGINAL = {"original_max_position_embeddings": 32}
MULTIPLIERS = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 6.0,
}  # fmt: skip
PAD = {"pad_token_id": 0}
LONG = {
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    },
}
WIDE = {"hidden_size": 72, "intermediate_size": 88, "initializer_range": 0.2}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
SHARP = {"initializer_range": 0.2, "intermediate_size": 88}
PATTERN = ("sliding_attention", "full_attention", "sliding_attention")
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 0.5, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
LIMITS = DecoderLimits(max_tokens=64, max_logits=64, max_positions=64, num_blocks=40)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha-head-dim": ("llama", {"num_key_value_heads": 4, "head_dim": 48}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-3": (
        "llama",
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                                                  "high_freq_factor": 4.0, **ORIGINAL}},
    ),
    "llama-yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}}),
    "llama-stray-window": ("llama", {"sliding_window": 5}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "granite": ("granite", {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
    "granite-tied": ("granite", {**MULTIPLIERS, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {**PAD, "no_rope_layers": [0, 1, 0], "tie_word_embeddings": False}),
    "smollm3-window": (
        "smollm3", {**PAD, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7},
    ),
    "mistral-nemo": ("mistral", {"sliding_window": None, "head_dim": 48, "hidden_size": 80}),
    "gemma": ("gemma", {**PAD, **WIDE, "head_dim": 32}),
    "gemma-mqa": ("gemma", {**PAD, **WIDE, "head_dim": 48, "num_key_value_heads": 1, "tie_word_embeddings": False,
                            "attention_bias": True}),
    "gemma2": ("gemma2", {**PAD, **WIDE, **CAPS, "head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 20}),
    "gemma2-layers": ("gemma2", {**PAD, **WIDE, **CAPS, "head_dim": 16, "sliding_window": 5,
                                 "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                                 "hidden_activation": "gelu", "attention_bias": True}),
    "gemma3": ("gemma3_text", {**PAD, **WIDE, "head_dim": 32, "sliding_window": 9, "sliding_window_pattern": 2,
                               "rope_local_base_freq": 100.0, "rope_theta": 5000.0}),
    "gemma3-linear": ("gemma3_text", {**PAD, **WIDE, **CAPS, "head_dim": 48, "sliding_window": 7,
                                      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                                      "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "vaultgemma": ("vaultgemma", {**PAD, **WIDE, **CAPS, "head_dim": 32, "sliding_window": 6}),
    "ministral": ("ministral", {**WIDE, "head_dim": 16, "sliding_window": 6, "layer_types": [*PATTERN]}),
    "ministral-full": ("ministral", {**WIDE, "head_dim": 48, "layer_types": ["full_attention"] * 3}),
    "ministral3": ("ministral3", {**WIDE, "head_dim": 32, "sliding_window": 9, "rope_parameters": YARN}),
    "ministral3-full": ("ministral3", {**WIDE, "head_dim": 16, "rope_parameters": {
        **YARN, "rope_type": "default", "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 7}}),
    "olmo2": ("olmo2", {**PAD, **SHARP, "attention_bias": True}),
    "olmo2-mqa": ("olmo2", {**PAD, **SHARP, "num_key_value_heads": 1, "hidden_size": 192, "rms_norm_eps": 0.1}),
    "olmo3": ("olmo3", {**PAD, **SHARP, "sliding_window": 7, "num_hidden_layers": 4}),
    "olmo3-yarn": ("olmo3", {**PAD, **SHARP, "sliding_window": 5, "layer_types": [*PATTERN],
                             "rope_scaling": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}}),
    "exaone4": ("exaone4", {**SHARP, "head_dim": 48, "sliding_window": 7, "layer_types": [*PATTERN]}),
    "exaone4-full": ("exaone4", {**SHARP, "hidden_size": 128, "sliding_window": None, "tie_word_embeddings": True,
                                 "layer_types": ["full_attention"] * 3}),
    "hyperclovax": ("hyperclovax", {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
    "hyperclovax-no-post-norm": ("hyperclovax", {**MULTIPLIERS, "use_post_norm": False, "head_dim": 32}),
    "arcee": ("arcee", {**SHARP, "mlp_bias": True}),
    "arcee-relu": ("arcee", {**SHARP, "hidden_act": "relu", "attention_bias": True, "head_dim": 32}),
    "seed_oss": ("seed_oss", {**WIDE, "head_dim": 32}),
    "seed_oss-biases": ("seed_oss", {**WIDE, "head_dim": 48, "attention_out_bias": True, "mlp_bias": True}),
    "cwm": ("cwm", {**SHARP, "head_dim": 32, "sliding_window": 7, "rope_theta": 500.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}}),
    "cwm-layers": ("cwm", {**SHARP, "head_dim": 16, "sliding_window": 5, "layer_types": [*PATTERN]}),
    "glm": ("glm", {**PAD, **SHARP, "head_dim": 32}),
    "glm-no-biases": ("glm", {**PAD, **SHARP, "head_dim": 48, "attention_bias": False, "partial_rotary_factor": 0.25}),
    "glm4": ("glm4", {**PAD, **WIDE, "head_dim": 32, "rms_norm_eps": 0.01}),
    "glm4-mqa": ("glm4", {**PAD, **WIDE, "head_dim": 48, "num_key_value_heads": 1, "attention_bias": False,
                          "partial_rotary_factor": 1.0}),
    "helium": ("helium", {**PAD, **SHARP, "head_dim": 16}),
    "helium-biases": ("helium", {**PAD, **SHARP, "hidden_size": 128, "head_dim": 32, "attention_bias": True,
                                 "mlp_bias": True}),
    "ernie4_5": ("ernie4_5", {**PAD, **WIDE, "head_dim": 32, "use_bias": True}),
    "ernie4_5-untied": ("ernie4_5", {**PAD, **WIDE, "head_dim": 48, "tie_word_embeddings": False}),
    "phi3": ("phi3", {**PAD, "sliding_window": 9}),
    "phi3-partial": ("phi3", {**PAD, "partial_rotary_factor": 0.5}),
    "phi3-long": ("phi3", {**PAD, **LONG, "original_max_position_embeddings": 32}),
    "phi3-short": ("phi3", {**PAD, **LONG, "original_max_position_embeddings": 64}),
}  # fmt: skip
QUANTIZED = {
    "int4": WeightScheme(4, 8, symmetric=False),
    "fp8": WeightScheme(8, -1, dtype="fp8"),
}


def save_random(family: str, changes: dict[str, Any], path: Path, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():  # biases start as zeros and norms as ones: make them count
        if parameter.dim() == 1 or "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return model


def run_chunks(decoder: Decoder, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence, computed a chunk at a time."""
    rows, done = [], 0
    groups = range(len(decoder.layout.groups))
    tables = [torch.tensor([[5, 1, 7, 2]], dtype=torch.int32) + 8 * group for group in groups]
    assert int(tables[-1].max()) < decoder.kv.shape[2], "the cache has too few blocks"
    for size in chunks:
        positions = torch.arange(done, done + size, dtype=torch.int32)
        steps = [
            Step(
                token_ids=torch.tensor(tokens[done : done + size], dtype=torch.int32),
                positions=positions,
                slots=table[0][positions.long() // 16] * 16 + positions % 16,
                seq_start=torch.tensor([0, size], dtype=torch.int32),
                block_tables=table,
                logit_rows=positions[:0],
                state_slots=torch.zeros(1, dtype=torch.int32) if decoder.sequence_states else None,
            )
            for table in tables
        ]
        decoder.run(*steps)
        decoder.head(steps[0], torch.arange(size, dtype=torch.int32))
        rows.append(decoder.logits[:size].clone())
        done += size
    return torch.cat(rows)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, kernels: str, tmp_path: Path) -> None:
    if kernels == "native" and native.missing():
        pytest.skip(str(native.missing()))
    family, changes = CASES[case]
    model = save_random(family, changes, tmp_path)
    source = HFDirectory(tmp_path)
    config = decoder_config(source.config, "small")
    decoder = Decoder(source, config, registry.make(kernels), LIMITS, kv_dtype=torch.float32)
    tokens = torch.randint(0, SMALL["vocab_size"], (40,), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
    whole = run_chunks(decoder, tokens.tolist(), [40])
    torch.testing.assert_close(whole, want, rtol=0, atol=1e-4)
    for chunks in ([17, 1, 22], [1] * 40):
        got = run_chunks(decoder, tokens.tolist(), chunks)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        assert kernels == "reference" or torch.equal(got, whole)  # batch-invariant


def without(config: DecoderConfig, **features: Any) -> DecoderConfig:
    """``config`` with other values of its own fields or of its family's."""
    own = {name for name in features if hasattr(config, name)}
    family = replace(config.family, **{name: value for name, value in features.items() if name not in own})
    return replace(config, family=family, **{name: features[name] for name in own})


@pytest.mark.parametrize(
    ("case", "features"),
    [
        ("gemma", {"one_plus": False}),
        ("gemma", {"multipliers": Multipliers()}),
        ("gemma", {"activation": "silu"}),
        ("gemma2", {"score_cap": 0.0}),
        ("gemma2", {"logit_cap": 0.0}),
        ("gemma2", {"windows": (0, 0, 0)}),
        ("gemma2", {"multipliers": Multipliers(72**0.5)}),
        ("gemma2", {"modules": Modules(mlp_norm="pre_feedforward_layernorm")}),
        ("gemma3", {"rope_kinds": ("full_attention",) * 3}),
        ("gemma3", {"rope_kinds": ("sliding_attention",) * 3}),
        ("gemma3", {"qk_norm": None}),
        ("gemma3", {"windows": (0, 0, 0)}),
        ("gemma3-linear", {"logit_cap": 0.0}),
        ("ministral3", {"scaled_queries": False}),
        ("ministral3-full", {"scaled_queries": False}),
        ("olmo2", {"qk_norm": None}),
        ("olmo2", {"modules": Modules(attention_norm=None, mlp_norm=None)}),
        ("olmo3-yarn", {"rope_kinds": ("sliding_attention",) * 3}),
        ("exaone4", {"rotated": (True, True, True)}),
        ("exaone4", {"qk_norm": None}),
        ("exaone4-full", {"rotated": (False, False, False)}),
        ("hyperclovax", {"modules": Modules()}),
        ("hyperclovax", {"multipliers": Multipliers(12.0, 0.22, 0.3, 1 / 6.0)}),
        ("arcee", {"activation": "relu"}),
        ("cwm", {"windows": (0, 0, 0)}),
        ("glm4", {"modules": GLM}),
        ("glm4", {"modules": replace(GLM4, interleaved=False)}),
        ("ernie4_5", {"modules": Modules()}),
    ],
)
def test_each_feature_counts(case: str, features: dict[str, Any], tmp_path: Path) -> None:
    """So that the comparison with transformers would miss none of them."""
    save_random(*CASES[case], tmp_path)
    source = HFDirectory(tmp_path)
    config, tokens = decoder_config(source.config, "small"), list(range(3, 43))
    with_it, without_it = (
        run_chunks(Decoder(source, shape, registry.make("reference"), LIMITS, kv_dtype=torch.float32), tokens, [40])
        for shape in (config, without(config, **features))
    )
    assert (with_it - without_it).abs().max() > 0.01


def round_weight(weight: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
    nearest = fp8.nearest if scheme.dtype == "fp8" else rtn.nearest
    return nearest(weight, torch.ones(weight.shape[1]), scheme)


def quantize(model: torch.nn.Module, path: Path, scheme: WeightScheme) -> None:
    """Round the linears of the layers of ``model``, and write it as a checkpoint."""
    spec = QuantSpec("rtn", scheme)
    form = FORMATS["compressed-tensors"]
    source = HFDirectory(path)
    linears = {
        f"{name}.weight": module for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and name != "lm_head"
    }  # fmt: skip
    with CheckpointWriter(path / "quantized", format=form) as writer:
        for name in source.names():
            if name in linears:
                transposed = isinstance(linears[name], Conv1D)
                weight = source.tensor(name)
                packed = round_weight(weight.T.contiguous() if transposed else weight, scheme)
                rounded = packed.dequantize()
                linears[name].weight.data = rounded.T.contiguous() if transposed else rounded
                writer.put_linear(name.removesuffix(".weight"), packed)
            else:
                writer.put(name, source.tensor(name))
        writer.put_json("config.json", {**source.config, "quantization_config": form.config_of(spec)})
        writer.finish()


@pytest.mark.parametrize("scheme", QUANTIZED)
@pytest.mark.parametrize(
    "case", ["llama-biases", "qwen3", "granite", "phi3-long", "gemma2", "gemma3", "olmo3", "exaone4", "arcee", "glm4"]
)
def test_quantized_logits_are_those_of_transformers(case: str, scheme: str, tmp_path: Path) -> None:
    """With the weights as they were rounded. The native products of int4 round their inputs too."""
    model = save_random(*CASES[case], tmp_path)
    quantize(model, tmp_path, QUANTIZED[scheme])
    tokens = torch.randint(0, SMALL["vocab_size"], (40,), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
    got = {}
    for kernels in ("reference",) if native.missing() else ("reference", "native"):
        source = HFDirectory(tmp_path / "quantized")
        decoder = Decoder(
            source, decoder_config(source.config, "small"), registry.make(kernels), LIMITS, kv_dtype=torch.float32
        )
        got[kernels] = run_chunks(decoder, tokens.tolist(), [40])
        if kernels == "native":  # batch-invariant
            for chunks in ([17, 1, 22], [1] * 40):
                assert torch.equal(run_chunks(decoder, tokens.tolist(), chunks), got[kernels])
    torch.testing.assert_close(got["reference"], want, rtol=0, atol=1e-4)
    if "native" in got and scheme == "fp8":
        torch.testing.assert_close(got["native"], want, rtol=0, atol=1e-4)
    elif "native" in got:
        assert (got["native"] - want).norm() < 0.04 * want.norm()


def test_headers_say_which_kernels_are_missing(tmp_path: Path) -> None:
    if native.missing():
        pytest.skip(str(native.missing()))
    save_random("llama", {"head_dim": 264}, tmp_path)
    source = HFDirectory(tmp_path)
    config, executor = decoder_config(source.config, "small"), registry.make("native")
    limits = DecoderLimits(max_tokens=8, max_logits=8, max_positions=64, num_blocks=8)
    found = missing_kernels(source, config, executor, torch.float16)
    assert found == {"attention: a head_dim of 264 has no C kernel: at most 256": 3}
    assert Decoder(source, config, executor, limits).fallbacks == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "quick_gelu"}, "'quick_gelu'"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": "wide"}, "not a valid"),
    ],
)
def test_what_is_not_computed_exactly_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config({"model_type": "llama", **SMALL, **changes}, "small")


def test_a_misshapen_weight_is_refused_by_name(tmp_path: Path) -> None:
    save_random("llama", {}, tmp_path)
    source = HFDirectory(tmp_path)
    config = decoder_config({**source.config, "intermediate_size": 96}, "small")
    limits = DecoderLimits(max_tokens=8, max_logits=8, max_positions=64, num_blocks=8)
    with pytest.raises(CheckpointError, match=r"gate_proj.*112.*96"):
        Decoder(source, config, registry.make("reference"), limits)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("case", ["llama", "granite", "gemma3"])
def test_hidden_states_of_layers_are_those_of_transformers(case: str, kernels: str, tmp_path: Path) -> None:
    """Of the input of layers, and behind the last one; the residual multiplier is left out."""
    if kernels == "native" and native.missing():
        pytest.skip(str(native.missing()))
    model, layers = save_random(*CASES[case], tmp_path), (0, 1, 3)
    source = HFDirectory(tmp_path)
    config = decoder_config(source.config, "small")
    behind_last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, given: behind_last.append(given[0]))  # type: ignore[union-attr]
    tokens = torch.randint(0, SMALL["vocab_size"], (40,), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        states = model(tokens[None], output_hidden_states=True).hidden_states
    decoders = [
        Decoder(source, config, registry.make(kernels), limits, kv_dtype=torch.float32)
        for limits in (replace(LIMITS, hidden_layers=layers), LIMITS)
    ]
    asked, plain = (run_chunks(decoder, tokens.tolist(), [17, 23]) for decoder in decoders)
    assert torch.equal(asked, plain) and decoders[1].hidden == ()
    placement = decoders[0].placement
    taken = [limits.workspace_bytes(config, placement.activations) for limits in (decoders[0].limits, LIMITS)]
    assert taken[0] - taken[1] == 3 * 64 * config.hidden_size * 4
    for found, want in zip(decoders[0].hidden, (states[0], states[1], *behind_last)):
        scaled = found[:23] * config.multipliers.residual  # of the last chunk
        torch.testing.assert_close(scaled, want[0, 17:], rtol=0, atol=1e-4)
