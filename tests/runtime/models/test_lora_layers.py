"""Adapters in the native decoder, against plain transformers with the adapter merged in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.lora import LoraAdapter, read_adapter
from qserve.kernels import native, registry
from qserve.kernels.executor import Step
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder
from qserve.runtime.models.lora_layers import LoraLayers
from tests.adapters import write_adapter
from tests.runtime.models import test_decoder as dense
from tests.runtime.models import test_latent as latent
from tests.runtime.models import test_layer_norm_families as layer_norms

CASES = {
    name: cases[name]
    for cases, names in (
        (dense.CASES, ("llama-biases", "granite", "phi3", "glm", "gemma2", "exaone4")),
        (layer_norms.CASES, ("gpt2", "gpt_neox", "cohere")),
    )
    for name in names
}
TOKENS = torch.randint(0, dense.SMALL["vocab_size"], (40,), generator=torch.Generator().manual_seed(7))


class Adapted:
    """A decoder all of whose tokens have the adapter of one slot."""

    def __init__(self, decoder: Decoder, slot: int) -> None:
        self._decoder, self._slot = decoder, slot
        self.layout, self.logits, self.kv = decoder.layout, decoder.logits, decoder.kv
        self.sequence_states = decoder.sequence_states

    def run(self, *steps: Step) -> None:
        slots = torch.full((steps[0].tokens,), self._slot, dtype=torch.int32)
        self._decoder.run(*(replace(step, adapters=slots) for step in steps))

    def head(self, step: Step, rows: torch.Tensor) -> None:
        self._decoder.head(step, rows)


def linears(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """[out, in] of what PEFT's ``target_modules="all-linear"`` names."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and name not in ("lm_head", "embed_out"):
            found[name] = tuple(module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape)
    return found  # type: ignore[return-value]


def merge(model: torch.nn.Module, adapter: LoraAdapter) -> None:
    for name, weight in adapter.modules.items():
        module: Any = model.get_submodule(name)
        module.weight.data += weight.delta().T if isinstance(module, Conv1D) else weight.delta()


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_merged_model(case: str, kernels: str, tmp_path: Path) -> None:
    if kernels == "native" and native.missing():
        pytest.skip(str(native.missing()))
    model = dense.save_random(*CASES[case], tmp_path)
    source, lora = HFDirectory(tmp_path), LoraLayers(3, 8)
    config = decoder_config(source.config, "small")
    decoder = Decoder(source, config, registry.make(kernels), dense.LIMITS, kv_dtype=torch.float32, lora=lora)
    assert lora.shapes == linears(model)
    write_adapter(tmp_path / "lora", linears(model), r=5, use_rslora=True, fan_in_fan_out=case == "gpt2")
    adapter = read_adapter(tmp_path / "lora", lora.shapes, max_rank=8)
    lora.put(1, lora.lay_out(adapter))
    with torch.no_grad():
        base = model(TOKENS[None]).logits[0]
        merge(model, adapter)
        want = model(TOKENS[None]).logits[0]
    assert (want - base).abs().max() > 0.05
    whole = dense.run_chunks(Adapted(decoder, 1), TOKENS.tolist(), [40])  # type: ignore[arg-type]
    torch.testing.assert_close(whole, want, rtol=0, atol=1e-4)
    parts = dense.run_chunks(Adapted(decoder, 1), TOKENS.tolist(), [17, 1, 22])  # type: ignore[arg-type]
    assert kernels == "reference" or torch.equal(parts, whole)
    torch.testing.assert_close(dense.run_chunks(decoder, TOKENS.tolist(), [40]), base, rtol=0, atol=1e-4)


def test_experts_take_no_adapter(tmp_path: Path) -> None:
    dense.save_random("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, tmp_path)
    source, lora = HFDirectory(tmp_path), LoraLayers(2, 8)
    Decoder(source, decoder_config(source.config, "small"), registry.make("reference"), dense.LIMITS, lora=lora)
    assert {name.rpartition(".")[2] for name in lora.shapes} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    name = "model.layers.0.mlp.experts.0.up_proj"
    with pytest.raises(CheckpointError, match=f"adapts {name}, which is no linear of this model that can have"):
        read_adapter(write_adapter(tmp_path / "lora", {name: (32, 64)}), lora.shapes, max_rank=8)


def test_latent_attention_takes_adapters_but_for_the_products_that_it_absorbs(tmp_path: Path) -> None:
    model = latent.make("youtu", tmp_path)
    source, lora = HFDirectory(tmp_path), LoraLayers(2, 8)
    config = decoder_config(source.config, "small")
    decoder = Decoder(source, config, registry.make("reference"), dense.LIMITS, kv_dtype=torch.float32, lora=lora)
    absorbed = {name: shape for name, shape in linears(model).items() if name.endswith("kv_b_proj")}
    assert lora.shapes == {name: shape for name, shape in linears(model).items() if name not in absorbed}
    adapter = read_adapter(write_adapter(tmp_path / "lora", lora.shapes, r=5), lora.shapes, max_rank=8)
    lora.put(1, lora.lay_out(adapter))
    base = latent.logits(model)
    merge(model, adapter)
    want = latent.logits(model)
    assert (want - base).abs().max() > 0.05
    got = dense.run_chunks(Adapted(decoder, 1), latent.tokens().tolist(), [40])  # type: ignore[arg-type]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    with pytest.raises(CheckpointError, match=r"kv_b_proj, which is no linear of this model that can have an adapter"):
        read_adapter(write_adapter(tmp_path / "absorbed", absorbed), lora.shapes, max_rank=8)
