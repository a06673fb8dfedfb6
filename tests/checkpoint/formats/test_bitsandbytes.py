"""NF4, FP4 and LLM.int8 as bitsandbytes stores them, by their formulas; tests/interop asks the package itself."""

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
from qserve.checkpoint.grid import BNB_FP4, NF4
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.checkpoint.unpacked import Unpacked, is_in

FORMAT = format_named("bitsandbytes")
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
GRIDS = {"nf4": NF4, "fp4": BNB_FP4}
MODULE = "model.layers.0.mlp.up_proj"


def stored(out: int, inp: int, *, nested: bool, kind: str = "nf4", **changes: Any) -> dict[str, Tensor]:
    """The tensors of a linear by the ends of their names in a file, with random bytes."""
    blocks = out * inp // 64
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [out, inp]}
    parts = {
        "weight": torch.randint(0, 256, (out * inp // 2, 1), dtype=torch.uint8),
        "weight.absmax": torch.rand(blocks), "weight.quant_map": torch.tensor(GRIDS[kind].codebook),
    }  # fmt: skip
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.37}
        parts["weight.absmax"] = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        parts["weight.nested_absmax"] = torch.rand(-(-blocks // 256))
        parts["weight.nested_quant_map"] = torch.linspace(-1, 1, 256) ** 3
    text = json.dumps(state | changes).encode()
    return parts | {f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(text), dtype=torch.uint8)}


def write(path: Path, parts: dict[str, Tensor], config: dict[str, Any] = CONFIG) -> HFDirectory:
    tensors = {f"{MODULE}.{name}": tensor for name, tensor in parts.items()}
    save_file(tensors | {"lm_head.weight": torch.randn(4, 8)}, path / "model.safetensors", {"format": "pt"})
    whole = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": config}
    (path / "config.json").write_text(json.dumps(whole))
    return HFDirectory(path)


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("nested", [False, True])
def test_weights_are_those_of_the_formula(nested: bool, kind: str, tmp_path: Path) -> None:
    out, inp = 150, 128  # more blocks than share a nested scale
    parts = stored(out, inp, nested=nested, kind=kind) | {"bias": torch.randn(out)}
    source = write(tmp_path, parts, {**CONFIG, "bnb_4bit_quant_type": kind})
    assert source.linears() == [MODULE] and source.shape(MODULE) == (out, inp) and source.names() == ["lm_head.weight"]
    codebook = GRIDS[kind].codebook
    assert codebook is not None
    want, flat = torch.empty(out * inp), parts["weight"].flatten().tolist()
    scales = parts["weight.absmax"]
    if nested:
        of_blocks = parts["weight.nested_absmax"][torch.arange(len(scales)) // 256]
        scales = parts["weight.nested_quant_map"][scales.long()] * of_blocks + torch.tensor(0.37)
    for i in range(out * inp):
        code = flat[i // 2] >> 4 if i % 2 == 0 else flat[i // 2] & 15
        want[i] = torch.tensor(codebook[code]) * scales[i // 64]
    weight = source.linear(MODULE)
    assert torch.equal(weight.dequantize(), want.view(out, inp))
    assert weight.bias is not None and torch.equal(weight.bias, parts["bias"])
    assert is_in(source, GRIDS[kind])
    dense = Unpacked(source)  # as it is served
    assert torch.equal(dense.tensor(f"{MODULE}.weight"), want.view(out, inp).bfloat16())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_type": "fp4"}, "quant_state says fp4, but the configuration says nf4"),
        ({"quant_type": "nf5"}, "nf5"),
        ({"blocksize": 128}, "blocks of 128"),
        ({"shape": [64, 96]}, r"\[64, 96\]"),
        ({"shape": [8]}, r"\[8\]"),
        ({"shape": [32, 128]}, "its shape"),
        ({"shape": "wide"}, "not what bitsandbytes writes"),
        ({"nested_blocksize": 0}, "nested_blocksize 0"),
        ({"nested_blocksize": 16}, "scales of scales"),
    ],
)
def test_another_state_is_refused_in_one_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = write(tmp_path, stored(64, 128, nested=True, **changes))
    with pytest.raises(CheckpointError, match=words) as caught:
        source.linear(MODULE)
    assert MODULE in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_parts_are_refused(tmp_path: Path) -> None:
    parts = stored(64, 128, nested=False)
    for name, tensor, words in (
        ("weight.quant_map", torch.zeros(16), "other numbers"),
        ("weight.absmax", torch.rand(5), "absmax has 5 scales"),
        ("weight.absmax", torch.full((128,), torch.inf), "a scale is NaN"),
        ("weight.quant_state.bitsandbytes__nf4", torch.zeros(4, dtype=torch.uint8), "not what bitsandbytes writes"),
    ):
        with pytest.raises(CheckpointError, match=words):
            write(tmp_path, {**parts, name: tensor}).linear(MODULE)


def test_configurations_and_writing_are_refused_by_name() -> None:
    for config, words in (({**CONFIG, "bnb_4bit_quant_type": "fp5"}, "'fp5'"),
                          ({**CONFIG, "load_in_8bit": True}, "both"),
                          ({**CONFIG, "bnb_4bit_quant_type": ["nf4"]}, "'nf4'"),
                          ({**CONFIG, "load_in_4bit": False}, "neither")):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            FORMAT.spec_of(config)
    spec = FORMAT.spec_of({**CONFIG, "llm_int8_skip_modules": ["mlp", "lm_head"]}, ["a.mlp.up_proj", "a.mlp2", "b.q"])
    assert spec.weights == WeightScheme(4, 64, dtype="nf4") and spec.ignored == ("lm_head", "a.mlp.up_proj")
    with pytest.raises(UsageError, match="read, not written"):
        FORMAT.config_of(QuantSpec("rtn", spec.weights))


def int8(out: int, inp: int) -> dict[str, Tensor]:
    """A linear in LLM.int8, every value of int8 in it."""
    weight = torch.arange(out * inp).view(out, inp).to(torch.int8)
    return {"weight": weight, "SCB": torch.rand(out) + 0.1, "weight_format": torch.tensor(0, dtype=torch.uint8)}


@pytest.mark.parametrize("told", [True, False])
def test_llm_int8_is_integers_per_channel(told: bool, tmp_path: Path) -> None:
    """With and without ``weight_format``."""
    parts = int8(24, 40) | {"bias": torch.randn(24)}
    if not told:
        del parts["weight_format"]
    source = write(tmp_path, parts, INT8)
    assert source.linears() == [MODULE] and source.shape(MODULE) == (24, 40) and source.names() == ["lm_head.weight"]
    assert source.spec is not None and source.spec.weights == WeightScheme(8, -1) and source.spec.activations is None
    weight = source.linear(MODULE)
    assert torch.equal(weight.dequantize(), parts["weight"].float() * (parts["SCB"] * (1 / 127))[:, None])
    torch.testing.assert_close(
        weight.dequantize().double(), parts["weight"].double() * parts["SCB"].double()[:, None] / 127, rtol=3e-7, atol=0
    )
    assert weight.bias is not None and torch.equal(weight.bias, parts["bias"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SCB": None}, "is stored as I8, but its scale is missing"),
        ({"SCB": torch.rand(5)}, "SCB has 5 numbers for 24 rows"),
        ({"SCB": torch.rand(24).half()}, "SCB must be float32"),
        ({"SCB": torch.full((24,), torch.nan)}, "a scale is NaN"),
        ({"weight": torch.zeros(24, 40, dtype=torch.uint8)}, "weight must be int8"),
        ({"weight": torch.zeros(24 * 40, dtype=torch.int8)}, "weight must be int8 of rank 2"),
        ({"weight_format": torch.tensor(1, dtype=torch.uint8)}, "rows are interleaved"),
        ({"bias": torch.rand(3)}, "bias is"),
    ],
)
def test_a_damaged_int8_linear_is_refused_in_one_line(
    changes: dict[str, Tensor | None], words: str, tmp_path: Path
) -> None:
    parts = {name: tensor for name, tensor in (int8(24, 40) | changes).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=words) as caught:
        write(tmp_path, parts, INT8).linear(MODULE)
    assert MODULE in str(caught.value) and "\n" not in str(caught.value)


def test_a_configuration_of_other_bits_is_refused(tmp_path: Path) -> None:
    four = stored(24, 64, nested=False)
    for parts, config, words in ((int8(24, 64), CONFIG, "in 8 bits, the configuration says 4"),
                                 (four, INT8, "in 4 bits, the configuration says 8")):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            write(tmp_path, parts, config).linear(MODULE)


def test_int8_is_converted_exactly_and_four_bits_are_not(tmp_path: Path) -> None:
    fp4 = stored(32, 64, nested=False, kind="fp4"), {**CONFIG, "bnb_4bit_quant_type": "fp4"}
    for name, (parts, config) in {
        "int8": (int8(32, 64), INT8), "nf4": (stored(32, 64, nested=False), CONFIG), "fp4": fp4,
    }.items():  # fmt: skip
        (tmp_path / name).mkdir()
        write(tmp_path / name, parts, config)
        (tmp_path / name / "tokenizer.json").write_text("{}")
    source, out = HFDirectory(tmp_path / "int8"), tmp_path / "out"
    convert(source, out, "compressed-tensors")
    found = HFDirectory(out)
    assert found.spec is not None and found.spec.weights == WeightScheme(8, -1) and found.spec.activations is None
    assert torch.equal(found.linear(MODULE).dequantize(), source.linear(MODULE).dequantize())
    with pytest.raises(CheckpointError, match="would round its scales to float16"):
        convert(source, tmp_path / "gptq", "gptq")
    for name in ("nf4", "fp4"):
        for target in ("compressed-tensors", "gptq", "awq"):
            with pytest.raises(UsageError, match=f"cannot be written as {target}") as caught:
                convert(HFDirectory(tmp_path / name), tmp_path / "other", target)
            assert "\n" not in str(caught.value)
