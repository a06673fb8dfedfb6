"""``qserve verify``: files, the card's weights, and the card's figures on windows that it did not score."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qserve.calibration.text import load_text
from qserve.checkpoint.card import CARD_FILE, QualityCard, read_card, write_card
from qserve.checkpoint.errors import DataError
from qserve.checkpoint.source import open_model
from qserve.evals.verification import Finding, fresh_windows

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("\n".join(f"word {n} and {n * n} of them" for n in range(400)))
    return file


@pytest.fixture
def judged(cli: Cli, tiny_model: Path, tiny_packed: Path, text: Path, tmp_path: Path) -> Path:
    """A checkpoint with a card of the first eight windows of ``text``."""
    model = shutil.copytree(tiny_packed, tmp_path / "judged")
    scored = ("--against", tiny_model, "--data", text, "--tokens", 256, "--window", 32)
    assert cli("eval", model, *scored).code == 0
    return model


def card_of(model: Path) -> QualityCard:
    card = read_card(model)
    assert card is not None
    return card


def test_a_card_that_holds(cli: Cli, tiny_model: Path, judged: Path, text: Path) -> None:
    done = cli("verify", judged)
    assert done.code == 0 and "each with the hash of its manifest" in done.out and "of these weights" in done.out
    done = cli("verify", judged, "--against", tiny_model, "--data", text, "--tokens", 512, "--seed", 3)
    assert done.code == 0, done.err
    assert "16 windows of 32 tokens, --seed 3" in done.out and done.out.count("holds") == 3
    assert cli("verify", judged, "--against", tiny_model, "--data", text, "--tokens", 512, "--seed", 3).out == done.out


def test_a_card_that_claims_too_much(cli: Cli, tiny_model: Path, judged: Path, text: Path) -> None:
    card = card_of(judged)
    better = {"kl_mean": (0.0, card.kl_mean / 1e3), **{k: v for k, v in card.intervals.items() if k != "kl_mean"}}
    write_card(judged, replace(card, kl_mean=card.kl_mean / 2e3, intervals=better))
    done = cli("verify", judged, "--against", tiny_model, "--data", text, "--tokens", 512)
    done.refused(3, "the card does not hold: kl_mean worse than it says")
    assert done.out.count("holds") == 2 and done.out.count("WORSE") == 1


def test_what_cannot_be_verified_is_refused(
    cli: Cli, tiny_model: Path, tiny_packed: Path, judged: Path, text: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + " more")
    measured = ("verify", judged, "--against", tiny_model, "--data", text)
    cli("verify", judged, "--against", tiny_model, "--data", other).refused(1, "give --data the same text")
    cli("verify", judged, "--against", tiny_packed, "--data", text).refused(1, "give --against the same base")
    for tokens in (16, 1 << 30):
        cli(*measured, "--tokens", tokens).refused(1, "choose --tokens to fit")
    (judged / CARD_FILE).rename(tmp_path / "card")
    cli("verify", judged).refused(1, "has no quality card")
    content = json.loads((tmp_path / "card").read_text())
    (judged / CARD_FILE).write_text(json.dumps({**content, "model_sha256": "0" * 64}))
    cli("verify", judged).refused(1, "belongs to other weights")
    (judged / "manifest.json").unlink()
    cli("verify", judged).refused(1, "no manifest.json")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    cli("verify", tmp_path / "m.gguf").refused(1)


def test_windows_that_the_card_did_not_score_come_first(tiny_model: Path, judged: Path, text: Path) -> None:
    card, base = card_of(judged), open_model(tiny_model)
    loaded = load_text(str(text), "evaluate")
    there = len(loaded.tokens(base.tokenizer())) // 32
    assert there > 20
    for seed in range(4):
        pieces = fresh_windows(card, loaded, base, 32 * (there - 8), seed)
        assert [piece.unit for piece in pieces] == list(range(8, there))
        units = [piece.unit for piece in fresh_windows(card, loaded, base, 32 * 5, seed)]
        assert len(set(units)) == 5 and min(units) >= 8 and units == sorted(units)
        assert len(fresh_windows(card, loaded, base, 32 * there, seed)) == there
    draws = {tuple(piece.unit for piece in fresh_windows(card, loaded, base, 32 * 5, seed)) for seed in range(8)}
    assert len(draws) > 4
    with pytest.raises(DataError, match="the same text"):
        fresh_windows(replace(card, data_sha256="0" * 64), loaded, base, 64, 0)


@pytest.mark.parametrize(
    ("name", "card", "sample", "holds"),
    [("kl_mean", (0.1, 0.08, 0.12), (0.11, 0.1, 0.13), True), ("kl_mean", (0.1, 0.08, 0.12), (0.2, 0.13, 0.3), False),
     ("kl_mean", (0.1, 0.08, 0.12), (0.01, 0.0, 0.02), True),
     ("top1_agreement", (0.9, 0.88, 0.92), (0.8, 0.7, 0.87), False),
     ("top1_agreement", (0.9, 0.88, 0.92), (0.8, 0.7, 0.89), True)],
)  # fmt: skip
def test_only_what_is_worse_beyond_both_intervals_fails(
    name: str, card: tuple[float, float, float], sample: tuple[float, float, float], holds: bool
) -> None:
    assert Finding(name, card, sample).holds == holds
