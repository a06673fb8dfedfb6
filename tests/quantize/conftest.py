"""Tiny random models with a tokenizer, on disk."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedTokenizerFast, Qwen2Config

from qserve.calibration.text import load_text
from qserve.quantize import gptq, windows

SIZES = dict(vocab_size=258, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=128)


def save(path: Path, config, dtype=torch.float32) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # fresh models are near-linear and their biases zero
            parameter.normal_(0, 0.3) if parameter.dim() == 1 else parameter.mul_(4)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path) -> None:
    """Of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: index for index, letter in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(path)


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    """Tied head, sizes that 64 divides."""
    config = LlamaConfig(hidden_size=64, intermediate_size=128, tie_word_embeddings=True, **SIZES)
    return save(tmp_path_factory.mktemp("llama") / "model", config)


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory) -> Path:
    """bfloat16, biases, untied head, a hidden size that 64 does not divide."""
    config = Qwen2Config(hidden_size=96, intermediate_size=128, tie_word_embeddings=False, **SIZES)
    return save(tmp_path_factory.mktemp("qwen2") / "model", config, torch.bfloat16)


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory) -> Path:
    """Two experts."""
    config = MixtralConfig(hidden_size=32, intermediate_size=64, num_local_experts=2, **SIZES)
    return save(tmp_path_factory.mktemp("mixtral") / "model", config)


@pytest.fixture(scope="session", params=[False, True], ids=["untied", "tied"])
def wide(request, tmp_path_factory) -> Path:
    """One block, of linears beside which headers are small."""
    sizes = {**SIZES, "vocab_size": 512, "num_hidden_layers": 1}
    config = LlamaConfig(hidden_size=512, intermediate_size=1024, tie_word_embeddings=request.param, **sizes)
    return save(tmp_path_factory.mktemp("wide") / "model", config)


@pytest.fixture
def llama_of(tmp_path):
    """Makes one of these widths, in bfloat16."""
    def make(hidden: int, intermediate: int, layers: int) -> Path:
        sizes = {**SIZES, "num_hidden_layers": layers}
        config = LlamaConfig(hidden_size=hidden, intermediate_size=intermediate, **sizes)
        return save(tmp_path / "model", config, torch.bfloat16)

    return make


@pytest.fixture
def little_text(monkeypatch):
    """Of the text that is calibrated on the beginning alone."""

    def shortened(name, split):
        text = load_text(name, split)
        return dataclasses.replace(text, text=text.text[:50_000])

    monkeypatch.setattr(windows, "load_text", shortened)


@pytest.fixture
def gptq_alone(monkeypatch):
    """GPTQ without the descent that follows it, which test_descent.py tests."""
    monkeypatch.setattr(gptq, "descend", lambda weight, codes, scales, *_, **__: (codes, scales))
