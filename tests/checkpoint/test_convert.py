from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qserve.checkpoint.card import QualityCard, write_card
from qserve.checkpoint.convert import convert
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.kv import is_kv, kv_scales
from qserve.checkpoint.spec import ActivationScheme, KVScheme, QuantSpec, WeightScheme
from qserve.checkpoint.summary import summarize
from qserve.checkpoint.writer import CheckpointWriter

SYM, ASYM = QuantSpec("gptq", WeightScheme(4, 32)), QuantSpec("awq", WeightScheme(4, 32, False))
INT8 = QuantSpec("smoothquant", WeightScheme(8, -1), ActivationScheme("int8"))
TENSOR = QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8", rows=-1), ActivationScheme("fp8", "tensor", dynamic=False))
BLOCK = QuantSpec("rtn", WeightScheme(8, 32, dtype="fp8", rows=32), ActivationScheme("fp8", "group", group_size=32))
CARD = QualityCard("base", "a" * 64, "text", "b" * 64, 100, 10, 20.0, 21.0, 0.1, 0.05, 0.2, 0.9, "cpu", "2026-01-01",
                   scope="four windows")


def save_tokenizer(directory: Path) -> None:
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(directory)


@pytest.fixture
def packed_model(tiny_llama, tmp_path, random_weight):
    """``packed_model(spec, format)``: the tiny llama with random packed projections, and one of them with a bias."""

    def make(spec: QuantSpec, format: str, *, extra=None, **options) -> HFDirectory:
        dense = HFDirectory(tiny_llama)
        out = tmp_path / f"{format}-source"
        with CheckpointWriter(out, format=FORMATS[format]) as writer:
            for i, name in enumerate(dense.names()):
                module = name.removesuffix(".weight")
                scheme = spec.scheme_of(module)
                embedding = module == "model.embed_tokens" and module not in spec.overrides
                if len(dense.shape(name)) != 2 or embedding or scheme is None:
                    writer.put(name, dense.tensor(name))
                    continue
                weight = random_weight(scheme, *dense.shape(name), i, bias="v_proj" in name,
                                       activations=spec.activations_of(module), **{"lowest_zero": 1, **options})
                writer.put_linear(module, weight)
            for name, tensor in (extra or {}).items():
                writer.put(name, tensor)
            writer.put_json("config.json", dense.config | {"quantization_config": FORMATS[format].config_of(spec)})
            save_tokenizer(writer.directory)
            writer.finish()
        write_card(out, CARD)
        return HFDirectory(out)

    return make


LOSSLESS = [
    (SYM, "gptq", "gptq_v2"), (SYM, "gptq_v2", "gptq"), (SYM, "gptq", "compressed-tensors"), (SYM, "gptq", "awq"),
    (SYM, "compressed-tensors", "gptq"), (SYM, "compressed-tensors", "awq"),
    (ASYM, "awq", "gptq_v2"), (ASYM, "awq", "compressed-tensors"), (ASYM, "gptq_v2", "awq"),
    (ASYM, "gptq_v2", "compressed-tensors"), (ASYM, "compressed-tensors", "awq"),
    (ASYM, "compressed-tensors", "gptq_v2"), (ASYM, "awq", "gptq"), (ASYM, "gptq_v2", "gptq"),
    (TENSOR, "fp8", "compressed-tensors"), (TENSOR, "compressed-tensors", "fp8"),
    (BLOCK, "fp8", "compressed-tensors"), (BLOCK, "compressed-tensors", "fp8"),
]  # fmt: skip


@pytest.mark.parametrize("spec, before, after", LOSSLESS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_bit_survives(packed_model, tmp_path, spec, before, after) -> None:
    source, out = packed_model(spec, before), tmp_path / "out"
    steps = []
    report = convert(source, out, after, progress=lambda done, total: steps.append((done, total)))
    found = HFDirectory(out)
    found.verify()
    assert report.format == found.format.name == after and report.modules == 14 and report.notes == ()
    assert steps[-1][0] == steps[-1][1] == len(source.linears()) + len(source.names())
    assert found.linears() == source.linears() and sorted(found.names()) == sorted(source.names())
    for module in source.linears():
        one, two = source.linear(module), found.linear(module)
        assert torch.equal(one.dequantize(), two.dequantize()), module
        assert (one.bias is None) == (two.bias is None) and (one.bias is None or torch.equal(one.bias, two.bias))
        assert (one.activations, one.input_scale) == (two.activations, two.input_scale)
    for name in source.names():
        assert torch.equal(source.tensor(name), found.tensor(name))
    assert found.tokenizer()("w5 w7")["input_ids"] == [5, 7]
    assert found.spec.method == spec.method and found.generation_config() == source.generation_config()
    assert found.card == replace(CARD, scope=found.card.scope, model_sha256=found.sha256())
    assert before in found.card.scope
    assert found.card.scope.startswith("four windows; ")


def test_there_and_back_gives_the_same_files(packed_model, tmp_path) -> None:
    source = packed_model(SYM, "gptq")
    convert(source, tmp_path / "there", "compressed-tensors")
    convert(HFDirectory(tmp_path / "there"), tmp_path / "back", "gptq")
    one, two = (load_file(path / "model.safetensors") for path in (source.path, tmp_path / "back"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == source.config and (tmp_path / "back" / "quantize_config.json").exists()


def test_overrides_embeddings_and_kv_scales_survive(packed_model, tmp_path) -> None:
    spec = QuantSpec("mixed", WeightScheme(4, 32), kv_cache=KVScheme("fp8", "head"), ignored=("lm_head",),
                     overrides={"model.embed_tokens": WeightScheme(8, -1),
                                "model.layers.0.mlp.down_proj": WeightScheme(3, 64)})
    scales = {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor([0.5, 2.0]) for i in range(2) for x in "kv"}
    scales |= {f"model.layers.{i}.self_attn.k_center": torch.ones(2, 8) for i in range(2)}
    source = packed_model(spec, "compressed-tensors", extra=scales)
    assert source.spec == spec and "model.embed_tokens" in source.linears()
    assert source.shape("model.embed_tokens") == (96, 64)
    assert kv_scales(source, "model.layers.1.self_attn")[0].tolist() == [0.5, 2.0]
    lines = "\n".join(summarize(source).lines())
    assert "compressed-tensors" in lines and "KV cache        fp8 per head" in lines and "3 bit g64" in lines
    with pytest.raises(UsageError, match="weights only"):
        convert(source, tmp_path / "out", "gptq")
    report = convert(source, tmp_path / "dense", "hf")
    dense = HFDirectory(tmp_path / "dense")
    assert len(report.notes) == 2 and not any(is_kv(name) for name in dense.names())
    assert dense.shape("model.embed_tokens.weight") == (96, 64)


def test_summary_names_format_and_inputs(packed_model) -> None:
    spec = replace(INT8, float_inputs=("model.layers.0.mlp.down_proj",))
    lines = summarize(packed_model(spec, "compressed-tensors")).lines()
    assert "format          compressed-tensors" in lines
    assert "inputs          int8 per token, dynamic; 1 linears keep theirs in floating point" in lines


@pytest.mark.parametrize(
    "spec, before, after, words",
    [
        (SYM, "gptq", "gptq", "already"),
        (SYM, "gptq", "exl3", "known: gptq"),
        (SYM, "gptq", "fp8", "fp8 format"),
        (replace(SYM, weights=WeightScheme(8, 32)), "gptq", "awq", "4-bit"),
        (replace(SYM, weights=WeightScheme(5, 32)), "compressed-tensors", "gptq", "2, 3, 4 or 8 bits"),
        (replace(SYM, overrides={"model.layers.0.mlp.up_proj": WeightScheme(4, 64)}), "gptq", "awq", "one group size"),
        (INT8, "compressed-tensors", "gptq", "weights only"),
        (INT8, "compressed-tensors", "fp8", "e4m3"),
        (replace(TENSOR, weights=WeightScheme(8, -1, dtype="fp8")), "compressed-tensors", "fp8", "per tensor or"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_target_cannot_say_is_refused_at_once(packed_model, tmp_path, spec, before, after, words) -> None:
    source = packed_model(spec, before)
    with pytest.raises(UsageError, match=words) as caught:
        convert(source, tmp_path / "out", after)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.path.name, "tiny"])


def test_loaders_are_asked(packed_model, tmp_path) -> None:
    source = packed_model(replace(SYM, weights=WeightScheme(3, 32)), "gptq")
    with pytest.raises(UsageError, match="vllm would refuse"):
        convert(source, tmp_path / "out", "compressed-tensors", loaders=("qserve", "vllm"))
    with pytest.raises(UsageError, match="unknown loader"):
        convert(source, tmp_path / "out", "compressed-tensors", loaders=("llama",))
    report = convert(source, tmp_path / "out", "compressed-tensors")
    assert {verdict.loader: verdict.accepts for verdict in report.verdicts}["vllm"] is False


def test_reordered_groups_stay_in_gptq(packed_model, tmp_path) -> None:
    source = packed_model(replace(SYM, act_order=True), "gptq", shuffled=True)
    for after in ("compressed-tensors", "awq"):
        with pytest.raises(CheckpointError, match="order") as caught:
            convert(source, tmp_path / "out", after)
        assert "\n" not in str(caught.value) and "model.layers.0" in str(caught.value)
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", "gptq_v2")
    found = HFDirectory(tmp_path / "out")
    assert found.spec.act_order
    module = source.linears()[0]
    assert torch.equal(found.linear(module).dequantize(), source.linear(module).dequantize())


def test_a_configuration_that_claims_reordering_may_still_hold_none(packed_model, tmp_path) -> None:
    convert(packed_model(replace(SYM, act_order=True), "gptq"), tmp_path / "out", "compressed-tensors")
    assert not HFDirectory(tmp_path / "out").spec.act_order


@pytest.mark.parametrize("part, words", [("weight_scale", "round its scales"), ("bias", "round its bias")])
def test_numbers_that_would_be_rounded_are_refused(packed_model, tmp_path, part, words) -> None:
    source = packed_model(SYM, "compressed-tensors")
    module = "model.layers.0.self_attn.v_proj"
    weight = source.linear(module)
    finer = {"weight_scale": replace(weight, scales=weight.scales * (1 + 2**-20)),
             "bias": replace(weight, bias=weight.bias * (1 + 2**-20))}[part]
    with CheckpointWriter(tmp_path / "finer", format=FORMATS["compressed-tensors"]) as writer:
        for name in source.linears():
            writer.put_linear(name, finer if name == module else source.linear(name))
        for name in source.names():
            writer.put(name, source.tensor(name))
        writer.put_json("config.json", source.config)
        save_tokenizer(writer.directory)
        writer.finish()
    with pytest.raises(CheckpointError, match=words) as caught:
        convert(HFDirectory(tmp_path / "finer"), tmp_path / "out", "gptq")
    assert module in str(caught.value) and not (tmp_path / "out").exists()


def test_a_zero_point_of_0_does_not_fit_version_1(packed_model, tmp_path) -> None:
    source = packed_model(ASYM, "gptq_v2", lowest_zero=0)
    with pytest.raises(CheckpointError, match="zero point of 0; write gptq_v2"):
        convert(source, tmp_path / "out", "gptq")
    assert not (tmp_path / "out").exists()


def test_dense_export_is_rounded_and_says_so(packed_model, tmp_path) -> None:
    source = packed_model(TENSOR, "fp8")
    report = convert(source, tmp_path / "out", "hf")
    found = HFDirectory(tmp_path / "out")
    assert found.spec is None and found.card is None and "quantization_config" not in found.config
    assert report.notes[0] == "weights are rounded to bfloat16" and "inputs" in report.notes[1]
    for module in source.linears():
        assert torch.equal(found.tensor(f"{module}.weight"), source.linear(module).dequantize().to(torch.bfloat16))
    assert torch.equal(found.tensor("model.layers.0.self_attn.v_proj.bias").float(),
                       source.linear("model.layers.0.self_attn.v_proj").bias.to(torch.bfloat16).float())
    with pytest.raises(UsageError, match="already"):
        convert(found, tmp_path / "again", "hf")
    with pytest.raises(UsageError, match="qserve quantize"):
        convert(found, tmp_path / "again", "gptq")


def test_existing_output_and_the_source_itself_are_safe(packed_model, tmp_path) -> None:
    source = packed_model(SYM, "gptq")
    with pytest.raises(UsageError, match="model itself"):
        convert(source, source.path, "gptq_v2", overwrite=True)
    convert(source, tmp_path / "out", "gptq_v2")
    with pytest.raises(CheckpointError, match="--overwrite"):
        convert(source, tmp_path / "out", "awq")
    convert(source, tmp_path / "out", "awq", overwrite=True)
    assert HFDirectory(tmp_path / "out").format.name == "awq"


def test_damage_is_found_before_it_is_copied(packed_model, tmp_path) -> None:
    source = packed_model(SYM, "gptq")
    path = source.path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="differs from its hash"):
        convert(source, tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()
