"""``EngineLoop``: takes commands, runs the engine's steps, and reports the results. It owns the engine."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from qserve.checkpoint.errors import QServeError
from qserve.kernels.ranks import RankLost
from qserve.runtime.backlog import QueueFullError
from qserve.runtime.client.messages import (
    Abort,
    Accepted,
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    BlocksChanged,
    BlocksRead,
    BlocksStored,
    Command,
    Ended,
    Event,
    KvBlock,
    LoadAdapter,
    PrepareGrammars,
    ReadBlocks,
    RefusalKind,
    Refused,
    SnapshotTaken,
    StepDone,
    StepFailed,
    Stop,
    StoreBlocks,
    Submit,
    TakeSnapshot,
    UnloadAdapter,
    WatchBlocks,
)
from qserve.runtime.sampling import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from qserve.runtime.adapters import Adapter
    from qserve.runtime.engine import Engine
    from qserve.runtime.models.lora_layers import LaidOut

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # while there is no work, for a rank that has ended
MAX_FAILED_STEPS = 10  # in a row; an engine that fails so often will not recover by itself


@dataclass(frozen=True)
class _Compiled:
    """A command whose constraint another thread has compiled, or why it could not."""

    command: Submit
    result: LLMatcher | BaseException


@dataclass(frozen=True)
class _Read:
    """A command whose adapter another thread has read, or why it could not."""

    command: LoadAdapter
    result: LaidOut | BaseException


class EngineLoop:
    """Runs ``engine.step()`` while there is work and waits for commands while there is none.

    ``emit`` is called with the events of each turn, in order, by the thread that is in ``run``. A step that raises ends
    every request, and the loop goes on. The loop ends after ``MAX_FAILED_STEPS`` such steps in a row, or if the engine
    cannot even step without requests.
    """

    def __init__(self, engine: Engine, emit: Callable[[Sequence[Event]], None]) -> None:
        self._engine = engine
        self._emit = emit
        self._commands: SimpleQueue[Command | _Compiled | _Read] = SimpleQueue()
        self._events: list[Event] = []
        self._compilers = ThreadPoolExecutor(2, "qserve-compile")  # so that no step waits for a grammar or a file
        # The first ids of commands, with their adapters: these stay, although no sequence holds them yet.
        self._compiling: dict[str, Adapter | None] = {}
        self._failed_steps = 0
        self._step_began: float | None = None

    def put(self, command: Command) -> None:
        """Hand in a command, from any thread."""
        self._commands.put(command)

    def step_seconds(self) -> float:
        """How long the current step has been running; 0 between steps. From any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def run(self) -> None:
        """Run until told to stop, or until the engine has failed for good."""
        failure = None
        try:
            while self._take_commands():
                if self._events:  # answers do not wait for the step
                    self._tell()
                failure = self._engine.failure
                if failure is None and self._engine.has_work():
                    failure = self._step()
                self._tell()
                if failure is not None:
                    break
        except BaseException as error:  # such as a panic of a library in Rust; whoever waits is told of it
            logger.exception("the engine ends")
            failure = f"the engine cannot go on: {type(error).__name__}"
        self._compilers.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(BaseException):  # who cannot go on may not be able to say how it is
            self._engine.abort_all()
            self._events.append(self._engine.stats())
            self._engine.close()
        self._emit([*self._events, Ended(failure)])

    def _tell(self) -> None:
        held, gone = self._engine.scheduler.blocks.changes()
        if held or gone:
            self._events.append(BlocksChanged([each.hex() for each in held], [each.hex() for each in gone]))
        events, self._events = self._events, []
        self._emit([self._engine.stats(), *events])

    def _take_commands(self) -> bool:
        """Take all waiting commands; wait for one if there is nothing else to do. Returns False to end the loop."""
        wait = not self._engine.has_work()
        with contextlib.suppress(Empty):
            while True:
                command = self._commands.get(wait, LOOK_SECONDS if self._engine.can_fail else None)
                wait = False
                match command:  # ``Load`` comes before the loop
                    case Stop():
                        return False
                    case Submit():
                        self._submit(command)
                    case _Compiled():
                        self._compiled(command)
                    case Abort():
                        for request_id in command.request_ids:
                            if request_id in self._compiling:
                                self._release(self._compiling.pop(request_id))
                            self._engine.abort(request_id)
                    case LoadAdapter():
                        self._compilers.submit(self._read_adapter, command)
                    case _Read():
                        self._add_adapter(command)
                    case UnloadAdapter():
                        self._remove_adapter(command)
                    case TakeSnapshot():
                        self._events.append(SnapshotTaken(self._engine.snapshot()))
                    case WatchBlocks(on):
                        self._watch_blocks(on)
                    case ReadBlocks():
                        self._events.append(BlocksRead(command.number, self._read_blocks(command.digests)))
                    case StoreBlocks():
                        self._events.append(BlocksStored(command.number, self._store_blocks(command.blocks)))
                    case PrepareGrammars():
                        self._compilers.submit(lambda: self._engine.grammars.tokenizer)
        return True

    def _watch_blocks(self, on: bool) -> None:
        blocks = self._engine.scheduler.blocks
        if on:
            self._events.append(BlocksChanged([each.hex() for each in blocks.watch()], [], whole=True))
        else:
            blocks.unwatch()

    def _read_blocks(self, digests: Sequence[str]) -> list[KvBlock]:
        scheduler, offload = self._engine.scheduler, self._engine.offload
        if offload is None or scheduler.has_copies:
            return []
        keys = [(group, digest) for digest in digests for group in range(len(scheduler.blocks.windows))]
        found = {key: scheduler.blocks.find((key[0], bytes.fromhex(key[1]))) for key in keys}
        return [KvBlock(*key, offload.read(block)) for key, block in found.items() if block is not None]

    def _store_blocks(self, blocks: Sequence[KvBlock]) -> int:
        scheduler, offload = self._engine.scheduler, self._engine.offload
        if offload is None or scheduler.has_copies:
            return 0
        new = [block for block in blocks if scheduler.blocks.find((block.group, bytes.fromhex(block.digest))) is None]
        return sum(offload.receive((block.group, bytes.fromhex(block.digest)), block.content) for block in new)

    def _submit(self, command: Submit) -> None:
        try:
            adapter = None if command.adapter is None else self._engine.adapters.find(command.adapter)
        except RequestError as error:
            self._refuse(command, error)
            return
        if command.params.constraint is None:
            self._queue(command, adapter)
        else:
            if adapter is not None:
                self._engine.adapters.hold(adapter.slot)
            self._compiling[command.request_ids[0]] = adapter
            self._compilers.submit(self._compile, command)

    def _release(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._engine.adapters.release(adapter.slot)

    def _read_adapter(self, command: LoadAdapter) -> None:
        result: LaidOut | BaseException
        try:
            result = self._engine.adapters.read(command.path)
        except BaseException as error:  # in a thread of a pool, which would keep it to itself
            result = error
        self._commands.put(_Read(command, result))

    def _add_adapter(self, read: _Read) -> None:
        command = read.command
        try:
            if isinstance(read.result, BaseException):
                raise read.result
            added = self._engine.adapters.add(command.name, command.path, read.result, replace=command.replace)
        except Exception as error:
            self._refuse_adapter(command, error)
        else:
            self._events.append(AdapterLoaded(command.number, AdapterInfo(added.name, added.sha256)))

    def _remove_adapter(self, command: UnloadAdapter) -> None:
        unloaded = AdapterUnloaded(command.number)
        try:
            self._engine.adapters.remove(command.name, lambda: self._events.append(unloaded))
        except Exception as error:
            self._refuse_adapter(command, error)

    def _refuse_adapter(self, command: LoadAdapter | UnloadAdapter, error: Exception) -> None:
        if not isinstance(error, QServeError):
            logger.error("an adapter could not be loaded or unloaded", exc_info=error)
            error = QServeError("the engine failed on this adapter; its log says why")
        self._events.append(AdapterRefused(command.number, str(error)))

    def _compile(self, command: Submit) -> None:
        assert command.params.constraint is not None
        result: LLMatcher | BaseException
        try:
            result = self._engine.grammars.matcher(command.params.constraint, command.grammar)
        except BaseException as error:  # in a thread of a pool, which would keep it to itself
            result = error
        self._commands.put(_Compiled(command, result))

    def _compiled(self, compiled: _Compiled) -> None:
        command, result = compiled.command, compiled.result
        if command.request_ids[0] not in self._compiling:
            return  # it was aborted
        adapter = self._compiling.pop(command.request_ids[0])
        if isinstance(result, BaseException):
            self._refuse(command, result)
        else:
            self._queue(command, adapter, result)
        self._release(adapter)

    def _queue(self, command: Submit, adapter: Adapter | None, matcher: LLMatcher | None = None) -> None:
        queued = []
        try:
            for request_id, prompt in zip(command.request_ids, command.prompts, strict=True):
                queued.append(request_id)  # first: what fails may have queued some of its choices
                self._engine.submit(
                    request_id,
                    prompt,
                    command.params,
                    priority=command.priority,
                    cache_salt=command.cache_salt,
                    tenant=command.tenant,
                    weight=command.weight,
                    matcher=matcher,
                    adapter=adapter,
                )
        except BaseException as error:  # a RequestError, or a defect that must not end the loop
            for request_id in queued:
                self._engine.abort(request_id)
            self._refuse(command, error)
        else:
            self._events.append(Accepted(command.request_ids[0]))

    def _refuse(self, command: Submit, error: BaseException) -> None:
        request_id = command.request_ids[0]
        if isinstance(error, RequestError):
            kind: RefusalKind = "queue_full" if isinstance(error, QueueFullError) else "request"
            self._events.append(Refused(request_id, kind, str(error), error.param))
        else:
            logger.error("a request could not be queued", exc_info=error)
            self._events.append(Refused(request_id, "failure", "the engine failed on this request; its log says why"))

    def _step(self) -> str | None:
        """Returns why the engine cannot go on, if it cannot."""
        working, newest = bool(self._engine.scheduler.request_ids()), self._engine.journal.newest
        self._step_began = began = time.monotonic()
        try:
            outputs = self._engine.step()
        except RankLost as error:
            self._events.append(StepFailed())
            return str(error)
        except Exception:
            logger.exception("a step of the engine failed; its requests are ended")
            self._events.append(StepFailed())
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                return f"{self._failed_steps} steps of the engine in a row failed; the log says why"
            if not working:
                raise
            return None
        finally:
            self._step_began = None
        self._failed_steps = 0
        record = self._engine.journal.newest
        new = record is not None and record is not newest
        self._events.append(StepDone(outputs, record if new else None, time.monotonic() - began))
        return None
