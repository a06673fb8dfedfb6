"""NF4 as bitsandbytes stores it, by its published formula; tests/interop asks the package itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import format_named
from qserve.checkpoint.grid import NF4
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.checkpoint.unpacked import Unpacked, is_in

FORMAT = format_named("bitsandbytes")
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MODULE = "model.layers.0.mlp.up_proj"


def stored(out: int, inp: int, *, nested: bool, **changes: Any) -> dict[str, Tensor]:
    """The tensors of a linear by the ends of their names in a file, with random bytes."""
    blocks = out * inp // 64
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, inp]}
    parts = {
        "weight": torch.randint(0, 256, (out * inp // 2, 1), dtype=torch.uint8),
        "weight.absmax": torch.rand(blocks), "weight.quant_map": torch.tensor(NF4.codebook),
    }  # fmt: skip
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.37}
        parts["weight.absmax"] = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        parts["weight.nested_absmax"] = torch.rand(-(-blocks // 256))
        parts["weight.nested_quant_map"] = torch.linspace(-1, 1, 256) ** 3
    text = json.dumps(state | changes).encode()
    return parts | {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8)}


def write(path: Path, parts: dict[str, Tensor]) -> HFDirectory:
    tensors = {f"{MODULE}.{name}": tensor for name, tensor in parts.items()}
    save_file(tensors | {"lm_head.weight": torch.randn(4, 8)}, path / "model.safetensors", {"format": "pt"})
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": CONFIG}
    (path / "config.json").write_text(json.dumps(config))
    return HFDirectory(path)


@pytest.mark.parametrize("nested", [False, True])
def test_weights_are_those_of_the_formula(nested: bool, tmp_path: Path) -> None:
    out, inp = 150, 128  # more blocks than share a nested scale
    parts = stored(out, inp, nested=nested) | {"bias": torch.randn(out)}
    source = write(tmp_path, parts)
    assert source.linears() == [MODULE] and source.shape(MODULE) == (out, inp) and source.names() == ["lm_head.weight"]
    assert NF4.codebook is not None
    want, flat = torch.empty(out * inp), parts["weight"].flatten().tolist()
    scales = parts["weight.absmax"]
    if nested:
        of_blocks = parts["weight.nested_absmax"][torch.arange(len(scales)) // 256]
        scales = parts["weight.nested_quant_map"][scales.long()] * of_blocks + torch.tensor(0.37)
    for i in range(out * inp):
        code = flat[i // 2] >> 4 if i % 2 == 0 else flat[i // 2] & 15
        want[i] = torch.tensor(NF4.codebook[code]) * scales[i // 64]
    weight = source.linear(MODULE)
    assert torch.equal(weight.dequantize(), want.view(out, inp))
    assert weight.bias is not None and torch.equal(weight.bias, parts["bias"])
    assert is_in(source, NF4)
    dense = Unpacked(source)  # as it is served
    assert torch.equal(dense.tensor(f"{MODULE}.weight"), want.view(out, inp).bfloat16())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_type": "fp4"}, "fp4"),
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
    for config, words in (({**CONFIG, "bnb_4bit_quant_type": "fp4"}, "'fp4'"),
                          ({**CONFIG, "load_in_4bit": False, "load_in_8bit": True}, "8 bits")):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            FORMAT.spec_of(config)
    spec = FORMAT.spec_of({**CONFIG, "llm_int8_skip_modules": ["mlp", "lm_head"]}, ["a.mlp.up_proj", "a.mlp2", "b.q"])
    assert spec.weights == WeightScheme(4, 64, dtype="nf4") and spec.ignored == ("lm_head", "a.mlp.up_proj")
    with pytest.raises(UsageError, match="read, not written"):
        FORMAT.config_of(QuantSpec("rtn", spec.weights))
