"""The names that dashboards query, and that their numbers add up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qserve.checkpoint.card import QualityCard
from qserve.kernels.ops import BLOCK_SIZE
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.server.serve import ServerHandle
from qserve.runtime.server.telemetry.metrics import Metrics

HEADERS = {"Authorization": "Bearer first-key"}
NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
    "request_prompt_tokens_sum",
    "request_generation_tokens_sum",
    "request_max_num_generation_tokens_sum",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "kv_cache_fragmentation_perc",
    "requests_rejected_total",
    "engine_step_failures_total",
    "engine_step_age_seconds",
    "engine_up",
    "ready",
    "build_info",
    "step_seconds_count",
)


def samples(server: ServerHandle) -> dict[str, float]:
    text = httpx.get(server.url.replace("/v1", "/metrics"), headers=HEADERS).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith("process_"):  # those are of the process, whatever it serves
                assert sample.labels["model_name"] == server.service.model_name
                assert sample.labels["engine"] == "0"
            if "le" not in sample.labels:
                found[sample.name + sample.labels.get("finished_reason", "")] = sample.value
    return found


def test_metrics(server: ServerHandle) -> None:
    before = samples(server)
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "n": 2}
    assert httpx.post(f"{server.url}/completions", json=body, headers=HEADERS).status_code == 200
    after = samples(server)
    for prefix in ("qserve:", "vllm:"):
        assert all(any(name.startswith(prefix + wanted) for name in after) for wanted in NAMES)
        grown = {
            name.removeprefix(prefix): value - before.get(name, 0.0)
            for name, value in after.items()
            if name.startswith(prefix)
        }
        assert grown["prompt_tokens_total"] == 3
        assert grown["generation_tokens_total"] == 12
        assert grown["request_success_totallength"] == 2
        assert grown["time_to_first_token_seconds_count"] == 1
        assert grown["inter_token_latency_seconds_count"] == 10
        assert grown["e2e_request_latency_seconds_count"] == 2
        assert grown["request_max_num_generation_tokens_sum"] == 12
        steps = grown["step_seconds_count"]
        assert steps == grown["step_tokens_count"] == grown["step_decode_tokens_count"] >= 6
        assert grown["step_tokens_sum"] == grown["step_prefill_tokens_sum"] + grown["step_decode_tokens_sum"]
        assert grown["step_decode_tokens_sum"] == 10  # the last of each choice is not fed back
    assert after["process_cpu_seconds_total"] >= before["process_cpu_seconds_total"] > 0
    assert after["process_resident_memory_bytes"] > 1e6


def test_embeddings_are_counted_by_their_prompts(server: ServerHandle) -> None:
    before = samples(server)
    body = {"input": [[5, 6, 7], [8, 9]]}
    assert httpx.post(f"{server.url}/embeddings", json=body, headers=HEADERS).status_code == 200
    after = samples(server)
    names = ("prompt_tokens_total", "request_prompt_tokens_count", "request_prompt_tokens_sum", "step_tokens_sum",
             "request_queue_time_seconds_count", "request_success_totalstop")  # fmt: skip
    grown = {name: after[f"qserve:{name}"] - before.get(f"qserve:{name}", 0.0) for name in names}
    assert list(grown.values()) == [5, 2, 5, 5, 2, 2]
    for name in ("generation_tokens_total", "time_to_first_token_seconds_count", "prefix_cache_queries_total"):
        assert after[f"qserve:{name}"] == before[f"qserve:{name}"]


def test_failing_steps_are_counted(server: ServerHandle, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a kernel broke")

    before = samples(server)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", fail)
        assert httpx.post(f"{server.url}/completions", json={"prompt": "a"}, headers=HEADERS).status_code == 500
    after = samples(server)
    name = "qserve:engine_step_failures_total"
    assert after[name] == before[name] + 1
    assert after["qserve:engine_up"] == after["qserve:ready"] == 1


@pytest.fixture
def alone(engine: Engine) -> Iterator[Engine]:
    yield engine
    engine.abort("r")


@pytest.mark.parametrize("prompt", [1, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_fragmentation_is_what_is_allocated_and_empty(alone: Engine, prompt: int) -> None:
    assert alone.stats().kv_fragmentation == 0
    alone.submit("r", [5] * prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    alone.step()
    blocks = -(-prompt // BLOCK_SIZE)
    assert alone.stats().kv_fragmentation == pytest.approx(1 - prompt / (blocks * BLOCK_SIZE))


def test_how_long_each_stage_waits_is_a_metric(engine: Engine) -> None:
    metrics, name = Metrics("m", vllm_alias=True), "pipeline_idle_ratio"
    assert name not in metrics.render(engine.stats(), up=True, ready=True, step_age=0.0).decode()
    for idle in ((0.5, 0.25), (0.0, 0.125)):
        stats = replace(engine.stats(), pipeline_idle=idle)
        text = metrics.render(stats, up=True, ready=True, step_age=0.0).decode()
        for stage, share in enumerate(idle):
            for prefix in ("qserve", "vllm"):
                assert f'{prefix}:{name}{{engine="0",model_name="m",stage="{stage}"}} {share}' in text


def test_the_quality_card_is_a_metric(engine: Engine) -> None:
    card = QualityCard(
        base_name="base", base_sha256="0", data_name="text", data_sha256="0", tokens=100, window=10,
        perplexity_base=10.0, perplexity=10.5, kl_mean=0.02, kl_median=0.01, kl_p90=0.05, top1_agreement=0.93,
        kernel_path="native", created="2026-01-01",
    )  # fmt: skip
    for measured, there in ((card, True), (None, False)):
        text = Metrics("m", measured).render(engine.stats(), up=True, ready=True, step_age=0.0).decode()
        for name, value in (("perplexity_increase", 0.05), ("kl_mean", 0.02), ("top1_agreement", 0.93)):
            found = [line for line in text.splitlines() if line.startswith(f"qserve:quality_{name}{{")]
            assert [float(line.split()[-1]) for line in found] == ([pytest.approx(value)] if there else [])
