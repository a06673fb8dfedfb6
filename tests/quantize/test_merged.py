"""``merged``: an adapter is added to the weights before they are rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.lora import read_adapter
from qserve.checkpoint.merged import merged
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob
from tests.adapters import write_adapter

SHAPES = {f"model.layers.{i}.self_attn.q_proj": (64, 64) for i in range(2)}
SHAPES |= {"model.layers.1.mlp.down_proj": (64, 128)}


def test_a_checkpoint_is_that_of_the_merged_model(tiny_model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "sql", SHAPES)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for name, weight in read_adapter(adapter, SHAPES, max_rank=8).modules.items():
        model.get_submodule(name).weight.data += weight.delta()
    model.save_pretrained(tmp_path / "whole")
    base = HFDirectory(tiny_model)
    base.save_tokenizer(tmp_path / "whole")
    job = QuantizeJob(method="rtn", group_size=32, calibration=None)
    source = merged(base, adapter)
    assert source.name == "tiny with sql" and source.sha256() not in (base.sha256(), merged(base, adapter).name)
    pipeline.run(source, tmp_path / "a", job)
    pipeline.run(HFDirectory(tmp_path / "whole"), tmp_path / "b", job)
    pipeline.run(base, tmp_path / "c", job)
    a, b, c = (HFDirectory(tmp_path / folder) for folder in "abc")
    for module in a.linears():
        assert torch.equal(a.linear(module).codes, b.linear(module).codes)
        assert torch.equal(a.linear(module).codes, c.linear(module).codes) == (module not in SHAPES)
    with pytest.raises(CheckpointError, match="a is quantized: an adapter is merged into the model that it was made"):
        merged(a, adapter)


def test_weights_that_lie_the_other_way(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)).save_pretrained(tmp_path)
    source, name = HFDirectory(tmp_path), "transformer.h.0.mlp.c_fc"
    name = name if source.has(f"{name}.weight") else name.removeprefix("transformer.")
    path = write_adapter(tmp_path / "sql", {name: (128, 32)}, fan_in_fan_out=True)
    adapter, whole = read_adapter(path, {name: (128, 32)}, max_rank=8), merged(source, path)
    stored = source.tensor(f"{name}.weight")
    assert torch.equal(whole.tensor(f"{name}.weight"), stored + adapter.modules[name].delta().T)
    assert whole.nbytes(f"{name}.weight") == stored.numel() * 4
    other = f"{name}.bias"
    assert torch.equal(whole.tensor(other), source.tensor(other)) and whole.nbytes(other) == source.nbytes(other)
