"""Adapters that PEFT saves, served beside their base: the logits of PEFT's own merged model, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qserve.checkpoint.source import open_model
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams
from tests.interop.conftest import TOKENS

pytestmark = pytest.mark.interop

KINDS: dict[str, dict[str, Any]] = {
    "all linears": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "rsLoRA": {"r": 5, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "patterns": {
        "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 4, r"model\.layers\.0\.mlp.down_proj": 2},
        "alpha_pattern": {"k_proj": 3, "q_proj": 5},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def adapters(judge, dense_llama, tmp_path_factory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp("peft") for kind in KINDS}
    judge("peft", "peft_merge.py", [(path, dense_llama, KINDS[kind]) for kind, path in found.items()])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_peft(kind, adapters, answers, dense_llama, tiny_model, tmp_path, monkeypatch) -> None:
    want = answers(adapters[kind])["logits"][0].log_softmax(-1)
    source = open_model(dense_llama)
    monkeypatch.setattr(source, "tokenizer", open_model(tiny_model).tokenizer)
    config = EngineConfig(kv_cache_dtype="fp32", kv_cache_memory=4 << 20, lora_modules=(("a", str(adapters[kind])),))
    engine, rows = Engine(source, config), []
    engine.submit("x", TOKENS[0].tolist(), SamplingParams(max_tokens=1, prompt_logprobs=0), adapter="a")
    engine._choices["x#0"].row_sink = lambda start, some: rows.append(some.clone())
    while engine.has_work():
        engine.step()
    found = torch.cat(rows)
    torch.testing.assert_close(found, want[: len(found)], rtol=0, atol=1e-4)
