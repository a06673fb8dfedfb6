"""``qserve eval`` and ``qserve report`` as a user gives them, on the tiny model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qserve.checkpoint.card import read_card
from qserve.evals import divergence
from qserve.evals.pieces import Piece

Cli = Callable[..., Any]
SCORED = ("--tokens", "128", "--window", "32", "--no-card")
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/report.schema.json").read_text(encoding="utf-8"))
SHORT = ("--needle-lengths", "128")


def test_a_reference_stands_in_for_the_base(
    cli: Cli, tiny_model: Path, tiny_packed: Path, text_file: Path, tmp_path: Path
) -> None:
    stored, one, other = tmp_path / "r.safetensors", tmp_path / "one.json", tmp_path / "other.json"
    done = cli("eval", tiny_model, "--save-reference", stored, "--reference-top", 400, "--data", text_file, *SCORED[:4])
    assert done.code == 0 and "124 tokens of fox.txt" in done.out and "will hold" in done.err
    assert cli("eval", tiny_packed, "--against", stored, "--no-card", "--json", one).code == 0
    assert cli("eval", tiny_packed, "--against", tiny_model, "--data", text_file, *SCORED, "--json", other).code == 0
    recorded, beside = (json.loads(path.read_text())["data"]["card"] for path in (one, other))
    assert recorded["kl_mean"] == pytest.approx(beside["kl_mean"], rel=1e-4) and "never above" in recorded["scope"]
    for name in ("perplexity", "perplexity_base", "top1_agreement", "base_sha256", "data_sha256", "tokens"):
        assert recorded[name] == beside[name], name
    cli("eval", tiny_packed, "--against", stored, "--tokens", 64).refused(2, "--tokens", "holds its own text")
    written = ("--html", tmp_path / "c.html", "--json", tmp_path / "c.json")
    done = cli("report", one, other, "--fail-on-regression", *written)
    assert done.code == 0 and "same" in done.out and "paired" in done.out
    assert (tmp_path / "c.html").read_text().count("<svg") == 1
    for path in (one, tmp_path / "c.json"):
        jsonschema.validate(json.loads(path.read_text()), SCHEMA)


def test_an_interrupted_eval_is_resumed(
    cli: Cli, tiny_model: Path, tiny_packed: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, one, other = tmp_path / "partial", tmp_path / "one.json", tmp_path / "other.json"
    command = ("eval", tiny_packed, "--against", tiny_model, "--data", text_file, *SCORED)
    whole, joined = cli(*command, "--json", one), divergence._joined

    def stop(found: Any, piece: Piece) -> Any:
        if piece.unit == 2:
            raise KeyboardInterrupt
        return joined(found, piece)

    with monkeypatch.context() as patch:
        patch.setattr(divergence, "_joined", stop)
        cli(*command, "--resume", kept).refused(130, "interrupted")
    assert whole.code == 0 and kept.exists()
    cli(*command[:-1], "--window", 16, "--resume", kept).refused(1, "another measurement")
    assert cli(*command, "--resume", kept, "--json", other).code == 0 and not kept.exists()
    first, second = (json.loads(path.read_text()) for path in (one, other))
    assert first["data"] == second["data"] and first["metrics"] == second["metrics"]
    assert first["plots"] == second["plots"]


def test_a_quantization_that_is_interrupted_while_it_is_measured_goes_on_there(
    cli: Cli, tiny_model: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, again, joined = tmp_path / "out", tmp_path / "again", divergence._joined
    plain = ("--method", "rtn", "--calibration", "none", "--group-size", 32)
    measured = ("--max-kl", 50, "--data", text_file, *SCORED[:4])
    seen: list[int] = []
    stopping = True

    def joined_until(found: Any, piece: Piece) -> Any:
        if stopping and piece.unit == 2:
            raise KeyboardInterrupt
        seen.append(piece.unit)
        return joined(found, piece)

    monkeypatch.setattr(divergence, "_joined", joined_until)
    cli("quantize", tiny_model, out, *plain, *measured).refused(130, "interrupted")
    stopping = False
    assert cli("quantize", tiny_model, out, *plain, *measured).code == 0 and seen == [0, 1, 2, 3]
    assert cli("quantize", tiny_model, again, *plain, *measured).code == 0 and seen[4:] == [0, 1, 2, 3]
    assert read_card(out) == read_card(again)
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out"]


def test_by_document_with_a_gate_file_and_a_noise_floor(
    cli: Cli, tiny_model: Path, tiny_packed: Path, tmp_path: Path
) -> None:
    data, gate, report = tmp_path / "d.jsonl", tmp_path / "g.toml", tmp_path / "r.json"
    data.write_text("".join(f'{{"text": "the quick brown fox {word} and the lazy dog"}}\n' for word in "abcdef"))
    gate.write_text('[kl_mean]\nmax = 50\n[perplexity_documents]\nmax = 1\n[top1_agreement]\nmin = "0%"\n')
    command = ("eval", tiny_packed, "--against", tiny_model, "--data", data, "--by", "document", *SCORED[2:])
    written = ("--json", report, "--html", tmp_path / "r.html")
    done = cli(*command, "--gate", gate, "--noise-floor", *written)
    done.refused(3, "gate failed: perplexity_documents")
    content = json.loads(report.read_text())
    assert not content["passed"] and content["data"]["setting"]["by"] == "document"
    known = {metric["name"]: metric for metric in content["metrics"]}
    assert 0 < known["noise_floor_kl"]["value"] < known["kl_mean"]["value"]
    assert len(known["kl_mean"]["samples"]) == 6 and "95 % within" in done.out
    assert (tmp_path / "r.html").read_text().count("<svg") == 4 and read_card(tiny_packed) is None
    gate.write_text("[speed]\nmin = 1\n")
    cli(*command, "--gate", gate).refused(2, "no speed is measured here")


def test_needles_and_a_comparison_that_fails(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    report = tmp_path / "n.json"
    small = ("--needle-lengths", "128", "--needle-depths", "0,100", "--needle-samples", "1")
    done = cli("eval", tiny_model, "--needle", *small, "--kv-cache-dtypes", "fp16,fp8", "--json", report)
    assert done.code == 0 and "fp8" in done.out and "gained by the needle" in done.out
    content = json.loads(report.read_text())
    assert content["kind"] == "needle" and len(content["data"]["found"]) == 4
    jsonschema.validate(content, SCHEMA)
    for metric in content["metrics"]:
        metric["value"] -= 5
        metric["low"], metric["high"], metric["pairing"] = metric["value"] - 0.1, metric["value"] + 0.1, ""
    (tmp_path / "later.json").write_text(json.dumps(content))
    worse = ("report", report, tmp_path / "later.json")
    assert cli(*worse).code == 0
    cli(*worse, "--noise", "0%", "--fail-on-regression").refused(3, "worse beyond noise", "fp8/loglikelihood")
    again = cli("report", report, "--markdown", tmp_path / "n.md")
    assert again.code == 0 and "Needles in the haystack of tiny" in (tmp_path / "n.md").read_text()
    cli("report", report, "--fail-on-regression").refused(2, "at least two")
    cli("report", tmp_path / "none.json").refused(1, "cannot be read")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("--against",)),
        (("--needle", "--tasks", "fox"), ("--tasks and --needle",)),
        (("--needle", "--tokens", "64"), ("--tokens does not go with --needle",)),
        (("--needle", "--kv-cache-dtypes", "auto"), ("--kv-cache-dtypes",)),
        (("--needle", "--kv-cache-dtypes", "int4", *SHORT), ("int4",)),
        (("--needle", "--kv-cache-dtypes", "fp16,int8", *SHORT), ("int8", "--kv-cache-dtypes")),
        (("--needle", "--needle-lengths", "600"), ("600", "512")),
        (("--needle", "--needle-depths", "x"), ("--needle-depths",)),
        (("--save-reference", "r.bin"), (".safetensors",)),
        (("--save-reference", "r.safetensors", "--max-kl", "1"), ("--max-kl does not go with --save-reference",)),
        (("--tasks", "fox", "--tasks-dir", "nowhere"), ("--tasks-dir nowhere",)),
        (("--tasks", "fox", "--task-limit", "0"), ("--task-limit",)),
        (("--against", "demo", "--by", "page"), ("--by knows",)),
        (("--against", "demo", "--stride", "0"), ("--stride",)),
        (("--against", "demo", "--stride", "8", "--by", "document"), ("--stride",)),
    ],
)
def test_what_does_not_go_together(
    cli: Cli, tiny_packed: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    cli("eval", tiny_packed, *options).refused(2, *words)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_tasks_need_lm_eval(cli: Cli, tiny_packed: Path) -> None:
    cli("eval", tiny_packed, "--tasks", "fox").refused(1, 'pip install "qserve-llm[evals]"')
