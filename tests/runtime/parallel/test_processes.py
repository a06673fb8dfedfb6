"""Ranks as processes: the same answers, and an end of any of them is the end of all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from qserve.checkpoint.errors import QServeError, UsageError
from qserve.kernels import native
from qserve.kernels.ranks import RankLost
from qserve.runtime.client.engine_client import EngineClient
from qserve.runtime.client.thread_host import ThreadHost
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.parallel.rank_orders import CopyBlock
from qserve.runtime.sampling import SamplingParams
from tests.runtime.test_delta_net import save_hybrid
from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

CONFIG = {"max_model_len": 256, "kv_cache_memory": 4 << 20, "threads": 1}
PROMPTS: list[str | list[int]] = [[5, 6, 7] * 20, [5, 6, 7] * 20 + [9], [11, 12]]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=12, seed=3, n=2, logprobs=1),
    SamplingParams(max_tokens=8, temperature=0.0, use_beam_search=True, n=2, ignore_eos=True),
]


def answers(engine: Engine) -> list[object]:
    """All that a caller sees, logits to the last bit among it; twice, the second time from the prefix cache."""
    found = []
    for _ in range(2):
        outputs = [
            (each.request_id, each.index, each.token_ids, each.text, each.logprobs, each.prompt_logprobs)
            for each in engine.generate(list(PROMPTS), list(PARAMS))
        ]
        found.append(sorted(outputs, key=lambda each: each[:2]))
        engine.check()
    return found


def children_end(pids: list[int], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def parallel(tiny_packed: Path) -> Iterator[Engine]:
    engine = Engine(str(tiny_packed), EngineConfig(**CONFIG, tensor_parallel_size=2))  # type: ignore[arg-type]
    yield engine
    engine.close()


def test_answers_are_those_of_one_rank(tiny_packed: Path, parallel: Engine) -> None:
    one = Engine(str(tiny_packed), EngineConfig(**CONFIG))  # type: ignore[arg-type]
    assert answers(parallel) == answers(one)
    assert any("2 ranks" in note for note in parallel.notes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_a_hybrid_keeps_its_states_on_every_rank(tiny_model: Path, tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Choices, beams and prompts that begin alike go on from copies of states; so does what was preempted."""
    save_hybrid(tiny_model, tmp_path, "qwen3_5")
    config = {**CONFIG, "max_num_seqs": 6, "kv_cache_memory": 160 << 10}
    ranks = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes))
    one = Engine(str(tmp_path), EngineConfig(**config))  # type: ignore[arg-type]
    several = Engine(str(tmp_path), EngineConfig(**config, **ranks))  # type: ignore[arg-type]
    try:
        assert answers(several) == answers(one)
        long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        prompts: list[str | list[int]] = [[7 + number] * 90 for number in range(6)]
        found = [[each.token_ids for each in engine.generate(prompts, [long] * 6)] for engine in (one, several)]
        assert found[0] == found[1] and several.stats().num_preemptions > 0
        assert several.stats().prefix_hits == one.stats().prefix_hits > 0
    finally:
        several.close()


def test_a_rank_that_cannot_do_what_it_is_asked_ends_the_engine(tiny_packed: Path) -> None:
    engine = Engine(str(tiny_packed), EngineConfig(**CONFIG, tensor_parallel_size=2))  # type: ignore[arg-type]
    assert engine._ranks is not None
    pids, order = engine._ranks.pids, CopyBlock(0, 10**6)
    for _ in range(2):
        with pytest.raises(RankLost, match=r"^rank 1 of the model failed: IndexError: .*"):
            engine._ranks.ask(order)
    assert engine.failure is not None
    engine.close()
    assert children_end(pids)


def test_a_rank_that_dies_ends_the_engine_with_one_line(parallel: Engine) -> None:
    """Last, for it uses up the engine."""
    assert parallel._ranks is not None
    pids = parallel._ranks.pids
    parallel.submit("a", [5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
    parallel.step()
    began = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(RankLost, match=r"^rank 1 of the model was ended by SIGKILL$"):
        while True:
            parallel.step()
    client = EngineClient(ThreadHost(parallel))
    client.start()  # it has nothing to do, and ends all the same
    while client.alive and time.monotonic() < began + 5:
        time.sleep(0.05)
    assert client.failure == "rank 1 of the model was ended by SIGKILL" and not client.alive
    assert children_end(pids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernels": "reference"}, "not served by the reference kernels: choose --kernels native"),
        ({"tensor_parallel_size": 5}, "has 4 attention heads"),
        ({"backend": "transformers"}, "--tensor-parallel-size 2 is served by the native backend alone"),
        ({"cpu_list": (0, 1, 2)}, "--cpu-list names 3 CPUs"),
    ],
)
def test_what_ranks_do_not_serve_is_refused_at_once(tiny_model: Path, changes: dict[str, object], words: str) -> None:
    options = {**CONFIG, "tensor_parallel_size": 2, "threads": None, **changes}
    with pytest.raises((UsageError, QServeError), match=words):
        Engine(str(tiny_model), EngineConfig(**options))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "end"),
    [("-tp", "drain"), ("-tp", "kill the engine"), ("-tp", "kill another"), ("-pp", "drain"), ("-pp", "kill another")],
)
def test_a_server_takes_its_ranks_along(tmp_path: Path, option: str, end: str) -> None:
    log, model = tmp_path / "log", save_tiny_model(tmp_path / "model", layers=3)
    with log.open("wb") as out:
        command = [sys.executable, "-m", "qserve", "run", str(model), "--port", "0", option, "3", "--threads", "1"]
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 90
        while b"serving" not in log.read_bytes():
            assert server.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        ranks = [each for each in psutil.Process(server.pid).children() if "rank_process" in " ".join(each.cmdline())]
        pids = [each.pid for each in ranks]
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGTERM)  # as a service manager does that ends the whole group
        time.sleep(0.3)
        assert server.poll() is None
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+", log.read_text())[:1]
        asked = {"prompt": [5, 6, 7], "max_tokens": 3, "model": "model", "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=asked)
        assert answer.json()["usage"]["completion_tokens"] == 3
        idle = re.findall(r'qserve:pipeline_idle_ratio\{.*stage="(\d)"\} 0\.\d+', httpx.get(f"{url}/metrics").text)
        assert idle == (["0", "1", "2"] if option == "-pp" else [])
        if end == "drain":
            server.terminate()
            assert server.wait(15) == 0
        elif end == "kill the engine":
            server.kill()
        else:
            os.kill(pids[1], signal.SIGKILL)
            assert server.wait(8) == 1
            last = log.read_text().strip().splitlines()[-1]
            rank = 2 if option == "-tp" else 1  # the engine has the first shard, or the last stage
            assert last == f"error: rank {rank} of the model was ended by SIGKILL", log.read_text()
        assert children_end(pids)
        assert "Traceback" not in log.read_text()
    finally:
        server.kill()
        server.wait()
