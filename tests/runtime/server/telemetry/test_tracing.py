"""Requests as OpenTelemetry spans: attributes, children, the trace that they continue, and missing packages."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from qserve.checkpoint.errors import QServeError, UsageError
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.listening import claim_socket
from qserve.runtime.server.serve import ServerHandle
from qserve.runtime.server.telemetry import tracing
from qserve.runtime.server.telemetry.tracing import Tracer, otlp_exporter

pytest.importorskip("opentelemetry.sdk", reason="the tracing extra is not installed")
BODY = {"prompt": "the", "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "seed": 3}
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def exporter() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def server(engine: Engine, exporter: Any) -> Iterator[ServerHandle]:
    handle = ServerHandle(engine)
    handle.service.tracer = Tracer(exporter)
    with handle:
        yield handle


@pytest.fixture
def spans(server: ServerHandle, exporter: Any) -> Any:
    """A function that returns the finished spans by name, once there are as many as were asked for."""
    tracer = server.service.tracer
    assert tracer is not None
    exporter.clear()

    def finished(count: int) -> dict[str, Any]:
        end = time.monotonic() + 20
        while len(exporter.get_finished_spans()) < count:
            assert time.monotonic() < end, f"no {count} spans came"
            tracer._provider.force_flush()
            time.sleep(0.01)
        return {span.name: span for span in exporter.get_finished_spans()}

    return finished


def test_a_request_continues_the_trace_of_its_client(server: ServerHandle, spans: Any) -> None:
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "X-Request-Id": "mine"}
    assert httpx.post(f"{server.url}/completions", json=BODY, headers=headers).status_code == 200
    name = f"text_completion {server.service.model_name}"
    found = spans(4)
    assert found.keys() == {name, "queue", "prefill", "decode"}
    root = found[name]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": server.service.model_name,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "qserve.request_id": "mine",
    }
    assert wanted.items() <= dict(root.attributes).items()
    assert 0 < root.attributes["gen_ai.response.time_to_first_chunk"] < (root.end_time - root.start_time) / 1e9 + 0.1
    assert [event.name for event in root.events] == ["gen_ai.first_token"]
    children = [found[phase] for phase in ("queue", "prefill", "decode")]
    assert all(child.parent.span_id == root.context.span_id for child in children)
    times = [time for child in children for time in (child.start_time, child.end_time)]
    assert times == sorted(times)


def test_a_trace_that_its_client_does_not_sample_is_not_made(server: ServerHandle, spans: Any) -> None:
    for flags in ("00", "01"):
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-{flags}"}
        httpx.post(f"{server.url}/completions", json=BODY, headers=headers)
    assert len(spans(4)) == 4


@pytest.mark.parametrize("traceparent", ["nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ÿ" * 300])
def test_a_bad_traceparent_starts_a_trace(server: ServerHandle, spans: Any, traceparent: str) -> None:
    headers = {"traceparent": traceparent.encode("latin-1")}
    assert httpx.get(f"{server.url}/models", headers=headers).status_code == 200
    (span,) = spans(1).values()
    assert span.parent is None
    assert span.name == "GET /v1/models"


def test_spans_reach_a_collector(engine: Engine) -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        config = ServerConfig(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}")
        with ServerHandle(engine, config=config) as server:
            assert httpx.post(f"{server.url}/completions", json=BODY | {"prompt": "secret"}).status_code == 200
        collector.shutdown()
    assert [path for path, _ in got] == ["/v1/traces"]
    assert b"gen_ai.usage.output_tokens" in got[0][1]
    assert b"secret" not in got[0][1]


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://a", "http://", "http://a:b", ""])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="--otlp-endpoint must be a URL"):
        otlp_exporter(endpoint)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(QServeError, match=r"pip install 'qserve-llm\[tracing\]'"):
        otlp_exporter("http://collector:4318")


def test_nothing_of_opentelemetry_is_imported_without_the_option() -> None:
    # The API alone does nothing; FastAPI imports it where it is installed.
    code = "import sys, qserve.runtime.server.serve; print([m for m in sys.modules if 'opentelemetry.sdk' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_collector_that_is_away_costs_nobody_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT", 0.5)
    with claim_socket("127.0.0.1", 0) as silent:  # connections are taken, and never answered
        config = ServerConfig(otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with ServerHandle(engine, config=config) as server:
            for _ in range(3):
                assert httpx.post(f"{server.url}/completions", json=BODY, timeout=20).status_code == 200
            start = time.monotonic()
            server.stop()
            assert not server._thread.is_alive()
    assert time.monotonic() - start < 20  # a hang is minutes
