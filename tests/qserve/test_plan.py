"""``qserve plan`` as a user gives it: its answer, its refusals, and its speed: it imports nothing heavy."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

Cli = Callable[..., Any]


def test_the_answer_and_its_arithmetic(cli: Cli, tmp_path: Path) -> None:
    asked = ("--gpu", "h200", "--slo", "ttft=500ms,tpot=50ms", "--traffic", "rate=10/s,prompt=2048,output=256")
    report, markdown = tmp_path / "reports" / "p.json", tmp_path / "reports" / "p.md"
    done = cli("plan", "llama-3-70b", *asked, "--explain", "--json", report, "--markdown", markdown,
               "--html", tmp_path / "p.html")  # fmt: skip
    assert done.code == 0, done.err
    assert "8 x NVIDIA H200" in done.out and "8 replicas of TP 1" in done.out and "--scheme fp8" in done.out
    assert "2 x 8 KV heads x 128 x 80 layers x 2 bytes = 327,680 bytes" in done.out
    assert "openai/gpt-4o" in done.out and "assumed, not measured: 50% of the peak operations" in done.out
    schema = json.loads((Path(__file__).parents[2] / "docs/report.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(report.read_text()), schema)
    assert "<svg" in (tmp_path / "p.html").read_text()
    plan = json.loads(report.read_text())["data"]["plan"]
    assert (plan["quantization"], plan["tp"], plan["gpus"]) == ("fp8", 1, 8)
    assert markdown.read_text().startswith("# llama-3-70b for rate=10/s")
    done = cli("plan", "llama-3-70b", *asked, "--quantization", "bf16", "--api", "1/2")
    assert done.code == 0 and "327,680" not in done.out and "Against services" in done.out and "1/2" in done.out


def test_a_directory_is_planned_from_its_config_alone(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    done = cli("plan", tmp_path, "--gpu", "l4", "--traffic", "rate=1,prompt=16,output=8")
    assert done.code == 0, done.err
    assert "1 x NVIDIA L4" in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("llama-3-8b", "--gpu", "h2oo"), 2, "unknown GPU 'h2oo': choose from b200, h200, h100"),
        (("llama-3-8b", "--slo", "ttft=soon"), 2, "ttft must be a time as 500ms"),
        (("llama-3-8b", "--traffic", "rate=10/s,prompts=4"), 2, "--traffic is rate=..., prompt=..., output=..., hit="),
        (("llama-3-8b", "--mfu", "1.1"), 2, "--mfu must be more than 0 and at most 1"),
        (("llama-3-8b", "--overhead", "1"), 2, "--overhead must be a time"),
        (("llama-3-8b", "--quantization", "q4_0"), 2, "a quantization is bf16, fp8, w8a8, or wBITSgGROUP"),
        (("llama-3-8b", "--api", "someone"), 2, "an API is one of deepinfra"),
        (("llama-3-70b", "--gpu", "a10", "--tp", "1", "--pp", "1"), 1, "GB of weights"),
        (("no-such-model",), 1, "no known shape: llama-2-7b"),
    ],
)
def test_what_cannot_be_is_one_line(cli: Cli, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = cli("plan", *arguments)
    assert done.code == code and words in done.err.replace("\n", " ") and "Traceback" not in done.err


def test_it_answers_in_a_second_without_torch() -> None:
    code = (
        "import sys\nfrom qserve.cli import app\n"
        "app(['plan', 'llama-3-70b', '--explain'], standalone_mode=False)\n"
        "heavy = [name for name in ('torch', 'transformers', 'numpy', 'scipy', 'fastapi') if name in sys.modules]\n"
        "assert not heavy, heavy"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "Best of each GPU and quantization" in done.stdout
    # Of the processor, not of the clock, which runs for everybody else here as well; a slow one takes twice as long.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
