"""Multi-head latent attention, small and random, against the logits of plain transformers in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qserve.checkpoint.families import Multipliers
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.modules import LLAMA
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme
from qserve.checkpoint.writer import CheckpointWriter
from qserve.evals.planner.family import shape_of
from qserve.kernels import registry
from qserve.quantize import fp8
from qserve.runtime.memory import block_bytes_of
from qserve.runtime.models import latent
from qserve.runtime.models.config import DecoderConfig, decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from tests.runtime.models.test_decoder import SMALL, run_chunks
from tests.runtime.models.test_moe import NATIVE, logits, quantize, tokens

WIDTHS = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 9, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "n_shared_experts": 2, "moe_intermediate_size": 48,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 0.7,
    "mscale_all_dim": 1.0, "beta_fast": 4.0, "beta_slow": 1.0,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        {**EXPERTS, "topk_method": "group_limited_greedy", "rope_parameters": YARN, "attention_bias": True},
    ),
    "deepseek_v2-lite": ("deepseek_v2", {**EXPERTS, "q_lora_rank": None, "n_shared_experts": 1, "mlp_bias": True}),
    "deepseek_v3": ("deepseek_v3", {**EXPERTS, "rope_parameters": YARN}),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {**EXPERTS, "rope_interleave": False, "attention_bias": True, "num_attention_heads": 20,
         "num_key_value_heads": 20, "qk_rope_head_dim": 6, "kv_lora_rank": 18},
    ),
    "deepseek_v3-blocks": (
        "deepseek_v3",
        {**EXPERTS, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128,
         "kv_lora_rank": 128, "v_head_dim": 64},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite", {**EXPERTS, "mlp_layer_types": ["sparse", "dense", "sparse"], "v_head_dim": 32},
    ),
    "minicpm3": (
        "minicpm3", {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 24, "mlp_bias": True, "v_head_dim": None},
    ),
    "youtu": (
        "youtu", {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 8},
    ),
}  # fmt: skip
LIMITS = DecoderLimits(max_tokens=64, max_logits=64, max_positions=64, num_blocks=24)


def make(case: str, path: Path) -> Any:
    kind, changes = CASES[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, "pad_token_id": 0, **WIDTHS, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "proj" in name:
            parameter.data = 0.15 * torch.randn_like(parameter)
        if name.endswith("mlp.gate.weight"):
            parameter.data = 0.3 * torch.randn_like(parameter)
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return model


def decoder(
    path: Path, kernels: str = "reference", config: DecoderConfig | None = None,
    kv_dtype: torch.dtype = torch.float32,
) -> Decoder:
    source = HFDirectory(path)
    config = config or decoder_config(source.config, "small")
    return Decoder(source, config, registry.make(kernels), LIMITS, kv_dtype=kv_dtype)


@pytest.mark.parametrize("kernels", ["reference", NATIVE])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, kernels: str, tmp_path: Path) -> None:
    want = logits(make(case, tmp_path))
    small = decoder(tmp_path, kernels)
    assert kernels == "reference" or not small.fallbacks
    got = {}
    for chunks in ([40], [17, 1, 22], [1] * 40):
        got[len(chunks)] = run_chunks(small, tokens().tolist(), chunks)
        torch.testing.assert_close(got[len(chunks)], want, rtol=0, atol=1e-4)
    if kernels == "native":
        assert torch.equal(got[1], got[3]) and torch.equal(got[1], got[40])


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    """Its configuration as it is published, with code beside the weights, which is not run."""
    want = logits(make("deepseek_v3", tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    kimi = {
        "model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "rope_theta": scaling.pop("rope_theta"), "rope_scaling": {"type": scaling.pop("rope_type"), **scaling},
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**config, **kimi}))
    source = HFDirectory(tmp_path)
    assert source.config["model_type"] == "deepseek_v3" and "auto_map" not in source.config
    got = run_chunks(decoder(tmp_path), tokens().tolist(), [40])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert shape_of({**config, **kimi}, "kimi") == shape_of({**config, "rope_parameters": scaling}, "kimi")


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("deepseek_v2", {"multipliers": Multipliers(attention=32**-0.5)}),
        ("deepseek_v2", {"modules": LLAMA}),
        ("deepseek_v2", {"groups": 1}),
        ("deepseek_v2", {"group_best": 2}),
        ("deepseek_v2-lite", {"scale": 1.0}),
        ("deepseek_v2-lite", {"groups": 3, "top_groups": 2}),
        ("deepseek_v3", {"multipliers": Multipliers(attention=32**-0.5)}),
        ("deepseek_v3", {"modules": LLAMA}),
        ("deepseek_v3", {"groups": 1}),
        ("deepseek_v3", {"sigmoid": False}),
        ("deepseek_v3", {"score_bias": False}),
        ("deepseek_v3-halves", {"modules": replace(LLAMA, interleaved=True)}),
        ("glm4_moe_lite", {"renormalize": False}),
        ("minicpm3", {"multipliers": Multipliers(12, 1.4 / 3**0.5, 32**-0.5)}),
        ("minicpm3", {"modules": replace(LLAMA, interleaved=True)}),
        ("youtu", {"modules": LLAMA}),
    ],
)
def test_without_one_feature_the_logits_are_others(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    want = logits(make(case, tmp_path))
    whole = decoder_config(HFDirectory(tmp_path).config, "small")
    own = {name: value for name, value in changes.items() if hasattr(whole, name)}
    rest = {name: value for name, value in changes.items() if name not in own}
    config = replace(whole, **own, moe=replace(whole.moe, **rest) if rest and whole.moe else whole.moe)
    got = run_chunks(decoder(tmp_path, config=config), tokens().tolist(), [40])
    assert (got - want).abs().max() > 1e-3


def test_norms_of_latents_have_an_epsilon_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = logits(make("deepseek_v3", tmp_path))
    monkeypatch.setattr(latent, "NORM_EPS", 1e-3)
    assert (run_chunks(decoder(tmp_path), tokens().tolist(), [40]) - want).abs().max() > 1e-3


def test_a_latent_is_kept_once(tmp_path: Path) -> None:
    make("deepseek_v3", tmp_path)
    small = decoder(tmp_path, kv_dtype=torch.float16)
    assert small.kv.nbytes == 3 * LIMITS.num_blocks * block_bytes_of(small.layout, torch.float16) // 3
    assert block_bytes_of(small.layout, torch.float16) == 3 * 16 * (40 + 8) * 2
    published = decoder_config({"model_type": "deepseek_v3"}, "DeepSeek-V3")
    assert published.kv_bytes_per_token(2) // published.num_hidden_layers == 1152


@pytest.mark.parametrize("form", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize("case", ["deepseek_v2-lite", "deepseek_v3", "minicpm3"])
def test_quantized_logits_are_those_of_transformers(case: str, form: str, tmp_path: Path) -> None:
    """With the weights as they were rounded. The native products round their inputs too."""
    make(case, tmp_path)
    quantize(tmp_path, WeightScheme(4, 8), form)
    want = logits(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval())
    got = run_chunks(decoder(tmp_path / "quantized"), tokens().tolist(), [40])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    small = decoder(tmp_path / "quantized", "native")
    got = run_chunks(small, tokens().tolist(), [40])
    # Of most tokens: some choose another expert, because their inputs were rounded.
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.05
    for chunks in ([17, 1, 22], [1] * 40):
        assert torch.equal(run_chunks(small, tokens().tolist(), chunks), got)


def save_in_fp8(path: Path) -> dict[str, torch.Tensor]:
    """A model at ``path``, and at ``path / "fp8"`` in DeepSeek-V3's own format: e4m3 with a scale for each block of
    128 x 128, and inputs rounded in groups of 128. Returns the weights as they were rounded."""
    make("deepseek_v3-blocks", path)
    scheme = WeightScheme(8, 128, dtype="fp8", rows=128)
    spec = QuantSpec("fp8", scheme, ActivationScheme("fp8", "group", group_size=128))
    source, rounded, form = HFDirectory(path), {}, FORMATS["fp8"]
    with CheckpointWriter(path / "fp8", format=form) as writer:
        for name in source.names():
            tensor, module = source.tensor(name), name.removesuffix(".weight")
            if module.endswith(("_proj", "_with_mqa")):
                packed = fp8.nearest(tensor, torch.ones(tensor.shape[1]), scheme)
                rounded[name] = packed.dequantize()
                writer.put_linear(module, replace(packed, activations=spec.activations))
            else:
                rounded[name] = tensor
                writer.put(name, tensor)
        writer.put_json("config.json", {**source.config, "quantization_config": form.config_of(spec)})
        writer.finish()
    return rounded


def test_blocks_of_fp8_are_served_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = save_in_fp8(tmp_path)
    save_file(rounded, tmp_path / "model.safetensors", {"format": "pt"})
    want = logits(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval())
    rounds = run_chunks(decoder(tmp_path / "fp8"), tokens().tolist(), [40])
    small = decoder(tmp_path / "fp8", "native")
    got = run_chunks(small, tokens().tolist(), [40])
    assert not small.fallbacks and ((got - rounds).norm(dim=-1) / rounds.norm(dim=-1)).median() < 0.01
    for chunks in ([17, 1, 22], [1] * 40):
        assert torch.equal(run_chunks(small, tokens().tolist(), chunks), got)
    with monkeypatch.context() as patched:
        patched.setattr("qserve.kernels.reference.round_input", lambda x, *others: x.float())
        got = run_chunks(decoder(tmp_path / "fp8"), tokens().tolist(), [40])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert (got - rounds).abs().max() > 0.01


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3 stores such a layer behind the last one."""
    want = logits(make("deepseek_v3", tmp_path))
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    extra = {name.replace("layers.2.", "layers.3."): x.clone() for name, x in stored.items() if "layers.2." in name}
    save_file({**stored, **extra, "model.layers.3.eh_proj.weight": torch.ones(64, 128)}, file, {"format": "pt"})
    assert not [name for name in HFDirectory(tmp_path).names() if "layers.3." in name]
    torch.testing.assert_close(run_chunks(decoder(tmp_path), tokens().tolist(), [40]), want, rtol=0, atol=1e-4)
