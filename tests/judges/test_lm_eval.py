"""lm-eval scores texts through the server; the engine scores them here. They must be the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine

pytestmark = pytest.mark.judges

TASK = """\
task: fox
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
DOCUMENTS = (
    ("The capital of France is", ("Paris", "London", "a quick brown fox and a lazy dog")),
    ("Two and two make", ("four", "five, which is one more than four")),
    ("The quick brown fox jumps over the lazy", ("dog", "fox", "naïve café – 🦊")),
)


def test_its_loglikelihoods_are_ours(environment, judge, served, tmp_path: Path) -> None:
    program = environment("lm-eval") / "bin" / "lm_eval"
    rows = [{"question": question, "choices": choices, "answer": 0} for question, choices in DOCUMENTS]
    data = tmp_path / "fox.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (tmp_path / "fox.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    engine = Engine(served.model, EngineConfig(kv_cache_memory=64 << 20, max_num_seqs=4))
    engine.source.save_tokenizer(tmp_path / "tokenizer")
    settings = {
        "model": served.name, "base_url": f"{served.url}/completions", "tokenizer": tmp_path / "tokenizer",
        "tokenizer_backend": "huggingface", "num_concurrent": 2, "max_retries": 1, "max_length": engine.max_model_len,
    }
    arguments = ",".join(f"{key}={value}" for key, value in settings.items())
    done = judge(
        [program, "--model", "local-completions", "--model_args", arguments, "--tasks", "fox", "--include_path",
         tmp_path, "--output_path", tmp_path / "out", "--log_samples", "--batch_size", "2"]
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    assert len(found) == len(DOCUMENTS)
    for sample in found:
        for place, ((loglikelihood, greedy),) in enumerate(sample["resps"]):
            texts = sample["arguments"][f"gen_args_{place}"]
            ours, tokens, likeliest = score(engine, texts["arg_0"], texts["arg_1"])
            assert abs(float(loglikelihood) - ours) <= 1e-3 * tokens, texts
            assert (greedy == "True") is likeliest, texts


def score(engine: Engine, context: str, continuation: str) -> tuple[float, int, bool]:
    """The log-likelihood of a continuation, its tokens, and whether each of them is the likeliest."""
    start = len(engine.encode(context))
    tokens = engine.encode(context + continuation)
    rows = torch.cat([chunk for _, chunk in engine.score(tokens)])[start - 1 : len(tokens) - 1]
    targets = torch.tensor(tokens[start:])
    total = rows.gather(1, targets[:, None]).sum().item()
    return total, len(targets), bool((rows.argmax(1) == targets).all())
