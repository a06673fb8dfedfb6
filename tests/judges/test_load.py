"""Load generators and acceptance suites that others wrote, for a moment each; their figures are printed (``-s``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qserve.checkpoint.source import open_model

pytestmark = pytest.mark.judges


def test_giraffe_accepts_the_server(environment, judge, served, tmp_path: Path) -> None:
    """Its checks of the interface; those of the answers' truth judge a model, not a server."""
    program = environment("giraffe") / "bin" / "giraffe"
    done = judge(
        [program, "run", "--url", served.url, "--model", served.name, "--checks", "access,serving,first_output",
         "--concurrency", "2", "--samples", "8", "--max-output-tokens", "16", "--first-output-ms", "60000",
         "--max-requests", "60", "--output", tmp_path / "run", "--output-format", "json"]
    )
    report = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    checks = {check["id"]: check for check in report["checks"] if check["status"] != "skipped"}
    assert {name: check["status"] for name, check in checks.items()} == {
        "access": "pass", "serving": "pass", "first_output": "pass"
    }, [check["summary"] for check in checks.values()]
    assert done.returncode == 0, done.stderr[-2000:]


def test_guidellm_finds_every_answer_whole(environment, judge, served, tmp_path: Path) -> None:
    program = environment("guidellm") / "bin" / "guidellm"
    open_model(served.model).save_tokenizer(tmp_path / "tokenizer")
    report = tmp_path / "report.json"
    prompt, output, requests, streams = 48, 24, 16, 4
    done = judge(
        [program, "run", "--backend", f"kind=openai_http,target={served.url.removesuffix('/v1')},model={served.name}",
         "--profile", f"kind=concurrent,streams={streams}", "--constraint", f"kind=max_requests,count={requests}",
         "--data", f"kind=synthetic_text,prompt_tokens={prompt},output_tokens={output}",
         "--tokenizer", f"kind=huggingface_auto,model={tmp_path / 'tokenizer'}",
         "--output", f"kind=json,path={report}", "--disable-console"]
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    metrics = found["metrics"]
    errors = {request["info"]["error"] for request in found["requests"]["errored"]}
    assert not errors and metrics["request_totals"]["successful"] == requests, errors
    assert metrics["output_token_count"]["successful"]["mean"] == output  # counted by the server's usage
    rate = metrics["output_tokens_per_second"]["successful"]["mean"]
    print(f"guidellm, {streams} streams: {rate:.1f} output tokens/s")
    for name in ("time_to_first_token_ms", "inter_token_latency_ms"):
        values = metrics[name]["successful"]
        print(f"  {name}: median {values['median']:.1f}, p95 {values['percentiles']['p95']:.1f}")
