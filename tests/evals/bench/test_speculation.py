"""The bench of drafts: what it counts, and that answers which differ are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from qserve.checkpoint.errors import QServeError
from qserve.evals.bench.speculation import Asked, compare, repeated, report
from qserve.evals.bench.workload import DATASETS, dataset_path, read_dataset
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.request import Request
from qserve.runtime.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


class Told:
    """Tells the answer to the only prompt."""

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer

    def draft(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        return {each.request_id: self._answer[len(each.output_token_ids) :][:3] for each in requests}

    def expects(self, requests: Sequence[Request]) -> bool:
        return False

    def timed(self, rows: int, seconds: float) -> None:
        pass


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return Engine(str(tiny_model), EngineConfig(kv_cache_memory=1 << 20, threads=1))


def test_what_drafts_save_is_counted(engine: Engine) -> None:
    (prompt,) = prompts = [[5, 6, 7]]
    answer = [token for output in engine.generate([*prompts], [PARAMS]) for token in output.token_ids]
    found = compare(engine, Told(answer), [(prompt, PARAMS)], 1, 2, lambda done, total: None)
    assert (found.requests, found.output, found.pairs, found.concurrency) == (1, 12, 2, 1)
    assert found.accepted == 1.0 and found.saved == pytest.approx(1 - 4 / 12), "one and three times four tokens"
    assert found.low <= found.ratio <= found.high
    shown = report("tiny", [found], "a question", {}, "qserve bench")
    assert shown.sections[0].rows[0][0] == "1" and {each.name for each in shown.metrics} == {
        "speculation_ratio/1", "output_rate/1"
    }  # fmt: skip


def test_several_are_asked_at_once(engine: Engine) -> None:
    asked: list[Asked] = [([5, 6, 7 + i], replace(PARAMS, temperature=1.0, seed=i)) for i in range(5)]
    found = compare(engine, Told([3] * 12), asked, 2, 1, lambda done, total: None)
    assert found.output == 60 and found.accepted < 0.5


def test_answers_that_differ_are_a_defect(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_seeds", Random(1))  # in CI there is one for all
    asked: list[Asked] = [([5, 6, 7], replace(PARAMS, temperature=5.0))]  # without a seed
    with pytest.raises(QServeError, match="answers with and without drafts differ"):
        compare(engine, Told([3]), asked, 1, 1, lambda done, total: None)


def test_repeated_is_what_came_in_the_answer_and_not_in_the_prompt() -> None:
    once, other = list(range(40)), list(range(100, 140))
    assert repeated([[]], [once]) == 0
    assert repeated([[]], [other + other]) > 0.1
    assert repeated([other], [other + other]) < repeated([[]], [other + other])
    assert repeated([[]], [[1] * 10]) == 0 and repeated([[]], [[1] * 132]) == pytest.approx(100 / 101)


def test_the_datasets_that_come_with_it() -> None:
    assert set(DATASETS) == {"edit", "extract", "document"} and dataset_path("a/b.jsonl") == Path("a/b.jsonl")
    for name in DATASETS:
        talk = next(read_dataset(dataset_path(name), 1, 0))
        assert len(talk.turns) == 1 and talk.turns[0].output == 256 and len(talk.turns[0].text or "") > 400
