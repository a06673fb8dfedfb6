"""``EngineClient``: an engine as coroutines see it: submit, abort, stats, snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from qserve.runtime.backlog import Backlog, QueueFullError
from qserve.runtime.client.failures import EngineFailure
from qserve.runtime.client.generation import Generation, Observer
from qserve.runtime.client.host import EngineHost
from qserve.runtime.client.messages import (
    Abort,
    Accepted,
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    BlocksChanged,
    BlocksRead,
    BlocksStored,
    Ended,
    Event,
    KvBlock,
    LoadAdapter,
    PrepareGrammars,
    ReadBlocks,
    Refused,
    SnapshotTaken,
    StepDone,
    StepFailed,
    StoreBlocks,
    Submit,
    TakeSnapshot,
    UnloadAdapter,
    WatchBlocks,
)
from qserve.runtime.client.timeline import Timeline
from qserve.runtime.journal import StepRecord
from qserve.runtime.output import RequestOutput
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.snapshot import EngineSnapshot
from qserve.runtime.stats import EngineStats

SHUTTING_DOWN = "the server is shutting down"
MAX_UNREAD = 1 << 18
"""Tokens and log-probabilities of a generation that may wait to be read: 50 to 100 MB."""


class StepObserver(Protocol):
    """Is told of every step of the engine."""

    def step(self, record: StepRecord, seconds: float) -> None: ...

    def step_failed(self) -> None: ...


@dataclass(eq=False)
class _Pending:
    """A generation that the engine has not accepted yet."""

    generation: Generation
    command: Submit
    answered: asyncio.Future[None]
    abandoned: bool = False

    @property
    def choices(self) -> int:
        return self.command.params.n * len(self.command.prompts)


@dataclass(eq=False)
class _Live:
    """A prompt that the engine has accepted."""

    generation: Generation
    timeline: Timeline
    unfinished: int
    gathered: dict[int, list[RequestOutput]] = field(default_factory=dict)  # by choice, since its first output

    def gather(self, output: RequestOutput, interval: int) -> list[RequestOutput]:
        """The outputs to hand out now: the first at once, then ``interval`` tokens at a time, all of them at an end."""
        waiting = self.gathered.setdefault(output.index, [])
        opened = output.output_tokens > len(output.token_ids)
        failed = output.finish_reason in ("abort", "error", "timeout")
        if not failed:
            waiting.append(output)
        if opened and output.finish_reason is None and sum(len(each.token_ids) for each in waiting) < interval:
            return []
        self.gathered[output.index] = []
        return ([_merge(waiting)] if waiting else []) + ([output] if failed else [])


class EngineClient:
    """All coroutines that use it share one event loop. ``stats`` are as of the engine's last turn.

    A generation gets a choice's first token at once, and then ``stream_interval`` tokens at a time. ``failure`` says
    why the engine ended, unless ``stop`` ended it. ``adapters`` are those that requests can name.
    """

    def __init__(self, host: EngineHost, steps: StepObserver | None = None, stream_interval: int = 1) -> None:
        self.host = host
        self.info = host.info
        self.stats: EngineStats = host.info.stats
        self.failure: str | None = None
        self._steps = steps
        self._stream_interval = stream_interval
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = itertools.count()
        self._pending: dict[str, _Pending] = {}  # by the first of their request ids
        self._live: dict[str, _Live] = {}
        self.adapters = {each.name: each for each in host.info.adapters}
        self._changes: dict[int, asyncio.Future[None]] = {}  # of adapters, by number
        self._exchanges: dict[int, asyncio.Future[Any]] = {}  # of blocks, by number
        self._blocks: Callable[[BlocksChanged], None] | None = None  # who watches them
        self._snapshots: deque[asyncio.Future[EngineSnapshot]] = deque()
        self._arriving = Backlog(host.info.max_waiting, host.info.max_waiting_tokens)
        self._ended = False

    @property
    def alive(self) -> bool:
        return self.host.alive and not self._ended

    @property
    def num_arriving(self) -> int:
        """Submitted choices that the engine has not seen yet."""
        return self._arriving.requests

    def start(self) -> None:
        self.host.start(self._receive)

    def stop(self, timeout: float = 10.0) -> None:
        """End every request and the engine; waits for the running step."""
        self.host.stop(timeout)

    def prepare_grammars(self) -> None:
        """Prepare the engine, so that the first constraint need not wait."""
        self.host.send(PrepareGrammars())

    def step_seconds(self) -> float:
        """How long the current step has been running; 0 between steps."""
        return self.host.step_seconds()

    def require_room(self, tenant: str) -> None:
        """Raise ``QueueFullError`` where not even one more request has room, behind those on their way."""
        waiting = Backlog.of(self.info.max_waiting, self.info.max_waiting_tokens, self.stats.waiting)
        waiting.require_room(tenant, 1, 1, self._arriving)

    async def submit(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        grammar: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        weight: float = 1.0,
        adapter: str | None = None,
        observer: Observer | None = None,
    ) -> Generation:
        """Queue all prompts or none. Raises ``RequestError``, ``QueueFullError`` or ``EngineFailure``.

        ``grammar``: ``params.constraint`` in llguidance's format, if it is known to compile in time.
        """
        observer = observer or Observer()
        if self._ended:
            observer.refused(params.n * len(prompts))
            raise EngineFailure("the engine has stopped")
        self._loop = asyncio.get_running_loop()
        now = time.monotonic()
        generation = Generation(
            [f"r{next(self._ids)}" for _ in prompts],
            params,
            [Timeline(now, len(prompt), params.max_tokens, params.n) for prompt in prompts],
            observer,
        )
        command = Submit(
            generation.request_ids, prompts, params, grammar, priority, cache_salt, tenant, weight, adapter
        )
        pending = _Pending(generation, command, self._loop.create_future())
        self._pending[generation.request_ids[0]] = pending
        self._arriving.add(tenant, generation.prompt_tokens, pending.choices)
        self.host.send(command)
        try:
            await pending.answered
        except asyncio.CancelledError:
            self.abort(generation)
            raise
        return generation

    def abort(self, generation: Generation) -> None:
        """End what is left of a generation; it gets nothing more."""
        generation.unfinished = 0
        generation.events.put_nowait([])  # whoever waits for more is done
        pending = self._pending.get(generation.request_ids[0])
        if pending is not None and not pending.abandoned:
            pending.abandoned = True
            for _ in generation.request_ids:
                generation.observer.dropped(generation.params.n, "abort")
        live = [found for request_id in generation.request_ids if (found := self._live.pop(request_id, None))]
        for each in live:
            generation.observer.dropped(each.unfinished, "abort")
        if pending is not None or live:
            self.host.send(Abort(generation.request_ids))

    def abort_all(self) -> None:
        """End every request with an error that its client sees."""
        waiting = [request_id for each in self._pending.values() for request_id in each.command.request_ids]
        self.host.send(Abort([*self._live, *waiting]))
        self._fail_live(SHUTTING_DOWN)
        self._refuse_pending(SHUTTING_DOWN)

    async def snapshot(self) -> EngineSnapshot:
        """The engine between two steps. Raises ``EngineFailure`` where it has ended."""
        if self._ended:
            raise EngineFailure("the engine has stopped")
        self._loop = asyncio.get_running_loop()
        taken: asyncio.Future[EngineSnapshot] = self._loop.create_future()
        self._snapshots.append(taken)
        self.host.send(TakeSnapshot())
        return await taken

    def watch_blocks(self, changed: Callable[[BlocksChanged], None] | None) -> None:
        """Call ``changed``, on the event loop, with all KV blocks that can be found and then with each change; None
        ends that. There is one watcher."""
        self._loop = asyncio.get_running_loop()
        self._blocks = changed
        self.host.send(WatchBlocks(changed is not None))

    async def read_blocks(self, digests: Sequence[str]) -> list[KvBlock]:
        """Those of these KV blocks that are in the cache or in memory. Raises ``EngineFailure``."""
        number, found = self._exchange()
        self.host.send(ReadBlocks(number, list(digests)))
        return list(await found)

    async def store_blocks(self, blocks: list[KvBlock]) -> int:
        """Keep KV blocks that another replica has computed; returns how many were kept. Raises ``EngineFailure``."""
        number, stored = self._exchange()
        self.host.send(StoreBlocks(number, blocks))
        return int(await stored)

    def _exchange(self) -> tuple[int, asyncio.Future[Any]]:
        if self._ended:
            raise EngineFailure("the engine has stopped")
        self._loop = asyncio.get_running_loop()
        number = next(self._ids)
        answer = self._exchanges[number] = self._loop.create_future()
        return number, answer

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load the adapter in the directory ``path``. Requests that have begun with another of this name end with it.
        Raises ``RequestError`` or ``EngineFailure``."""
        await self._change(LoadAdapter(next(self._ids), name, path, replace))

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter, and return when those that run with it have ended."""
        self.adapters.pop(name, None)  # at once: what is submitted from now on would be refused by the engine
        await self._change(UnloadAdapter(next(self._ids), name))

    async def _change(self, command: LoadAdapter | UnloadAdapter) -> None:
        if self._ended:
            raise EngineFailure("the engine has stopped")
        self._loop = asyncio.get_running_loop()
        changed = self._changes[command.number] = self._loop.create_future()
        self.host.send(command)
        await changed

    def _changed(self, number: int, error: Exception | None = None) -> None:
        if not (changed := self._changes.pop(number)).done():  # else its caller has gone
            if error is None:
                changed.set_result(None)
            else:
                changed.set_exception(error)

    def give_up(self, failure: str) -> None:
        """End every request with an error although the engine does not answer; the engine is left behind."""
        self._end(failure, "the engine is stuck; the server restarts")

    def _receive(self, events: Sequence[Event]) -> None:
        """Called by the host's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._take, events)
                return
        with contextlib.suppress(RuntimeError):
            self._take(events)

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case StepDone():
                    self._deliver(event)
                case EngineStats():
                    self.stats = event
                case Accepted(request_id):
                    self._accept(request_id)
                case Refused(request_id):
                    self._refuse(request_id, _error(event))
                case SnapshotTaken(snapshot):
                    if not (taken := self._snapshots.popleft()).done():
                        taken.set_result(snapshot)
                case BlocksChanged():
                    if self._blocks is not None:
                        self._blocks(event)
                case BlocksRead(number, blocks):
                    self._exchanged(number, blocks)
                case BlocksStored(number, count):
                    self._exchanged(number, count)
                case AdapterLoaded(number, adapter):
                    self.adapters[adapter.name] = adapter
                    self._changed(number)
                case AdapterUnloaded(number):
                    self._changed(number)
                case AdapterRefused(number, message):
                    self._changed(number, RequestError(message))
                case StepFailed():
                    self._fail_live("the engine failed while it worked on this request")
                    if self._steps is not None:
                        self._steps.step_failed()
                case Ended(failure):
                    self._end(failure, SHUTTING_DOWN)

    def _exchanged(self, number: int, result: object) -> None:
        if not (answer := self._exchanges.pop(number)).done():  # else its caller has gone
            answer.set_result(result)

    def _arrived(self, request_id: str) -> _Pending | None:
        """The submission that the engine has answered; None where nobody waits for it any more."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return None
        self._arriving.remove(pending.command.tenant, pending.generation.prompt_tokens, pending.choices)
        return None if pending.abandoned else pending

    def _accept(self, request_id: str) -> None:
        if (pending := self._arrived(request_id)) is None:
            return
        generation = pending.generation
        generation.unfinished = pending.choices
        for each, timeline in zip(generation.request_ids, generation.timelines, strict=True):
            self._live[each] = _Live(generation, timeline, generation.params.n)
        if not pending.answered.done():  # else it is cancelled, and its caller is about to abort it
            pending.answered.set_result(None)

    def _refuse(self, request_id: str, error: Exception) -> None:
        if (pending := self._arrived(request_id)) is None:
            return
        pending.abandoned = True
        pending.generation.observer.refused(pending.choices)
        if not pending.answered.done():
            pending.answered.set_exception(error)

    def _deliver(self, done: StepDone) -> None:
        now = time.monotonic()
        if done.record is not None and self._steps is not None:
            self._steps.step(done.record, done.seconds)
        batches: dict[Generation, list[RequestOutput]] = {}
        for output in done.outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            if ready := live.gather(output, self._stream_interval):
                batches.setdefault(live.generation, []).extend(ready)
            live.generation.observer.output(live.timeline, output, now)
            if output.finish_reason is not None:
                live.unfinished -= 1
                if not live.unfinished:
                    del self._live[output.request_id]
        for generation, batch in batches.items():
            if generation.unread > MAX_UNREAD:
                self._leave(generation)
            else:
                generation.put(batch)

    def _leave(self, generation: Generation) -> None:
        """End what is left of a generation whose caller does not keep up; it gets what waits already, and an error."""
        for request_id in generation.request_ids:
            if live := self._live.pop(request_id, None):
                generation.observer.dropped(live.unfinished, "abort")
        generation.events.put_nowait(EngineFailure("the answer ends here, for it is not read as fast as it is made"))
        self.host.send(Abort(generation.request_ids))

    def _fail_live(self, message: str) -> None:
        live, self._live = self._live, {}
        for each in live.values():
            each.timeline.failed()
            each.generation.observer.dropped(each.unfinished, "error")
            if gathered := [_merge(waiting) for waiting in each.gathered.values() if waiting]:
                each.generation.put(gathered)
            each.generation.events.put_nowait(EngineFailure(message))

    def _refuse_pending(self, message: str) -> None:
        for request_id in list(self._pending):
            self._refuse(request_id, EngineFailure(message))

    def _end(self, failure: str | None, message: str) -> None:
        self.failure, self._ended = self.failure or failure, True
        self._fail_live(message)
        self._refuse_pending(message)
        for number in list(self._changes):
            self._changed(number, EngineFailure("the engine has stopped"))
        for answer in self._exchanges.values():
            if not answer.done():
                answer.set_exception(EngineFailure("the engine has stopped"))
        self._exchanges.clear()
        while self._snapshots:
            if not (taken := self._snapshots.popleft()).done():
                taken.set_exception(EngineFailure("the engine has stopped"))


def _error(refused: Refused) -> Exception:
    if refused.kind == "failure":
        return EngineFailure(refused.message)
    return (QueueFullError if refused.kind == "queue_full" else RequestError)(refused.message, refused.param)


def _merge(outputs: list[RequestOutput]) -> RequestOutput:
    """Merge successive outputs of one choice."""
    if len(outputs) == 1:
        return outputs[0]
    logprobs = [token for output in outputs for token in output.logprobs or []]
    return replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs or None,
    )
