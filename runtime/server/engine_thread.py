"""``EngineThread``: the one thread that owns the engine, and ``Generation``, what a coroutine holds of it.

Commands go in through a thread-safe queue, outputs come back to the event loop once per step. Knows threads
and event loops; does not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from qserve.runtime.backlog import Backlog
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.limits.keys import ApiKey
from qserve.runtime.server.limits.quota import Quotas
from qserve.runtime.server.limits.rate import ServiceRate
from qserve.runtime.server.telemetry.metrics import Metrics
from qserve.runtime.server.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from qserve.runtime.engine import Engine
    from qserve.runtime.output import RequestOutput
    from qserve.runtime.snapshot import EngineSnapshot
    from qserve.runtime.stats import EngineStats

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER = 120  # seconds; clients give up on longer ones
MAX_FAILED_STEPS = 10  # in a row; an engine that fails so often will not recover by itself


class EngineFailure(Exception):
    """The engine could not go on with this generation. ``str(error)`` may be shown to the client."""

    def as_api_error(self) -> APIError:
        return APIError(500, str(self))


class DeadlineExceeded(EngineFailure):
    """The request was not done within its ``timeout``."""

    def as_api_error(self) -> APIError:
        # Clients send a failed request again by default; its time is over.
        return APIError(408, str(self), param="timeout", code="timeout", headers={"x-should-retry": "false"})


@dataclass(eq=False)
class Generation:
    """The prompts of one HTTP request in the engine. Iterating yields ``(choice, output)`` until all ended.

    Choice ``prompt * n + index`` is answer number ``index`` to that prompt. Raises ``EngineFailure``, or
    ``RequestError`` where the request itself is why it cannot go on.
    """

    request_ids: list[str]
    params: SamplingParams
    loop: asyncio.AbstractEventLoop
    prompt_tokens: int = 0
    timelines: list[Timeline] = field(default_factory=list)  # one for each prompt
    unfinished: int = 0
    events: asyncio.Queue[list[RequestOutput] | EngineFailure] = field(default_factory=asyncio.Queue)

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        places = {request_id: i for i, request_id in enumerate(self.request_ids)}
        while self.unfinished:
            event = await self.events.get()
            if isinstance(event, EngineFailure):
                self.unfinished = 0
                raise event
            for output in event:
                if output.error_param is not None:
                    raise RequestError(output.error or "", output.error_param)
                if output.finish_reason == "timeout":
                    raise DeadlineExceeded(output.error)
                if output.finish_reason in ("abort", "error"):
                    raise EngineFailure(output.error or "the request was aborted")
                self.unfinished -= output.finish_reason is not None
                yield places[output.request_id] * self.params.n + output.index, output


@dataclass
class _Submit:
    generation: Generation
    prompts: list[list[int]]
    priority: int
    cache_salt: str
    key: ApiKey | None
    arrival: float
    accepted: asyncio.Future[None]
    matcher: LLMatcher | None

    @property
    def tenant(self) -> str:
        return self.key.name if self.key else ""

    @property
    def choices(self) -> int:
        return self.generation.params.n * len(self.prompts)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True)
class _Abort:
    request_ids: list[str]


@dataclass(frozen=True)
class _Look:
    loop: asyncio.AbstractEventLoop
    seen: asyncio.Future[EngineSnapshot]


@dataclass(eq=False)
class _Live:
    generation: Generation
    timeline: Timeline
    unfinished: int
    key: ApiKey | None
    gathered: dict[int, list[RequestOutput]] = field(default_factory=dict)  # by choice, after its first

    def gather(self, output: RequestOutput, interval: int) -> list[RequestOutput]:
        """What is to be handed out now: the first output at once, then ``interval`` tokens at a time, all at an end."""
        waiting = self.gathered.setdefault(output.index, [])
        opened = output.output_tokens > len(output.token_ids)
        failed = output.finish_reason in ("abort", "error", "timeout")
        if not failed:
            waiting.append(output)
        if opened and output.finish_reason is None and sum(len(each.token_ids) for each in waiting) < interval:
            return []
        self.gathered[output.index] = []
        return ([_merge(waiting)] if waiting else []) + ([output] if failed else [])


class EngineThread:
    """Runs ``engine.step()`` while there is work and sleeps while there is none.

    A step that raises ends every request with an ``EngineFailure``, and the thread goes on. After
    ``MAX_FAILED_STEPS`` such steps in a row, or if the engine cannot even step without requests, the thread ends:
    ``alive`` is False and ``failure`` says why. All coroutines that submit share one event loop, which hears of a
    choice's first token at once and then of ``stream_interval`` tokens at a time.
    """

    def __init__(self, engine: Engine, metrics: Metrics, stream_interval: int = 1) -> None:
        self._engine = engine
        self._stream_interval = stream_interval
        self._metrics = metrics
        self._commands: SimpleQueue[_Submit | _Abort | _Look | None] = SimpleQueue()
        self._live: dict[str, _Live] = {}
        self._ids = itertools.count()
        self._quotas = Quotas()
        self._arriving = Backlog(engine.config.max_waiting, engine.scheduler.backlog.max_tokens)
        self._arrivals = threading.Lock()
        self._rate = ServiceRate(time.monotonic())
        self._backlog_seconds = 0.0
        self._failed_steps = 0
        self._step_began: float | None = None
        self._ended = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="qserve-engine", daemon=True)
        self.stats: EngineStats = engine.stats()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._ended

    @property
    def num_arriving(self) -> int:
        """Choices that were let in and that the engine has not seen yet."""
        return self._arriving.requests

    def step_seconds(self) -> float:
        """For how long the step that runs now has been running; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End every request and the thread; waits for the step that is running."""
        self._commands.put(None)
        self._thread.join(timeout)

    async def submit(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        matcher: LLMatcher | None = None,
        key: ApiKey | None = None,
    ) -> Generation:
        """Queue all prompts or none, on the account of ``key``.

        Raises ``RequestError``, ``QueueFullError``, ``QuotaError`` or ``EngineFailure``.
        """
        loop = asyncio.get_running_loop()
        generation = Generation([f"r{next(self._ids)}" for _ in prompts], params, loop)
        arrival, accepted = time.monotonic(), loop.create_future()
        command = _Submit(generation, prompts, priority, cache_salt, key, arrival, accepted, matcher)
        # The engine looks at commands between steps. What it would refuse is refused here, without that wait.
        with self._arrivals:
            self._engine.scheduler.backlog.require_room(
                command.tenant, command.choices, command.tokens, self._arriving
            )
            self._arriving.add(command.tenant, command.tokens, command.choices)
        self._commands.put(command)
        if self._ended:
            raise EngineFailure("the engine has stopped")
        try:
            await command.accepted
        except asyncio.CancelledError:
            self.abort(generation)
            raise
        return generation

    def abort(self, generation: Generation) -> None:
        """End what is left of a generation; nothing more is heard of it."""
        generation.unfinished = 0
        self._commands.put(_Abort(generation.request_ids))

    async def snapshot(self) -> EngineSnapshot:
        """The engine between two steps. Raises ``EngineFailure`` where the thread has ended."""
        loop = asyncio.get_running_loop()
        command = _Look(loop, loop.create_future())
        self._commands.put(command)
        while not self._ended:
            done, _ = await asyncio.wait((command.seen,), timeout=1.0)
            if done:
                return command.seen.result()
        raise EngineFailure("the engine has stopped")

    def abort_all(self) -> None:
        """End every request with an error that its client gets."""
        self._commands.put(_Abort([]))

    def check_room(self, key: ApiKey | None) -> None:
        """Raise ``QueueFullError`` or ``QuotaError`` where not even one more request has room."""
        with self._arrivals:
            self._engine.scheduler.backlog.require_room(key.name if key else "", 1, 1, self._arriving)
        if key is not None:
            self._quotas.check(key, 1, time.monotonic(), self._backlog_seconds)

    def retry_after(self) -> int:
        """Seconds in which what waits now should be done, at the rate of the last minute; 1..120."""
        return max(1, min(MAX_RETRY_AFTER, ceil(self._backlog_seconds)))

    def give_up(self, failure: str) -> None:
        """End every request with an error although the engine does not answer; its thread is left behind."""
        self.failure, self._ended = failure, True
        for request in tuple(self._live.values()):
            self._metrics.ended("error")
            self._tell(request.generation, "the engine is stuck; the server restarts")
        self._refuse_commands("the engine is stuck; the server restarts")

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.has_work():
                    self._step()
                self._observe()
        except Exception as error:
            logger.exception("the engine thread ends")
            self.failure = self.failure or f"the engine cannot go on: {type(error).__name__}"
        self._ended = True
        self._fail_all("the server is shutting down")
        self._refuse_commands("the server is shutting down")

    def _refuse_commands(self, message: str) -> None:
        with contextlib.suppress(Empty):
            while True:
                if isinstance(command := self._commands.get_nowait(), _Submit):
                    self._answer(command, EngineFailure(message))

    def _take_commands(self) -> bool:
        """Take all commands there are; wait for one if there is nothing else to do. False ends the thread."""
        wait = not self._engine.has_work()
        with contextlib.suppress(Empty):
            while True:
                command = self._commands.get(block=wait)
                wait = False
                if command is None:
                    return False
                if isinstance(command, _Submit):
                    self._submit(command)
                elif isinstance(command, _Look):
                    self._call(command.loop, partial(command.seen.set_result, self._engine.snapshot()))
                elif command.request_ids:
                    self._abort(command.request_ids)
                else:
                    self._fail_all("the server is shutting down")
        return True

    def _submit(self, command: _Submit) -> None:
        generation, submitted = command.generation, []
        key, choices, now = command.key, generation.params.n, time.monotonic()
        with self._arrivals:
            self._arriving.remove(command.tenant, command.tokens, command.choices)
        try:
            if key is not None:
                self._quotas.check(key, command.choices, now, self._backlog_seconds)
            for request_id, prompt in zip(generation.request_ids, command.prompts, strict=True):
                generation.prompt_tokens += self._engine.submit(
                    request_id,
                    prompt,
                    generation.params,
                    priority=command.priority,
                    cache_salt=command.cache_salt,
                    matcher=command.matcher,
                    tenant=command.tenant,
                    weight=key.weight if key else 1.0,
                )
                submitted.append(request_id)
        except Exception as error:  # RequestError, QuotaError, or a bug that must not end the thread
            for request_id in submitted:
                self._engine.abort(request_id)
            self._answer(command, error)
            return
        generation.unfinished = choices * len(submitted)
        if key is not None:
            self._quotas.began(key, generation.unfinished)
            self._quotas.spend(key, generation.prompt_tokens, now)
        for request_id, prompt in zip(submitted, command.prompts):
            timeline = Timeline(command.arrival, len(prompt), generation.params.max_tokens, choices)
            generation.timelines.append(timeline)
            self._live[request_id] = _Live(generation, timeline, choices, key)
        self._answer(command, None)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if live := self._live.pop(request_id, None):
                self._engine.abort(request_id)
                self._release(live, live.unfinished)
                self._metrics.ended("abort")

    def _step(self) -> None:
        working, journal = bool(self._live), self._engine.journal
        previous = journal.newest
        self._step_began = started = time.monotonic()
        try:
            outputs = self._engine.step()
        except Exception:
            self._metrics.step_failed()
            logger.exception("a step of the engine failed; its requests are ended")
            self._fail_all("the engine failed while it worked on this request")
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                self.failure = f"{self._failed_steps} steps of the engine in a row failed; the log says why"
            if self.failure or not working:
                raise
            return
        finally:
            self._step_began = None
        self._failed_steps = 0
        if journal.newest is not None and journal.newest is not previous:
            self._metrics.step(journal.newest, time.monotonic() - started)
        self._deliver(outputs)

    def _observe(self) -> None:
        self.stats = stats = self._engine.stats()
        self._backlog_seconds = self._rate.backlog_seconds(stats.num_waiting, stats.waiting_tokens, time.monotonic())

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        now = time.monotonic()
        batches: dict[Generation, list[RequestOutput]] = {}
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            if ready := live.gather(output, self._stream_interval):
                batches.setdefault(live.generation, []).extend(ready)
            self._metrics.observe(live.timeline, output, now)
            self._account(live, output, now)
            if output.finish_reason is not None:
                live.unfinished -= 1
                if not live.unfinished:
                    del self._live[output.request_id]
        if batches:
            self._call(next(iter(batches)).loop, partial(_hand_out, batches))

    def _account(self, live: _Live, output: RequestOutput, now: float) -> None:
        """Count an output for the rate of the server and for its key."""
        tokens = len(output.token_ids)
        if live.key is not None:
            self._quotas.spend(live.key, tokens, now)
        first = output.output_tokens == tokens and output.error is None  # an embedding has no token at all
        if first and output.index == 0:  # its prompt was computed
            tokens += output.prompt_tokens - output.cached_tokens
        self._rate.computed(tokens, now)
        if output.finish_reason is not None:
            self._rate.finished(output.output_tokens, now)
            self._release(live, 1)

    def _release(self, live: _Live, choices: int) -> None:
        if live.key is not None:
            self._quotas.ended(live.key, choices)

    def _fail_all(self, message: str) -> None:
        live, self._live = self._live, {}
        for request_id, request in live.items():
            with contextlib.suppress(Exception):
                self._engine.abort(request_id)
            self._release(request, request.unfinished)
            self._metrics.ended("error")
            request.timeline.failed()
            if gathered := [_merge(waiting) for waiting in request.gathered.values() if waiting]:
                self._call(request.generation.loop, partial(request.generation.events.put_nowait, gathered))
            self._tell(request.generation, message)

    def _tell(self, generation: Generation, message: str) -> None:
        self._call(generation.loop, partial(generation.events.put_nowait, EngineFailure(message)))

    def _answer(self, command: _Submit, error: Exception | None) -> None:
        def answer() -> None:
            if not command.accepted.done():
                command.accepted.set_exception(error) if error else command.accepted.set_result(None)

        self._call(command.generation.loop, answer)

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(function)


def _merge(outputs: list[RequestOutput]) -> RequestOutput:
    """Successive outputs of one choice as one."""
    if len(outputs) == 1:
        return outputs[0]
    logprobs = [token for output in outputs for token in output.logprobs or []]
    return replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs or None,
    )


def _hand_out(batches: dict[Generation, list[RequestOutput]]) -> None:
    for generation, batch in batches.items():
        generation.events.put_nowait(batch)
