"""``OfflineProcess``: an ``LLM`` in a process of its own, which says how much of the processor its answers took."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import psutil

from qserve.runtime.config import EngineConfig
from qserve.runtime.llm import LLM
from qserve.runtime.sampling import SamplingParams
from tests.reliability.client import Json

_SPAWN = multiprocessing.get_context("spawn")


class OfflineProcess:
    """Answers completions without a server. A context manager."""

    def __init__(self, model: str, engine: EngineConfig) -> None:
        self._control, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_answer, args=(model, engine, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._control.recv()  # it is loaded

    def run(self, bodies: list[Json]) -> tuple[float, int]:
        """Processor seconds and output tokens of all of these completions, given at once."""
        self._control.send(bodies)
        seconds, tokens = self._control.recv()
        return float(seconds), int(tokens)

    def __enter__(self) -> OfflineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _answer(model: str, engine: EngineConfig, control: Connection) -> None:
    llm, process = LLM(model, engine), psutil.Process()
    control.send("loaded")
    while True:
        bodies = control.recv()
        each = [SamplingParams(max_tokens=body["max_tokens"], temperature=0.0, ignore_eos=True) for body in bodies]
        before = process.cpu_times()
        results = llm.generate([body["prompt"] for body in bodies], each)
        after = process.cpu_times()
        tokens = sum(len(result.outputs[0].token_ids) for result in results)
        control.send((after.user + after.system - before.user - before.system, tokens))
