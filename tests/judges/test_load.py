"""Load generators and acceptance suites that others wrote, for a moment each; their figures are printed (``-s``)."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qserve.checkpoint.source import open_model
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.runner import PromptSink, StepOutput
from qserve.runtime.server.serve import ServerHandle
from qserve.runtime.step_plan import StepPlan

from .conftest import Served

pytestmark = pytest.mark.judges

STEP = 0.05


def test_giraffe_accepts_the_server(environment, judge, anywhere, tmp_path: Path) -> None:
    """Its checks of the interface; those of the answers' truth judge a model, not a server."""
    program = environment("giraffe") / "bin" / "giraffe"
    done = judge(
        [program, "run", "--url", anywhere.url, "--model", anywhere.name, "--checks", "access,serving,first_output",
         "--concurrency", "2", "--samples", "8", "--max-output-tokens", "16", "--first-output-ms", "60000",
         "--max-requests", "60", "--output", tmp_path / "run", "--output-format", "json"]
    )
    report = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    checks = {check["id"]: check for check in report["checks"] if check["status"] != "skipped"}
    assert {name: check["status"] for name, check in checks.items()} == {
        "access": "pass", "serving": "pass", "first_output": "pass"
    }, [check["summary"] for check in checks.values()]
    assert done.returncode == 0, done.stderr[-2000:]


def test_guidellm_finds_every_answer_whole(environment, judge, anywhere, tmp_path: Path) -> None:
    output, requests, streams = 24, 16, 4
    for attempt in range(3):  # now and then GuideLLM ends a run before its last request, which it counts nowhere
        found = guidellm(environment, judge, anywhere, tmp_path / f"{attempt}", streams, requests, 48, output)
        metrics, totals = found["metrics"], found["metrics"]["request_totals"]
        assert not found["requests"]["errored"], {request["info"]["error"] for request in found["requests"]["errored"]}
        if totals["successful"] == requests:
            break
    else:
        pytest.fail(f"{requests} requests in each of three runs, and of the last came {totals}")
    assert metrics["output_token_count"]["successful"]["mean"] == output  # counted by the server's usage
    rate = metrics["output_tokens_per_second"]["successful"]["mean"]
    print(f"guidellm, {streams} streams: {rate:.1f} output tokens/s")
    for name in ("time_to_first_token_ms", "inter_token_latency_ms"):
        values = metrics[name]["successful"]
        print(f"  {name}: median {values['median']:.1f}, p95 {values['percentiles']['p95']:.1f}")


class Metronome:
    """A runner whose steps take ``STEP`` seconds and no processor, whatever else runs on the machine."""

    def __init__(self, engine: Engine) -> None:
        self._vocab_size = engine.vocab_size
        (self._token,) = engine.encode("a")

    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        time.sleep(STEP)
        ids = tuple(sequence.request_id for sequence in plan.sequences if sequence.num_sampled)
        logits = torch.zeros(len(ids), self._vocab_size)
        logits[:, self._token] = 50.0
        return StepOutput(ids, logits, torch.full((len(ids),), self._token, dtype=torch.int32))


@pytest.fixture
def beating(tiny_model: Path) -> Iterator[Served]:
    engine = Engine(str(tiny_model), EngineConfig(kv_cache_memory=64 << 20, threads=1))
    engine.runner = Metronome(engine)
    with ServerHandle(engine) as server:
        yield Served(server.url, str(tiny_model), engine.model_name)


def test_guidellm_and_qserve_bench_agree(environment, judge, beating, tmp_path: Path) -> None:
    """By turns, on a server that needs no processor: the medians of three rounds are within a tenth, or a step."""
    streams, requests, output = 4, 16, 32
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(3):
        home = tmp_path / f"{number}"
        metrics = guidellm(environment, judge, beating, home, streams, requests, 64, output, seed=number)["metrics"]
        prompt = round(metrics["prompt_token_count"]["successful"]["mean"])  # with those of the chat template
        theirs = {
            "TTFT": metrics["time_to_first_token_ms"]["successful"]["mean"],
            "ITL": metrics["inter_token_latency_ms"]["successful"]["mean"],
            "output tokens/s": metrics["output_tokens_per_second"]["successful"]["mean"],
        }
        rounds.append((theirs, ours(judge, beating, home / "ours.json", streams, requests, prompt, output)))
        print(*rounds[-1], sep="\n")
    for name in rounds[0][0]:
        other, own = (statistics.median(each[side][name] for each in rounds) for side in (0, 1))
        print(f"{name}: guidellm {other:.2f}, qserve bench {own:.2f}, ratio {own / other:.3f}")
        # Whoever just misses a step waits for the next one.
        assert own == pytest.approx(other, **({"abs": STEP * 1e3} if name == "TTFT" else {"rel": 0.1})), name


def guidellm(environment, judge, served, home: Path, streams, requests, prompt, output, *, seed: int = 42):
    """Its findings, of so many requests. The same seed makes the same prompts, which a prefix cache knows."""
    (home / "tokenizer").mkdir(parents=True)
    open_model(served.model).save_tokenizer(home / "tokenizer")
    report = home / "report.json"
    done = judge(
        [environment("guidellm") / "bin" / "guidellm", "run",
         "--backend", f"kind=openai_http,target={served.url.removesuffix('/v1')},model={served.name}",
         "--profile", f"kind=concurrent,streams={streams}", "--constraint", f"kind=max_requests,count={requests}",
         "--data", f"kind=synthetic_text,prompt_tokens={prompt},output_tokens={output}",
         "--seed", f"kind=static,value={seed}", "--tokenizer", f"kind=huggingface_auto,model={home / 'tokenizer'}",
         "--output", f"kind=json,path={report}", "--disable-console"]
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    return found


def ours(judge, served, report: Path, streams, requests, prompt, output) -> dict[str, float]:
    done = judge(
        [sys.executable, "-m", "qserve", "bench", served.url, "--concurrency", streams, "--requests", requests,
         "--prompt", prompt, "--output", output, "--endpoint", "chat", "--json", report]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (level,) = json.loads(report.read_text(encoding="utf-8"))["data"]["levels"]
    times = level["latency_seconds"]
    return {
        "TTFT": times["ttft"]["mean"] * 1e3,
        "ITL": times["tpot"]["mean"] * 1e3,
        "output tokens/s": level["figures"]["output_tokens_per_second"],
    }
