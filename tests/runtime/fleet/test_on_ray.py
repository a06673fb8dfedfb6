"""A fleet on Ray Serve: canaries, kills, an update, scaling to zero, and its end.

It runs in an environment of its own, which ``tests/environments.py fleet DIR`` makes: Ray brings packages that the
others must do without. The tests share one fleet of three models, and go from what changes little to its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from qserve.evals.bench.client import Client
from qserve.runtime.server.http.listening import claim_socket

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[3]
VARIABLE = "QSERVE_FLEET"
TOKEN = secrets.token_hex(32)  # else Ray leaves one in the home directory
FLEET = """
port = {port}

[models.a]
model = "{model}"
replicas = 2
version = "{version}"
options = ["--kv-cache-memory", "64MiB", "--max-num-seqs", "16"]

[models.b]
model = "{model}"
options = ["--kv-cache-memory", "64MiB"]

[models.idle]
model = "{model}"
min_replicas = 0
max_replicas = 1
cooldown = 4
interval = 1
options = ["--kv-cache-memory", "64MiB"]

[aliases.chat]
a = 80
b = 20
"""


class FleetProcess:
    """``qserve fleet FILE`` and what its processes do."""

    def __init__(self, python: Path, folder: Path, model: Path) -> None:
        with claim_socket("127.0.0.1", 0) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.file, self._model = folder / "fleet.toml", model
        self.write("1")
        variables = {"PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [python, "-m", "qserve", "fleet", str(self.file)],
            env=os.environ | variables, cwd=folder, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.until(lambda: any("the fleet serves" in line for line in self.lines), 150, "it starts")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def write(self, version: str) -> None:
        self.file.write_text(FLEET.format(port=self.port, model=self._model, version=version))

    def until(self, true: Callable[[], bool], seconds: float, what: str) -> float:
        """Seconds until it is true."""
        began = time.monotonic()
        while not true():
            assert self.process.poll() is None, "".join(self.lines)
            assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}\n" + "".join(self.lines)
            time.sleep(0.1)
        return time.monotonic() - began

    def ask(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"} | headers)
        with urllib.request.urlopen(request, timeout=90) as answer:
            content: dict[str, Any] = json.load(answer)
        return content

    def replicas(self, model: str) -> list[str]:
        """Addresses of those that take requests."""
        listed = self.ask("/v1/replicas")["data"]
        return [each["id"] for each in listed if model in each["models"] and each["takes_requests"]]

    def servers(self, model: str) -> dict[int, psutil.Process]:
        """By process id."""
        found = {}
        for each in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = each.cmdline()
            except psutil.Error:
                continue
            if "--served-model-name" in line and line[line.index("--served-model-name") + 1] == model:
                found[each.pid] = each
        return found

    async def streams(self, model: str, count: int, tokens: int, meanwhile: Callable[[], None]) -> list[Any]:
        client = Client(f"{self.url}/v1", timeout=120)
        body = {"model": model, "max_tokens": tokens, "ignore_eos": True}
        asked = [
            asyncio.create_task(client.stream(body | {"prompt": f"{i} the quick brown fox"}, "completions"))
            for i in range(count)
        ]
        await asyncio.sleep(1.0)
        meanwhile()
        return await asyncio.gather(*asked)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[FleetProcess]:
    home = os.environ.get(VARIABLE)
    if not home or not (Path(home) / "ray" / "complete.json").exists():
        pytest.skip(f"{VARIABLE} names no environment: make it with tests/environments.py fleet DIR")
    running = FleetProcess(Path(home).absolute() / "ray/bin/python", tmp_path_factory.mktemp("fleet"), tiny_model)
    try:
        yield running
    finally:
        running.process.kill()  # Ray's processes and ours end with it
        running.process.wait()


def test_a_canary_gets_its_share_and_sessions_stay(fleet: FleetProcess) -> None:
    body = {"model": "chat", "prompt": "x", "max_tokens": 1}
    seen = Counter(fleet.ask("/v1/completions", body, **{"X-Session-Id": f"s{i}"})["model"] for i in range(200))
    assert seen.keys() == {"a", "b"} and 20 <= seen["b"] <= 62, seen  # 40 expected, four standard deviations around
    again = {fleet.ask("/v1/completions", body, **{"X-Session-Id": "s1"})["model"] for _ in range(5)}
    assert len(again) == 1
    assert {each["id"] for each in fleet.ask("/v1/models")["data"]} == {"a", "b", "idle", "chat"}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fleet.ask("/v1/completions", body | {"model": "z"})


def test_a_killed_server_takes_only_the_streams_that_had_begun(fleet: FleetProcess) -> None:
    before = set(fleet.replicas("a"))
    killed: list[float] = []

    def kill() -> None:
        next(iter(fleet.servers("a").values())).kill()
        killed.append(time.monotonic())

    answers = asyncio.run(fleet.streams("a", 64, 400, kill))
    ends = Counter(answer.end for answer in answers)
    assert ends.keys() <= {"done", "error"}, f"a stream hangs or breaks: {ends}"
    assert 1 <= ends["error"] <= 16 and all(each.tokens == 400 for each in answers if each.end == "done"), ends
    assert all("ended while it worked" in each.reason and each.times for each in answers if each.end == "error")
    fleet.until(lambda: len(set(fleet.replicas("a"))) == 2 and set(fleet.replicas("a")) != before, 60, "a new replica")
    print(f"\na new replica {time.monotonic() - killed[0]:.1f} s after kill -9; {dict(ends)}")


def test_a_server_ends_with_its_actor_and_another_comes(fleet: FleetProcess) -> None:
    (pid, server) = next(iter(fleet.servers("a").items()))
    before = set(fleet.replicas("a"))
    actor = server.parent()
    assert actor is not None and "Replica" in " ".join(actor.cmdline())
    actor.kill()
    fleet.until(lambda: not psutil.pid_exists(pid), 5, "the server of a killed actor ends")
    assert fleet.ask("/v1/completions", {"model": "a", "prompt": "x", "max_tokens": 1})["model"] == "a"
    fleet.until(lambda: len(fleet.replicas("a")) == 2 and set(fleet.replicas("a")) != before, 60, "a new replica")


def test_an_update_under_load_fails_no_request(fleet: FleetProcess) -> None:
    before, updated = set(fleet.replicas("a")), threading.Event()
    fleet.lines.clear()

    async def load() -> list[Any]:
        client, answers = Client(f"{fleet.url}/v1", timeout=60), list[Any]()

        async def one(number: int) -> None:
            while not updated.is_set():
                body = {"model": "a", "prompt": f"{number} fox", "max_tokens": 24, "ignore_eos": True}
                answers.append(await client.stream(body, "completions"))

        await asyncio.gather(*(one(number) for number in range(4)))
        return answers

    def update() -> None:
        try:
            fleet.write("2")
            fleet.process.send_signal(signal.SIGHUP)
            done = lambda: not before & set(fleet.replicas("a")) and len(fleet.replicas("a")) == 2  # noqa: E731
            fleet.until(done, 120, "two replicas of the new version")
            fleet.until(lambda: len(fleet.servers("a")) == 2, 60, "the old servers have ended")
        finally:
            updated.set()

    thread = threading.Thread(target=update)
    thread.start()
    answers = asyncio.run(load())
    thread.join()
    assert not before & set(fleet.replicas("a"))
    ends = Counter(answer.end for answer in answers)
    assert set(ends) == {"done"} and len(answers) > 20, ends
    assert len(fleet.replicas("b")) == 1, "a model that has not changed goes on"
    print(f"\n{len(answers)} requests during an update, all complete")


def test_an_idle_model_has_no_replica_and_who_asks_waits_for_its_start(fleet: FleetProcess) -> None:
    fleet.until(lambda: not fleet.servers("idle"), 60, "the idle model has no server")
    began = time.monotonic()
    assert fleet.ask("/v1/completions", {"model": "idle", "prompt": "x", "max_tokens": 1})["model"] == "idle"
    print(f"\na cold start of {time.monotonic() - began:.1f} s")


def test_the_metrics_name_replicas_that_are_there(fleet: FleetProcess) -> None:
    with urllib.request.urlopen(f"{fleet.url}/metrics") as answer:
        page = answer.read().decode()
    named = set(re.findall(r'router_requests_total\{replica="([^"]+)"\}', page))
    assert named == {each["id"] for each in fleet.ask("/v1/replicas")["data"]}


def test_a_signal_ends_the_fleet_with_its_last_request(fleet: FleetProcess) -> None:
    children = psutil.Process(fleet.process.pid).children(recursive=True)
    answers = asyncio.run(fleet.streams("a", 8, 300, fleet.process.terminate))
    assert {answer.end for answer in answers} == {"done"}, Counter(answer.end for answer in answers)
    assert fleet.process.wait(90) == 0, "".join(fleet.lines)
    _, alive = psutil.wait_procs(children, 10)
    assert not alive, [each.cmdline() for each in alive]


def test_a_model_that_does_not_load_is_one_line(fleet: FleetProcess, tmp_path: Path) -> None:
    home = Path(os.environ[VARIABLE]).absolute()
    done = subprocess.run(
        [home / "ray/bin/python", "-m", "qserve", "fleet", "--model", str(tmp_path), "--port", "8"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN": TOKEN},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and "config.json" in done.stderr.splitlines()[-1], done.stderr


