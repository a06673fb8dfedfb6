"""Request ids and the one line that every request leaves in the log: what it holds, and what it never holds."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from qserve.checkpoint.errors import UsageError
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle
from qserve.runtime.server.telemetry import logs

KEY = "a-secret-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
BODY = {"prompt": "a secret prompt", "max_tokens": 5, "ignore_eos": True}


class Log:
    """The lines that are written to ``stream`` from now on."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream
        self._start = len(stream.getvalue())

    def text(self) -> str:
        return self._stream.getvalue()[self._start :]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]

    def of(self, response: httpx.Response) -> dict[str, Any]:
        """The line of one request."""
        return self.named(response.headers["x-request-id"])

    def named(self, request_id: str) -> dict[str, Any]:
        """The line of the request with this id, which is written when its answer has gone already."""
        end = time.monotonic() + 20
        while True:
            for line in self.lines():
                if line["message"] == "request" and line["request_id"] == request_id:
                    return line
            assert time.monotonic() < end, f"no line of {request_id}"
            time.sleep(0.01)


@pytest.fixture(scope="module")
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    named = [logging.getLogger(name) for name in ("qserve", "uvicorn")]
    handlers, levels = root.handlers[:], [logger.level for logger in (root, *named)]
    stream = io.StringIO()
    logs.configure("json", "debug", stream)
    yield stream
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    for logger, level in zip((root, *named), levels):
        logger.setLevel(level)


@pytest.fixture(scope="module")
def logged(stream: io.StringIO, engine: Engine) -> Iterator[ServerHandle]:
    log = Log(stream)
    with ServerHandle(engine, config=ServerConfig(api_keys=(KEY,))) as handle:
        yield handle
    told = [line["message"] for line in log.lines() if line["logger"].endswith("server.serve")]
    assert told == ["ready", "draining", "ended"]
    assert any(line["logger"].startswith("uvicorn") for line in log.lines())


@pytest.fixture
def log(stream: io.StringIO, logged: ServerHandle) -> Log:
    return Log(stream)


def test_a_line_tells_what_a_request_cost_and_nothing_that_is_secret(logged: ServerHandle, log: Log) -> None:
    response = httpx.post(f"{logged.url}/completions", json=BODY | {"n": 2}, headers=HEADERS | {"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    line = log.of(response)
    assert (line["method"], line["route"], line["status"], line["level"]) == ("POST", "/v1/completions", 200, "info")
    assert (line["output_tokens"], line["finish_reason"]) == (10, "length")
    assert line["prompt_tokens"] == response.json()["usage"]["prompt_tokens"]
    assert line["model"] == logged.service.model_name
    assert 0 <= line["queue_seconds"] <= line["ttft_seconds"] <= line["total_seconds"]
    answer = response.json()["choices"][0]["text"]
    assert not any(secret in log.text() for secret in (KEY, "secret prompt", json.dumps(answer)))


def test_a_stream_has_its_line_when_it_has_ended(logged: ServerHandle, log: Log) -> None:
    with httpx.stream("POST", f"{logged.url}/completions", json=BODY | {"stream": True}, headers=HEADERS) as response:
        response.read()
    line = log.of(response)
    assert line["request_id"].startswith("req-")
    assert (line["output_tokens"], line["status"]) == (5, 200)


def test_a_client_that_leaves(logged: ServerHandle, log: Log, slow: None) -> None:
    long = BODY | {"max_tokens": 400}
    with httpx.stream("POST", f"{logged.url}/completions", json=long | {"stream": True}, headers=HEADERS) as response:
        next(response.iter_lines())
    line = log.of(response)
    assert (line["finish_reason"], line["status"]) == ("abort", 200)
    assert 0 < line["output_tokens"] < 400
    with pytest.raises(httpx.ReadTimeout):
        named = HEADERS | {"X-Request-Id": "left"}
        httpx.post(f"{logged.url}/completions", json=long, headers=named, timeout=httpx.Timeout(30, read=0.2))
    assert log.named("left")["status"] == 499


@pytest.mark.parametrize("bad", ["", "with a space", "x" * 129, "tab\there"])
def test_an_id_that_is_long_or_not_printable_is_replaced(logged: ServerHandle, bad: str) -> None:
    response = httpx.get(f"{logged.url}/models", headers=HEADERS | {"X-Request-Id": bad})
    assert response.headers["x-request-id"].startswith("req-")


def test_every_refusal_has_an_id_a_line_and_a_count(logged: ServerHandle, log: Log) -> None:
    def rejected(reason: str) -> float:
        text = httpx.get(logged.url.replace("/v1", "/metrics"), headers=HEADERS).text
        lines = [line for line in text.splitlines() if line.startswith("qserve:requests_rejected_total")]
        return next(float(line.split()[-1]) for line in lines if f'reason="{reason}"' in line)

    cases = [
        ("POST", "/v1/completions", HEADERS, {"prompt": 1}, 400, "invalid", "/v1/completions"),
        ("GET", "/v1/models", {}, None, 401, "unauthorized", "unmatched"),
        ("GET", "/v1/secret-path", HEADERS, None, 404, "not_found", "unmatched"),
        ("GET", "/v1/completions", HEADERS, None, 405, "not_found", "/v1/completions"),
        ("GET", "/v1/models", {"X-Long": "a" * 40_000}, None, 431, "headers_too_large", "unmatched"),
    ]
    for method, path, headers, body, status, reason, route in cases:
        before = rejected(reason)
        response = httpx.request(method, logged.url.removesuffix("/v1") + path, headers=headers, json=body)
        assert response.status_code == status
        line = log.of(response)
        assert (line["status"], line["route"]) == (status, route)
        assert rejected(reason) == before + 1
    assert "secret-path" not in log.text()


def test_a_defect_is_an_error_object_with_an_id_and_a_traceback_in_the_log(
    logged: ServerHandle, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logged.service, "model", lambda name: 1 / 0)
    response = httpx.get(f"{logged.url}/models", headers=HEADERS)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    line = log.of(response)
    (told,) = [line for line in log.lines() if "exception" in line]
    assert line["level"] == "error"
    assert told["request_id"] == line["request_id"] == response.headers["x-request-id"]
    assert "ZeroDivisionError" in told["exception"]


def test_probes_are_told_at_debug_only(logged: ServerHandle, log: Log) -> None:
    response = httpx.get(logged.url.replace("/v1", "/health"))
    assert response.status_code == 200 and log.of(response)["level"] == "debug"


def test_a_line_of_text_is_one_line() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs._Text())
    logger = logging.Logger("qserve.test")
    logger.addHandler(handler)
    logs.event(logger, "a\nb", plain="x-1", odd="two words\n", missing=None)
    assert stream.getvalue().endswith('INFO qserve.test: a\\nb plain=x-1 odd="two words\\n"\n')


@pytest.mark.parametrize(("log_format", "level"), [("xml", "info"), ("json", "loud")])
def test_an_unknown_format_or_level_is_refused(log_format: str, level: str) -> None:
    with pytest.raises(UsageError, match="must be one of"):
        logs.start(log_format, level, print)


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "SECRET", "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": ["SECRET"], "stop": ["SECRET"], "stream": True}),
    ("/v1/completions", {"prompt": "a", "guided_regex": "SECRET"}),
    ("/v1/completions", {"prompt": "a", "guided_regex": "(SECRET"}),
    ("/v1/completions", {"prompt": "a", "guided_grammar": "start: SECRET"}),
    ("/v1/completions", {"prompt": "a", "SECRET": 1}),
    ("/v1/completions", {"prompt": "SECRET", "temperature": -1}),
    ("/v1/completions", {"prompt": "SECRET " * 1000}),
    ("/v1/completions", {"prompt": "a", "model": "SECRET"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "SECRET"}], "user": "SECRET"}),
    ("/v1/chat/completions", {"messages": [{"role": "SECRET", "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "SECRET"}], "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "refuse me"}], "user": "SECRET"}),
    ("/v1/responses", {"input": "SECRET", "instructions": "SECRET"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "SECRET"}], "system": "SECRET", "max_tokens": 8}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "SECRET"}]}], "max_tokens": 8}),
    ("/v1/embeddings", {"input": "SECRET"}),
    ("/v1/rerank", {"query": "SECRET", "documents": ["SECRET"], "pooling": "last"}),
    ("/classify", {"input": "SECRET"}),
    ("/tokenize", {"prompt": "SECRET"}),
    ("/v1/SECRET?key=SECRET", {}),
]


def test_even_at_debug_nothing_tells_prompts_outputs_or_keys(
    logged: ServerHandle, log: Log, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", logging.DEBUG)  # other packages too
    for client in ("httpx", "httpcore"):
        monkeypatch.setattr(logging.getLogger(client), "level", logging.CRITICAL)
    outputs = []
    for path, body in ROUTES:
        limit = {"max_tokens": 8} if "completions" in path else {"max_output_tokens": 16} if "responses" in path else {}
        url = logged.url.removesuffix("/v1") + path
        response = httpx.post(url, json=body | limit, headers=HEADERS, timeout=60)
        log.of(response)
        if response.is_success and not body.get("stream"):
            outputs += [choice["text"] for choice in response.json().get("choices", ()) if "text" in choice]
    for header in ({"Authorization": "Bearer SECRET"}, {"X-Secret": "SECRET", "Cookie": "SECRET"}):
        log.of(httpx.post(f"{logged.url}/completions", json={"prompt": "a"}, headers=header))

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("a kernel broke")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", broken)
        failed = httpx.post(f"{logged.url}/completions", json={"prompt": "SECRET"}, headers=HEADERS, timeout=60)
        assert failed.status_code == 500 and log.of(failed)["level"] == "error"
    text = log.text()
    assert "a kernel broke" in text, "a failure is told"
    assert "SECRET" not in text and KEY not in text
    assert not any(len(output) > 3 and json.dumps(output)[1:-1] in text for output in outputs)
