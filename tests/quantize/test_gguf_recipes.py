"""llama.cpp's mixtures: the types of a file's tensors, and models that are quantized to them."""

import dataclasses
import json
import shutil
from collections import Counter

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from qserve import LLM, SamplingParams
from qserve.checkpoint.convert import convert
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.gguf_schemes import GGUF_SCHEMES
from qserve.checkpoint.gguf_tensors import Stored
from qserve.checkpoint.gguf_undo import untiled_columns
from qserve.checkpoint.hf import HFDirectory
from qserve.quantize import pipeline, prepare
from qserve.quantize.gguf_recipes import RECIPES, schemes_of
from qserve.quantize.job import QuantizeJob

pytestmark = pytest.mark.usefixtures("little_text")
SMALL = dict(samples=4, sequence_length=64, calibration="builtin")


def with_a_merge(model, out):
    """Files of llama.cpp's have merges of their tokenizer."""
    tokenizer = shutil.copytree(model, out) / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["model"]["vocab"]["ab"] = content["model"]["vocab"].pop("~")
    content["model"]["merges"] = [["a", "b"]]
    tokenizer.write_text(json.dumps(content))
    return out


def types(recipe, layers, inp=256, *, tied=True, experts=0):
    """The types by the tensors' names in the file."""
    tensors, shapes = {}, {}

    def add(module, target, inputs=inp, **more):
        shape = (64, inputs)
        tensors[f"{module}.weight"] = Stored(shape, (f"{target}.weight",), (shape,), **more)
        shapes[module] = shape

    for i in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"):
            add(f"{i}.{name}", f"blk.{i}.{name}")
        for expert in range(experts):
            add(f"{i}.{expert}.ffn_down", f"blk.{i}.ffn_down_exps", place=expert)
        if not experts:
            add(f"{i}.ffn_down", f"blk.{i}.ffn_down")
    add("embed", "token_embd")
    if not tied:
        add("lm_head", "output")
    found, notices = schemes_of(RECIPES[recipe], tensors, shapes)
    names = {scheme: name for name, scheme in GGUF_SCHEMES.items()} | {None: "floats"}
    return {module: names[scheme] for module, scheme in found.items()}, notices


def test_the_types_are_those_of_llama_cpp():
    """As its files of 16 layers have them."""
    found, notices = types("Q4_K_M", 16)
    assert not notices and found["embed"] == "Q6_K"
    for name in ("attn_v", "ffn_down"):
        assert [i for i in range(16) if found[f"{i}.{name}"] == "Q6_K"] == [0, 1, 4, 7, 10, 13, 14, 15]
    assert Counter(found.values()) == {"Q4_K": 16 * 7 - 16, "Q6_K": 17}
    found, _ = types("Q5_K_M", 16, tied=False)
    assert (found["embed"], found["lm_head"]) == ("Q5_K", "Q6_K") and Counter(found.values())["Q6_K"] == 17
    found, _ = types("Q4_K_S", 16)
    assert [i for i in range(16) if found[f"{i}.attn_v"] == "Q5_K"] == [0, 1, 2, 3]
    assert [i for i in range(16) if found[f"{i}.ffn_down"] == "Q5_K"] == [0, 1]
    found, _ = types("Q3_K_M", 16)
    assert [found[f"{i}.attn_v"] for i in range(3)] == ["Q5_K", "Q5_K", "Q4_K"]
    assert [found[f"{i}.ffn_down"] for i in range(3)] == ["Q5_K", "Q4_K", "Q4_K"]
    assert found["3.attn_output"] == "Q4_K" and found["3.attn_q"] == "Q3_K"
    found, _ = types("Q3_K_L", 16)
    assert Counter(found.values()) == {"Q3_K": 16 * 4, "Q5_K": 16 * 3, "Q6_K": 1}
    for name, usual in (("Q3_K_S", "Q3_K"), ("Q5_K_S", "Q5_K"), ("Q6_K", "Q6_K")):
        assert Counter(types(name, 4)[0].values()) == Counter({usual: 28}) + Counter({"Q6_K": 1})


def test_experts_of_a_layer_have_one_type():
    found, _ = types("Q4_K_M", 16, experts=3)
    for expert in range(3):
        assert [i for i in range(16) if found[f"{i}.{expert}.ffn_down"] == "Q6_K"] == [0, 1, 4, 7, 10, 13, 14, 15]


def test_rows_that_blocks_do_not_fill_have_narrower_ones():
    found, notices = types("Q4_K_M", 8, inp=576)
    assert Counter(found.values()) == {"Q5_0": 8 * 7 - 8, "Q8_0": 9}
    assert notices == ("48 linears of 576 inputs are Q5_0 rather than Q4_K, whose blocks are of 256",
                       "9 linears of 576 inputs are Q8_0 rather than Q6_K, whose blocks are of 256")  # fmt: skip
    assert set(types("Q3_K_S", 1, inp=96)[0].values()) == {"Q4_0", "Q8_0"}
    assert set(types("Q5_K_S", 1, inp=96)[0].values()) == {"Q5_1", "Q8_0"}
    assert set(types("Q5_K_S", 1, inp=80)[0].values()) == {"floats"}


def test_columns_in_another_order_have_narrower_ones_too_and_what_has_no_place_is_refused():
    stored = Stored((64, 256), ("blk.0.ssm_out.weight",), ((64, 256),), undo=untiled_columns)
    found, _ = schemes_of(RECIPES["Q4_K_M"], {"a.weight": stored}, {"a": (64, 256)})
    assert found == {"a": GGUF_SCHEMES["Q5_0"]}
    with pytest.raises(UsageError, match="b has no place in a GGUF file"):
        schemes_of(RECIPES["Q4_K_M"], {"a.weight": stored}, {"b": (64, 256)})


@pytest.mark.parametrize(
    "scheme", ["Q4_K_M", *(pytest.param(each, marks=pytest.mark.slow) for each in ("Q3_K_M", "Q5_K_S", "Q6_K"))]
)
def test_a_model_is_written_as_it_was_measured(scheme, wide, tmp_path):
    """Serving the directory, serving the file, and what the ``gguf`` package makes of the file: the same numbers."""
    source, job = HFDirectory(with_a_merge(wide, tmp_path / "model")), QuantizeJob(**SMALL, scheme=scheme)
    report = pipeline.run(source, tmp_path / "out", job)
    assert report.format == "gguf" and not any(layer.fallback for layer in report.layers)
    read = HFDirectory(tmp_path / "out")
    assert read.spec == dataclasses.replace(report.spec, float_inputs=()) and read.spec.method == "gptq"
    assert convert(read, tmp_path / "m.gguf", "gguf").modules == len(read.linears())
    file = GGUFFile(tmp_path / "m.gguf")
    packed = file.packed()
    assert len(packed.linears()) == 7 and len(read.linears()) == (8 if source.config["tie_word_embeddings"] else 9)
    for module in read.linears():
        weight, name = read.linear(module), f"{module}.weight"
        assert weight.scheme == read.spec.scheme_of(module)
        # the same but for the rounding of products
        torch.testing.assert_close(file.tensor(name), weight.dequantize(), rtol=1e-5, atol=1e-7)
        if module in packed.linears():
            again = packed.linear(module)
            assert again.scheme == weight.scheme and torch.equal(again.dequantize(), weight.dequantize())
    down = file._tensors["blk.0.ffn_down.weight"]
    assert down.kind.name == {"Q4_K_M": "Q6_K", "Q3_K_M": "Q4_K", "Q5_K_S": "Q5_K", "Q6_K": "Q6_K"}[scheme]
    raw, shape = file._raw("blk.0.ffn_down.weight")
    want = dequantize(raw.reshape(shape[0], -1), Kind[down.kind.name])
    assert torch.equal(file.tensor("model.layers.0.mlp.down_proj.weight"), torch.from_numpy(want))
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    scores = [[next(iter(each.values())).logprob for each in
               LLM(str(tmp_path / name)).generate(list(range(40)), asked)[0].prompt_logprobs[1:]]
              for name in ("out", "m.gguf")]  # fmt: skip
    assert scores[0] == pytest.approx(scores[1], abs=0.05)  # the embedding is in bytes, or in floats


def test_experts_lie_in_one_tensor(mixtral, tmp_path):
    report = pipeline.run(HFDirectory(with_a_merge(mixtral, tmp_path / "model")), tmp_path / "out",
                          QuantizeJob(**SMALL, scheme="Q4_K_M"))  # fmt: skip
    assert "of 32 inputs are Q5_0 rather than Q4_K" in " ".join(report.notices)
    source = HFDirectory(tmp_path / "out")
    convert(source, tmp_path / "m.gguf", "gguf")
    file = GGUFFile(tmp_path / "m.gguf")
    kinds = {name: tensor.kind.name for name, tensor in file._tensors.items()}
    assert [kinds[f"blk.{i}.ffn_down_exps.weight"] for i in range(2)] == ["Q5_0", "Q8_0"]
    for module in source.linears():
        assert torch.equal(file.tensor(f"{module}.weight"), source.linear(module).dequantize())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_what_was_interrupted_goes_on_with_the_same_result(method, wide, tmp_path, monkeypatch):
    source, job = HFDirectory(wide), QuantizeJob(**SMALL, scheme="Q4_K_M", method=method)
    pipeline.run(source, tmp_path / "whole", job)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, "write_rest", interrupted)
        pipeline.run(source, tmp_path / "out", job)
    monkeypatch.setattr(pipeline.BlockQuantizer, "run", lambda *_: pytest.fail("it was quantized again"))
    pipeline.run(source, tmp_path / "out", job)
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


@pytest.mark.slow
def test_compensation_beats_rounding_to_nearest(wide, tmp_path):
    errors = {}
    for method in ("gptq", "rtn"):
        job = QuantizeJob(**SMALL, scheme="Q3_K_S", method=method)
        report = pipeline.run(HFDirectory(wide), tmp_path / method, job)
        errors[method] = sum(layer.error for layer in report.layers if layer.module.startswith("model.layers"))
    assert errors["gptq"] < 0.8 * errors["rtn"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(method="awq"), "Q4_K_M is for --method gptq, yaqa or rtn, not awq"),
        (dict(effort="best"), "--effort best is for weights alone"),
        (dict(target_bits=4.5), "mixed precision is for --scheme weights"),
        (dict(embedding_bits=8), "leave out --embeddings and --head"),
        (dict(format="gptq"), "written in the format gguf, not gptq"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_with_a_recipe(options, words):
    with pytest.raises(UsageError, match=words):
        QuantizeJob(scheme="Q4_K_M", **options)


def test_everything_impossible_is_refused_before_calibration(wide, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "walk", lambda *_, **__: pytest.fail("calibration began"))
    source = HFDirectory(wide)
    for options, words in (
        (dict(scheme="Q4_K_M", loaders=("vllm",)), "vllm would refuse .* qserve convert --format gguf makes a file"),
        (dict(scheme="Q4_K_M", kv_cache="fp8"), "GGUF files hold quantized weights only"),
        (dict(format="gguf"), "no block of llama.cpp's holds 4 bit g64 symmetric; use --scheme Q4_K_M, or"),
    ):
        with pytest.raises(UsageError, match=words):
            pipeline.run(source, tmp_path / "out", QuantizeJob(**{**SMALL, **options}))
    source.config["model_type"] = "deepseek_v3"
    with pytest.raises(UsageError, match="latent attention: GGUF files of such models are read, but not written"):
        prepare._by_recipe(RECIPES["Q4_K_M"], source, None)
