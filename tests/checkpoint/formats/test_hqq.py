"""HQQ as hqq stores it, by its published layout; tests/interop asks the package itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qserve.checkpoint.convert import convert
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import format_named
from qserve.checkpoint.grid import AFFINE
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.checkpoint.unpacked import Unpacked, is_in

FORMAT = format_named("hqq")
MODULE = "model.layers.0.mlp.up_proj"
OUT, INP = 24, 128


def config(bits: int = 4, size: int | None = 64, **changes: Any) -> dict[str, Any]:
    weights = {"nbits": bits, "group_size": size, "axis": 1, "view_as_float": False} | changes
    return {"quant_method": "hqq", "skip_modules": ["lm_head"],
            "quant_config": {"weight_quant_params": weights, "scale_quant_params": None}}  # fmt: skip


def stored(bits: int = 4, size: int = 64, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The parts of a linear with random bytes, and with the numbers in it."""
    groups = OUT * INP // size
    if bits == 3:  # ten in 30 bits
        codes = torch.randint(0, 1 << 30, (-(-groups // 10), size), dtype=torch.int32)
    else:
        codes = torch.randint(0, 256, (groups * bits // 8, size), dtype=torch.uint8)
    numbers = {"nbits": bits, "group_size": size, "axis": 1}
    return {
        "W_q": codes, "scale": torch.rand(groups, 1).to(dtype),
        "zero": (torch.rand(groups, 1) * (1 << bits)).to(dtype), "shape": torch.tensor([OUT, INP]),
        "quant_scale": torch.tensor(0, dtype=torch.uint8), "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        **{name: torch.tensor(number, dtype=torch.int32) for name, number in numbers.items()},
    }  # fmt: skip


def write(path: Path, parts: dict[str, Tensor], quantization: dict[str, Any] | None) -> HFDirectory:
    tensors = {f"{MODULE}.{name}": tensor for name, tensor in parts.items()}
    save_file(tensors | {"lm_head.weight": torch.randn(4, 8)}, path / "model.safetensors", {"format": "pt"})
    whole = {"model_type": "llama", "dtype": "bfloat16"} | (
        {} if quantization is None else {"quantization_config": quantization}
    )
    (path / "config.json").write_text(json.dumps(whole))
    return HFDirectory(path)


def formula(parts: dict[str, Tensor], bits: int, size: int) -> Tensor:
    """[out, in], one weight at a time."""
    scale, zero, words = parts["scale"].flatten(), parts["zero"].flatten(), parts["W_q"].tolist()
    height, most = len(words), 10 if bits == 3 else 8 // bits
    want = torch.empty(OUT * INP, dtype=scale.dtype)
    for i in range(OUT * INP):
        group, place = divmod(i, size)
        shift = bits * (most - 1 - group // height)
        code = torch.tensor(words[group % height][place] >> shift & ((1 << bits) - 1), dtype=scale.dtype)
        want[i] = (code - zero[group]) * scale[group]
    return want.view(OUT, INP)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "size"), [(8, 64), (4, 64), (3, 64), (2, 64), (4, None), (3, None)])
def test_weights_are_those_of_the_formula(
    bits: int, size: int | None, dtype: torch.dtype, told: bool, tmp_path: Path
) -> None:
    """With ``quantization_config`` and without."""
    width = size or INP
    parts = stored(bits, width, dtype) | {"bias": torch.randn(OUT).to(dtype)}
    source = write(tmp_path, parts, config(bits, size) if told else None)
    assert source.linears() == [MODULE] and source.shape(MODULE) == (OUT, INP) and source.names() == ["lm_head.weight"]
    weight, want = source.linear(MODULE), formula(parts, bits, width)
    assert torch.equal(weight.dequantize(), want.float())
    assert weight.bias is not None and torch.equal(weight.bias, parts["bias"].float())
    assert is_in(source, AFFINE)
    assert torch.equal(Unpacked(source).tensor(f"{MODULE}.weight"), want.bfloat16())  # as it is served


@pytest.mark.parametrize("bits", [4, 3])
def test_codes_may_be_stored_as_floats(bits: int, tmp_path: Path) -> None:
    """``view_as_float``: the same bytes."""
    parts = stored(bits)
    viewed = parts | {"W_q": parts["W_q"].view(torch.bfloat16)}
    found = write(tmp_path, viewed, config(bits, view_as_float=True)).linear(MODULE)
    assert torch.equal(found.dequantize(), formula(parts, bits, 64).float())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": None}, "scale is missing"),
        ({"zero": None}, "zero is missing"),
        ({"shape": None}, "shape is missing"),
        ({"shape": torch.tensor([OUT])}, r"shape is \[24\]"),
        ({"shape": torch.tensor([OUT, 0])}, r"shape is \[24, 0\]"),
        ({"shape": torch.tensor([OUT, 96])}, "do not divide its input of 96"),
        ({"shape": torch.tensor([OUT + 1, INP])}, "expected 50 floats"),
        ({"zero": torch.rand(48, 1)}, "floats of one dtype"),
        ({"scale": torch.full((48, 1), torch.nan).bfloat16()}, "a scale is NaN"),
        ({"zero": torch.full((48, 1), torch.inf).bfloat16()}, "a zero point is NaN or infinite"),
        ({"W_q": torch.zeros(23, 64, dtype=torch.uint8)}, "W_q has 1472 bytes, 48 groups of 64 at 4 bits have 1536"),
        ({"nbits": torch.tensor(8)}, "nbits is 8, expected 4"),
        ({"nbits": torch.tensor(torch.nan)}, "nbits is -1, expected 4"),
        ({"group_size": torch.tensor(32)}, "group_size is 32, expected 64"),
        ({"axis": torch.tensor(0)}, "axis is 0, expected 1"),
        ({"quant_scale": torch.tensor(1)}, "quant_scale is 1, expected 0"),
        ({"bias": torch.rand(3)}, "bias is"),
    ],
)
def test_a_damaged_linear_is_refused_in_one_line(
    changes: dict[str, Tensor | None], words: str, tmp_path: Path
) -> None:
    parts = {name: tensor for name, tensor in (stored() | changes).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=words) as caught:
        write(tmp_path, parts, config()).linear(MODULE)
    assert MODULE in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_not_read_is_refused_in_one_line(tmp_path: Path) -> None:
    without = {name: tensor for name, tensor in stored().items() if name != "nbits"}
    for parts, quantization, words in (
        (stored(), config(axis=0), "groups along axis 0 are not supported; quantize the model again with axis=1"),
        (stored() | {"axis": torch.tensor(0)}, None, "groups along axis 0"),
        (stored(), config(1), "bits"),
        (stored(), config(1.58), "bits is 1.58"),
        (stored(), config(size="64"), "group_size is '64'"),
        (stored(), {"quant_method": "hqq"}, "quant_config must be an object"),
        (stored(), {"quant_method": "hqq", "quant_config": {"mlp.up_proj": None}}, "quantizes nothing"),
        (stored(), {"quant_method": "hqq", "quant_config": {"mlp.up_proj": 4}}, "weight_quant_params"),
        (stored(), config() | {"skip_modules": ["mlp.up_proj"]}, "skips .*up_proj, but it is stored packed"),
        (without, None, "lacks the tensor .*up_proj.nbits"),
    ):
        with pytest.raises(CheckpointError, match=words) as caught:
            write(tmp_path, parts, quantization)
        assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "model.safetensors").rename(tmp_path / "qmodel.pt")
    with pytest.raises(CheckpointError, match=r"pickled weights only.*save_to_safetensors of hqq"):
        HFDirectory(tmp_path)


def test_each_module_may_have_its_own_scheme() -> None:
    modules = [f"model.layers.{i}.{name}" for i in (0, 11) for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down")]
    four, eight = config(4)["quant_config"], config(8, None)["quant_config"]
    spec = FORMAT.spec_of({"quant_config": {"self_attn.q_proj": four, "mlp.up_proj": eight, "mlp.down": None}}, modules)
    for layer in (0, 11):
        assert spec.scheme_of(f"model.layers.{layer}.self_attn.q_proj") == WeightScheme(4, 64, False, dtype="hqq")
        assert spec.scheme_of(f"model.layers.{layer}.mlp.up_proj") == WeightScheme(8, -1, False, dtype="hqq")
        assert spec.scheme_of(f"model.layers.{layer}.mlp.down") is None
    one = FORMAT.spec_of({"quant_config": {modules[0]: four, modules[3]: eight}}, modules)
    assert [one.scheme_of(name) is None for name in modules] == [False, True, True, False, True, True]


@pytest.mark.parametrize("told", [True, False])
def test_it_is_rewritten_in_16_bits_alone(told: bool, tmp_path: Path) -> None:
    source = write(tmp_path, stored(), config() if told else None)
    (tmp_path / "tokenizer.json").write_text("{}")
    dense = tmp_path.with_name(f"{tmp_path.name}-dense")
    convert(source, dense, "hf")
    assert torch.equal(HFDirectory(dense).tensor(f"{MODULE}.weight"), source.linear(MODULE).dequantize().bfloat16())
    assert source.spec is not None
    with pytest.raises(UsageError, match="read, not written"):
        FORMAT.config_of(QuantSpec("rtn", source.spec.weights))
    for target in ("compressed-tensors", "gptq", "gptq_v2", "awq", "fp8"):
        with pytest.raises(UsageError, match=f"cannot be written as {target}") as caught:
            convert(source, tmp_path.with_name("other"), target)
        assert "\n" not in str(caught.value)
