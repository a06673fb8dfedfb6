"""``timed_steps``: what the steps of a server take, as its client sees them, for ``simulator.fit``.

The server may be any that batches continuously and counts tokens. Its front end, and what lies between it and the
client, count as a part of each step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qserve.checkpoint.errors import QServeError
from qserve.evals.bench.client import Answer, Client
from qserve.evals.bench.drive import Update
from qserve.evals.bench.workload import Words
from qserve.evals.simulator.cost import StepShape
from qserve.evals.simulator.fit import Timed
from qserve.runtime.limits import SchedulerConfig

_PROMPTS = (8, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048)
_COUNTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_OUTPUT = 32
_STEPS = 8  # of a batch at least: a client sees only a part of the first and the last
_MARGIN = 16  # tokens by which a text may be longer than it was meant to be


@dataclass(frozen=True)
class Batch:
    """Requests that are sent at once, of ``prompt`` tokens behind ``prefix`` tokens that are computed before."""

    count: int
    prefix: int
    prompt: int
    output: int


def batches(limits: SchedulerConfig) -> list[Batch]:
    """Prompts alone, prompts behind a cached prefix, and decodes: short and long ones, within the limits."""
    room = limits.max_model_len - _OUTPUT - _MARGIN
    prompts = [size for size in _PROMPTS if size <= min(limits.max_num_batched_tokens - _MARGIN, room)]
    prefix = room // 2
    found = [Batch(1, 0, size, 1) for size in prompts]
    found += [Batch(1, prefix, size, 1) for size in prompts if prefix + size <= room]
    counts = [count for count in _COUNTS if count <= limits.max_num_seqs]
    return found + [Batch(count, 0, size, _OUTPUT) for size in (16, 256) if size <= room for count in counts]


async def timed_steps(
    client: Client, fields: dict[str, Any], words: Words, limits: SchedulerConfig, repeats: int, update: Update
) -> list[Timed]:
    """Send all ``batches`` ``repeats`` times to a server that serves nobody else. Raises ``QServeError`` with what it
    answers instead.

    ``fields``: for every request; ``words``, calibrated: make the prompts.
    """
    designed, found = batches(limits), list[Timed]()
    # Whole rounds: a slow phase of the machine then affects a part of every kind of step.
    for turn in range(repeats):
        for number, batch in enumerate(designed):
            salt = f"{turn} {number}"
            prefix = words.text(f"{salt} prefix", words.count(batch.prefix))
            if prefix:
                await _send(client, fields, [prefix], 1)
            own = max(1, words.count(batch.prompt - words.fixed))
            prompts = [f"{prefix} {words.text(f'{salt} {index}', own)}".strip() for index in range(batch.count)]
            answers = await _send(client, fields, prompts, batch.output)
            if batch.prefix and answers[0].cached_tokens is None:
                continue  # a server that does not tell what it had cached: nobody knows what the step computed
            if (step := step_of(answers, limits.max_num_batched_tokens)) is not None:
                found.append(step)
            update(turn * len(designed) + number + 1, repeats * len(designed))
    return found


async def _send(client: Client, fields: dict[str, Any], prompts: Sequence[str], output: int) -> list[Answer]:
    bodies = [{**fields, "prompt": prompt, "max_tokens": output} for prompt in prompts]
    answers = await asyncio.gather(*(client.stream(body, "completions") for body in bodies))
    for answer in answers:
        if answer.end != "done" or answer.tokens is None or answer.prompt_tokens is None:
            reason = answer.reason or "it does not count tokens"
            raise QServeError(f"{client.url} cannot be measured: {reason}")
    return answers


def step_of(answers: Sequence[Answer], most: int) -> Timed | None:
    """The step that computed the one prompt, or the mean of those in which all requests decoded; None where the answers
    do not show one. ``most``: tokens of a step."""
    if len(answers) == 1 and answers[0].tokens == 1:
        answer = answers[0]
        start = answer.cached_tokens or 0
        new = (answer.prompt_tokens or 0) - start
        if not 0 < new <= most:
            return None
        return StepShape(new, 1, new * start + new * (new + 1) // 2, 0), answer.last - answer.sent
    if not all(len(answer.times) > 1 for answer in answers):
        return None
    first, last = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
    count, positions = 0.0, 0.0
    for answer in answers:
        each = ((answer.tokens or 0) - 1) / (len(answer.times) - 1)  # tokens of an event: some hold several
        before = sum(time <= first for time in answer.times) * each
        inside = sum(first < time <= last for time in answer.times) * each
        count += inside
        positions += (answer.prompt_tokens or 0) + before + inside / 2
    steps = count / len(answers)
    if steps < _STEPS:
        return None
    return StepShape(len(answers), len(answers), 0, round(positions)), (last - first) / steps
