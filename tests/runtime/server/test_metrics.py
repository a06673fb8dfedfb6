"""The names that dashboards query, and that their numbers add up."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from qserve.runtime.server.serve import ServerHandle

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
)


def samples(server: ServerHandle) -> dict[str, float]:
    text = httpx.get(server.url.replace("/v1", "/metrics"), headers=HEADERS).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("process_"):  # of the process, whatever it serves
                continue
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
