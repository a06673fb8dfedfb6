"""``Driver``: sends a workload at its rhythm and records the result of every request.

Closed loop: a number of users, each of whom asks again after each answer. Open loop: requests come at their times,
whatever the server is doing. Their waiting counts from when they were due, not from when a busy client sent them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

from qserve.checkpoint.errors import QServeError
from qserve.evals.bench.client import Answer, Client, Endpoint
from qserve.evals.bench.workload import Session, Words
from qserve.evals.simulator.records import Records

Update = Callable[[int, int], None]


@dataclass
class Run:
    """The results of one load. Times in ``records`` are ``time.perf_counter`` seconds; ``scheduled`` is when a request
    was sent.

    Attributes:
        planned: requests that were to be sent.
        gaps: inter-token latencies of all requests.
        failures: the number of requests that were not done, by cause.
        reasons: for each cause, the first message.
        prompt_tokens, cached_tokens: those of answered requests, as the server counts them.
        chunks: events with text.
        counted: whether the server counted the tokens; otherwise each event counts as one.
        cpu: processor seconds of this client.
        began, ended: of the whole load.
        stopped: why it ended early, if it did.
    """

    planned: int
    records: Records = field(default_factory=Records)
    gaps: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    chunks: int = 0
    counted: bool = True
    cpu: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    stopped: str | None = None

    def add(self, index: int, due: float, answer: Answer) -> None:
        """Count one request that was due at ``due``."""
        if answer.end != "done" or not answer.last:
            kind = str(answer.status) if answer.end == "refused" else answer.end
            if answer.end == "done":
                kind, answer.reason = "empty", "an answer without a token"
            self.failures[kind] += 1
            self.reasons.setdefault(kind, answer.reason)
            return
        tokens = answer.tokens
        if tokens is None:
            tokens, self.counted = max(1, len(answer.times)), False
        # An answer of half characters shows nothing until its end.
        times = answer.times or [answer.last]
        last = max(times[-1], answer.last)
        self.records.add(index, due, answer.sent, times[0], last, answer.prompt_tokens or 0, tokens)
        self.gaps += [later - earlier for earlier, later in pairwise(times)]
        self.prompt_tokens += answer.prompt_tokens or 0
        self.cached_tokens += answer.cached_tokens or 0
        self.chunks += len(times)

    @property
    def failed(self) -> int:
        return self.failures.total()


class Driver:
    """One server under load. ``fields``: for every request, beside its prompt and length."""

    def __init__(self, client: Client, endpoint: Endpoint, fields: dict[str, Any], words: Words, think: float) -> None:
        self._client = client
        self._endpoint = endpoint
        self._fields = fields
        self._words = words
        self._think = think
        self._numbers = count()
        self._gone: str | None = None  # why the server is believed to be gone

    async def calibrate(self) -> None:
        """Learn how the server counts words, from two short requests. Raises ``QServeError`` with its refusal."""
        sizes = []
        for words in (4, 36):
            prompt = self._words.text(f"probe {words}", words)
            answer = await self._client.stream(self._body([("user", prompt)], 1), self._endpoint)
            if answer.end != "done":
                status = f" {answer.status}" if answer.status else ""
                raise QServeError(f"{self._client.url} answered a request with {answer.end}{status}: {answer.reason}")
            if answer.prompt_tokens is None:
                return  # then a word is one token
            sizes.append((words, answer.prompt_tokens))
        self._words.calibrate(*sizes)

    async def closed(self, sessions: Iterator[Session], users: int, requests: int, update: Update) -> Run:
        """Send ``requests`` requests by ``users`` users at once."""
        run, started = Run(requests), 0

        async def use() -> None:
            nonlocal started
            for session in sessions:
                number = next(self._numbers)
                asked: list[tuple[str, str]] = []
                for turn in range(len(session.turns)):
                    if started >= requests or self._gone:
                        return
                    started += 1
                    answered = await self._turn(run, session, number, turn, asked, None)
                    update(len(run.records) + run.failed, requests)
                    if not answered:
                        break

        await self._measure(run, [use() for _ in range(users)])
        return run

    async def opened(self, sessions: Sequence[Session], update: Update) -> Run:
        """Send each when it is due, and later turns after the answer to the one before."""
        run = Run(sum(len(session.turns) for session in sessions))
        start = time.perf_counter() + 0.01

        async def visit(session: Session) -> None:
            due, asked, number = start + session.time, list[tuple[str, str]](), next(self._numbers)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            for turn in range(len(session.turns)):
                if self._gone:
                    return
                answered = await self._turn(run, session, number, turn, asked, due)
                update(len(run.records) + run.failed, run.planned)
                if not answered:
                    return
                due = time.perf_counter()

        await self._measure(run, [visit(session) for session in sessions])
        return run

    async def _measure(self, run: Run, work: Sequence[Awaitable[None]]) -> None:
        """Do the work. An interruption ends it, and finished requests count."""
        run.began, cpu = time.perf_counter(), time.thread_time()
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            run.stopped = "interrupted"
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
        run.ended, run.cpu = time.perf_counter(), time.thread_time() - cpu
        run.stopped = run.stopped or self._gone

    async def _turn(
        self, run: Run, session: Session, number: int, turn: int, asked: list[tuple[str, str]], due: float | None
    ) -> bool:
        """Ask, record the result, and keep it for the following turns. False where no turn can follow."""
        if turn:
            if self._think:
                await asyncio.sleep(self._think)
                due = None if due is None else due + self._think
            text = self._words.later(session.turns[turn], number, turn)
        else:
            text = self._words.first(session, number)
        asked.append(("user", text))
        answer = await self._client.stream(self._body(asked, session.turns[turn].output), self._endpoint)
        run.add(number, answer.sent if due is None else due, answer)
        asked.append(("assistant", answer.text.replace("\0", "")))  # a model may write NUL, but servers refuse it
        if answer.end == "unreachable":
            self._gone = f"the server is gone: {answer.reason}"
        return answer.end == "done"

    def _body(self, asked: Sequence[tuple[str, str]], output: int) -> dict[str, Any]:
        if self._endpoint == "chat":
            return {
                **self._fields,
                "messages": [{"role": role, "content": text} for role, text in asked],
                "max_tokens": output,
            }
        return {**self._fields, "prompt": "\n".join(text for _, text in asked), "max_tokens": output}
