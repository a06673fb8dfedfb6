"""``qserve simulate`` from the command line: a report, a page, a fit on the tiny model, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from qserve.cli import app
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.serve import ServerHandle

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/report.schema.json").read_text(encoding="utf-8"))
ROOFLINE = "flops=1e14,bandwidth=1e12,parameters=1e9,weights=2e9,kv=1e5"


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *args])
    return result.exit_code, result.output


def test_a_report_and_a_page_come_out_the_same_each_time(tmp_path: Path) -> None:
    reports = []
    for name in ("a", "b"):
        files = [str(tmp_path / f"{name}.{kind}") for kind in ("json", "md", "html")]
        code, output = run(
            "--roofline", ROOFLINE, "--rate", "20", "--requests", "120", "--output", "lognormal:30:0.8", "--price", "3",
            "--replicas", "2", "--slo", "ttft=200ms,tpot=20ms", "--json", files[0], "--markdown", files[1],
            "--animate", files[2], "--max-replicas", "3", "--html", str(tmp_path / "report.html"),
        )  # fmt: skip
        assert code == 0, output
        content = json.loads(Path(files[0]).read_text())
        jsonschema.validate(content, SCHEMA)
        assert {"goodput_per_second", "ttft_p95", "rejected"} <= {metric["name"] for metric in content["metrics"]}
        reports.append(content["data"])
    assert (tmp_path / "report.html").read_text().count("<svg") == 1
    assert reports[0] == reports[1]
    figures = reports[0]["figures"]
    assert figures["requests"] == 120 and figures["cost_per_million_output_tokens"] > 0
    assert 0 < figures["goodput_share"] <= 1 and 0 < figures["utilisation"] <= 1 and 0 < figures["kv_peak"] <= 1
    assert {"mean", "p50", "p90", "p95", "p99"} == reports[0]["latency_seconds"]["ttft"].keys()
    assert "| time to first token |" in (tmp_path / "a.md").read_text()
    page = (tmp_path / "a.html").read_text()
    assert "http" not in page and "src=" not in page and "times the throughput" in page


def test_a_trace_is_simulated(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"arrival": i / 9, "prompt": 50, "output": 5}) + "\n" for i in range(30)))
    code, output = run("--roofline", ROOFLINE, "--trace", str(trace), "--static")
    assert code == 0 and "30" in output


def test_a_model_on_gpus_needs_no_spec(tmp_path: Path) -> None:
    times = []
    for gpus in ("1", "2"):
        report = tmp_path / f"{gpus}.json"
        code, output = run("llama-3-8b", "--gpu", "h200", "--tp", gpus, "--requests", "50", "--json", str(report))
        assert code == 0, output
        data = json.loads(report.read_text())["data"]
        assert data["cost_model"]["gpu"] == "h200" and data["figures"]["cost"] > 0
        times.append(data["latency_seconds"]["tpot"]["mean"])
    assert times[1] < times[0] < 2 * times[1]  # two are faster, but all-reduces and overhead are not halved


def test_requests_per_step_are_printed_with_three_digits(tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    sizes = [(16, 6), (16, 6), (16, 3)]  # together for three steps, two of them for three more
    trace.write_text("".join(json.dumps({"arrival": 0, "prompt": p, "output": o}) + "\n" for p, o in sizes))
    code, output = run("--roofline", ROOFLINE, "--trace", str(trace), "--json", str(report))
    assert code == 0 and json.loads(report.read_text())["data"]["figures"]["requests_per_step"] == 2.5
    assert re.search(r"requests per step\W+2\.50\W", output)
    code, output = run("--roofline", ROOFLINE, "--rate", "0.0123", "--requests", "200", "--output", "3")
    assert code == 0 and re.search(r"requests per second\W+0\.0\d{3}\W", output)


def test_a_fit_of_the_tiny_model_drives_a_simulation_and_is_compared(tiny_model: Path, tmp_path: Path) -> None:
    cost, report = tmp_path / "cost.json", tmp_path / "report.json"
    code, output = run(
        str(tiny_model), "--fit", str(cost), "--validate", "--validate-seconds", "1", "--max-num-seqs", "4",
        "--max-num-batched-tokens", "64", "--json", str(report),
    )  # fmt: skip
    assert code == 0, output
    jsonschema.validate(json.loads(report.read_text()), SCHEMA)
    found = json.loads(report.read_text())["data"]
    assert [each["name"] for each in found["workloads"]] == ["steady", "bursty", "crowded"]
    for each in found["workloads"]:
        assert each["measured"].keys() == each["simulated"].keys() and all(each["simulated"].values())
    code, output = run("--cost", str(cost), "--requests", "20", "--rate", "100", "--prompt", "40", "--output", "10")
    assert code == 0, output


def test_a_url_is_fitted_and_gets_the_simulated_traffic(tiny_packed: Path, tmp_path: Path) -> None:
    limits = ("--max-model-len", "256", "--max-num-seqs", "2", "--max-num-batched-tokens", "64")
    traffic = ("--rate", "20", "--requests", "10", "--prompt", "40", "--output", "8")
    cost, report = tmp_path / "cost.json", tmp_path / "report.json"
    engine = Engine(str(tiny_packed), EngineConfig(max_num_seqs=2, kv_cache_memory=64 << 20, threads=1))
    with ServerHandle(engine) as server:
        code, output = run(server.url, "--fit", str(cost), "--validate", "--json", str(report), *limits, *traffic)
    assert code == 0, output
    jsonschema.validate(json.loads(report.read_text()), SCHEMA)
    (workload,) = json.loads(report.read_text())["data"]["workloads"]
    assert workload["requests"] == 10 and workload["measured"].keys() == workload["simulated"].keys()
    assert json.loads(cost.read_text())["model"] == engine.model_name
    code, output = run(server.url, "--cost", str(cost), "--validate", *limits, *traffic)
    assert code == 1 and len(output.strip().splitlines()) == 1, "a server that is gone is one line"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give either --cost FILE"),
        (["--roofline", ROOFLINE, "--cost", "x"], "give either --cost FILE"),
        (["demo", "--roofline", ROOFLINE], "MODEL is measured with --fit"),
        (["--gpu", "h200"], "give both or neither"),
        (["llama-3-8b", "--gpu", "h200", "--roofline", ROOFLINE], "give either --cost FILE"),
        (["llama-3-8b", "--gpu", "h200", "--tp", "3"], "cannot share"),
        (["llama-3-8b", "--gpu", "a100-80gb", "--quantization", "fp8"], "no products of fp8"),
        (["llama-3-8b", "--gpu", "h200", "--fit", "x"], "leave out --gpu"),
        (["--fit", "x"], "name it"),
        (["demo", "--validate"], "--validate needs"),
        (["http://127.0.0.1:1", "--fit", "x", "--threads", "1"], "--threads has no meaning"),
        (["http://127.0.0.1:1", "--fit", "x", "--gpu", "h200"], "leave out --gpu"),
        (["http://", "--fit", "x"], "a server is named like"),
        (["http://127.0.0.1:1", "--validate"], "--validate needs"),
        (["--roofline", ROOFLINE, "--routing", "random"], "unknown routing"),
        (["--roofline", ROOFLINE, "--rate", "nan"], "--rate must be"),
        (["--roofline", ROOFLINE, "--slo", "ttft=5"], "must be a time"),
        (["--roofline", ROOFLINE, "--kv-blocks", "0"], "--kv-blocks must be"),
        (["--roofline", ROOFLINE, "--prefixes", "3"], "belong together"),
        (["--roofline", ROOFLINE, "--max-num-seqs", "0"], "max_num_seqs must be"),
        (["--roofline", ROOFLINE, "--price", "-1"], "--price must be"),
        (["--roofline", ROOFLINE, "--replicas", "0"], "--replicas must be"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(args: list[str], message: str) -> None:
    code, output = run(*args)
    assert code == 2 and message in output and len(output.strip().splitlines()) == 1


def test_files_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    for option in ("--trace", "--cost"):
        extra = ["--roofline", ROOFLINE] if option == "--trace" else []
        code, output = run(*extra, option, str(tmp_path / "none"))
        assert code == 1 and len(output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--spare-replicas", "1"), "needs --max-replicas"),
     (("--max-replicas", "4", "--spare-replicas", "-1"), "at least 0"),
     (("--max-replicas", "4", "--spare-replicas", "x"), "valid integer")],
)  # fmt: skip
def test_spare_replicas_that_make_no_sense_are_refused(options: tuple[str, ...], message: str) -> None:
    code, said = run("--roofline", ROOFLINE, "--rate", "4", "--requests", "20", *options)
    assert code == 2 and message in said
