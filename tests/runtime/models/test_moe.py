"""Mixtures of experts, small and random, against the logits of plain transformers in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.checkpoint.writer import CheckpointWriter
from qserve.kernels import native, registry
from qserve.quantize import rtn
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from tests.runtime.models.test_decoder import SMALL, run_chunks, without

GLM = {
    "n_routed_experts": 9, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 6.0,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "initializer_range": 0.1, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 16,
        "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral-window": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 9}),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 7, "shared_expert_intermediate_size": 80}),
    "qwen2_moe-some-layers": (
        "qwen2_moe",
        {"num_experts": 5, "shared_expert_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 5, "norm_topk_prob": True, "head_dim": 32}),
    "qwen3_moe-some-layers": (
        "qwen3_moe", {"num_experts": 11, "num_experts_per_tok": 4, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "glm4_moe": ("glm4_moe", {**GLM, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe-plain": (
        "glm4_moe",
        {**GLM, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 0, "head_dim": 32,
         "norm_topk_prob": False},
    ),
    "dots1": ("dots1", {**GLM, "n_shared_experts": 2}),
    "dots1-plain": ("dots1", {**GLM, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": False}),
    "olmoe": ("olmoe", {"num_experts": 7, "norm_topk_prob": True}),
    "olmoe-biases": ("olmoe", {"num_experts": 5, "num_key_value_heads": 4, "attention_bias": True}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16}),
    "minimax_m2-all-rotated": ("minimax_m2", {"num_local_experts": 5, "head_dim": 16}),
    "granitemoe": ("granitemoe", {**MULTIPLIERS, "num_local_experts": 5}),
    "granitemoe-biases": ("granitemoe", {**MULTIPLIERS, "num_local_experts": 3, "attention_bias": True}),
    "granitemoeshared": ("granitemoeshared", {**MULTIPLIERS, "num_local_experts": 5, "shared_intermediate_size": 80}),
    "granitemoeshared-without": (
        "granitemoeshared", {**MULTIPLIERS, "num_local_experts": 4, "shared_intermediate_size": 0},
    ),
    "gpt_oss": ("gpt_oss", {**GPT_OSS, "num_local_experts": 6, "head_dim": 16, "sliding_window": 9}),
    "gpt_oss-more": (
        "gpt_oss",
        {**GPT_OSS, "num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 32, "num_hidden_layers": 4,
         "sliding_window": 21, "num_key_value_heads": 1, "hidden_size": 80, "intermediate_size": 48},
    ),
}  # fmt: skip
LIMITS = DecoderLimits(max_tokens=64, max_logits=64, max_positions=64, num_blocks=24)
NATIVE = pytest.param("native", marks=pytest.mark.skipif(native.missing() is not None, reason=str(native.missing())))


def make(case: str, **more: Any) -> Any:
    kind, changes = CASES[case]
    torch.manual_seed(0)
    small = {**SMALL, "moe_intermediate_size": 48, "num_experts_per_tok": 2, "pad_token_id": 0, **changes, **more}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small), attn_implementation="eager").eval()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "expert" in name or "mlp" in name:
            parameter.data *= 5.0
        if name.endswith(("mlp.gate.weight", "moe.gate.weight", "router.weight")):
            parameter.data = 0.3 * torch.randn_like(parameter)
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
        if kind == "gpt_oss" and name.endswith(("sinks", "gate_up_proj_bias")):  # some gates beyond the limit of 7
            parameter.data = 2.0 * torch.randn_like(parameter)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, SMALL["vocab_size"], (40,), generator=torch.Generator().manual_seed(7))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()[None]).logits[0]


def decoder(path: Path, kernels: str = "reference", **changes: Any) -> Decoder:
    source = HFDirectory(path)
    config = decoder_config(source.config, "small")
    config = replace(config, moe=replace(config.moe, **changes))  # type: ignore[type-var]
    return Decoder(source, config, registry.make(kernels), LIMITS, kv_dtype=torch.float32)


@pytest.mark.parametrize("kernels", ["reference", NATIVE])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, kernels: str, tmp_path: Path) -> None:
    model = make(case)
    model.save_pretrained(tmp_path)
    small, want = decoder(tmp_path, kernels), logits(model)
    assert not [line for line in small.fallbacks if line.startswith(("route", "experts", "sigmoid"))]
    got = {}
    for chunks in ([40], [17, 1, 22], [1] * 40):
        got[len(chunks)] = run_chunks(small, tokens().tolist(), chunks)
        torch.testing.assert_close(got[len(chunks)], want, rtol=0, atol=1e-4)
    if kernels == "native":
        assert torch.equal(got[1], got[3]) and torch.equal(got[1], got[40])


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("mixtral", {"renormalize": False}),
        ("mixtral", {"top_k": 1}),
        ("qwen2_moe", {"renormalize": True}),
        ("qwen2_moe", {"shared_gate": False}),
        ("qwen2_moe", {"shared": 0}),
        ("olmoe", {"renormalize": False}),
        ("minimax_m2", {"score_bias": False}),
        ("glm4_moe", {"sigmoid": False}),
        ("glm4_moe", {"score_bias": False}),
        ("glm4_moe", {"groups": 1}),
        ("glm4_moe", {"group_best": 1}),
        ("glm4_moe", {"scale": 1.0}),
        ("glm4_moe", {"renormalize": False}),
        ("glm4_moe", {"shared": 0}),
        ("gpt_oss", {"function": "silu"}),
        ("gpt_oss", {"renormalize": False}),
    ],
)
def test_without_one_feature_the_logits_are_others(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = make(case)
    model.save_pretrained(tmp_path)
    got = run_chunks(decoder(tmp_path, **changes), tokens().tolist(), [40])
    assert (got - logits(model)).abs().max() > 1e-3


def test_each_part_of_gpt_oss_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt_oss")
    model.save_pretrained(tmp_path)
    want = logits(model)

    def differs() -> bool:
        small = Decoder(HFDirectory(tmp_path), config, registry.make("reference"), LIMITS, kv_dtype=torch.float32)
        return bool((run_chunks(small, tokens().tolist(), [40]) - want).abs().max() > 1e-2)

    whole = config = decoder_config(HFDirectory(tmp_path).config, "small")
    assert not differs()
    for features in ({"sinks": False}, {"windows": (0, 0, 0)}, {"rope_kinds": ("plain",) * 3}):
        config = without(whole, **features)
        config.hf.rope_parameters = {**whole.hf.rope_parameters, "plain": {"rope_theta": 1000.0}}
        assert differs(), features
    config = whole
    with monkeypatch.context() as patched:
        patched.setattr("qserve.kernels.reference.CLAMP", 1e9)
        assert differs()
    stored = load_file(tmp_path / "model.safetensors")
    for part in ("q_proj.bias", "o_proj.bias", "router.bias", "gate_up_proj_bias", "down_proj_bias"):
        save_file(
            {name: torch.zeros_like(tensor) if name.endswith(part) else tensor for name, tensor in stored.items()},
            tmp_path / "model.safetensors", {"format": "pt"},
        )  # fmt: skip
        assert differs(), part


def publish(model: Any, path: Path) -> None:
    """``model`` as OpenAI publishes GPT-OSS, with random experts in MXFP4. Those of ``model`` become the same."""
    model.save_pretrained(path)
    stored, held = load_file(path / "model.safetensors"), model.state_dict()
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inp, out = stored.pop(name).shape
        blocks = torch.randint(0, 256, (count, out, inp // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 123, (count, out, inp // 32), dtype=torch.uint8)
        held[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("shape", [{}, {"num_local_experts": 9, "num_experts_per_tok": 4, "head_dim": 48}])
def test_published_gpt_oss_runs_its_experts_as_they_are(shape: dict[str, Any], tmp_path: Path) -> None:
    model = make("gpt_oss", hidden_size=96, intermediate_size=64, **shape)
    publish(model, tmp_path)
    want = logits(model)
    got = run_chunks(decoder(tmp_path), tokens().tolist(), [40])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    if native.missing() is None:
        small = decoder(tmp_path, "native")
        assert not small.fallbacks
        got = run_chunks(small, tokens().tolist(), [40])  # the products round their inputs
        assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.02
        for chunks in ([17, 1, 22], [1] * 40):
            assert torch.equal(run_chunks(small, tokens().tolist(), chunks), got)


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_experts_stored_together_are_read(kind: str, tmp_path: Path) -> None:
    """As transformers holds them: one tensor of all gate and up projections, one of all down projections."""
    model = make(kind)
    model.save_pretrained(tmp_path)
    want = logits(model)
    file = tmp_path / "model.safetensors"
    stored = {name: tensor for name, tensor in load_file(file).items() if ".experts." not in name}
    held = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if ".experts." in name}
    assert all(tensor.dim() == 3 for tensor in held.values())
    save_file({**stored, **held}, file)
    torch.testing.assert_close(run_chunks(decoder(tmp_path), tokens().tolist(), [40]), want, rtol=0, atol=1e-4)


def quantize(path: Path, scheme: WeightScheme, form: str, *, odd: str = "") -> None:
    """Round the linears of the checkpoint at ``path``, its experts among them. Modules whose name holds ``odd`` get 8
    bits."""
    source, rounded = HFDirectory(path), {}
    modules = [name.removesuffix(".weight") for name in source.names() if name.endswith(".weight")]
    spec = QuantSpec(
        "rtn", scheme, overrides={name: replace(scheme, bits=8) for name in modules if odd and odd in name},
        ignored=tuple(name for name in modules if name.endswith(("gate", "lm_head"))),
    )  # fmt: skip
    with CheckpointWriter(path / "quantized", format=FORMATS[form]) as writer:
        for name in source.names():
            module = name.removesuffix(".weight")
            of_module = spec.scheme_of(module)
            if module.endswith(("_proj", ".w1", ".w2", ".w3")) and of_module is not None:
                weight = source.tensor(name)
                packed = rtn.nearest(weight, torch.ones(weight.shape[1]), of_module)
                rounded[name] = packed.dequantize()
                writer.put_linear(module, packed)
            else:
                rounded[name] = source.tensor(name)
                writer.put(name, rounded[name])
        writer.put_json("config.json", {**source.config, "quantization_config": FORMATS[form].config_of(spec)})
        writer.finish()
    save_file(rounded, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("case", "form", "scheme"),
    [
        ("mixtral", "gptq", WeightScheme(4, 16)), ("qwen2_moe", "compressed-tensors", WeightScheme(4, 16)),
        ("glm4_moe", "awq", WeightScheme(4, 16, symmetric=False)),
        ("mixtral", "compressed-tensors", WeightScheme(4, 16, dtype="trellis")),
    ],
)  # fmt: skip
def test_quantized_logits_are_those_of_transformers(
    case: str, form: str, scheme: WeightScheme, tmp_path: Path
) -> None:
    """With the weights as they were rounded. The native products round their inputs too."""
    make(case).save_pretrained(tmp_path)
    quantize(tmp_path, scheme, form)
    want = logits(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval())
    got = run_chunks(decoder(tmp_path / "quantized"), tokens().tolist(), [40])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    if native.missing() is None:
        small = decoder(tmp_path / "quantized", "native")
        got = run_chunks(small, tokens().tolist(), [40])
        # Of most tokens: some choose another expert, because their inputs were rounded.
        assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.03
        for chunks in ([17, 1, 22], [1] * 40):
            assert torch.equal(run_chunks(small, tokens().tolist(), chunks), got)


def test_what_is_missing_or_differs_is_named(tmp_path: Path) -> None:
    make("qwen3_moe").save_pretrained(tmp_path)
    quantize(tmp_path, WeightScheme(4, 16), "compressed-tensors", odd="experts.2")
    with pytest.raises(CheckpointError, match=r"experts of model\.layers\.0 are stored in different ways"):
        decoder(tmp_path / "quantized")
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.3\.up_proj"):
        decoder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 4}, "9 experts cannot form 4 groups"),
        ({"topk_group": 4}, "of which 4 are chosen"),
        ({"num_experts_per_tok": 7}, "cannot take 7 experts of 2 of 3 groups of 9"),
        ({"num_experts_per_tok": 0}, "cannot take 0 experts"),
    ],
)
def test_routing_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config({"model_type": "glm4_moe", **SMALL, "moe_intermediate_size": 48, **GLM, **changes}, "small")
