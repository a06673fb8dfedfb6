"""What a checkpoint was calibrated on, and which weights its card is about, can be seen; judging on the same text is
refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qserve.checkpoint.calibration_record import CalibrationRecord, read_calibration
from qserve.checkpoint.card import read_card, write_card
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.source import open_model

Cli = Callable[..., Any]
SMALL = ("--samples", 8, "--sequence-length", 200, "--group-size", 32, "--tokens", 512, "--window", 128)


def numbers(start: int, count: int) -> str:
    return " ".join(f"w{n}" for n in range(start, start + count)) + "\n"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """To calibrate with, and to judge by."""
    folder = tmp_path_factory.mktemp("texts")
    for name, start in (("one.txt", 0), ("other.txt", 5000)):
        (folder / name).write_text(numbers(start, 400))
    return folder / "one.txt", folder / "other.txt"


@pytest.fixture(scope="module")
def calibrated(tiny_model: Path, texts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from qserve.quantize import pipeline
    from qserve.quantize.job import QuantizeJob

    out = tmp_path_factory.mktemp("models") / "calibrated"
    job = QuantizeJob(samples=8, sequence_length=128, group_size=32, effort="fast", calibration=str(texts[0]))
    pipeline.run(open_model(tiny_model), out, job)
    return out


def test_a_record_knows_its_text() -> None:
    record = CalibrationRecord.of("a", "0" * 64, 10, [numbers(0, 50)])
    assert len(record.ngrams) == 43 and record.share([numbers(0, 50).upper()]) == 1.0
    assert record.share([numbers(25, 50)]) == pytest.approx(18 / 43)
    assert record.share([numbers(50, 50)]) == record.share(["too short"]) == 0.0


def test_a_sample_of_the_hashes_gives_nearly_the_share() -> None:
    record = CalibrationRecord.of("a", "0" * 64, 10, [numbers(0, 50_000)])
    assert len(record.ngrams) == 4096
    assert record.share([numbers(0, 10_000)]) == 1.0
    assert record.share([numbers(45_000, 10_000)]) == pytest.approx(0.5, abs=0.06)


def test_a_record_is_read_back_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    record = CalibrationRecord.of("a", "0" * 64, 10, [numbers(0, 50)])
    (tmp_path / "calibration.json").write_text(json.dumps(record.to_json()))
    assert read_calibration(tmp_path) == record
    (tmp_path / "calibration.json").write_text(json.dumps({**record.to_json(), "ngrams": "not hexadecimal"}))
    with pytest.raises(CheckpointError, match="malformed"):
        read_calibration(tmp_path)


def test_quantize_refuses_to_judge_by_its_calibration_text(
    cli: Cli, tiny_model: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    one, other = texts
    command = ("quantize", tiny_model, tmp_path / "out", *SMALL, "--effort", "fast", "--max-kl", 9)
    command = (*command, "--calibration", one)
    cli(*command, "--data", one).refused(1, "is calibration text", "--allow-calibration-text")
    assert not (tmp_path / "out").exists() and list(tmp_path.iterdir()) == []
    assert cli(*command, "--data", one, "--allow-calibration-text").code == 0
    insisted = read_card(tmp_path / "out")
    assert insisted is not None and insisted.calibration_overlap > 0.1
    assert cli(*command, "--data", other, "--overwrite").code == 0
    card = read_card(tmp_path / "out")
    source = open_model(tmp_path / "out")
    assert card is not None and source.calibration is not None
    assert (card.calibration_name, card.calibration_sha256) == ("one.txt", source.calibration.data_sha256)
    assert card.calibration_overlap == 0.0 and card.model_sha256 == source.sha256()
    assert "calibrated on   one.txt" in cli("inspect", tmp_path / "out").out


def test_eval_refuses_it_too(cli: Cli, tiny_model: Path, calibrated: Path, texts: tuple[Path, Path]) -> None:
    scored = ("eval", calibrated, "--against", tiny_model, "--tokens", 256, "--window", 64, "--no-card")
    cli(*scored, "--data", texts[0]).refused(1, "is calibration text")
    assert cli(*scored, "--data", texts[0], "--allow-calibration-text").code == 0
    assert cli(*scored, "--data", texts[1]).code == 0


def test_a_card_of_other_weights_is_seen(
    cli: Cli, tiny_model: Path, tiny_packed: Path, calibrated: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    mine, theirs = shutil.copytree(calibrated, tmp_path / "mine"), shutil.copytree(tiny_packed, tmp_path / "theirs")
    scored = ("--against", tiny_model, "--tokens", 256, "--window", 64, "--data", texts[1])
    assert cli("eval", mine, *scored).code == 0
    card = read_card(mine)
    assert card is not None
    write_card(theirs, card)
    assert "belongs to other weights" not in cli("inspect", mine).out
    assert "belongs to other weights" in cli("inspect", theirs).out.replace("\n", " ")
    found = {each["name"].rpartition("/")[2]: each for each in json.loads(cli("list", tmp_path, "--json").out)}
    assert found["mine"]["problem"] is None and found["mine"]["quality_card"]["kl_mean"] == card.kl_mean
    assert "belongs to other weights" in found["theirs"]["problem"] and found["theirs"]["quality_card"] is None
    assert found["theirs"]["format"] == "gptq", "it can still be read"
    write_card(theirs, replace(card, model_sha256=""))  # as written before cards named their weights
    assert "belongs to other weights" not in cli("inspect", theirs).out
    assert cli("convert", mine, tmp_path / "converted", "--format", "compressed-tensors").code == 0
    assert "belongs to other weights" not in cli("inspect", tmp_path / "converted").out
    assert read_calibration(tmp_path / "converted") == read_calibration(mine)
