"""The parts behind a quality report: pieces of text, references, resumed runs, intervals, gates in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qserve.calibration.text import load_text
from qserve.checkpoint.errors import CapacityError, DataError, UsageError
from qserve.checkpoint.source import open_model
from qserve.evals import quality, reference
from qserve.evals.bootstrap import interval, mean_interval, resampled_means, standard_error
from qserve.evals.divergence import Divergence, compare
from qserve.evals.gate import Gate, judge_values, read_gates
from qserve.evals.partial import Partial
from qserve.evals.pieces import of_documents, sliding
from qserve.evals.quality_report import metrics, quality_report
from qserve.evals.reference import Reference, record, stored_bytes, vocabulary_hash
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine

WINDOW = 24


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> Engine:
    return Engine(open_model(tiny_model), EngineConfig(max_model_len=WINDOW + 1, max_num_seqs=16,
                                                       max_num_batched_tokens=16, threads=1))  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_packed: Path) -> Engine:
    return Engine(open_model(tiny_packed), EngineConfig(max_model_len=WINDOW + 1, max_num_seqs=16,
                                                        max_num_batched_tokens=16, threads=1))  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> quality.EvalJob:
    path = tmp_path_factory.mktemp("text") / "docs.jsonl"
    texts = ["the quick brown fox", "and the lazy dog, hello world, " * 4, "a", "system user assistant"]
    path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    return quality.EvalJob(load_text(str(path), "evaluate"), 90, WINDOW, "document")


@pytest.fixture(scope="module")
def found(base: Engine, model: Engine, job: quality.EvalJob) -> Divergence:
    return compare(base, model, quality.pieces_of(job, base.source))


def equal(one: Divergence, other: Divergence) -> bool:
    return all(torch.equal(value, other.tensors()[name]) for name, value in one.tensors().items())


def test_a_sliding_window_scores_every_token_once_with_the_context_it_promises() -> None:
    pieces = sliding(range(100), tokens=50, window=20, stride=8)
    scored = [int(token) for piece in pieces for token in piece.tokens[piece.first :]]
    assert scored == list(range(1, 44)) and [len(piece.tokens) for piece in pieces] == [20] * 4
    assert [piece.first for piece in pieces] == [1, 12, 12, 12] and [piece.unit for piece in pieces] == [0, 1, 2, 3]
    with pytest.raises(DataError, match="need 44 tokens"):
        sliding(range(43), tokens=50, window=20, stride=8)


def test_documents_are_read_by_themselves_and_long_ones_in_parts() -> None:
    pieces = of_documents([[1, 2, 3], [4], list(range(25)), [7, 8, 9]], tokens=30, window=10)
    assert [(piece.unit, len(piece.tokens)) for piece in pieces] == [(0, 3), (2, 10), (2, 10), (2, 5)]
    assert sum(map(len, (piece.tokens for piece in of_documents([[1, 2, 3], [4, 5, 6]], 5, 10)))) == 5
    with pytest.raises(DataError, match="nothing to predict"):
        of_documents([[1], [2]], 10, 10)


def test_divergence_by_document(base: Engine, model: Engine, job: quality.EvalJob, found: Divergence) -> None:
    assert set(found.unit.tolist()) == {0, 1, 3}, "a document of one token predicts nothing"
    sums, counts = found.by_unit(found.kl, found.agree)
    assert float(sums[:, 0].sum()) == pytest.approx(float(found.kl.sum())) and counts.sum() == found.tokens
    one = found.unit == 1
    assert float(sums[1, 0] / counts[1]) == pytest.approx(float(found.kl[one].mean()))
    assert bool((found.confidence > 0).all() and (found.confidence <= 1).all())
    known = {each.name: each for each in metrics(found, job.setting(base.source))}
    means = [float(found.nll[found.unit == unit].mean()) for unit in (0, 1, 3)]
    assert known["perplexity_documents"].value == pytest.approx(math.exp(sum(means) / 3))
    with pytest.raises(DataError, match="is one text"):
        quality.pieces_of(quality.EvalJob(load_text("builtin", "evaluate"), by="document"), base.source)


def test_a_reference_of_the_whole_vocabulary_is_exact_and_a_short_one_never_above(
    base: Engine, model: Engine, job: quality.EvalJob, found: Divergence, tmp_path: Path
) -> None:
    pieces, vocabulary = quality.pieces_of(job, base.source), vocabulary_hash(base.tokenizer.get_vocab())
    below = 0.0
    for top in (4, 64, 100_000):
        made = record(base, job.setting(base.source), vocabulary, pieces, top)
        made.save(tmp_path / "r.safetensors")
        read = Reference.load(tmp_path / "r.safetensors")
        got = compare(read, model, read.pieces)
        for name in ("base_nll", "nll", "agree", "position", "unit"):
            assert torch.equal(getattr(got, name), getattr(found, name)), name
        torch.testing.assert_close(got.confidence, found.confidence)
        assert bool((got.kl <= found.kl + 1e-5).all())
        assert below - 1e-9 <= float(got.kl.mean())
        below = float(got.kl.mean())
        assert float(compare(read, base, read.pieces).kl.max()) < 1e-5, "the base diverges from itself"
    torch.testing.assert_close(got.kl, found.kl, atol=1e-5, rtol=1e-4)
    quality.require_one_vocabulary(read, model)


def test_a_reference_that_is_damaged_or_too_large(
    base: Engine, model: Engine, job: quality.EvalJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, path = quality.pieces_of(job, base.source), tmp_path / "r.safetensors"
    made = record(base, job.setting(base.source), "other", pieces, 8)
    made.save(path)
    with pytest.raises(DataError, match="different tokenizers"):
        quality.require_one_vocabulary(made, model)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="damaged"):
        Reference.load(path)
    path.write_bytes(b"no")
    with pytest.raises(DataError, match="cannot be read"):
        Reference.load(path)
    with pytest.raises(DataError, match="does not exist"):
        Reference.load(tmp_path / "none.safetensors")
    monkeypatch.setattr(reference, "LIMIT", 1000)
    with pytest.raises(CapacityError, match="lower --reference-top"):
        stored_bytes(pieces, 8)


class Stopping:
    """An engine that is interrupted after some pieces."""

    def __init__(self, engine: Engine, pieces: int) -> None:
        self._engine, self._left = engine, pieces

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def score(self, tokens: list[int]) -> Iterator[tuple[int, Tensor]]:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        return self._engine.score(tokens)


def test_an_interrupted_run_goes_on_to_the_same_result(
    base: Engine, model: Engine, job: quality.EvalJob, found: Divergence, tmp_path: Path
) -> None:
    pieces, file = quality.pieces_of(job, base.source), tmp_path / "partial"
    for done in (0, 1, 2):
        with pytest.raises(KeyboardInterrupt):
            compare(base, Stopping(model, min(done, 1)), pieces, partial=Partial(file, "k"))  # type: ignore[arg-type]
        assert Partial(file, "k").load()[0] == done
    with pytest.raises(DataError, match="another measurement"):
        Partial(file, "other").load()
    seen: list[int] = []
    again = compare(base, model, pieces, lambda done, _: seen.append(done), partial=Partial(file, "k"))
    assert equal(again, found) and seen == list(range(3, len(pieces) + 1))
    setting = job.setting(base.source)
    key = quality.measurement_key(setting, model, pieces)
    assert key == quality.measurement_key(setting, model, pieces) != quality.measurement_key(setting, base, pieces)
    assert key != quality.measurement_key(setting, model, pieces[1:])


def test_a_bootstrap_interval_is_as_wide_as_theory_says() -> None:
    torch.manual_seed(0)
    samples = torch.randn(400, dtype=torch.float64) + 5
    low, high = interval(resampled_means(samples[:, None], torch.ones(400, dtype=torch.float64))[:, 0])
    error = standard_error(samples.tolist())
    assert low < float(samples.mean()) < high
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.1)
    assert error == pytest.approx(float(samples.std()) / 20)
    assert mean_interval([1.0]) is None and mean_interval([2.0, 2.0]) == (2.0, 2.0)
    assert mean_interval(samples.tolist()) == (low, high), "the same on every call"


def test_the_report_holds_intervals_plots_and_the_floor(
    base: Engine, model: Engine, found: Divergence, job: quality.EvalJob
) -> None:
    setting = job.setting(base.source)
    card = quality.card_of(found, setting, model)
    report = quality_report(card, "w4", "c", (), found, setting, found)
    known = {metric.name: metric for metric in report.metrics}
    assert known["kl_mean"].value == card.kl_mean and known["perplexity"].value == card.perplexity
    for name in ("kl_mean", "top1_agreement", "perplexity", "perplexity_increase"):
        metric = known[name]
        assert metric.low is not None and metric.high is not None and metric.low <= metric.value <= metric.high, name
        assert len(metric.samples) == 3 and metric.pairing
    assert known["noise_floor_kl"].value == card.kl_mean and "noise floor" in report.to_markdown()
    assert [plot.title for plot in report.plots] == [
        "Divergence by position", "Divergence by confidence", "Flips by confidence", "Tail of the divergence"
    ]  # fmt: skip
    mask = found.confidence < 0.1
    assert report.plots[1].series[0].y[0] == pytest.approx(float(found.kl[mask].mean()))
    json.dumps(report.to_json(), allow_nan=False)
    single = quality_report(card, "w4", "c", (), Divergence(**{
        name: value[found.unit == 1] for name, value in found.tensors().items()}), setting)  # fmt: skip
    assert all(metric.low is None for metric in single.metrics), "one document has no interval"


def test_gates_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "g.toml"
    path.write_text('[kl_mean]\nmax = 0.1\n["fox/acc"]\nmin = "80%"\nmax = 1\n[gain]\nmin = -2.5\n')
    gates = read_gates(path)
    assert gates == [
        Gate("kl_mean", 0.1, "at_most"), Gate("fox/acc", 0.8, "at_least"), Gate("fox/acc", 1.0, "at_most"),
        Gate("gain", -2.5, "at_least"),
    ]  # fmt: skip
    values = {"kl_mean": 0.2, "fox/acc": 0.8, "gain": float("nan")}
    assert [report.passed for report in judge_values(gates, values, 1, "")] == [False, True, True, False]
    with pytest.raises(UsageError, match=r"no gain is measured here.*kl_mean"):
        judge_values(gates, {"kl_mean": 0.0, "fox/acc": 0.9}, 1, "")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("kl_mean = 0.1", "write \\[kl_mean\\]"),
        ("[kl_mean]\nmaximum = 1", "write \\[kl_mean\\]"),
        ("[kl_mean]\nmax = true", "max of kl_mean must be a number"),
        ('[kl_mean]\nmax = "much"', "max of kl_mean must be a number"),
        ('[kl_mean]\nmax = "x%"', "max of kl_mean must be a number"),
        ("[kl_mean]\nmax = nan", "max of kl_mean must be a number"),
        ("[kl_mean", "not TOML"),
        ("", "holds no limits"),
    ],
)
def test_a_gate_file_that_says_something_else(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "g.toml").write_text(content)
    with pytest.raises(UsageError, match=problem):
        read_gates(tmp_path / "g.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        read_gates(tmp_path / "none.toml")
