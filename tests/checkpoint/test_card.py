from __future__ import annotations

import json

import pytest

from qserve.checkpoint.card import QualityCard, read_card, write_card
from qserve.checkpoint.errors import CheckpointError

CARD = QualityCard(
    base_name="demo",
    base_sha256="b" * 64,
    data_name="builtin",
    data_sha256="d" * 64,
    tokens=16384,
    window=1024,
    perplexity_base=22.55,
    perplexity=25.05,
    kl_mean=0.121,
    kl_median=0.05,
    kl_p90=0.31,
    top1_agreement=0.819,
    kernel_path="cpu",
    created="2026-01-31",
    versions={"torch": "2.13.0"},
    scope="English prose only",
)


def test_round_trip_through_a_file(tmp_path) -> None:
    assert read_card(tmp_path) is None
    write_card(tmp_path, CARD)
    assert read_card(tmp_path) == CARD
    write_card(tmp_path, QualityCard.from_json(CARD.to_json() | {"tokens": 5}))
    assert read_card(tmp_path).tokens == 5
    assert [path.name for path in tmp_path.iterdir()] == ["quality_card.json"]


def test_summary_shows_every_number() -> None:
    lines = CARD.summary()
    text = "\n".join(lines)
    for part in (
        "demo",
        "builtin",
        "16,384",
        "1,024",
        "22.550",
        "25.050",
        "+11.09%",
        "0.1210",
        "0.0500",
        "0.3100",
        "81.90%",
        "cpu",
        "2026-01-31",
        "torch 2.13.0",
        "English prose only",
    ):
        assert part in text, part
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"vibes": 1}, "unknown field 'vibes'"),
        ({"perplexity": float("nan")}, "perplexity must be a finite number"),
        ({"perplexity": "22"}, "perplexity must be a finite number"),
        ({"kl_mean": None}, "kl_mean"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 1.5}, "tokens"),
        ({"window": True}, "window"),
        ({"base_name": 3}, "base_name"),
        ({"versions": {"torch": 2}}, "versions"),
        ({"versions": ["torch"]}, "versions"),
    ],
)
def test_cards_that_are_wrong_are_refused(change, words) -> None:
    with pytest.raises(CheckpointError, match=words):
        QualityCard.from_json(CARD.to_json() | change)


def test_missing_field_and_broken_file(tmp_path) -> None:
    content = CARD.to_json()
    del content["kl_p90"]
    with pytest.raises(CheckpointError, match="'kl_p90' is missing"):
        QualityCard.from_json(content)
    (tmp_path / "quality_card.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=r"quality_card\.json: expected a JSON object"):
        read_card(tmp_path)
    (tmp_path / "quality_card.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_card(tmp_path)
