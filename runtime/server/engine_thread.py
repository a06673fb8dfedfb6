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
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.metrics import Metrics
from qserve.runtime.server.timeline import Timeline

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from qserve.runtime.engine import Engine, EngineStats, RequestOutput
    from qserve.runtime.snapshot import EngineSnapshot

logger = logging.getLogger(__name__)

RATE_WINDOW = 60.0  # seconds over which the rate of finished requests is measured
MAX_RETRY_AFTER = 120


class EngineFailure(Exception):
    """The engine could not go on with this generation. ``str(error)`` may be shown to the client."""


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
    arrival: float
    accepted: asyncio.Future[None]
    matcher: LLMatcher | None


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


class EngineThread:
    """Runs ``engine.step()`` while there is work and sleeps while there is none.

    A step that raises ends every request with an ``EngineFailure``, and the thread goes on. If the engine is
    then still unable to step, the thread ends and ``alive`` is False. All coroutines that submit share one
    event loop.
    """

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._commands: SimpleQueue[_Submit | _Abort | _Look | None] = SimpleQueue()
        self._live: dict[str, _Live] = {}
        self._ids = itertools.count()
        self._finished: deque[float] = deque(maxlen=10_000)  # times at which requests ended
        self._started = time.monotonic()
        self._ended = False
        self._step_started: float | None = None
        self._thread = threading.Thread(target=self._run, name="qserve-engine", daemon=True)
        self.stats: EngineStats = engine.stats()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._ended

    @property
    def step_age(self) -> float:
        """Seconds since the step that is running began; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

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
    ) -> Generation:
        """Queue all prompts or none. Raises ``RequestError``, ``QueueFullError`` or ``EngineFailure``."""
        loop = asyncio.get_running_loop()
        generation = Generation([f"r{next(self._ids)}" for _ in prompts], params, loop)
        arrival, accepted = time.monotonic(), loop.create_future()
        command = _Submit(generation, prompts, priority, cache_salt, arrival, accepted, matcher)
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

    def retry_after(self) -> int:
        """Seconds in which the requests that wait now should be done, at the rate of the last minute."""
        now = time.monotonic()
        span = min(now - self._started, RATE_WINDOW)
        finished = sum(now - moment <= span for moment in tuple(self._finished))
        seconds = self.stats.num_waiting * span / (finished + 1)
        return max(1, min(MAX_RETRY_AFTER, round(seconds + 0.5)))

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.has_work():
                    self._step()
                self.stats = self._engine.stats()
        except Exception:
            logger.exception("the engine thread ends")
        self._ended = True
        self._fail_all("the server is shutting down")
        with contextlib.suppress(Empty):
            while True:
                if isinstance(command := self._commands.get_nowait(), _Submit):
                    self._answer(command, EngineFailure("the server is shutting down"))

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
        try:
            for request_id, prompt in zip(generation.request_ids, command.prompts, strict=True):
                generation.prompt_tokens += self._engine.submit(
                    request_id,
                    prompt,
                    generation.params,
                    priority=command.priority,
                    cache_salt=command.cache_salt,
                    matcher=command.matcher,
                )
                submitted.append(request_id)
        except Exception as error:  # RequestError, or a bug that must not end the thread
            for request_id in submitted:
                self._engine.abort(request_id)
            self._answer(command, error)
            return
        choices = generation.params.n
        generation.unfinished = choices * len(submitted)
        for request_id, prompt in zip(submitted, command.prompts):
            timeline = Timeline(command.arrival, len(prompt), generation.params.max_tokens, choices)
            generation.timelines.append(timeline)
            self._live[request_id] = _Live(generation, timeline, choices)
        self._answer(command, None)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self._live.pop(request_id, None):
                self._engine.abort(request_id)
                self._metrics.ended("abort")

    def _step(self) -> None:
        working = bool(self._live)
        self._step_started = started = time.monotonic()
        try:
            outputs = self._engine.step()
        except Exception:
            self._metrics.step_failed()
            logger.exception("a step of the engine failed; its requests are ended")
            self._fail_all("the engine failed while it worked on this request")
            if not working:
                raise
            return
        finally:
            self._step_started = None
        if self._engine.last_plan is not None:
            self._metrics.step(self._engine.last_plan, time.monotonic() - started)
        self._deliver(outputs)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        now = time.monotonic()
        batches: dict[Generation, list[RequestOutput]] = {}
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            batches.setdefault(live.generation, []).append(output)
            self._metrics.observe(live.timeline, output, now)
            if output.finish_reason is not None:
                live.unfinished -= 1
                if not live.unfinished:
                    del self._live[output.request_id]
                    self._finished.append(now)
        if batches:
            self._call(next(iter(batches)).loop, partial(_hand_out, batches))

    def _fail_all(self, message: str) -> None:
        live, self._live = self._live, {}
        for request_id, request in live.items():
            with contextlib.suppress(Exception):
                self._engine.abort(request_id)
            self._metrics.ended("error")
            request.timeline.failed()
            generation = request.generation
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


def _hand_out(batches: dict[Generation, list[RequestOutput]]) -> None:
    for generation, batch in batches.items():
        generation.events.put_nowait(batch)
