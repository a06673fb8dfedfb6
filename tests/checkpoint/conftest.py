from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    """A dense llama with random weights, saved by transformers as a Hugging Face directory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    directory = tmp_path / "tiny"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory
