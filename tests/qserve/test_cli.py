"""The commands as a user gives them, on the tiny model: quantize, eval, inspect, bench, run, and their gates."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from qserve.checkpoint.card import read_card
from qserve.checkpoint.source import open_model
from qserve.commands.values import api_keys

Cli = Callable[..., Any]
RTN = ("--method", "rtn", "--group-size", "32", "--calibration", "none")
SCORED = ("--tokens", "128", "--window", "32")


def test_quantize_eval_inspect_and_bench(
    cli: Cli, tiny_model: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, report, markdown = tmp_path / "w4", tmp_path / "reports" / "r.json", tmp_path / "reports" / "r.md"
    calibration = ("--calibration", text_file, "--samples", 4, "--sequence-length", 64)
    done = cli("quantize", tiny_model, out, "--method", "gptq", "--group-size", 32, *calibration)
    assert done.code == 0, done.err
    assert "14 linears" in done.out and "vllm loads it" in done.out
    assert re.search(r"expecting +\d+ s, [\d,]+ MiB of memory", done.err)
    assert (out / "tokenizer.json").exists() and (out / "generation_config.json").exists()
    assert len(open_model(out).linears()) == 14 and read_card(out) is None

    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/qserve", "eval", "a b"])
    written = ("--json", report, "--markdown", markdown)
    done = cli("eval", out, "--against", tiny_model, "--data", text_file, *SCORED, *written,
               "--allow-calibration-text")  # fmt: skip
    assert done.code == 0, done.err
    content = json.loads(report.read_text())
    card = read_card(out)
    assert card is not None and content["data"]["card"] == card.to_json()
    assert card.tokens == 128 - 4 and card.window == 32 and card.data_name == text_file.name
    assert 0 < card.kl_mean < 1 and 0 < card.top1_agreement < 1
    assert content["kind"] == "quality" and content["passed"] and content["command"] == "qserve eval 'a b'"
    assert f"{card.top1_agreement:.2%}" in markdown.read_text() and f"{card.kl_mean:.4f}" in markdown.read_text()
    assert len(content["data"]["worst"]) == 20 and "Tokens with the largest divergence" in markdown.read_text()
    assert all(line in done.out for line in card.summary())

    done = cli("inspect", out, "--layers")
    assert done.code == 0, done.err
    assert all(line in done.out for line in card.summary())
    assert all(module in done.out for module in open_model(out).linears())
    assert "14 x 4 bit g32 symmetric" in done.out

    small = ("--concurrency", "1,3", "--prompt", 8, "--output", 3, "--repeats", 1)
    done = cli("bench", out, *small, "--json", report, "--markdown", markdown)
    assert done.code == 0, done.err
    content = json.loads(report.read_text())
    assert content["kind"] == "throughput" and content["data"]["load"] == {"prompt": 8, "output": 3}
    assert [speed["concurrency"] for speed in content["data"]["speeds"]] == [1, 3]
    assert "prefill tok/s" in done.out and "prefill tok/s" in markdown.read_text()


def test_rtn_needs_no_text_and_an_override_of_nothing(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "w8"
    assert cli("quantize", tiny_model, out, *RTN, "--bits", 8, "--asym").code == 0
    first = (out / "manifest.json").read_bytes()
    cli("quantize", tiny_model, out, *RTN).refused(1, "not empty", "--overwrite")
    assert (out / "manifest.json").read_bytes() == first
    assert cli("quantize", tiny_model, out, *RTN, "--overwrite").code == 0
    assert "14 x 4 bit g32 symmetric" in cli("inspect", out).out
    assert [path.name for path in tmp_path.iterdir()] == ["w8"]


def test_a_failing_gate_names_what_failed_and_publishes_nothing(
    cli: Cli, tiny_model: Path, text_file: Path, tmp_path: Path
) -> None:
    gates = ("--max-kl", "1e-9", "--min-top1", "100%", "--max-ppl-increase", "500%")
    command = ("quantize", tiny_model, tmp_path / "w4", *RTN, "--data", text_file, *SCORED)
    done = cli(*command, *gates)
    done.refused(3, "gate failed: kl_mean, top1_agreement")
    assert "is not published; what was made is kept in" in done.err and "with looser gates publishes it" in done.err
    rows = {row.split()[0]: row for row in done.err.splitlines() if "<=" in row or ">=" in row}
    found = re.search(r"([\d.]+) +([\d.]+) +<= ([\d.]+) ", rows["kl_mean"])
    measured, bound, limit = map(float, found.groups())  # type: ignore[union-attr]
    assert limit == 0 and measured < bound and f"FAILED by {bound:.3g}"[:-1] in rows["kl_mean"]
    assert "FAILED by" in rows["top1_agreement"] and ">= 1.0000" in rows["top1_agreement"]
    assert rows["perplexity_increase"].endswith("passed")
    assert [path.name for path in tmp_path.iterdir()] == [".w4.partial"]
    assert cli(*command, *gates).code == 3 and not (tmp_path / "w4").exists()
    done = cli(*command, "--max-kl", 50)
    assert done.code == 0 and "2 of 2 blocks are done" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["w4"]


def test_a_failing_gate_leaves_the_checkpoint_that_was_there(
    cli: Cli, tiny_model: Path, tiny_packed: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "w4"
    shutil.copytree(tiny_packed, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    gate = ("--max-kl", "0", "--data", text_file, *SCORED)
    cli("quantize", tiny_model, out, *RTN, "--asym", "--overwrite", *gate).refused(3, "kl_mean")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".w4.partial", "w4"]


def test_a_passing_gate_publishes_with_a_card(cli: Cli, tiny_model: Path, text_file: Path, tmp_path: Path) -> None:
    gates = ("--max-kl", "50", "--min-top1", "1%")
    done = cli("quantize", tiny_model, tmp_path / "w4", *RTN, *gates, "--data", text_file, *SCORED)
    assert done.code == 0, done.err
    card = read_card(tmp_path / "w4")
    assert card is not None and card.tokens == 124
    assert done.out.count("passed") == 2 and all(line in done.out for line in card.summary())


def test_eval_gates_and_still_writes_what_it_measured(
    cli: Cli, tiny_model: Path, tiny_packed: Path, text_file: Path, tmp_path: Path
) -> None:
    report = tmp_path / "r.json"
    options = ("--against", tiny_model, "--data", text_file, *SCORED, "--no-card", "--json", report)
    cli("eval", tiny_packed, *options, "--max-ppl-increase", "0%", "--max-kl", 0).refused(3, "kl_mean")
    content = json.loads(report.read_text())
    assert not content["passed"] and {gate["metric"] for gate in content["gates"]} == {"kl_mean", "perplexity_increase"}
    assert read_card(tiny_packed) is None
    done = cli("eval", tiny_model, *options, "--max-kl", 0, "--min-top1", "100%", "--max-ppl-increase", 0)
    assert done.code == 0, "a model against itself passes the strictest gates"


@pytest.mark.slow
def test_bench_gates_on_the_ratio_to_transformers(cli: Cli, tiny_packed: Path, tiny_model: Path) -> None:
    small = ("--concurrency", "1,2", "--prompt", 8, "--output", 3, "--repeats", 1, "--against", tiny_model)
    done = cli("bench", tiny_packed, *small, "--min-ratio", "1=1e-6,2=1e9")
    done.refused(3, "output rate at 2")
    assert "output rate at 1" in done.err and "passed" in done.err
    assert "transformers generate" in done.out


def test_doctor_says_what_is_selected(cli: Cli) -> None:
    done = cli("doctor")
    assert done.code == 0
    assert re.search(r"^selected +(native|reference)$", done.out, re.MULTILINE)
    assert re.search(r"^native +(available|missing)", done.out, re.MULTILINE)
    assert re.search(r"^threads +\d+ .*(CPUs \d.*|pinned)", done.out, re.MULTILINE)
    assert re.search(r"^triton +(available|missing)", done.out, re.MULTILINE)
    assert re.search(r"^ranks +of CPUs through shared memory; of GPUs (by NCCL|not: .*)$", done.out, re.MULTILINE)
    assert re.search(r"^ +configurations +not used: ", done.out, re.MULTILINE), "there is no GPU to look them up for"
    for kernel in ("attention", "rope_kv fp8", "norm"):
        assert re.search(rf"^ +{kernel} .*", done.out, re.MULTILINE)


def test_version_and_debug(cli: Cli, tmp_path: Path) -> None:
    from qserve import __version__

    assert cli("--version").out.strip() == __version__
    with pytest.raises(Exception, match="does not exist"):
        cli("--debug", "inspect", tmp_path / "nothing")


@pytest.mark.parametrize("value", ["", " k"])
def test_an_empty_key_opens_no_server(cli: Cli, tiny_packed: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("QSERVE_API_KEY", value)
    cli("run", tiny_packed, "--port", "0").refused(2, "API key")


def test_where_keys_come_from() -> None:
    vllm, ours = {"VLLM_API_KEY": "theirs"}, {"QSERVE_API_KEY": "ours"}
    assert api_keys(["a", "b"], vllm | ours) == ("a", "b")
    assert api_keys(None, vllm | ours) == ("ours",) and api_keys(None, vllm) == ("theirs",)
    assert api_keys(None, {}) == ()


def test_run_serves_drains_and_exits_0(tiny_packed: Path) -> None:
    command = [sys.executable, "-m", "qserve", "run", str(tiny_packed), "--port", "0", "--served-model-name", "fox"]
    environment = os.environ | {"QSERVE_API_KEY": "k"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            url = next(match[1] for line in lines if (match := re.search(r"serving fox on (\S+)", line)))
            client = openai.OpenAI(base_url=url, api_key="k", timeout=30, max_retries=0)
            hello: list[Any] = [{"role": "user", "content": "hello"}]
            answer = client.chat.completions.create(model="fox", messages=hello, max_tokens=5)
            assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 5
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="wrong").models.list()

            stream = client.chat.completions.create(
                model="fox", messages=hello, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            chunks = [next(stream)]
            process.send_signal(signal.SIGTERM)
            chunks += list(stream)
            assert chunks[-1].choices[0].finish_reason == "length", "what was running is finished"
            assert process.wait(30) == 0
            assert "Traceback" not in "".join(lines)
        finally:
            process.kill()


def test_dry_run_report_and_convert(cli: Cli, tiny_model: Path, text_file: Path, tmp_path: Path) -> None:
    out, pages, other = tmp_path / "w4", tmp_path / "report", tmp_path / "ct"
    options = ("--group-size", 32, "--samples", 4, "--sequence-length", 64, "--calibration", text_file)
    for bits in (4, 5):
        done = cli("quantize", tiny_model, out, *options, "--target-bits", bits, "--dry-run")
        assert done.code == 0, done.err
        assert "a checkpoint of at most" in done.out and not list(tmp_path.glob(".w4*")) and not out.exists()
        assert f"14 x chosen per module, {bits} bits on average" in done.out and "4 bit g32" not in done.out
    done = cli("quantize", tiny_model, out, *options, "--minimize", "size", "--max-kl", 0.5, "--dry-run")
    assert "14 x chosen per module, the fewest bits within a divergence of 0.5" in done.out
    cli("quantize", tiny_model, out, "--dry-run", "--calibration", "missing.txt").refused(1, "missing.txt")
    cli("quantize", tiny_model, text_file.parent, "--dry-run", *options).refused(1, "not empty")

    scored = ("--data", text_file, *SCORED, "--allow-calibration-text")
    mixed = ("--target-bits", 5, "--format", "gptq")
    done = cli("quantize", tiny_model, out, *options, *mixed, "--report", pages, *scored)
    assert done.code == 0, done.err
    content = json.loads((pages / "quantization.json").read_text())
    card = read_card(out)
    assert card is not None and content["data"]["card"] == card.to_json()
    assert "<svg" in (pages / "quantization.html").read_text() and (pages / "quantization.md").exists()
    eight = ("--bits", 8, "--method", "rtn")
    done = cli("quantize", tiny_model, tmp_path / "w8", *options, *eight, "--report", pages, *scored)
    assert done.code == 0, done.err
    measured = json.loads((pages / "quantization.json").read_text())["data"]["measured"]
    assert [each["label"] for each in measured] == ["w8", "w4"] and measured[1]["kl"] == card.kl_mean
    assert measured[0]["bits_per_weight"] == 8 + (16 + 8) / 32 and measured[0]["kl"] < measured[1]["kl"]

    done = cli("convert", out, other, "--format", "compressed-tensors")
    assert done.code == 0, done.err
    before, after = open_model(out), open_model(other)
    assert after.config["quantization_config"]["quant_method"] == "compressed-tensors"
    for module in before.linears():
        assert before.linear(module).dequantize().equal(after.linear(module).dequantize())
    cli("convert", out, tmp_path / "awq", "--format", "awq").refused(2, "awq")
    assert not (tmp_path / "awq").exists()
