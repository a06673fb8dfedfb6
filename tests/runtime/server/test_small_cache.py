"""A KV cache of 50 blocks under more load than fits: all of it ends, and its tokens are those of a large cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.serve import ServerHandle

BLOCKS, PROMPT, OUTPUT, REQUESTS = 50, 40, 120, 24


def made(path: Path, memory: int) -> Engine:
    return Engine(str(path), EngineConfig(max_model_len=256, max_num_seqs=16, kv_cache_memory=memory, threads=2))


def body(number: int) -> dict[str, Any]:
    chosen = {"temperature": 0.0} if number % 3 else {"temperature": 1.0, "seed": number}
    prompt = [3 + (number * 7 + place) % 250 for place in range(PROMPT)]
    return {"prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "logprobs": 1, **chosen}


def ask_all(engine: Engine, *, leave: bool) -> list[Any]:
    """The choices of all requests, sent at once; where some ``leave``, others are streams that are left early."""
    with ServerHandle(engine) as server, httpx.Client(base_url=server.url, timeout=120) as client:

        def ask(number: int) -> Any:
            if number < 0:
                with client.stream("POST", "/completions", json=body(number) | {"stream": True, "n": 3}) as stream:
                    return next(stream.iter_lines())
            answer = client.post("/completions", json=body(number))
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"]

        numbers = [*range(REQUESTS), *(range(-8, 0) if leave else ())]
        with ThreadPoolExecutor(len(numbers)) as pool:
            choices = list(pool.map(ask, numbers))[:REQUESTS]
    engine.check()
    assert engine.stats().kv_blocks_used == engine.stats().num_running == engine.stats().num_waiting == 0
    return choices


def test_a_50_block_cache(tiny_model: Path) -> None:
    large = made(tiny_model, 16 << 20)
    expected = ask_all(large, leave=False)
    assert large.stats().num_preemptions == 0
    assert all(len(choice["logprobs"]["tokens"]) == OUTPUT for (choice,) in expected)
    small = made(tiny_model, BLOCKS * large.memory.kv_cache // large.memory.num_blocks)
    assert small.stats().kv_blocks_total == BLOCKS
    assert ask_all(small, leave=True) == expected
    assert small.stats().num_preemptions > 0


def test_prompts_that_can_never_wait_together_are_refused_for_good(tiny_model: Path) -> None:
    """Not with a 503, with which a client comes again and again."""
    engine = Engine(str(tiny_model), EngineConfig(max_model_len=256, max_waiting_tokens=100, kv_cache_memory=16 << 20))
    with ServerHandle(engine) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for path, field, more in (("/embeddings", "input", {}), ("/completions", "prompt", {"max_tokens": 1})):
            refused = client.post(path, json={field: [[5] * 60] * 2} | more)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, field)
            assert "120 tokens" in error["message"] and "the 100 that may wait" in error["message"]
            assert client.post(path, json={field: [[5] * 50] * 2} | more).status_code == 200
            assert client.post(path, json={field: [[5] * 200]} | more).status_code == 200, "one of any length may wait"
        answer = client.post("/completions", json={"prompt": [5] * 200, "n": 3, "max_tokens": 1})
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 3, "its choices share it"
    engine.check()
