"""``Metrics``: the metrics for Prometheus, under the names that dashboards of LLM servers query."""

from __future__ import annotations

import platform
import re
from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from qserve.runtime.client.timeline import Timeline
from qserve.runtime.server.telemetry import gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qserve.checkpoint.card import QualityCard
    from qserve.runtime.journal import StepRecord
    from qserve.runtime.output import RequestOutput
    from qserve.runtime.stats import EngineStats, GpuUse, OffloadUse

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_TOKENS = tuple(2**power for power in range(18))
_STEP_TOKENS = (0, *(2**power for power in range(14)))
_LABELS = ("model_name", "engine")

REJECTIONS = {  # status -> why a request was not taken on
    400: "invalid",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "not_found",
    408: "timeout",
    413: "body_too_large",
    415: "invalid",
    422: "invalid",
    429: "key_limit",
    431: "headers_too_large",
    503: "overloaded",
}


class Metrics:
    """Written by the engine thread, rendered by the server. ``vllm_alias`` repeats all under ``vllm:``."""

    def __init__(
        self,
        model_name: str,
        card: QualityCard | None = None,
        *,
        vllm_alias: bool = False,
        kernels: str = "",
        max_waiting: int = 0,
    ) -> None:
        self._registry = CollectorRegistry()
        self._alias = vllm_alias
        self._model = model_name
        ProcessCollector(registry=self._registry)  # CPU seconds, resident memory, open files of this process
        build = {"version": version("qserve-llm"), "python": platform.python_version(), "kernels": kernels}
        Gauge("qserve:build_info", "What runs here; always 1.", (*_LABELS, *build), registry=self._registry).labels(
            model_name, "0", *build.values()
        ).set(1)
        self._up = self._gauge("engine_up", "1 while the engine can work, else 0.")
        self._ready = self._gauge("ready", "1 while new requests are taken on, 0 while draining or failed.")
        self._step_age = self._gauge("engine_step_age_seconds", "Age of the step that is running, 0 between steps.")
        self._running = self._gauge("num_requests_running", "Requests being computed.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._gauge("max_requests_waiting", "Requests that may wait; more are refused.").set(max_waiting)
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.")
        self._fragmentation = self._gauge(
            "kv_cache_fragmentation_perc", "Share of the allocated KV positions that hold nothing, 0 to 1."
        )
        self._totals = {  # field of EngineStats -> its counter
            "prefix_queries": self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
            "prefix_hits": self._counter("prefix_cache_hits", "Prompt tokens taken from the prefix cache."),
            "num_preemptions": self._counter("num_preemptions", "Requests put back into the queue."),
            "num_drafts": self._counter("spec_decode_num_drafts", "Drafts of the tokens that come next."),
            "num_draft_tokens": self._counter("spec_decode_num_draft_tokens", "Their tokens."),
            "num_accepted_tokens": self._counter(
                "spec_decode_num_accepted_tokens", "Those that were right: each saved its request a step."
            ),
        }
        self._counted = dict.fromkeys(self._totals, 0)
        self._gpu: dict[str, Gauge] = {}  # none without a GPU
        self._pipeline_idle: Gauge | None = None  # without stages
        self._offload_gauges: dict[str, Gauge] = {}  # none without tiers of the KV cache
        self._offload_counters: dict[str, tuple[Counter, int]] = {}  # with what they show
        self._failures = self._counter("engine_step_failures", "Steps that failed and ended their requests.")
        self._prompt_total = self._counter("prompt_tokens", "Prompt tokens of requests.")
        self._output_total = self._counter("generation_tokens", "Tokens generated.")
        self._success = self._by("request_success", "Requests that ended, by reason.", "finished_reason")
        self._rejected = self._by("requests_rejected", "Requests that were refused, by reason.", "reason")
        for reason in sorted(set(REJECTIONS.values()) | {"draining"}):  # a rate needs a zero before the first count
            self._rejected.labels(model_name, "0", reason)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self._itl = self._histogram("inter_token_latency_seconds", "Between two tokens.", _TOKEN_SECONDS)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            _TOKEN_SECONDS,
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first computation.", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "First computation to first output.", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.", _SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output = self._histogram("request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._asked = self._histogram("request_max_num_generation_tokens", "Output tokens asked for.", _TOKENS)
        self._step_seconds = self._histogram("step_seconds", "Time of one step of the engine.", _TOKEN_SECONDS)
        self._step_tokens = self._histogram("step_tokens", "Input tokens of a step.", _STEP_TOKENS)
        self._step_prefill = self._histogram("step_prefill_tokens", "Those that belong to prompts.", _STEP_TOKENS)
        self._step_decode = self._histogram("step_decode_tokens", "Those that were sampled before.", _STEP_TOKENS)
        if card is not None:
            self._gauge("quality_perplexity", "Perplexity as measured on the quality card.").set(card.perplexity)
            self._gauge("quality_perplexity_base", "The same of the base model.").set(card.perplexity_base)
            self._gauge("quality_perplexity_increase", "Their ratio less 1.").set(card.perplexity_increase)
            self._gauge("quality_kl_mean", "Mean KL divergence from the base model, in nats.").set(card.kl_mean)
            self._gauge("quality_top1_agreement", "Top-1 agreement with the base model, 0 to 1.").set(
                card.top1_agreement
            )

    def step(self, record: StepRecord, seconds: float) -> None:
        """Count one step of the engine, which took ``seconds``."""
        self._step_seconds.observe(seconds)
        self._step_tokens.observe(record.prefill_tokens + record.decode_tokens)
        self._step_prefill.observe(record.prefill_tokens)
        self._step_decode.observe(record.decode_tokens)

    def step_failed(self) -> None:
        self._failures.inc()

    def observe(self, request: Timeline, output: RequestOutput, now: float) -> None:
        """Count what one step added to a request; ``request`` takes it in too."""
        opening, previous = request.first_token is None, request.last_token.get(output.index)
        request.add(output, now)
        if (opening and output.token_ids) or output.embedding is not None:  # the prompt was computed
            queued = output.queue_seconds
            self._queue.observe(queued)
            self._prefill.observe(max(0.0, now - request.arrival - queued))
            self._prompt_total.inc(request.prompt_tokens)
            self._prompt.observe(request.prompt_tokens)
        if output.token_ids:
            self._output_total.inc(len(output.token_ids))
            if opening:
                self._ttft.observe(now - request.arrival)
            if previous is not None:
                self._itl.observe((now - previous) / len(output.token_ids))
        if output.finish_reason is None:
            return
        self.ended(output.finish_reason)
        self._e2e.observe(now - request.arrival)
        self._output.observe(output.output_tokens)
        if request.max_tokens is not None:
            self._asked.observe(request.max_tokens)
        if request.first_token is not None:
            self._decode.observe(now - request.first_token)
            if output.output_tokens > 1:
                self._tpot.observe((now - request.first_token) / (output.output_tokens - 1))

    def ended(self, reason: str) -> None:
        """Count one choice (or aborted request) that ended."""
        self._success.labels(self._model, "0", reason).inc()

    def rejected(self, reason: str) -> None:
        """Count a request that was not taken on; ``reason`` is one of ``REJECTIONS`` or ``draining``."""
        self._rejected.labels(self._model, "0", reason).inc()

    def render(self, stats: EngineStats, *, up: bool, ready: bool, step_age: float) -> bytes:
        """The text exposition format, with the gauges as of ``stats``; ``step_age`` in seconds."""
        self._up.set(up)
        self._ready.set(ready)
        self._step_age.set(step_age)
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_blocks_used / max(1, stats.kv_blocks_total))
        self._fragmentation.set(stats.kv_fragmentation)
        for name, counter in self._totals.items():
            counter.inc(getattr(stats, name) - self._counted[name])
            self._counted[name] = getattr(stats, name)
        if stats.gpu is not None:
            self._show_gpu(stats.gpu)
        if stats.offload is not None:
            self._show_offload(stats.offload)
        if stats.pipeline_idle:
            self._show_pipeline(stats.pipeline_idle)
        text = generate_latest(self._registry)
        if self._alias:
            own = b"".join(line for line in text.splitlines(keepends=True) if b"qserve:" in line)
            text += re.sub(rb"(?m)^(# (?:HELP|TYPE) )?qserve:", rb"\1vllm:", own)
        return text

    def _show_pipeline(self, idle: Sequence[float]) -> None:
        if self._pipeline_idle is None:
            about = "Share of the time in which a stage waited for a step while others computed one, 0 to 1."
            name = "qserve:pipeline_idle_ratio"
            self._pipeline_idle = Gauge(name, about, (*_LABELS, "stage"), registry=self._registry)
        for stage, share in enumerate(idle):
            self._pipeline_idle.labels(self._model, "0", str(stage)).set(share)

    def _show_offload(self, use: OffloadUse) -> None:
        gauges = {
            "kv_offload_memory_usage_perc": ("Share of the memory for evicted KV blocks in use, 0 to 1.", use.memory),
            "kv_offload_disk_blocks": ("KV blocks on disk.", use.disk_blocks),
        }
        counters = {
            "kv_offload_stored_blocks": ("KV blocks that went from the cache to memory.", use.stored),
            "kv_offload_loaded_blocks": ("KV blocks that came back from memory.", use.loaded),
            "kv_offload_written_blocks": ("KV blocks that were written to disk.", use.written),
            "kv_offload_read_blocks": ("KV blocks that were read from disk into memory.", use.read),
            "kv_transfer_received_blocks": ("KV blocks that came from other replicas.", use.received),
            "kv_transfer_sent_blocks": ("KV blocks that went to other replicas.", use.sent),
            "kv_offload_failed_blocks": ("KV blocks that could not be written or read.", use.failed),
        }
        for name, (about, value) in gauges.items():
            if name not in self._offload_gauges:
                self._offload_gauges[name] = self._gauge(name, about)
            self._offload_gauges[name].set(value)
        for name, (about, count) in counters.items():
            if name not in self._offload_counters:
                self._offload_counters[name] = self._counter(name, about), 0
            counter, shown = self._offload_counters[name]
            counter.inc(count - shown)
            self._offload_counters[name] = counter, count

    def _show_gpu(self, use: GpuUse) -> None:
        shown: dict[str, tuple[str, float]] = {
            "gpu_memory_allocated_bytes": ("GPU memory that tensors of this server hold.", use.allocated),
            "gpu_memory_reserved_bytes": ("The same, and what is set aside for tensors to come.", use.reserved),
        }
        if (state := gpu.read(use.uuid)) is not None:
            shown |= {
                "gpu_memory_free_bytes": ("GPU memory that no process holds.", state.free_bytes),
                "gpu_memory_total_bytes": ("Memory of the GPU.", state.total_bytes),
                "gpu_utilization_perc": ("Share of time in which a kernel ran, 0 to 1.", state.utilization),
            }
        for name, (about, value) in shown.items():
            if name not in self._gpu:
                self._gpu[name] = self._gauge(name, about)
            self._gpu[name].set(value)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"qserve:{name}", about, _LABELS, registry=self._registry).labels(self._model, "0")

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"qserve:{name}", about, _LABELS, registry=self._registry).labels(self._model, "0")

    def _by(self, name: str, about: str, label: str) -> Counter:
        return Counter(f"qserve:{name}", about, (*_LABELS, label), registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"qserve:{name}", about, _LABELS, buckets=buckets, registry=self._registry)
        return metric.labels(self._model, "0")
