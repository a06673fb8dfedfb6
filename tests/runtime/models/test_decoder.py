"""Each family of the native decoder, small and random, against the logits of plain transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.hf import HFDirectory
from qserve.kernels import native, registry
from qserve.kernels.ops import Step
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ORIGINAL = {"original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha-head-dim": ("llama", {"num_key_value_heads": 4, "head_dim": 48}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-3": (
        "llama",
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                                                  "high_freq_factor": 4.0, **ORIGINAL}},
    ),
    "llama-yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}}),
    "llama-stray-window": ("llama", {"sliding_window": 5}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}  # fmt: skip


def save_random(family: str, changes: dict[str, Any], path: Path, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():  # biases start as zeros and norms as ones: make them count
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return model


def run_chunks(decoder: Decoder, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence, computed a chunk at a time."""
    rows, done = [], 0
    table = torch.tensor([[5, 1, 7, 2]], dtype=torch.int32)
    for size in chunks:
        positions = torch.arange(done, done + size, dtype=torch.int32)
        step = Step(
            token_ids=torch.tensor(tokens[done : done + size], dtype=torch.int32),
            positions=positions,
            slots=table[0][positions.long() // 16] * 16 + positions % 16,
            seq_start=torch.tensor([0, size], dtype=torch.int32),
            block_tables=table,
            logit_rows=positions[:0],
        )
        decoder.run(step)
        decoder.head(step, torch.arange(size, dtype=torch.int32))
        rows.append(decoder.logits[:size].clone())
        done += size
    return torch.cat(rows)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, kernels: str, tmp_path: Path) -> None:
    if kernels == "native" and native.missing():
        pytest.skip(str(native.missing()))
    family, changes = CASES[case]
    model = save_random(family, changes, tmp_path)
    source = HFDirectory(tmp_path)
    config = decoder_config(source.config, "small")
    limits = DecoderLimits(max_tokens=64, max_logits=64, max_positions=64, num_blocks=8)
    decoder = Decoder(source, config, registry.make(kernels), limits, kv_dtype=torch.float32)
    tokens = torch.randint(0, SMALL["vocab_size"], (40,), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
    for chunks in ([40], [17, 1, 22], [1] * 40):
        got = run_chunks(decoder, tokens.tolist(), chunks)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": "wide"}, "not a valid"),
    ],
)
def test_what_is_not_computed_exactly_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config({"model_type": "llama", **SMALL, **changes}, "small")


def test_a_misshapen_weight_is_refused_by_name(tmp_path: Path) -> None:
    save_random("llama", {}, tmp_path)
    source = HFDirectory(tmp_path)
    config = decoder_config({**source.config, "intermediate_size": 96}, "small")
    limits = DecoderLimits(max_tokens=8, max_logits=8, max_positions=64, num_blocks=8)
    with pytest.raises(CheckpointError, match=r"gate_proj.*112.*96"):
        Decoder(source, config, registry.make("reference"), limits)
