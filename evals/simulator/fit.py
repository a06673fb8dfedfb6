"""``fit``: the coefficients of a ``FittedCost`` from steps of the real engine on this machine.

A small designed set of batches varies the causes of a step's cost independently: tokens, logit rows, positions that
prompts attend to, positions that decodes attend to. Least squares over relative errors, no coefficient negative.
Errors are relative to what is predicted: relative to what was measured, slow steps count less than quick ones, and the
means that a simulation needs come out too low.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from qserve.checkpoint.errors import UsageError
from qserve.evals.simulator.cost import FittedCost, StepShape, hats, shape_of
from qserve.evals.simulator.recorder import recording
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
ROUNDS = 20_000

Timed = tuple[StepShape, float]
"""The shape of a step and the seconds it took."""


def designed(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> list[tuple[int, int, int]]:
    """Batches ``(requests, prompt tokens, output tokens)``; short, long and many, within the limits of the engine."""
    budget, steps = max_num_batched_tokens, 6
    found = [(1, size, 1) for size in (8, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048) if size <= budget]
    found += [(count, 16, 2 * steps) for count in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)]
    found += [(1, 3 * budget, steps), (4, budget, steps), (16, 256, steps), (32, 128, steps), (64, 64, steps)]
    return [
        (count, min(prompt, max_model_len - output), output)
        for count, prompt, output in found
        if count <= max_num_seqs and max_model_len > output
    ]


def timed_steps(
    engine: Engine, text: Sequence[int], repeats: int = 2, progress: Callable[[int, int], None] | None = None
) -> list[Timed]:
    """Run the designed batches on an engine that serves nobody else, with prompts cut from ``text``."""
    limits = engine.scheduler.config
    batches = designed(limits.max_num_seqs, limits.max_num_batched_tokens, engine.max_model_len)
    blocks = engine.scheduler.blocks
    batches = [
        (count, prompt, output)
        for count, prompt, output in batches
        if count * (blocks.blocks_for(prompt + output) + 1) <= blocks.num_blocks
    ]
    if not batches:
        raise UsageError("the KV cache is too small to measure steps: raise --kv-cache-memory")
    _batch(engine, text, *batches[0], salt="warm")
    found: list[Timed] = []
    # Whole rounds: a slow phase of the machine then affects a part of every kind of step.
    for turn in range(repeats):
        for number, batch in enumerate(batches):
            found += _batch(engine, text, *batch, salt=f"{turn} {number}")
            if progress:
                progress(turn * len(batches) + number + 1, repeats * len(batches))
    return found


def fit(steps: Sequence[Timed], model: str = "") -> FittedCost:
    """The cost model of measured steps. Raises ``UsageError`` where there are too few."""
    sizes = sorted({shape.tokens for shape, _ in steps})
    if len(sizes) < 2 or len(steps) < 8:
        raise UsageError("too few different steps were measured to fit a cost model")
    knots = [knot for knot in KNOTS if sizes[0] < knot < sizes[-1]]
    # A knot without a step near it would have nothing to hold it.
    knots = [sizes[0], *(k for k in knots if any(0.75 * k <= size <= 1.33 * k for size in sizes)), sizes[-1]]
    rows, times = np.zeros((len(steps), len(knots) + 3)), np.array([seconds for _, seconds in steps])
    for number, (shape, _) in enumerate(steps):
        for index, weight in hats(knots, shape.tokens):
            rows[number, index] += weight
        rows[number, len(knots) :] = shape.rows, shape.prefill_kv, shape.decode_kv
    weights, predicted = np.ones(len(steps)), times
    found = np.zeros(rows.shape[1])
    for _ in range(5):
        found = _non_negative(rows * (weights / predicted)[:, None], weights * times / predicted)
        predicted = np.maximum(rows @ found, 1e-9)
        misses = np.abs(times / predicted - 1.0)
        # A step that something else interrupted counts little (Huber, 1964); on a busy machine many are slow.
        limit = max(0.1, 3 * float(np.median(misses)))
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(misses, 1e-9)))
    curve = [(knot, float(seconds)) for knot, seconds in zip(knots, found)]
    least = min((seconds for _, seconds in curve if seconds > 0), default=1e-9)
    curve = [(knot, seconds or least) for knot, seconds in curve]
    per_row, per_prefill_kv, per_decode_kv = map(float, found[len(knots) :])
    cost = FittedCost(tuple(curve), per_row, per_prefill_kv, per_decode_kv, model)
    return replace(cost, error=statistics.median(abs(cost.seconds(*shape) / t - 1.0) for shape, t in steps))


def _batch(engine: Engine, text: Sequence[int], count: int, prompt: int, output: int, salt: str) -> list[Timed]:
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    for index in range(count):
        start = index * 37 % max(1, len(text) - prompt)
        cut = (list(text[start : start + prompt]) * (1 + prompt // len(text)))[:prompt]
        engine.submit(str(index), cut, params, cache_salt=f"{salt} {index}")
    found: list[Timed] = []
    with recording(engine) as recorder:
        while engine.has_work():
            start_time = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - start_time
            if (plan := recorder.take()) is not None:
                found.append((shape_of(plan), seconds))
    return found


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with no coefficient below 0, by coordinate descent (the problem is convex)."""
    scale = np.sqrt((matrix**2).sum(axis=0))
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    gram, right = scaled.T @ scaled, scaled.T @ target
    found = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        before = found.copy()
        for index in range(len(found)):
            if gram[index, index] > 0:
                found[index] = max(0.0, found[index] + (right[index] - gram[index] @ found) / gram[index, index])
        if np.abs(found - before).max() < 1e-12:
            break
    solution: np.ndarray = found / scale
    return solution
