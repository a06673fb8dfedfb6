"""A fleet on Ray Serve: canaries, kills, an update, scaling to zero, and its end.

It runs in an environment of its own, which ``tests/environments.py fleet DIR`` makes: Ray brings packages that the
others must do without. The tests share one fleet of three models, and go from what changes little to its end.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from qserve.evals.bench.client import Client

from .ray_fleet import ROOT, TOKEN, FleetProcess, environment

pytestmark = pytest.mark.fleet

FLEET = """
port = {port}

[models.a]
model = "{model}"
replicas = 2
version = "{version}"
kv_transfer = true
options = ["--kv-cache-memory", "64MiB", "--max-num-seqs", "16", "--kv-offload-memory", "64MiB"]

[models.b]
model = "{model}"
options = ["--kv-cache-memory", "64MiB"]

[models.idle]
model = "{model}"
min_replicas = 0
max_replicas = 2
spare_replicas = 1
cooldown = 4
interval = 1
options = ["--kv-cache-memory", "64MiB"]

[aliases.chat]
a = 80
b = 20
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[FleetProcess]:
    running = FleetProcess(tmp_path_factory.mktemp("fleet"), FLEET, model=tiny_model)
    try:
        yield running
    finally:
        running.kill()


def test_a_canary_gets_its_share_and_sessions_stay(fleet: FleetProcess) -> None:
    body = {"model": "chat", "prompt": "x", "max_tokens": 1}
    seen = Counter(fleet.ask("/v1/completions", body, **{"X-Session-Id": f"s{i}"})["model"] for i in range(200))
    assert seen.keys() == {"a", "b"} and 20 <= seen["b"] <= 62, seen  # 40 expected, four standard deviations around
    again = {fleet.ask("/v1/completions", body, **{"X-Session-Id": "s1"})["model"] for _ in range(5)}
    assert len(again) == 1
    assert {each["id"] for each in fleet.ask("/v1/models")["data"]} == {"a", "b", "idle", "chat"}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fleet.ask("/v1/completions", body | {"model": "z"})


def test_replicas_fetch_prompts_from_each_other(fleet: FleetProcess) -> None:
    body = {"model": "a", "prompt": [5 + 3 * i % 90 for i in range(200)], "max_tokens": 4, "temperature": 0}
    answers = []
    for replica in fleet.replicas("a"):  # held back, so that the other one answers
        fleet.ask("/v1/replicas/drain", {"replica": replica})
        answers.append(fleet.ask("/v1/completions", body))
        fleet.ask("/v1/replicas/resume", {"replica": replica})
    first, second = answers
    assert first["choices"] == second["choices"]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    assert cached == [0, 192], "the second had all full blocks from the first"


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


@pytest.mark.timeout(600)
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
            fleet.until(done, 240, "two replicas of the new version")
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


def test_a_spare_replica_comes_with_load_and_goes_with_it(fleet: FleetProcess) -> None:
    def found() -> int:
        fleet.ask("/v1/completions", {"model": "idle", "prompt": "x", "max_tokens": 64, "ignore_eos": True})
        return len(fleet.replicas("idle"))

    fleet.until(lambda: found() == 2, 60, "a second replica, though one request at a time needs one")
    fleet.until(lambda: not fleet.servers("idle"), 60, "the idle model has no server")


def test_the_metrics_name_replicas_that_are_there(fleet: FleetProcess) -> None:
    def same() -> bool:
        with urllib.request.urlopen(f"{fleet.url}/metrics") as answer:
            page = answer.read().decode()
        named = set(re.findall(r'router_requests_total\{replica="([^"]+)"\}', page))
        return named == {each["id"] for each in fleet.ask("/v1/replicas")["data"]}

    fleet.until(same, 30, "other replicas than there are")  # the one before may leave between the two questions


def test_a_signal_ends_the_fleet_with_its_last_request(fleet: FleetProcess) -> None:
    children = psutil.Process(fleet.process.pid).children(recursive=True)
    answers = asyncio.run(fleet.streams("a", 8, 300, fleet.process.terminate))
    assert {answer.end for answer in answers} == {"done"}, Counter(answer.end for answer in answers)
    assert fleet.process.wait(90) == 0, "".join(fleet.lines)
    _, alive = psutil.wait_procs(children, 10)
    assert not alive, [each.cmdline() for each in alive]


def test_a_model_that_does_not_load_is_one_line(fleet: FleetProcess, tmp_path: Path) -> None:
    done = subprocess.run(
        [environment() / "bin/python", "-m", "qserve", "fleet", "--model", str(tmp_path), "--port", "8"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN": TOKEN},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and "config.json" in done.stderr.splitlines()[-1], done.stderr


