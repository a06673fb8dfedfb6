"""A small random model behind the real engine and the real server, on a free port of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qserve.checkpoint.demo import demo_path
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.app import ServerConfig
from qserve.runtime.server.serve import ServerHandle

KEYS = ("first-key", "second-key")
TEMPLATE = (
    "{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_model(out: Path) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        ["the quick brown fox and the lazy dog, system user assistant hello world"],
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=special),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=special[:2]
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
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(out)
    return out


@pytest.fixture(
    scope="session",
    params=[
        "tiny",
        pytest.param("demo", marks=[pytest.mark.slow, pytest.mark.skipif(not demo_path().exists(), reason="no demo")]),
    ],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model = save_tiny_model(tmp_path_factory.mktemp("server") / "tiny") if request.param == "tiny" else "demo"
    config = EngineConfig(max_model_len=512, max_num_seqs=16, kv_cache_memory=256 << 20, threads=2)
    return Engine(str(model), config)


class Slow:
    """A runner that takes its time, so that something can happen while it runs."""

    def __init__(self, runner: Any, seconds: float) -> None:
        self.runner = runner
        self.seconds = seconds

    def run(self, *arguments: Any) -> Any:
        time.sleep(self.seconds)
        return self.runner.run(*arguments)


@pytest.fixture
def slow(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "runner", Slow(engine.runner, 0.02))


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[ServerHandle]:
    with ServerHandle(engine, config=ServerConfig(api_keys=KEYS, vllm_metrics=True)) as handle:
        yield handle
    engine.check()


@pytest.fixture
def client(server: ServerHandle) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key=KEYS[0], max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(server: ServerHandle) -> str:
    return server.service.model_name
