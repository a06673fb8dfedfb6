"""An engine in a process of its own: the same tokens, its errors here, and its end noticed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from qserve.checkpoint.errors import QServeError
from qserve.checkpoint.source import open_model
from qserve.runtime.client.codec import decode, encode
from qserve.runtime.client.engine_client import EngineClient
from qserve.runtime.client.failures import EngineFailure
from qserve.runtime.client.messages import Submit
from qserve.runtime.client.process_host import ProcessHost
from qserve.runtime.config import EngineConfig
from qserve.runtime.constraint import Constraint
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams

CONFIG = EngineConfig(max_model_len=256, kv_cache_memory=16 << 20)
PARAMS = SamplingParams(n=2, max_tokens=12, seed=7, ignore_eos=True, logprobs=1, stop=("zz", "\n\0"))


def test_a_process_gives_the_same_tokens_and_its_end_is_a_failure(tiny_model: Path) -> None:
    source = open_model(str(tiny_model))
    expected: dict[int, list[int]] = {0: [], 1: []}
    for output in Engine(source, CONFIG).generate([[5, 6, 7]], [PARAMS]):
        expected[output.index] += output.token_ids
    client = EngineClient(ProcessHost(source, CONFIG))
    client.start()

    async def ask() -> None:
        found: dict[int, list[int]] = {0: [], 1: []}
        async for choice, output in await client.submit([[5, 6, 7]], PARAMS):
            found[choice] += output.token_ids
            assert output.logprobs and len(output.logprobs[0].top) == 1
        assert found == expected
        long = await client.submit([[5, 6, 7]], SamplingParams(max_tokens=240, ignore_eos=True))
        client.host._process.kill()  # type: ignore[attr-defined]
        with pytest.raises(EngineFailure):
            async for _ in long:
                pass

    asyncio.run(ask())
    assert not client.alive and client.failure
    client.stop()


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_one_line(tiny_model: Path) -> None:
    with pytest.raises(QServeError, match="kv-cache-memory"):
        ProcessHost(open_model(str(tiny_model)), EngineConfig(max_model_len=256, kv_cache_memory=1))


def test_a_command_is_a_line_that_comes_back_equal() -> None:
    constraint = Constraint("regex", "a\nb", "guided_regex")
    params = SamplingParams(logit_bias={"5": 1.5}, seed=2**62, visible_tokens=(3,), constraint=constraint)
    command = Submit(["r0"], [[1, 2]], params, grammar="start: /x/", weight=0.5)
    line = encode(command)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and decode(line) == command
