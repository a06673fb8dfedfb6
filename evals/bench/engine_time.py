"""The engine's own time per step, by part: the real engine on a model that computes nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from qserve.checkpoint.source import ModelSource
from qserve.evals.report import Metric, Report, Section
from qserve.kernels.ops import BLOCK_SIZE
from qserve.runtime.backend import CacheDescription, Limits, LoadedModel
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.memory import MemoryPlan
from qserve.runtime.runner import PromptSink, StepOutput
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.step_arrays import StepArrays
from qserve.runtime.step_in_flight import StepInFlight
from qserve.runtime.step_plan import StepPlan

PARTS = ("schedule", "arrays", "sample", "commit", "text", "stats", "rest")
_PREFILL_TOKENS = 1 << 16


@dataclass(frozen=True)
class EngineTime:
    """Seconds of a step in which all requests decode. ``parts`` are medians over the repeats of the mean step, one for
    each of ``PARTS``; ``slowest`` is the longest single step. ``submit`` and ``abort`` are of one request."""

    requests: int
    context: int
    steps: int
    parts: dict[str, float]
    step: float
    slowest: float
    submit: float
    abort: float


class _NoModel:
    """Makes the arrays of each step, and answers with the same logits for every row."""

    def __init__(self, vocab_size: int, rows: int) -> None:
        self.arrays = StepArrays()
        row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)) * 3
        self._logits = row.expand(rows, -1)
        self._greedy = row.argmax().int().expand(rows)

    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        self.arrays.describe(plan, {})
        rows = plan.rows
        return StepOutput(rows, self._logits[: len(rows)], self._greedy[: len(rows)])


class _NoBackend:
    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def plan(self, source: ModelSource, config: EngineConfig) -> MemoryPlan:
        rows = config.max_num_seqs
        return MemoryPlan(0, 0, 0, 0, rows * -(-self._tokens // BLOCK_SIZE) + 2 * rows, self._tokens)

    def load(
        self, source: ModelSource, config: EngineConfig, progress: Any = None, planned: Any = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> LoadedModel:  # fmt: skip
        rows, size, memory = config.max_num_seqs, int(source.config["vocab_size"]), self.plan(source, config)
        return LoadedModel(
            _NoModel(size, rows),
            CacheDescription(memory.num_blocks, BLOCK_SIZE),
            Limits(size, 1, self._tokens, max(_PREFILL_TOKENS, rows), rows),
            memory,
            "no model",
        )


def measure(
    source: ModelSource, requests: int, context: int, steps: int, repeats: int, options: dict[str, Any] | None = None
) -> EngineTime:
    """Time ``repeats`` times ``steps`` steps of ``requests`` that decode behind ``context`` tokens. ``options``: fields
    of their ``SamplingParams``. The contexts differ by up to a block, so that tables do not all grow in one step."""
    total = context + repeats * steps + 8
    config = EngineConfig(max_num_seqs=requests, max_waiting=requests, max_waiting_tokens=requests * total)
    engine = Engine(source, config, backend=_NoBackend(total))
    params = SamplingParams(
        **{"max_tokens": repeats * steps + 8, "temperature": 0.0, "ignore_eos": True, **(options or {})}
    )
    prompts = [
        [(7 * index + 31 * position) % engine.vocab_size for position in range(max(1, context - index % BLOCK_SIZE))]
        for index in range(requests)
    ]
    begin = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, params, cache_salt=str(index))
    submit = (time.perf_counter() - begin) / requests
    del prompts  # else the garbage collector visits their tokens
    gc.collect()
    gc.freeze()  # as a server does when it is ready
    while any(not request.is_decoding for request in (*engine.scheduler.running(), *engine.scheduler.waiting())):
        engine.step()
    found: list[dict[str, float]] = []
    slowest = 0.0
    for _ in range(repeats):
        with _timed(engine) as spent:
            for _ in range(steps):
                begin = time.perf_counter()
                engine.step()
                engine.stats()  # as the engine's loop does
                slowest = max(slowest, time.perf_counter() - begin)
                spent["step"] = spent.get("step", 0.0) + time.perf_counter() - begin
        spent["rest"] = spent["step"] - sum(spent.get(part, 0.0) for part in PARTS)
        found.append({part: spent.get(part, 0.0) / steps for part in (*PARTS, "step")})
    begin = time.perf_counter()
    for index in range(requests):
        engine.abort(str(index))
    abort = (time.perf_counter() - begin) / requests
    gc.unfreeze()
    parts = {part: median(each[part] for each in found) for part in (*PARTS, "step")}
    step = parts.pop("step")
    return EngineTime(requests, context, steps, parts, step, slowest, submit, abort)


@contextmanager
def _timed(engine: Engine) -> Iterator[dict[str, float]]:
    """In this context the calls of an engine's parts are timed, in seconds by part."""
    assert isinstance(engine.runner, _NoModel)
    spent: dict[str, float] = {}
    places: list[tuple[Any, str, str]] = [
        (engine.scheduler, "schedule", "schedule"),
        (engine.runner.arrays, "describe", "arrays"),
        (StepInFlight, "land", "sample"),
        (engine.scheduler, "commit", "commit"),
        (engine, "_advance", "text"),
        (engine, "stats", "stats"),
    ]
    originals = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, part), original in zip(places, originals):
        setattr(owner, name, _counted(original, part, spent))
    try:
        yield spent
    finally:
        for (owner, name, _), original in zip(places, originals):
            setattr(owner, name, original)


def _counted(call: Callable[..., Any], part: str, spent: dict[str, float]) -> Callable[..., Any]:
    def counted(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            spent[part] = spent.get(part, 0.0) + time.perf_counter() - begin

    return counted


def report(name: str, found: list[EngineTime], command: str) -> Report:
    """A row for each load, in milliseconds."""
    header = ("requests", "context", *PARTS, "step", "slowest step", "submit", "abort")
    rows = [
        (
            f"{each.requests:,}", f"{each.context:,}",
            *(f"{1e3 * seconds:.3f}" for seconds in (*each.parts.values(), each.step, each.slowest)),
            f"{1e3 * each.submit:.3f}", f"{1e3 * each.abort:.3f}",
        )
        for each in found
    ]  # fmt: skip
    section = Section("Milliseconds of a step without the model, by part", header, tuple(rows))
    metrics = tuple(
        Metric(f"engine_step/{each.requests}x{each.context}", each.step, "s", "lower") for each in found
    )
    data = {"loads": [asdict(each) for each in found]}
    return Report("engine_time", f"The engine without a model, tokenizer of {name}", command, data, (section,),
                  metrics=metrics)
