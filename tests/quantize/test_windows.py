"""Which parts of a text a job reads: to calibrate, to tune, and to judge the tuning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.tokenizer import leading_tokens
from qserve.quantize import distill
from qserve.quantize.job import QuantizeJob
from qserve.quantize.windows import given_windows, tuning_windows
from tests.tiny_model import save_tiny_model

LENGTH = 64


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> HFDirectory:
    return HFDirectory(save_tiny_model(tmp_path_factory.mktemp("model")))


def numbers(count: int, folder: Path) -> str:
    """A text without repetitions."""
    path = folder / "text.txt"
    path.write_text(" ".join(f"{n:05d}" for n in range(count)))
    return str(path)


def job(text: str, **options: object) -> QuantizeJob:
    return QuantizeJob(calibration=text, sequence_length=LENGTH, **{"samples": 3, "effort": "best", **options})  # type: ignore[arg-type]


def read(source: HFDirectory, asked: QuantizeJob) -> tuple[Tensor, Tensor, Tensor]:
    windows, _ = given_windows(source, asked)
    assert windows is not None
    return windows, *tuning_windows(source, asked, windows)


def test_what_judges_is_the_end_of_the_text_and_is_not_read_before(source: HFDirectory, tmp_path: Path) -> None:
    text = numbers(5000, tmp_path)
    windows, tuned, judging = read(source, job(text))
    assert windows.shape == (3, LENGTH) and tuned.shape[1] == judging.shape[1] == LENGTH
    assert len(judging) == distill.JUDGED and len(tuned) == distill.most_windows(None) == distill.STEPS * distill.BATCH
    tokens = source.tokenizer()(Path(text).read_text(), add_special_tokens=False)["input_ids"]
    begin = len(leading_tokens(source.tokenizer()))
    end = judging[:, begin:].flatten().tolist()
    assert tokens[-len(end) :] == end
    last = len(tokens) - len(end)
    for window in torch.cat([windows, tuned[:20]])[:, begin:].tolist():
        places = [at for at in range(len(tokens)) if tokens[at : at + len(window)] == window]
        assert places and min(places) + len(window) <= last


def test_with_hours_there_are_more_windows_and_the_first_are_the_same(source: HFDirectory, tmp_path: Path) -> None:
    text = numbers(9000, tmp_path)
    _, few, judging = read(source, job(text))
    _, many, again = read(source, job(text, hours=2.0))
    assert len(few) < len(many) <= distill.most_windows(2.0) == 4 * len(few)
    assert torch.equal(many[: len(few)], few) and torch.equal(judging, again)


def test_a_short_text_judges_by_what_is_learned_from(source: HFDirectory, tmp_path: Path) -> None:
    text = numbers(50, tmp_path)
    windows, tuned, judging = read(source, job(text))
    assert torch.equal(tuned, windows) and torch.equal(judging, windows)


def test_the_record_has_what_was_tuned_on(source: HFDirectory, tmp_path: Path) -> None:
    text = numbers(5000, tmp_path)
    normal, best = (given_windows(source, job(text, effort=effort))[1] for effort in ("normal", "best"))
    assert normal is not None and best is not None and normal.tokens == 3 * LENGTH < best.tokens
    words = Path(text).read_text()
    assert normal.share([words]) < 0.1 < best.share([words])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hours": 0.0}, "--hours must be above 0"),
        ({"hours": float("nan")}, "--hours must be above 0"),
        ({"hours": float("inf")}, "--hours must be above 0"),
        ({"hours": 1.0, "effort": "normal"}, "--hours is for --effort best"),
        ({"hours": 1.0, "max_kl": 0.1}, "leave out --hours"),
    ],
)
def test_hours_that_nothing_would_use_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(Exception, match=says):
        job("builtin", **options)
