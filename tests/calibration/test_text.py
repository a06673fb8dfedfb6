import hashlib
import json

import datasets
import pytest

from qserve.calibration.text import load_text
from qserve.checkpoint.calibration_record import ngram_hashes
from qserve.checkpoint.errors import DataError


def test_builtin_is_prose_of_about_80_and_20_percent():
    calibrate, evaluate = load_text("builtin", "calibrate"), load_text("builtin", "evaluate")
    share = len(calibrate.text) / (len(calibrate.text) + len(evaluate.text))
    assert 0.75 < share < 0.85
    assert len(calibrate.text) > 250_000
    assert "\n****" not in calibrate.text and "\n+----" not in calibrate.text + evaluate.text
    assert calibrate.sha256 == hashlib.sha256(calibrate.text.encode()).hexdigest()
    assert load_text("builtin", "calibrate") == calibrate


def test_builtin_evaluation_was_not_calibrated_on():
    seen = set(load_text("builtin", "calibrate").text.split("\n\n"))
    held_out = load_text("builtin", "evaluate").text.split("\n\n")
    assert len(held_out) > 100
    assert not seen.intersection(held_out)
    parts = [ngram_hashes([load_text("builtin", split).text]) for split in ("calibrate", "evaluate")]
    # The same eight words in a row; runs of tokens, punctuation among them, are shared by less than a hundredth.
    assert len(parts[1]) > 10_000 and len(parts[0] & parts[1]) < 0.001 * len(parts[1])
    assert len(set(held_out)) == len(held_out)


def test_a_file_is_used_whole_for_either_split(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text("Grüße\n\nund mehr", encoding="utf-8")
    assert load_text(str(path), "calibrate").text == "Grüße\n\nund mehr"
    assert load_text(str(path), "evaluate") == load_text(str(path), "calibrate")


def test_jsonl_keeps_separators_inside_strings(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one\u2028still one"}\n\n{"text": "two", "id": 7}\n', encoding="utf-8")
    assert load_text(str(path)).text == "one\u2028still one\n\ntwo"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"\xff\xfe\x00\x01", "not UTF-8"),
        ("a.txt", b"text\x00more", "binary"),
        ("a.txt", b" \n\n ", "holds no text"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": \n', "line 2: not valid JSON"),
        ("a.jsonl", b'{"body": "x"}\n', '"text"'),
        ("a.jsonl", b"[1]\n", '"text"'),
    ],
)
def test_bad_files_are_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_text(str(path))
    assert "\n" not in str(caught.value)


def test_missing_file_directory_and_nonsense(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_text(str(tmp_path / "missing.txt"))
    with pytest.raises(DataError, match="is a directory"):
        load_text(str(tmp_path))
    with pytest.raises(DataError, match="neither a file nor a dataset"):
        load_text("what: is / this?")


def test_a_dataset_that_cannot_be_reached_is_one_line(monkeypatch):

    def offline(*_, **__):
        raise ConnectionError("no route to host\nsecond line")

    monkeypatch.setattr(datasets, "get_dataset_split_names", offline)
    with pytest.raises(DataError, match=r"wikitext2 .*no route to host.*builtin") as caught:
        load_text("wikitext2")
    assert "\n" not in str(caught.value)


def test_dataset_rows_are_joined_and_splits_chosen(monkeypatch):
    asked = []

    def load(name, config, split, streaming):
        asked.append((name, config, split))
        return [{"text": " = Title = \n"}, {"text": "Body.\n"}]

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["train", "validation"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_text("wikitext2", "evaluate").text == " = Title = \n\n\nBody.\n"
    load_text("org/data:en", "calibrate")
    load_text("org/data:en:train", "evaluate")
    assert asked == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "validation"),
        ("org/data", "en", "train"),
        ("org/data", "en", "train"),
    ]
    with pytest.raises(DataError, match="has no split test"):
        load_text("org/data:en:test")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: [json.loads('{"body": "x"}')])
    with pytest.raises(DataError, match='no column "text"; it has body'):
        load_text("org/data")
