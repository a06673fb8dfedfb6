"""Processes that the fleet keeps itself: started on demand, ended when idle, started again when they die. The servers
are small programs, which start in a moment."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from qserve.runtime.fleet import ingress, local_model
from qserve.runtime.fleet.local_model import LocalModel
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.limits.keys import add_key

from .conftest import RouterHandle, routed

SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingUnixStreamServer

name, path, slow = sys.argv[1:4]

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", len(body))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        data = [{"id": name, "caller": "alice", "tokens": 0}]
        page = {"status": "ready", "data": data, "since": 1.0, "kv": {"total": 9, "block_size": 16}}
        self.answer(json.dumps(page).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == "die":
            os._exit(7)
        if body["prompt"] == "die later":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", 1000)
            self.end_headers()
            self.wfile.write(b"data: 1\\n\\n")
            time.sleep(0.2)
            os._exit(7)
        time.sleep(body.get("seconds", 0))
        if body.get("stream"):
            self.answer(b"data: %d\\n\\ndata: [DONE]\\n\\n" % os.getpid(), "text/event-stream")
        else:
            self.answer(json.dumps({"model": name, "pid": os.getpid()}).encode())

    def log_message(self, *_):
        pass

time.sleep(float(slow))
with ThreadingUnixStreamServer(path, Handler) as server:
    server.daemon_threads = True
    server.serve_forever()
"""


@pytest.fixture
def kept(tmp_path: Path) -> Callable[..., LocalModel]:
    (tmp_path / "server.py").write_text(SERVER)

    def made(name: str, slow: float = 0.0, unload_after: float | None = None) -> LocalModel:
        path = tmp_path / f"{name}.sock"
        return LocalModel(
            name, [sys.executable, "-S", str(tmp_path / "server.py"), name, str(path), str(slow)], path, unload_after
        )

    return made


def ask(router: RouterHandle, prompt: str = "x", **fields: Any) -> tuple[int, bytes]:
    body = json.dumps({"prompt": prompt, **fields}).encode()
    request = urllib.request.Request(f"{router.url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def states(router: RouterHandle) -> dict[str, str]:
    return {name: replica.state for replica in router.fleet.replicas.values() for name in replica.models}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_model_chooses_the_process_and_the_first_is_for_those_that_name_none(kept: Any) -> None:
    with routed([], local=[kept("a"), kept("b")]) as router:
        assert [json.loads(ask(router, **of)[1])["model"] for of in ({"model": "b"}, {"model": "a"}, {})] == list("baa")
        status, error = ask(router, model="c")
        assert status == 404 and json.loads(error)["error"]["code"] == "model_not_found"
        with urllib.request.urlopen(f"{router.url}/v1/models") as answer:
            assert [entry["id"] for entry in json.load(answer)["data"]] == ["a", "b"]


def test_an_idle_model_is_unloaded_and_the_next_request_waits_for_it(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "HEARTBEAT_SECONDS", 0.05)
    idle, pinned = kept("idle", 0.3, 0.5), kept("pinned")
    with routed([], local=[idle, pinned]) as router:
        first = json.loads(ask(router, model="pinned")[1])["pid"]
        process = json.loads(ask(router, model="idle", seconds=1)[1])["pid"]  # a long request is not idle
        until(lambda: states(router) == {"idle": "unloaded", "pinned": "ready"})
        until(lambda: not psutil.pid_exists(process))
        assert urllib.request.urlopen(f"{router.url}/ready").status == 200
        status, stream = ask(router, model="idle", stream=True)
        assert status == 200 and stream.startswith(b": waiting\n\n: waiting\n\n") and b"[DONE]" in stream
        until(lambda: states(router)["idle"] == "unloaded")
        assert ask(router, model="idle")[0] == 200  # without a stream there is nothing to beat in
        assert json.loads(ask(router, model="pinned")[1])["pid"] == first
    assert (idle.starts, pinned.starts) == (3, 1) and not psutil.pid_exists(first)


def test_a_process_that_dies_is_started_again_and_unseen_requests_are_answered(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_model, "BACKOFF", 0.1)
    model = kept("m")
    with routed([], local=[model]) as router:
        process = json.loads(ask(router)[1])["pid"]
        os.kill(process, signal.SIGKILL)
        status, answer = ask(router)
        assert status == 200 and json.loads(answer)["pid"] != process
        status, stream = ask(router, "die later", stream=True)
        assert status == 200 and stream.startswith(b"data: 1\n\n") and b"replica_lost" in stream
        status, error = ask(router, "die")  # a request that kills every process is not tried for ever
        assert status == 502 and json.loads(error)["error"]["code"] == "replica_lost"
        assert ask(router)[0] == 200
    assert model.starts in (4, 5)  # a process that is just ending may be the first that "die" ends with


def test_a_model_that_cannot_be_loaded_says_why_and_is_tried_again_later(
    kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_model, "BACKOFF", 0.3)
    broken = LocalModel("broken", [sys.executable, "-S", "-c", "raise SystemExit('no such shard')"], tmp_path / "s")
    missing = LocalModel("missing", [str(tmp_path / "nothing")], tmp_path / "t")
    with routed([], local=[broken, missing, kept("m")]) as router:
        for name, reason in (("broken", "no such shard"), ("missing", "No such file")):
            status, answer = ask(router, model=name)
            error = json.loads(answer)["error"]
            assert status == 503 and error["code"] == "model_failed" and reason in error["message"]
        assert ask(router, model="m")[0] == 200
        until(lambda: broken.starts > 2)


def test_a_key_counts_over_all_models_once(kept: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    key = add_key("alice", keys)
    keys.write_text(keys.read_text() + "max_requests = 1\n")
    with routed([], ServerConfig(api_keys_file=keys), local=[kept("a"), kept("b", 0.0, 0.5)]) as router:
        until(lambda: states(router)["b"] == "unloaded")

        def call(model: str, seconds: float) -> int:
            request = urllib.request.Request(
                f"{router.url}/v1/completions",
                json.dumps({"prompt": "x", "model": model, "seconds": seconds}).encode(),
                {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
            )
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(call, "b", 0.5)  # waits for its model first
            until(lambda: states(router)["b"] != "unloaded")
            assert call("a", 0) == 429 and running.result() == 200
        assert call("a", 0) == 200


def test_batches_go_to_the_models_they_name_and_wait_for_them(kept: Any, tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"{model}{i}", "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": ""}}
        for i in range(8)
        for model in ("a", "b")
    ]
    config = ServerConfig(batch_dir=tmp_path / "batches")
    with routed([], config, local=[kept("a"), kept("b", 0.2, 0.3)]) as router:
        until(lambda: states(router)["b"] == "unloaded")
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        until(lambda: client.batches.retrieve(made.id).status == "completed")
        output = client.batches.retrieve(made.id).output_file_id
        assert output is not None
        answers = [json.loads(text) for text in client.files.content(output).text.splitlines()]
        assert {each["custom_id"]: each["response"]["body"]["model"] for each in answers} == {
            line["custom_id"]: line["body"]["model"] for line in lines
        }
