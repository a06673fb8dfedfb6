"""A tiny model with a tokenizer, dense and packed, made once per session: no network, no downloads."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qserve.checkpoint.source import open_model
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse me' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_collection_finish() -> None:
    """Thousands of tests and what they import stay until the end: the search for garbage need not go through them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def save_tiny_model(out: Path, more_special: Sequence[str] = (), context: int = 512) -> Path:
    """Two random llama layers and a byte-level BPE tokenizer of about 320 tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more_special]
    backend.train_from_iterator(
        ["the quick brown fox and the lazy dog, system user assistant hello world"],
        trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=[*special[:2], *more_special]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(out)
    return out


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model directory. Not to be written to."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_packed(tiny_model: Path) -> Path:
    """The same model at 4 bits, groups of 32. Not to be written to."""
    out = tiny_model.parent / "tiny-w4"
    pipeline.run(open_model(tiny_model), out, QuantizeJob(method="rtn", group_size=32, calibration=None))
    return out


@pytest.fixture(scope="module")
def plain_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every client of httpx reads the certificates that it trusts, which takes longer than most requests: none here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield
