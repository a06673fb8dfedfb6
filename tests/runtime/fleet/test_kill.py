"""kill -9 of replicas under load: what had no first byte succeeds elsewhere, the rest ends with an error."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from qserve.evals.bench.client import Answer, Client
from qserve.evals.bench.server_process import ServerProcess
from qserve.runtime.config import EngineConfig
from qserve.runtime.server.config import ServerConfig

from .conftest import routed

STREAMS, TOKENS = 64, 400


@pytest.mark.slow
def test_a_killed_replica_takes_only_the_streams_that_had_begun(tiny_model: Path) -> None:
    engine = EngineConfig(max_model_len=512, max_num_seqs=16, kv_cache_memory=64 << 20, threads=1)

    async def streams(url: str, kill: ServerProcess) -> list[Answer]:
        client = Client(f"{url}/v1", timeout=120)
        asked = [
            asyncio.create_task(
                client.stream(
                    {"prompt": f"{i} the quick brown fox", "max_tokens": TOKENS, "ignore_eos": True}, "completions"
                )
            )
            for i in range(STREAMS)
        ]
        while not kill.state().running:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.4)  # so that some have a first token
        assert not all(each.done() for each in asked)
        kill.signal(signal.SIGKILL)
        return await asyncio.gather(*asked)

    with (
        ServerProcess(str(tiny_model), engine, ServerConfig()) as first,
        ServerProcess(str(tiny_model), engine, ServerConfig()) as second,
        routed([f"http://127.0.0.1:{each.port}" for each in (first, second)]) as router,
    ):
        answers = asyncio.run(streams(router.url, first))
        assert router.fleet.num_ready == 1
        again = asyncio.run(Client(f"{router.url}/v1").stream({"prompt": "x", "max_tokens": 2}, "completions"))
        assert again.end == "done"
        assert second.until_idle(30) < 30 and second.state().lost is None
    ends = {end: [each for each in answers if each.end == end] for end in {each.end for each in answers}}
    assert ends.keys() <= {"done", "error"}, f"a stream hangs or breaks: {ends.keys()}"
    assert all(each.tokens == TOKENS for each in ends["done"])
    assert 1 <= len(ends["error"]) <= 16, "those that ran there, and no other"
    assert all("ended while it worked" in each.reason and each.times for each in ends["error"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_that_are_killed_at_random_lose_only_what_ran_on_them(
    tiny_model: Path, pytestconfig: pytest.Config
) -> None:
    """1,500 streams, or 10,000 with ``--everything``, 24 at a time, on three replicas. At any moment one that is not
    the last is killed, and another starts at its place."""
    requests, users, slots = 10_000 if pytestconfig.getoption("--everything") else 1_500, 24, 16
    config = EngineConfig(max_model_len=256, max_num_seqs=slots, kv_cache_memory=64 << 20, threads=1)
    draw, ends, killed = random.Random(0), Counter[str](), 0

    def replica(port: int = 0) -> ServerProcess:
        return ServerProcess(str(tiny_model), config, ServerConfig(), port)

    async def use(client: Client, numbers: Iterator[int]) -> None:
        for number in numbers:
            tokens = draw.choice((1, 16, 100))
            body = {"prompt": f"{number} the quick", "max_tokens": tokens, "ignore_eos": True}
            answer = await client.stream(body, "completions")
            ends[answer.end] += 1
            if answer.end == "error":
                assert answer.times and "ended while it worked" in answer.reason, answer.reason
            else:
                assert (answer.end, answer.tokens) == ("done", tokens), answer.reason

    async def kill(replicas: list[ServerProcess]) -> None:
        nonlocal killed
        starting: dict[int, asyncio.Task[ServerProcess]] = {}
        while starting or ends.total() < requests - users:
            # Longer than a request waits: one that meets two deaths is refused, because it may be what kills.
            await asyncio.sleep(draw.uniform(2.0, 3.0))
            for place, task in [*starting.items()]:
                if task.done():
                    replicas[place] = starting.pop(place).result()
            alive = [place for place in range(len(replicas)) if place not in starting]
            if len(alive) > 1 and ends.total() < requests - users:
                place = draw.choice(alive)
                replicas[place].signal(signal.SIGKILL)
                replicas[place].wait(10)
                killed += 1
                starting[place] = asyncio.create_task(asyncio.to_thread(replica, replicas[place].port))

    async def load(url: str, replicas: list[ServerProcess]) -> None:
        client, numbers = Client(f"{url}/v1", timeout=120), iter(range(requests))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill(replicas))
            for _ in range(users):
                tasks.create_task(use(client, numbers))

    replicas = [replica() for _ in range(3)]
    try:
        with routed([f"http://127.0.0.1:{each.port}" for each in replicas]) as router:
            asyncio.run(load(router.url, replicas))
            router.until_ready(3)
            for each in replicas:
                assert each.until_idle(30) < 30 and each.state().lost is None
    finally:
        for child in multiprocessing.active_children():  # also one that was about to start
            child.kill()
    print(f"{killed} kills: {dict(ends)}")
    assert killed >= 2 and ends.total() == requests
    assert ends["error"] <= slots * killed, "those that ran there, and no other"
