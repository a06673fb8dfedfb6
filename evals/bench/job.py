"""``Job``: a sweep of loads on one server, from the first question to the last token. Prints nothing."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qserve.checkpoint.errors import QServeError, UsageError
from qserve.evals.bench.client import Client, Endpoint, NotListed
from qserve.evals.bench.drive import Driver, Run, Update
from qserve.evals.bench.level import Level
from qserve.evals.bench.workload import Session, Words, read_dataset, sessions_of
from qserve.evals.lengths import MAX_TOKENS, Lengths
from qserve.evals.simulator.traffic import Traffic, read_trace
from qserve.evals.slo import UNLIMITED, Slo

_LEAST_REQUESTS = 16
_WAVES = 8  # requests for each user
_SECONDS = 30  # of an open loop


@dataclass(frozen=True)
class Job:
    """What to send.

    Attributes:
        levels: users at once, or with ``is_open`` requests per second.
        requests: of each level; None takes 8 for each user, or 30 seconds of an open loop, and at least 16.
        warmup: requests before each level that do not count; None takes one for each user, at most 16.
        prompt, output: tokens; the prefix comes on top.
        burst, prefixes, prefix_tokens, seed: as in ``Traffic``.
        turns: of each session; think: seconds before each but the first.
        dataset: conversations to ask instead of words; trace: requests to repeat at their times.
        endpoint, slo: what is asked, and what counts as good.
    """

    levels: tuple[float, ...]
    is_open: bool
    prompt: Lengths
    output: Lengths
    requests: int | None = None
    warmup: int | None = None
    burst: int = 1
    prefixes: int = 0
    prefix_tokens: int = 0
    turns: int = 1
    think: float = 0.0
    dataset: Path | None = None
    trace: Path | None = None
    endpoint: Endpoint = "completions"
    seed: int = 0
    slo: Slo = UNLIMITED

    def __post_init__(self) -> None:
        if min(self.levels) <= 0 or list(self.levels) != sorted(set(self.levels)):
            raise UsageError("a sweep goes from light to heavy: its loads must rise")
        if (self.requests is not None and self.requests < 1) or (self.warmup is not None and self.warmup < 0):
            raise UsageError("--requests must be at least 1, --warmup at least 0")
        if self.turns < 1 or self.think < 0:
            raise UsageError("--turns must be at least 1, --think at least 0 seconds")
        if self.dataset is not None and (self.trace is not None or self.prefixes):
            raise UsageError("--dataset brings prompts and lengths: neither --trace nor --prefixes go with it")
        _traffic(self, 1, 1.0, MAX_TOKENS, self.seed)  # this refuses invalid values
        if self.trace is not None and self.turns > 1:
            raise UsageError("a trace has requests of one turn: leave out --turns")

    def to_json(self) -> dict[str, object]:
        """The job for a report; files by their names."""
        content = {key: value for key, value in asdict(self).items() if key not in ("slo", "dataset", "trace")}
        files = {"dataset": self.dataset, "trace": self.trace}
        return {**content, **{key: None if path is None else path.name for key, path in files.items()}}

    def count(self, level: float) -> int:
        """Requests of a level."""
        if self.requests is not None:
            return self.requests
        return max(_LEAST_REQUESTS, round(level * (_SECONDS if self.is_open else _WAVES)))


@dataclass(frozen=True)
class Found:
    """``model``: the server's name for it; ``levels``: those that were run."""

    model: str
    levels: tuple[Level, ...]
    unit: str


def run(job: Job, client: Client, model: str | None, fields: dict[str, Any], update: Update) -> Found:
    """Run every level, warm. After an interruption, or if the server is gone, it returns what it has.

    ``model`` None takes the first that the server lists. Raises ``QServeError`` where nothing can be measured.
    """
    allow_connections()
    return asyncio.run(_run(job, client, model, fields, update))


async def _run(job: Job, client: Client, model: str | None, fields: dict[str, Any], update: Update) -> Found:
    name, context = await served_model(client, model)
    prompt, output = job.prefix_tokens + job.prompt.longest, job.output.longest
    if job.dataset is None and job.trace is None and prompt + output > _room(context):
        raise UsageError(
            f"prompts of {prompt} and outputs of {output} tokens exceed the {_room(context)} that are filled of the "
            f"context of {context} tokens"
        )
    words = Words(secrets.token_hex(3))
    driver = Driver(client, job.endpoint, {"model": name, **fields}, words, job.think)
    await driver.calibrate()
    trace = _trace(job)
    loads = {len(trace) / max(trace[-1].time, 1e-9): len(trace)} if trace else {n: job.count(n) for n in job.levels}
    before, total = 0, sum(loads.values())
    levels: list[Level] = []

    def tell(done: int, _: int) -> None:
        update(before + done, total)

    try:
        for value, requests in loads.items():
            warmup = job.warmup if job.warmup is not None else min(16, 4 if job.is_open else round(value))
            if warmup:
                warm = _sessions(job, warmup, 1.0, context, job.seed + 1)
                users = warmup if job.is_open else min(warmup, round(value))
                run = await driver.closed(warm, users, warmup, lambda done, total: None)
                if run.stopped:
                    levels += [Level(value, Run(requests, stopped=run.stopped), job.slo)] * bool(levels)
                    break
            if trace:
                run = await driver.opened(trace, tell)
            elif job.is_open:
                asked = _sessions(job, -(-requests // job.turns), value / job.turns, context, job.seed)
                run = await driver.opened(list(asked), tell)
            else:
                asked = _sessions(job, requests, 1.0, context, job.seed)
                run = await driver.closed(asked, round(value), requests, tell)
            levels.append(Level(value, run, job.slo))
            before += requests
            if run.stopped:
                break
    finally:
        client.close()
    if not any(len(level.run.records) for level in levels):
        reasons = [reason for level in levels for reason in level.run.reasons.values()]
        raise QServeError(f"no request was answered: {reasons[0] if reasons else run.stopped or 'nothing was sent'}")
    return Found(name, tuple(levels), "requests/s" if job.is_open else "concurrent requests")


async def served_model(client: Client, wanted: str | None) -> tuple[str, int]:
    """The name to ask for, and the model's context as far as the server tells it."""
    try:
        listed = await client.models()
    except NotListed:
        if wanted is None:
            raise
        listed = []
    names = [each["id"] for each in listed]
    if wanted is None and not names:
        raise QServeError(f"{client.url} lists no model: name one with --model")
    if wanted is not None and names and wanted not in names:
        raise QServeError(f"{client.url} does not serve {wanted}; it lists {', '.join(names[:5])}")
    name = wanted or names[0]
    context = next((each.get("max_model_len") for each in listed if each["id"] == name), None)
    return name, context if isinstance(context, int) and context > 64 else MAX_TOKENS


def _trace(job: Job) -> list[Session]:
    if job.trace is None:
        return []
    return sessions_of(read_trace(job.trace)[: job.requests], 1, job.prompt, job.output, job.seed)


def _sessions(job: Job, requests: int, rate: float, context: int, seed: int) -> Iterator[Session]:
    """``requests`` sessions, enough for as many requests, at times of a Poisson process."""
    arrivals = _traffic(job, requests, rate, _room(context), seed)
    if job.dataset is None:
        return iter(sessions_of(arrivals, job.turns, job.prompt, job.output, seed))
    talks = read_dataset(job.dataset, job.turns, seed)
    return (Session(each.time, talk.turns) for each, talk in zip(arrivals, talks))


def _room(context: int) -> int:
    """The context less a margin: a text has only about as many tokens as asked, so requests must stay below it."""
    return context if context == MAX_TOKENS else context - max(16, context // 20)


def _traffic(job: Job, requests: int, rate: float, room: int, seed: int) -> Traffic:
    return Traffic(rate, requests, job.prompt, job.output, job.burst, job.prefixes, job.prefix_tokens, room, seed)


def allow_connections() -> None:
    """Allow as many open files as possible: each request in flight needs one, and an open loop does not bound them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, 1 << 16) if hard == resource.RLIM_INFINITY else hard
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
