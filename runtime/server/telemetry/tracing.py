"""``Tracer``: a request as OpenTelemetry spans, under the semantic conventions for generative AI.

opentelemetry is imported only where a ``Tracer`` is made: it comes with the ``tracing`` extra. Spans are made from a
request's timeline when it has ended, so they cost nothing while tokens flow. A collector that is slow or gone costs
dropped spans and no time.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from qserve.checkpoint.errors import QServeError, UsageError
from qserve.runtime.client.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from qserve.runtime.server.telemetry.request_record import RequestRecord

EXPORT_TIMEOUT = 5.0  # seconds, for one batch of spans
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends spans to ``endpoint`` by OTLP over HTTP; an address without a path gets the usual ``/v1/traces``.

    Raises ``UsageError`` for an invalid URL and ``QServeError`` where the extra is missing.
    """
    try:
        parts = urlsplit(endpoint)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--otlp-endpoint must be a URL as http://collector:4318, not {endpoint!r:.200}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise QServeError(
            "traces need the tracing extra: pip install 'qserve-llm[tracing]', or leave out --otlp-endpoint"
        ) from None
    if parts.path in ("", "/"):
        endpoint = parts._replace(path="/v1/traces").geturl()
    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT)


class Tracer:
    """Makes the spans of requests: one for the whole, with children for queue, prefill and decode of each prompt."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "qserve", "service.version": version("qserve-llm")})
        # The caller decides what is traced; a request without a decision is traced.
        self._provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("qserve")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, request: RequestRecord, model: str) -> None:
        """The spans of a request that has ended, continuing the client's trace if it sent one."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        epoch = time.time_ns() - time.monotonic_ns()

        def at(moment: float) -> int:
            return epoch + int(moment * 1e9)

        attributes = _attributes(request, model)
        operation = attributes.get("gen_ai.operation.name")
        span = self._tracer.start_span(
            f"{operation} {model}" if operation else f"{request.method} {request.route}",
            context=self._propagator.extract(request.traceparent),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=at(request.started),
        )
        failed = "error" in request.finish_reasons
        if failed or (request.status or 0) >= 500:
            span.set_attribute("error.type", "engine_failure" if failed else str(request.status))
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        for timeline in request.timelines:
            if timeline.first_token is not None:
                span.add_event("gen_ai.first_token", timestamp=at(timeline.first_token))
            for name, start, end in _phases(timeline, request.ended):
                child = self._tracer.start_span(name, context=inside, start_time=at(start))
                child.end(at(end))
        span.end(at(request.ended))

    def close(self) -> None:
        """Send the spans that are left, within a few seconds."""
        self._provider.force_flush(int(EXPORT_TIMEOUT * 1000))
        self._provider.shutdown()


def _attributes(request: RequestRecord, model: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": request.method,
        "http.route": request.route,
        "http.response.status_code": request.status,
        "qserve.request_id": request.request_id,
    }
    params = request.params
    if params is None:
        return attributes
    asked = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.response.time_to_first_chunk": request.ttft_seconds,
    }
    return (
        attributes
        | {name: value for name, value in asked.items() if value is not None}
        | {
            "gen_ai.operation.name": _OPERATIONS.get(request.route, "text_completion"),
            "gen_ai.provider.name": "qserve",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "gen_ai.usage.output_tokens": request.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
            "gen_ai.response.finish_reasons": request.finish_reasons,
        }
    )


def _phases(timeline: Timeline, ended: float) -> list[tuple[str, float, float]]:
    """The phases that a prompt reached: (name, start, end)."""
    started, first = timeline.prefill_start, timeline.first_token
    phases = [("queue", timeline.arrival, ended if started is None else started)]
    if started is not None:
        phases.append(("prefill", started, ended if first is None else first))
    if first is not None:
        phases.append(("decode", first, max(timeline.last_token.values())))
    return phases
