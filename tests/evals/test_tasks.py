"""The requests of lm-eval, answered without lm-eval, against plain transformers; and the reading of its figures."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from qserve.checkpoint.errors import DataError, QServeError
from qserve.checkpoint.source import open_model
from qserve.evals.tasks import Answers, Compared, TaskResult, require_lm_eval, results_of
from qserve.evals.tasks_report import metrics, side_by_side, tasks_report
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine

CONTEXT = 48


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    config = EngineConfig(
        max_model_len=CONTEXT + 1, max_num_seqs=16, max_num_batched_tokens=16, kv_cache_dtype="fp32", threads=1
    )
    return Engine(open_model(tiny_model), config)


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def expected(oracle: LlamaForCausalLM, tokens: list[int], start: int) -> tuple[float, bool]:
    with torch.no_grad():
        rows = oracle(torch.tensor([tokens])).logits[0, start - 1 : -1].double().log_softmax(-1)
    target = torch.tensor(tokens[start:])
    return float(rows.gather(1, target[:, None]).sum()), bool((rows.argmax(-1) == target).all())


@pytest.mark.parametrize(("context", "text"), [("the quick brown", " fox"), ("hello ", "world"), ("", "the lazy dog")])
def test_a_loglikelihood_is_that_of_transformers(
    engine: Engine, oracle: LlamaForCausalLM, context: str, text: str
) -> None:
    tokens, start = engine.encode(context + text), len(engine.encode(context.rstrip()))
    if not context:
        tokens, start = [engine.tokenizer.eos_token_id, *tokens], 1
    value, greedy = Answers(engine).loglikelihood(context, text)
    assert (pytest.approx(value, abs=1e-3), greedy) == expected(oracle, tokens, start)


def test_a_greedy_continuation_is_known_as_such_and_a_long_context_is_cut(
    engine: Engine, oracle: LlamaForCausalLM
) -> None:
    told: list[int] = []
    answers = Answers(engine, lambda: told.append(1))
    context = "the quick brown fox and the lazy dog " * 6
    tokens = engine.encode(context + "hello")
    start = len(engine.encode(context.rstrip())) - (len(tokens) - CONTEXT)
    value, greedy = answers.loglikelihood(context, "hello")
    assert (pytest.approx(value, abs=1e-3), greedy) == expected(oracle, tokens[-CONTEXT:], start)
    with pytest.raises(DataError, match="does not fit"):
        answers.loglikelihood("a", "the quick brown fox " * 40)
    assert told == [1]


def test_a_rolling_loglikelihood_counts_each_token_once(engine: Engine, oracle: LlamaForCausalLM) -> None:
    text = "the quick brown fox and the lazy dog, system user assistant " * 10
    tokens = [engine.tokenizer.eos_token_id, *engine.encode(text)]
    assert len(tokens) > 2 * CONTEXT
    total, done = 0.0, 1
    while done < len(tokens):
        begin = max(0, done - CONTEXT // 2) if done > 1 else 0
        end = min(begin + CONTEXT, len(tokens))
        total += expected(oracle, tokens[begin:end], done - begin)[0]
        done = end
    assert Answers(engine).rolling(text) == pytest.approx(total, abs=1e-2)
    short = "hello world"
    alone = Answers(engine).loglikelihood("", short)[0]
    assert Answers(engine).rolling(short) == pytest.approx(alone, abs=1e-6)


def test_texts_end_at_the_first_of_any_number_of_stops(engine: Engine) -> None:
    answers = Answers(engine)
    prompts = ["the quick", "hello world and"]
    free = answers.generate(prompts, [{"max_gen_toks": 12, "until": []}] * 2)
    assert all(free) and free == answers.generate(prompts, [{"max_gen_toks": 12, "do_sample": False}] * 2)
    stop = free[0][len(free[0]) // 2]
    stops = ["never 1", "never 2", "never 3", "never 4", stop]
    cut = answers.generate(prompts[:1], [{"max_gen_toks": 12, "until": stops, "temperature": 0.0}])
    assert cut == [free[0][: free[0].index(stop)]]
    with pytest.raises(DataError, match="asks for penalty"):
        answers.generate(prompts[:1], [{"penalty": 1}])


FOUND = {
    "results": {"fox": {"alias": "fox", "acc,none": 0.75, "acc_stderr,none": 0.25, "f1,take": 0.5,
                        "f1_stderr,take": "N/A"},
                "ppl": {"word_perplexity,none": 12.0, "word_perplexity_stderr,none": math.nan}},
    "samples": {"fox": [
        {"doc_id": 3, "filter": "none", "acc": 0.0}, {"doc_id": 0, "filter": "none", "acc": 1.0},
        {"doc_id": 1, "filter": "none", "acc": 1.0}, {"doc_id": 2, "filter": "none", "acc": 1.0},
        {"doc_id": 0, "filter": "take", "f1": [1, 2]},
    ]},
    "higher_is_better": {"fox": {"acc": True}, "ppl": {"word_perplexity": False}},
}  # fmt: skip


def test_results_are_read_with_the_documents_that_they_are_means_of() -> None:
    acc, f1, ppl = results_of(FOUND)
    assert acc == TaskResult("fox", "acc", 0.75, 0.25, True, (1.0, 1.0, 1.0, 0.0))
    assert (f1.metric, f1.stderr, f1.documents) == ("f1 (take)", None, ())
    assert (ppl.value, ppl.stderr, ppl.higher_is_better) == (12.0, None, False)


def test_a_difference_is_paired_by_document() -> None:
    base = TaskResult("fox", "acc", 0.75, 0.25, True, (1.0, 1.0, 1.0, 0.0))
    model = TaskResult("fox", "acc", 0.5, 0.29, True, (1.0, 1.0, 0.0, 0.0))
    (pair,) = side_by_side([base], [model])
    assert pair.difference == -0.25 and pair.stderr == pytest.approx(0.25)
    assert Compared(None, model).difference is None
    assert Compared(base, TaskResult("a", "b", 1, None, True, ())).stderr is None
    report = tasks_report([pair], "w4", "base", "c")
    assert "-0.2500 ± 0.4900" in report.to_markdown() and len(report.plots[0].series) == 2
    value, difference = metrics([pair])
    assert (value.name, value.samples, value.better) == ("fox/acc", model.documents, "higher")
    assert (difference.name, difference.value) == ("fox/acc difference", -0.25)
    assert len(tasks_report([Compared(None, model)], "w4", None, "c").sections[0].header) == 4


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_one_line_says_what_to_install() -> None:
    with pytest.raises(QServeError, match=r'pip install "qserve-llm\[evals\]"'):
        require_lm_eval()
