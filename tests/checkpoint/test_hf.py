from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.source import open_model
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme

MODULE = "model.layers.0.self_attn.q_proj"


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def quantize(directory: Path, version: str = "gptq") -> tuple[QuantSpec, dict[str, QuantizedWeight]]:
    """Replace every projection in a saved tiny llama by a packed one, written with plain safetensors."""
    tensors = load_file(directory / "model.safetensors")
    own = WeightScheme(8, 32)
    spec = QuantSpec(
        "rtn",
        WeightScheme(4, 64),
        overrides={name.removesuffix(".weight"): own for name in tensors if "down_proj" in name},
    )
    weights = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module, weight = name.removesuffix(".weight"), tensors.pop(name).to(torch.float32)
        scheme = spec.scheme_of(module)
        grouped = weight.reshape(len(weight), -1, scheme.group_size)
        scales = (grouped.abs().amax(2) / (scheme.zero - 1)).to(torch.float16).to(torch.float32)
        codes = (grouped / scales[:, :, None]).round().clamp(-scheme.zero, scheme.zero - 1) + scheme.zero
        weights[module] = QuantizedWeight(scheme, codes.reshape(weight.shape).to(torch.uint8), scales)
        tensors |= {f"{module}.{part}": tensor for part, tensor in FORMATS[version].pack(weights[module]).items()}
    save_file(tensors, directory / "model.safetensors")
    edit_json(directory / "config.json", quantization_config=FORMATS[version].config_of(spec))
    return spec, weights


def test_dense_directory(tiny_llama) -> None:
    source = open_model(tiny_llama)
    stored = load_file(tiny_llama / "model.safetensors")
    assert isinstance(source, HFDirectory) and source.name == "tiny" and source.path == tiny_llama
    assert source.spec is None and source.card is None and source.linears() == []
    assert sorted(source.names()) == sorted(stored)
    for name, tensor in stored.items():
        assert source.has(name) and source.shape(name) == tuple(tensor.shape)
        assert source.tensor(name).dtype == torch.bfloat16 and torch.equal(source.tensor(name), tensor)
    assert source.dtype() == torch.bfloat16
    assert source.parameters() == sum(tensor.numel() for tensor in stored.values())
    assert source.stored_bytes() == (tiny_llama / "model.safetensors").stat().st_size
    assert source.generation_config() == json.loads((tiny_llama / "generation_config.json").read_text())
    assert not source.has("model.layers.7.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"layers\.7"):
        source.tensor("model.layers.7.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match="no packed linear"):
        source.linear(MODULE)
    source.verify()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists what is mapped on Linux only")
def test_nothing_stays_mapped(tiny_llama) -> None:
    """A map counts as memory of the process once it was read, and whole models add up."""
    source = HFDirectory(tiny_llama)
    tensors = [source.tensor(name) for name in source.names()]
    assert tensors and str(tiny_llama) not in Path("/proc/self/maps").read_text()


def test_a_file_that_is_cut_short_after_its_header_was_read_is_refused(tiny_llama) -> None:
    source = HFDirectory(tiny_llama)
    path = tiny_llama / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="cut short"):
        for name in source.names():
            source.tensor(name)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists what is mapped on Linux only")
def test_large_words_are_mapped_until_they_are_unpacked(tmp_path) -> None:
    format, scheme = FORMATS["gptq"], WeightScheme(4, 64)
    weight = QuantizedWeight(scheme, torch.randint(0, 16, (2048, 1024)).to(torch.uint8), torch.ones(2048, 16))
    path = tmp_path / "model.safetensors"
    save_file({f"large.{part}": tensor for part, tensor in format.pack(weight).items()}, path)
    spec = QuantSpec("rtn", scheme)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": format.config_of(spec)}))
    source = HFDirectory(tmp_path)
    read = source.linear("large")
    assert str(path) in Path("/proc/self/maps").read_text()
    assert torch.equal(read.codes, weight.codes)
    assert str(path) not in Path("/proc/self/maps").read_text()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="cut short"):
        source.linear("large")


@pytest.mark.parametrize(("dtype", "shape"), [("F32", [2, 3]), ("F16", [7]), ("F4", [12]), ("I64", [])])
def test_a_tensor_of_other_bytes_than_its_shape_says_is_refused(tiny_llama, dtype, shape) -> None:
    header = json.dumps({"strange": {"dtype": dtype, "shape": shape, "data_offsets": [0, 12]}}).encode()
    (tiny_llama / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(CheckpointError, match=r"strange cannot be read: 12 bytes"):
        HFDirectory(tiny_llama).tensor("strange")


def test_sharded_directory_reads_the_same(tiny_llama, tmp_path) -> None:
    LlamaForCausalLM.from_pretrained(tiny_llama).save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    one, many = HFDirectory(tiny_llama), HFDirectory(tmp_path / "shards")
    assert sorted(one.names()) == sorted(many.names())
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.names())
    assert one.parameters() == many.parameters()


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("where", ["config.json", "quantize_config.json"])
def test_packed_directory(tiny_llama, version, where) -> None:
    spec, weights = quantize(tiny_llama, version)
    if where == "quantize_config.json":
        config = json.loads((tiny_llama / "config.json").read_text())
        (tiny_llama / where).write_text(json.dumps(config.pop("quantization_config")))
        (tiny_llama / "config.json").write_text(json.dumps(config))
    source = HFDirectory(tiny_llama)
    assert source.spec == spec
    assert sorted(source.linears()) == sorted(weights)
    assert not any("proj" in name for name in source.names()) and not source.has(f"{MODULE}.qweight")
    for module, weight in weights.items():
        found = source.linear(module)
        assert found.scheme == weight.scheme and found.zeros is None and found.g_idx is None
        assert torch.equal(found.codes, weight.codes) and torch.equal(found.scales, weight.scales)
        assert source.shape(module) == (weight.out_features, weight.in_features)
    assert source.parameters() == 2 * 96 * 64 + 5 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)


def test_identity_follows_weights_and_config(tiny_llama) -> None:
    first = HFDirectory(tiny_llama).sha256()
    assert first == HFDirectory(tiny_llama).sha256() and len(first) == 64
    edit_json(tiny_llama / "config.json", rope_theta=123.0)
    second = HFDirectory(tiny_llama).sha256()
    tensors = load_file(tiny_llama / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, tiny_llama / "model.safetensors")
    assert len({first, second, HFDirectory(tiny_llama).sha256()}) == 3


def save_tokenizer(directory: Path, words: int) -> None:
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="w0", chat_template="{{ messages[0].content }}"
    ).save_pretrained(directory)


def test_tokenizer_is_read_and_copied(tiny_llama, tmp_path) -> None:
    save_tokenizer(tiny_llama, 96)
    source = HFDirectory(tiny_llama)
    assert source.tokenizer()("w5 w7")["input_ids"] == [5, 7]
    assert source.tokenizer() is source.tokenizer()
    out = tmp_path / "out"
    out.mkdir()
    source.save_tokenizer(out)
    assert {path.name for path in out.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert all(path.read_bytes() == (tiny_llama / path.name).read_bytes() for path in out.iterdir())


def one_line(caught: pytest.ExceptionInfo[CheckpointError], *parts: object) -> None:
    assert "\n" not in str(caught.value)
    assert all(str(part) in str(caught.value) for part in parts)


def test_tokenizer_missing_broken_or_of_another_model(tiny_llama) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer"):
        HFDirectory(tiny_llama).tokenizer()
    save_tokenizer(tiny_llama, 200)
    with pytest.raises(CheckpointError, match="another model") as caught:
        HFDirectory(tiny_llama).tokenizer()
    one_line(caught, tiny_llama, 200, 96)
    (tiny_llama / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(CheckpointError, match="cannot be loaded") as caught:
        HFDirectory(tiny_llama).tokenizer()
    one_line(caught, tiny_llama)


def test_missing_directory_and_files(tmp_path, tiny_llama) -> None:
    for path in (tmp_path / "absent", str(tmp_path / "absent")):
        with pytest.raises(CheckpointError, match="does not exist"):
            open_model(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_model(tmp_path / "empty")
    (tiny_llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        open_model(tiny_llama)
    (tiny_llama / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        open_model(tiny_llama)


@pytest.mark.parametrize("content", ["{", "", "[1, 2]", "\x00\xff", '{"a": NaN', "[" * 100_000])
def test_corrupt_json(tiny_llama, content) -> None:
    (tiny_llama / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError) as caught:
        open_model(tiny_llama)
    one_line(caught, tiny_llama / "config.json")


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 0.5, -1])
def test_truncated_safetensors(tiny_llama, keep) -> None:
    path = tiny_llama / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError, match="truncated") as caught:
        open_model(tiny_llama)
    one_line(caught, path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b"[1]",
        b'{"x": {"dtype": "F32"}}',
        b'{"x": {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
    ],
)
def test_malformed_safetensors_header(tiny_llama, header) -> None:
    (tiny_llama / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="header") as caught:
        open_model(tiny_llama)
    one_line(caught)


def test_trailing_bytes_are_noticed(tiny_llama) -> None:
    with (tiny_llama / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 10)
    with pytest.raises(CheckpointError, match="longer than its header"):
        open_model(tiny_llama)


def test_header_whose_shapes_and_offsets_disagree_is_refused_on_reading(tiny_llama) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [100], "data_offsets": [0, 4]}}).encode()
    (tiny_llama / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(CheckpointError) as caught:
        open_model(tiny_llama).tensor("x")
    one_line(caught, "model.safetensors")


def test_shards_missing_cut_or_lying(tiny_llama, tmp_path) -> None:
    directory = tmp_path / "shards"
    LlamaForCausalLM.from_pretrained(tiny_llama).save_pretrained(directory, max_shard_size="40KB")
    index = directory / "model.safetensors.index.json"
    original = index.read_text()
    shard = sorted(directory.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match="is missing, named by") as caught:
        HFDirectory(directory)
    one_line(caught, shard)
    shard.write_bytes(content[:-7])
    with pytest.raises(CheckpointError, match="truncated") as caught:
        HFDirectory(directory)
    one_line(caught, shard)
    shard.write_bytes(content)
    weight_map = json.loads(original)["weight_map"]
    for broken, words in [
        ({"weight_map": weight_map | {"ghost": shard.name}}, "lacks the tensor ghost"),
        ({"weight_map": weight_map | {"ghost": "../other.safetensors"}}, "no file name"),
        ({"weight_map": {}}, "weight_map"),
        ({}, "weight_map"),
    ]:
        index.write_text(json.dumps(broken))
        with pytest.raises(CheckpointError, match=words):
            HFDirectory(directory)


@pytest.mark.parametrize("method", ["exl3", "torchao"])
def test_unsupported_quantization_is_refused_by_name(tiny_llama, method) -> None:
    edit_json(tiny_llama / "config.json", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(CheckpointError, match=f"quant_method '{method}' is not supported") as caught:
        open_model(tiny_llama)
    one_line(caught, tiny_llama / "config.json")


def test_config_and_tensors_that_contradict(tiny_llama) -> None:
    quantize(tiny_llama)
    config = json.loads((tiny_llama / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (tiny_llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="lacks quantization_config"):
        HFDirectory(tiny_llama)
    edit_json(tiny_llama / "config.json", quantization_config=quantization | {"dynamic": {"-:.*q_proj": {}}})
    with pytest.raises(CheckpointError, match=r"skips .*q_proj, but it is stored packed"):
        HFDirectory(tiny_llama)
    edit_json(tiny_llama / "config.json", quantization_config=quantization | {"group_size": 32})
    with pytest.raises(CheckpointError, match="scales") as caught:
        HFDirectory(tiny_llama).linear(MODULE)
    one_line(caught, MODULE)


def test_nan_scale_and_missing_part_name_the_module(tiny_llama) -> None:
    quantize(tiny_llama)
    path = tiny_llama / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{MODULE}.scales"][0, 0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="NaN") as caught:
        HFDirectory(tiny_llama).linear(MODULE)
    one_line(caught, MODULE, path)
    del tensors[f"{MODULE}.scales"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="scales is missing"):
        HFDirectory(tiny_llama).linear(MODULE)


def pack_one(directory: Path, format: str, spec: QuantSpec) -> QuantizedWeight:
    """Replace one projection by a packed one, leaving the others dense."""
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(f"{MODULE}.weight")
    scheme = spec.scheme_of(MODULE)
    codes = torch.arange(64 * 64).reshape(64, 64).remainder(scheme.max_code).to(torch.uint8)
    if scheme.dtype == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0
    scales = torch.full((64, scheme.groups(64)), 0.5)
    zeros = None if scheme.symmetric else torch.full(scales.shape, 7, dtype=torch.uint8)
    weight = QuantizedWeight(scheme, codes, scales, zeros, activations=spec.activations)
    tensors |= {f"{MODULE}.{part}": tensor for part, tensor in FORMATS[format].pack(weight).items()}
    save_file(tensors, directory / "model.safetensors")
    edit_json(directory / "config.json", quantization_config=FORMATS[format].config_of(spec))
    return weight


FP8 = ActivationScheme("fp8")
KINDS = [
    ("awq", QuantSpec("awq", WeightScheme(4, 32, False))),
    ("compressed-tensors", QuantSpec("rtn", WeightScheme(6, 32, False))),
    ("compressed-tensors", QuantSpec("rtn", WeightScheme(8, -1), ActivationScheme("int8"))),
    ("compressed-tensors", QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8"), FP8)),
    ("fp8", QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8", rows=-1), FP8)),
]


@pytest.mark.parametrize("format, spec", KINDS)
def test_every_format_is_read(tiny_llama, format, spec) -> None:
    weight = pack_one(tiny_llama, format, spec)
    source = open_model(tiny_llama)
    assert source.format.name == format and source.linears() == [MODULE]
    assert source.shape(MODULE) == (64, 64) and not source.has(f"{MODULE}.weight")
    assert torch.equal(source.linear(MODULE).dequantize(), weight.dequantize())
    assert source.linear(MODULE).activations == spec.activations
    assert source.tensor("model.layers.0.self_attn.o_proj.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("format, spec", KINDS)
def test_packed_tensors_without_their_configuration_are_refused(tiny_llama, format, spec) -> None:
    pack_one(tiny_llama, format, spec)
    edit_json(tiny_llama / "config.json", quantization_config=None)
    with pytest.raises(CheckpointError, match="lacks quantization_config") as caught:
        open_model(tiny_llama)
    one_line(caught, MODULE)


@pytest.mark.parametrize("format, spec", KINDS[2:])
def test_a_weight_without_its_scale_is_refused_at_open(tiny_llama, format, spec) -> None:
    pack_one(tiny_llama, format, spec)
    tensors = load_file(tiny_llama / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "scale" not in name},
              tiny_llama / "model.safetensors")
    with pytest.raises(CheckpointError, match="its scale is missing") as caught:
        open_model(tiny_llama)
    one_line(caught, f"{MODULE}.weight")


def test_a_shape_that_lies_is_refused(tiny_llama) -> None:
    pack_one(tiny_llama, *KINDS[1])
    tensors = load_file(tiny_llama / "model.safetensors")
    tensors[f"{MODULE}.weight_shape"] = torch.tensor([3, 64])
    save_file(tensors, tiny_llama / "model.safetensors")
    with pytest.raises(CheckpointError, match="weight_shape says") as caught:
        open_model(tiny_llama).shape(MODULE)
    one_line(caught, tiny_llama, MODULE)
