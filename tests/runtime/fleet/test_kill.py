"""kill -9 of a replica under 64 streams: what had no first byte succeeds elsewhere, the rest ends with an error."""

from __future__ import annotations

import asyncio
import signal
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
        await asyncio.sleep(1.5)
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
