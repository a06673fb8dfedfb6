"""Models written as GGUF: the very numbers, read back by us and dequantized by the ``gguf`` package; or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType
from gguf.quants import dequantize
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from qserve.checkpoint.convert import convert
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.gguf_blocks import pack_blocks
from qserve.checkpoint.gguf_schemes import GGUF_SCHEMES
from qserve.checkpoint.gguf_tensors import Stored
from qserve.checkpoint.gguf_tokenizer import tokenizer_of
from qserve.checkpoint.gguf_undo import untiled_columns
from qserve.checkpoint.gguf_vocabulary import vocabulary_of
from qserve.checkpoint.gguf_writer import _FILE_TYPES, _in_order_of_file
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.kv import kv_scales
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme
from qserve.checkpoint.writer import CheckpointWriter
from qserve.cli import app
from tests.checkpoint.test_gguf_families import CASES, random_model
from tests.checkpoint.test_gguf_tokenizer import TEXTS, WORDS, byte_level, metadata_of, trained

READ_ONLY = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "gpt_oss"}
"""Model types that are read from GGUF but not written."""
FEW = ("llama", "phi3-long", "gemma3", "falcon", "qwen3_moe", "granitemoe", "qwen3_5")
"""Cases that between them use every way in which tensors change."""


def save_tokenizer(directory: Path, *, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 95 letters and one mark."""
    letters = [chr(code) for code in range(33, 127)] + ["\u0120"]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)} | {"ab": 95}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=chat_template)
    tokenizer.save_pretrained(directory)
    return tokenizer


def model_of(case: str, directory: Path) -> HFDirectory:
    kind, _, changes, _ = CASES[case]
    random_model(kind, changes, directory)
    save_tokenizer(directory)
    return HFDirectory(directory)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in FEW else pytest.mark.slow)
     for case, (kind, *_) in CASES.items() if kind not in READ_ONLY],
)  # fmt: skip
def test_a_model_comes_back(case: str, tmp_path: Path) -> None:
    source = model_of(case, tmp_path / "model")
    report = convert(source, tmp_path / "m.gguf", "gguf")
    found = GGUFFile(tmp_path / "m.gguf")
    assert report.format == "gguf" and report.modules == 0
    assert all("ignores the window" in note for note in report.notes)
    assert found.config["model_type"] == source.config["model_type"]
    assert set(found.names()) == set(source.names())
    for name in source.names():  # a norm that multiplies by 1 + w loses some last bits of w
        torch.testing.assert_close(
            found.tensor(name).float(), source.tensor(name).float(), rtol=0, atol=2e-7, msg=name
        )
    assert found.tokenizer()("ab 12 c")["input_ids"] == source.tokenizer()("ab 12 c")["input_ids"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("case", [case for case, (kind, *_) in CASES.items() if kind in READ_ONLY])
def test_what_is_only_read_is_refused_by_its_reason(case: str, tmp_path: Path) -> None:
    source = model_of(case, tmp_path / "model")
    with pytest.raises(UsageError, match=r"(latent attention|sinks): GGUF files of such models are read"):
        convert(source, tmp_path / "m.gguf", "gguf")
    assert not (tmp_path / "m.gguf").exists()


BLOCKS = [
    (WeightScheme(4, 32), Kind.Q4_0), (WeightScheme(4, 64), Kind.Q4_0), (WeightScheme(4, -1), Kind.Q4_0),
    (WeightScheme(3, 32), Kind.Q4_0), (WeightScheme(2, 128), Kind.Q4_0), (WeightScheme(5, 32), Kind.Q5_0),
    (WeightScheme(5, -1), Kind.Q5_0), (WeightScheme(6, 32), Kind.Q8_0), (WeightScheme(8, 64), Kind.Q8_0),
    (WeightScheme(8, -1), Kind.Q8_0),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "kind"), BLOCKS, ids=lambda each: str(each))
def test_blocks_hold_the_very_numbers(scheme: WeightScheme, kind: Kind, random_weight: Any) -> None:
    weight = random_weight(scheme, 5, 160)
    found = dequantize(pack_blocks(weight), kind)
    assert np.array_equal(found, weight.dequantize().numpy())


@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda weight: replace(weight, scales=weight.scales * 1.0001), "rounded to float16"),
     (lambda weight: replace(weight, scales=weight.scales * 1e9), "does not fit float16"),
     (lambda weight: replace(weight, g_idx=torch.arange(96).flip(0).to(torch.int32) // 32), "not consecutive"),
     (lambda weight: replace(weight, zeros=torch.zeros(4, 3, dtype=torch.uint8)), "does not fit Q4_0"),
     (lambda weight: replace(weight, scheme=WeightScheme(4, 48)), "no blocks of 32"),
     (lambda weight: replace(weight, scheme=WeightScheme(4, 32, False)), "no zero points"),
     (lambda weight: replace(weight, scheme=WeightScheme(8, 32, dtype="fp8")), "no block type holds")],
)  # fmt: skip
def test_what_blocks_would_change_is_refused(
    change: Callable[[QuantizedWeight], QuantizedWeight], words: str, random_weight: Any
) -> None:
    with pytest.raises(CheckpointError, match=words):
        pack_blocks(change(random_weight(WeightScheme(4, 32), 4, 96)))


def packed(dense: HFDirectory, out: Path, random_weight: Any, spec: QuantSpec, *, one: WeightScheme | None = None,
           format: str = "compressed-tensors") -> HFDirectory:  # fmt: skip
    """``dense`` with random packed linears in its layers, the first of ``one`` scheme if there is one."""
    modules = [name.removesuffix(".weight") for name in dense.names()
               if ".layers." in name and name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight"))]
    kept = tuple({name.removesuffix(".weight") for name in dense.names() if name.endswith(".weight")} - set(modules))
    spec = replace(spec, ignored=kept, overrides={} if one is None else {modules[0]: one})
    with CheckpointWriter(out, format=FORMATS[format]) as writer:
        for name in dense.names():
            module = name.removesuffix(".weight")
            if module in modules:
                shape, scheme = dense.shape(name), spec.scheme_of(module)
                bias = dense.has(f"{module}.bias")
                weight = random_weight(scheme, *shape, len(name), bias=bias, activations=spec.activations)
                writer.put_linear(module, weight)
            elif not (name.endswith(".bias") and name.removesuffix(".bias") in modules):
                writer.put(name, dense.tensor(name))
        if spec.kv_cache is not None:
            for layer in range(dense.config["num_hidden_layers"]):
                for name, tensor in kv_scales(f"model.layers.{layer}.self_attn", torch.ones(1), torch.ones(1)).items():
                    writer.put(name, tensor)
        writer.put_json("config.json", dense.config | {"quantization_config": FORMATS[format].config_of(spec)})
        save_tokenizer(writer.directory)
        writer.finish()
    return HFDirectory(out)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3_moe", "mixtral", "qwen3_5"])
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_packed_linears_keep_their_numbers(case: str, bits: int, tmp_path: Path, random_weight: Any) -> None:
    spec = QuantSpec("gptq", WeightScheme(bits, 32))
    source = packed(model_of(case, tmp_path / "d"), tmp_path / "q", random_weight, spec)
    assert source.linears()
    convert(source, tmp_path / "m.gguf", "gguf")
    found = GGUFFile(tmp_path / "m.gguf")
    for module in source.linears():
        weight = source.linear(module)
        assert torch.equal(found.tensor(f"{module}.weight"), weight.dequantize()), module
        assert weight.bias is None or torch.equal(found.tensor(f"{module}.bias"), weight.bias)
    kind = {4: Kind.Q4_0, 5: Kind.Q5_0, 8: Kind.Q8_0}[bits]
    assert {each.kind for each in found._tensors.values()} >= {kind, Kind.F32}


def test_types_of_files_are_those_of_llama_cpp() -> None:
    assert _FILE_TYPES.keys() == {Kind.F32, Kind.F16, Kind.BF16, *(Kind[name] for name in GGUF_SCHEMES)}
    for kind, number in _FILE_TYPES.items():
        recipe = "_M" if kind in (Kind.Q3_K, Kind.Q4_K, Kind.Q5_K) else ""
        assert LlamaFileType(number).name == f"{'ALL' if kind is Kind.F32 else 'MOSTLY'}_{kind.name}{recipe}"


def test_types_differ_by_tensor_but_not_among_experts(tmp_path: Path, random_weight: Any) -> None:
    spec, one = QuantSpec("gptq", WeightScheme(4, 32)), WeightScheme(8, 32)
    source = packed(model_of("llama", tmp_path / "d"), tmp_path / "q", random_weight, spec, one=one)
    convert(source, tmp_path / "m.gguf", "gguf")
    kinds = [each.kind for each in GGUFFile(tmp_path / "m.gguf")._tensors.values()]
    assert kinds.count(Kind.Q8_0) == 1 and kinds.count(Kind.Q4_0) == 20
    source = packed(model_of("mixtral", tmp_path / "e"), tmp_path / "r", random_weight, spec)
    expert = next(module for module in source.linears() if "experts.1." in module)
    spec = replace(source.spec, overrides={expert: one})
    source.spec = spec  # type: ignore[misc]
    with pytest.raises(UsageError, match=r"the experts of .* are not stored alike"):
        convert(source, tmp_path / "n.gguf", "gguf")


def test_what_a_file_leaves_out_is_said_and_what_it_cannot_hold_refused(tmp_path: Path, random_weight: Any) -> None:
    dense = model_of("mistral", tmp_path / "d")
    int8 = QuantSpec("smoothquant", WeightScheme(8, -1), ActivationScheme("int8"))
    source = packed(dense, tmp_path / "int8", random_weight, int8)
    assert convert(source, tmp_path / "m.gguf", "gguf").notes == (
        "llama.cpp ignores the window of 7 tokens: beyond it answers differ",
        "inputs are no longer rounded as in the checkpoint (int8 per token, dynamic)",
    )
    for number, (spec, words) in enumerate([
        (QuantSpec("awq", WeightScheme(4, 32, False)), "no zero points; quantize without --asym"),
        (QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8"), ActivationScheme("fp8")), "no block type holds fp8"),
        (QuantSpec("gptq", WeightScheme(4, 8)), "use --group-size 32"),
    ]):  # fmt: skip
        source = packed(dense, tmp_path / f"s{number}", random_weight, spec)
        with pytest.raises(UsageError, match=words):
            convert(source, tmp_path / "n.gguf", "gguf")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    (tmp_path / "d" / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(UsageError, match="whose metadata do not hold its hidden_act \\('gelu'\\)"):
        convert(HFDirectory(tmp_path / "d"), tmp_path / "n.gguf", "gguf")
    assert not (tmp_path / "n.gguf").exists()


def test_the_command(tmp_path: Path) -> None:
    model_of("llama", tmp_path / "d")
    out = tmp_path / "m.gguf"
    call = CliRunner().invoke(app, ["convert", str(tmp_path / "d"), str(out), "--format", "gguf"])
    assert call.exit_code == 0 and "0 modules in gguf" in call.output
    before = out.read_bytes()
    for command, words in (
        ([str(out)], "exists; choose another name or pass --overwrite"), ([str(tmp_path / "m.bin")], "ends in .gguf"),
    ):  # fmt: skip
        call = CliRunner().invoke(app, ["convert", str(tmp_path / "d"), *command, "--format", "gguf"])
        assert call.exit_code == 2 or call.exit_code == 1
        assert words in " ".join(call.output.split()) and out.read_bytes() == before
    call = CliRunner().invoke(app, ["convert", str(tmp_path / "d"), str(out), "--format", "gguf", "--overwrite"])
    assert call.exit_code == 0 and out.read_bytes() == before and len(list(tmp_path.iterdir())) == 2


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model_of("llama", tmp_path / "d")
    whole, calls = source.tensor, []

    def tensor(name: str, rows: range | None = None) -> torch.Tensor:
        calls.append(name)
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        return whole(name, rows)

    monkeypatch.setattr(source, "tensor", tensor)
    with pytest.raises(CheckpointError, match=r"no space left to write .*m.gguf"):
        convert(source, tmp_path / "m.gguf", "gguf")
    assert list(tmp_path.iterdir()) == [tmp_path / "d"]


def llama_legacy() -> PreTrainedTokenizerFast:
    """SentencePiece's BPE as transformers stores Llama 2's: merges without scores."""
    processor = trained(add_dummy_prefix=True)
    read = tokenizer_of(metadata_of(processor), 420)
    model = json.loads(read.backend_tokenizer.to_str())["model"]
    backend = Tokenizer(
        models.BPE(model["vocab"], [tuple(pair) for pair in model["merges"]], unk_token="<unk>", fuse_unk=True,
                   byte_fallback=True)
    )  # fmt: skip
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])  # fmt: skip
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def split_first(pattern: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE that cuts text by one expression, as Llama 3, Qwen and others store it."""
    read = tokenizer_of({**byte_level(), "tokenizer.ggml.pre": "gpt-2"}, 400)
    backend = read.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>")


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("make", "size", "expected"),
    [(lambda: split_first(QWEN), 400, {"pre": "qwen2"}),
     (lambda: split_first(QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")), 400, {"pre": "llama-bpe"}),
     (lambda: tokenizer_of({**byte_level(), "tokenizer.ggml.pre": "gpt-4o"}, 400), 400, {"pre": "gpt-4o"}),
     (lambda: tokenizer_of({**byte_level(), "tokenizer.ggml.pre": "gpt-2"}, 400), 450, {"pre": "gpt-2"}),
     (llama_legacy, 420, {"model": "llama", "add_space_prefix": True, "add_bos_token": True})],
    ids=["qwen", "llama3", "gpt-4o", "gpt-2 and unused rows", "llama2"],
)  # fmt: skip
def test_tokenizers_come_back(make: Callable[[], Any], size: int, expected: dict[str, Any]) -> None:
    tokenizer = make()
    tokenizer.chat_template = "{{ messages[0].content }}"
    keys = vocabulary_of(tokenizer, size, {"eos_token_id": [5, 9]}, "m")
    assert {key: keys[f"tokenizer.ggml.{key}"] for key in expected} == expected
    assert keys["tokenizer.chat_template"] == "{{ messages[0].content }}" and len(keys["tokenizer.ggml.tokens"]) == size
    found = tokenizer_of(keys, size)
    for text in [*TEXTS, *WORDS.splitlines(), WORDS, "<|start|>a<|end|>"]:
        assert found(text)["input_ids"] == tokenizer(text)["input_ids"], text


def test_a_tokenizer_that_cannot_be_said_is_refused() -> None:
    whole = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel()
    for words in (Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), whole):
        with pytest.raises(UsageError, match=r"m: its tokenizer is not made of merges \(BPE\)"):
            vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=words), 4, {}, "m")
    with pytest.raises(UsageError, match="do not describe how its tokenizer cuts text"):
        vocabulary_of(split_first(r"[aeiou]"), 400, {}, "m")


def test_heads_that_move_must_not_share_groups(random_weight: Any) -> None:
    shape = (8, 192)
    stored = Stored(shape, ("ssm_out.weight",), (shape,), undo=partial(untiled_columns, key_heads=2, heads=6))
    weight = random_weight(WeightScheme(4, 32), *shape)
    moved = _in_order_of_file(weight, stored, 0)
    assert torch.equal(stored.made([moved.dequantize()]), weight.dequantize())
    with pytest.raises(CheckpointError, match=r"a head has 4 bit g64 .* use --group-size 32"):
        _in_order_of_file(random_weight(WeightScheme(4, 64), *shape), stored, 0)
