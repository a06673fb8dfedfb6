"""Stages as processes: the same answers with several plans in flight, and an end of any of them is the end of all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qserve.checkpoint.errors import QServeError
from qserve.checkpoint.source import open_model
from qserve.kernels import native
from qserve.kernels.ranks import RankLost
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.speculative_config import SpeculativeConfig
from tests.runtime.parallel.test_processes import answers, children_end
from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

BLOCKS = 24
CONFIG = {"max_model_len": 256, "max_num_seqs": 8, "threads": 1, "seed": 1}
LAYERS = 5
BLOCK_BYTES = LAYERS * 2 * 2 * 16 * 16 * 2  # layers, keys and values, heads, numbers of a head, tokens, bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers at 4 bits, which three stages cannot share evenly."""
    out = tmp_path_factory.mktemp("stages")
    dense = save_tiny_model(out / "dense", layers=LAYERS)
    pipeline.run(open_model(dense), out / "w4", QuantizeJob(method="rtn", group_size=32, calibration=None))
    return out / "w4"


@pytest.fixture(scope="module")
def piped(model: Path) -> Iterator[Engine]:
    options = {**CONFIG, "kv_cache_memory": BLOCKS * BLOCK_BYTES, "pipeline_parallel_size": 3}
    engine = Engine(str(model), EngineConfig(**options))  # type: ignore[arg-type]
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(model: Path) -> Engine:
    """With room for everybody."""
    return Engine(str(model), EngineConfig(**CONFIG, kv_cache_memory=4 << 20))  # type: ignore[arg-type]


def load(engine: Engine) -> dict[str, object]:
    """Tokens and logits of requests that come while others run, more than there is room for."""
    found: dict[str, list[object]] = {}
    most = todo = 0
    while todo < 20 or engine.has_work():
        for name in range(todo, min(todo + 2, 20)):
            prompt = [(name * 31 + index * 7) % 90 + 1 for index in range(1 + name * 37 % 90)]
            params = SamplingParams(max_tokens=5 + name * 13 % 40, seed=name, logprobs=1, ignore_eos=True)
            engine.submit(str(name), prompt, params)
        todo += 2
        for output in engine.step():
            found.setdefault(output.request_id, []).append((output.token_ids, output.logprobs))
        most = max(most, engine.scheduler.num_in_flight + 1)
        engine.check()
    assert most == engine.scheduler.config.num_stages
    return {name: [each for tokens in parts for each in zip(*tokens)] for name, parts in found.items()}  # type: ignore[call-overload]


def test_answers_are_those_of_one_rank(piped: Engine, alone: Engine) -> None:
    assert piped.memory.num_blocks == BLOCKS
    assert answers(piped) == answers(alone)
    assert load(piped) == load(alone)
    assert piped.stats().num_preemptions > 0
    idle = piped.stats().pipeline_idle
    assert len(idle) == 3 and all(0 < share < 1 for share in idle) and not alone.stats().pipeline_idle
    (note,) = (note for note in piped.notes if note.startswith("pipeline parallel"))
    assert note == "pipeline parallel: stages of 2, 2, 1 layers, with 1 threads each"


def test_a_step_that_fails_leaves_an_engine_as_good_as_new(
    piped: Engine, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcd":
        piped.submit(name, [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(3):
        piped.step()
    assert piped.scheduler.num_in_flight == 2
    with monkeypatch.context() as patch:
        patch.setattr(piped.runner, "_read_out", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            piped.step()
    assert not piped.has_work()
    assert answers(piped) == answers(alone)


def test_a_rank_that_dies_ends_the_engine_with_one_line(piped: Engine) -> None:
    """Last, for it uses up the engine."""
    assert piped._ranks is not None
    pids = piped._ranks.pids
    assert len(pids) == 2
    piped.submit("a", [5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
    piped.step()
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankLost, match=r"^rank 1 of the model was ended by SIGKILL$"):
        while True:
            piped.step()
    assert time.monotonic() < began + 5 and piped.failure == "rank 1 of the model was ended by SIGKILL"
    piped.close()
    assert children_end(pids)


@pytest.mark.slow
def test_stages_of_several_shards_answer_like_one_rank_and_end_with_it(model: Path, alone: Engine) -> None:
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    engine = Engine(str(model), EngineConfig(**CONFIG, kv_cache_memory=BLOCKS * BLOCK_BYTES, **sizes))  # type: ignore[arg-type]
    try:
        assert engine.memory.num_blocks == BLOCKS and engine._ranks is not None
        (note,) = (note for note in engine.notes if note.startswith("pipeline parallel"))
        assert note == "pipeline parallel: stages of 3, 2 layers, each tensor parallel: 2 ranks, with 1 threads each"
        assert answers(engine) == answers(alone)
        assert load(engine) == load(alone)
        assert engine.stats().num_preemptions > 0 and len(engine.stats().pipeline_idle) == 2
        pids, began = engine._ranks.pids, time.monotonic()
        engine.submit("a", [5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
        engine.step()
        os.kill(pids[1], signal.SIGKILL)  # no stage waits for it but its own
        with pytest.raises(RankLost, match=r"^rank 1 of the model was ended by SIGKILL$"):
            while True:
                engine.step()
        assert time.monotonic() < began + 5
    finally:
        engine.close()
    assert len(pids) == 3 and children_end(pids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_transfer": True}, "--kv-transfer cannot be combined"),
        ({"kernels": "reference"}, "not served by the reference kernels"),
        ({"pipeline_parallel_size": 3}, "has 2 layers, and each rank needs one"),
        ({"tensor_parallel_size": 5}, "has 4 attention heads, and each rank needs one"),
        ({"backend": "transformers"}, "is served by the native backend alone"),
        ({"speculative_config": SpeculativeConfig("ngram")}, "speculative decoding cannot be combined"),
        ({"cpu_list": (0, 1, 2)}, "--cpu-list names 3 CPUs"),
        ({"cpu_list": (0, 1, 2), "tensor_parallel_size": 2}, "must be as many for each of the 4 ranks"),
        ({"pipeline_parallel_size": 0}, "--pipeline-parallel-size must be at least 1"),
    ],
)
def test_what_stages_do_not_serve_is_refused_at_once(tiny_model: Path, changes: dict[str, object], words: str) -> None:
    options = {"max_model_len": 256, "pipeline_parallel_size": 2, **changes}
    with pytest.raises(QServeError, match=f"--pipeline-parallel-size .*{words}|{words}"):
        Engine(str(tiny_model), EngineConfig(**options))  # type: ignore[arg-type]
