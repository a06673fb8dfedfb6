"""``ConstraintChecker``: tries every new constraint in a worker that can be killed, before the engine sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from qserve.runtime.backlog import QueueFullError
from qserve.runtime.client.failures import EngineFailure
from qserve.runtime.constraint import Constraint
from qserve.runtime.grammar import Vocabulary
from qserve.runtime.sampling import RequestError
from qserve.runtime.server.limits.fair_lock import FairLock
from qserve.runtime.server.limits.shared_pool import SharedPool

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 0.75  # for one constraint; what people write takes milliseconds
TURN_SECONDS = 0.06  # for one while others wait
WAIT_SECONDS = 0.1  # on top of COMPILE_SECONDS: by then everybody has an answer, however many came at once
LOOK_SECONDS = 0.01  # between two checks whether others wait
GRACE_SECONDS = 0.15  # for the worker to say that its seconds are over; if it does not, it is killed
NICENESS = 5  # the model goes first
START_SECONDS = 60.0  # for a new worker, on a machine that has other things to do
MAX_TRIALS = 64  # different constraints that wait for the worker; one tenant has half of them at most
LATE = {"late": ""}  # no verdict: the time went to the turns of others
MAX_VERDICTS = 256  # remembered, so that the same constraint costs no second trial
REMEMBER_SECONDS = 60.0  # for a refusal, which may be due to a busy moment

_Key = tuple[str, str]  # kind and text


@dataclass(frozen=True)
class _Verdict:
    """``grammar``: the constraint in llguidance's format, known to compile in time. ``error``: why it is refused."""

    grammar: str = ""
    error: str = ""
    until: float = math.inf  # as time.monotonic()


class ConstraintChecker:
    """All callers share one event loop, which is never blocked. ``vocabulary`` is called with the first constraint."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._worker = Worker(vocabulary)
        self._verdicts: OrderedDict[_Key, _Verdict] = OrderedDict()
        self._trials: dict[_Key, asyncio.Task[_Verdict | None]] = {}
        self._waiting = SharedPool(MAX_TRIALS)
        self._turns = FairLock()
        self._starting: asyncio.Future[None] | None = None
        self._trying = ThreadPoolExecutor(1, "qserve-constraints")

    def start(self) -> None:
        """Return when a constraint can be tried at once, or after ``START_SECONDS``.

        Without this the first constraint would wait for the start. If the start fails, the first constraint tries it
        again: a server that nobody asks for structured output does not need the worker.
        """
        try:
            self._trying.submit(self._worker.start).result()
        except Exception as error:
            logger.warning("constraints cannot be tried out yet, the first of them tries again: %s", error)

    async def grammar(self, constraint: Constraint, tenant: str = "") -> str:
        """The constraint in llguidance's format, known to compile in time.

        Raises ``RequestError`` naming its ``param``, or ``QueueFullError``.

        ``tenant``: the caller. Waiting constraints have their turns one tenant after another.
        """
        verdict = await self._verdict(constraint, tenant)
        if verdict.error:
            raise RequestError(verdict.error, constraint.param)
        return verdict.grammar

    def close(self) -> None:
        """End the worker, even in the middle of its work."""
        self._worker.close()
        self._trying.shutdown()

    async def _verdict(self, constraint: Constraint, tenant: str) -> _Verdict:
        key = constraint.kind, constraint.text
        verdict = self._verdicts.get(key)
        if verdict is not None and time.monotonic() < verdict.until:
            self._verdicts.move_to_end(key)
            return verdict
        if key not in self._trials:
            if not self._waiting.take(tenant):
                raise QueueFullError("too many constraints wait to be tried out; try again later")
            self._trials[key] = asyncio.create_task(self._try(key, constraint, tenant))
        verdict = await asyncio.shield(self._trials[key])  # others may be waiting for it too
        if verdict is None:
            raise QueueFullError("too many constraints to be tried out for one that takes so long; try again later")
        return verdict

    async def _try(self, key: _Key, constraint: Constraint, tenant: str) -> _Verdict | None:
        try:
            answer = await self._ask(constraint, tenant)
        finally:
            del self._trials[key]
            self._waiting.give_back(tenant)
        if answer == LATE:
            return None
        if "grammar" in answer:
            verdict = _Verdict(grammar=answer["grammar"])
        else:
            verdict = _Verdict(error=answer["error"], until=time.monotonic() + REMEMBER_SECONDS)
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _ask(self, constraint: Constraint, tenant: str) -> dict[str, str]:
        """As ``Worker.ask``, in less than a second once there is a worker."""
        loop = asyncio.get_running_loop()
        if not self._worker.ready:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.ensure_future(loop.run_in_executor(self._trying, self._worker.start))
            await asyncio.shield(self._starting)
        end = time.monotonic() + COMPILE_SECONDS + WAIT_SECONDS
        try:
            async with self._turns.of(tenant, COMPILE_SECONDS + WAIT_SECONDS - TURN_SECONDS):
                seconds = min(COMPILE_SECONDS, max(TURN_SECONDS, end - time.monotonic()))
                ask = partial(self._worker.ask, constraint, seconds, self._turns.waited_for)
                return await loop.run_in_executor(self._trying, ask)
        except TimeoutError:
            return LATE


class Worker:
    """The process ``grammar_worker``. ``start`` or a question starts it, again after it died or was killed.

    Questions come from one thread; ``close`` may come from another.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._closed = False
        self._changing = threading.Lock()

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        return None if self._process is None else self._process.pid

    @property
    def ready(self) -> bool:
        return self._ready

    def start(self) -> None:
        """Return when the process takes questions. Raises ``EngineFailure`` where it does not come up."""
        self._running()

    def ask(self, constraint: Constraint, seconds: float, hurry: Callable[[], bool]) -> dict[str, str]:
        """``{"grammar": ...}``, ``{"error": ...}`` or ``LATE``, within about ``seconds`` of a running worker.

        After ``TURN_SECONDS`` it ends as soon as ``hurry()`` is true. A constraint that was tried for less than
        ``COMPILE_SECONDS`` is never refused as too slow.
        """
        question = {"kind": constraint.kind, "text": constraint.text, "seconds": seconds}
        for _ in range(2):  # twice: a worker that somebody killed is no reason to refuse
            process = self._running()
            start = time.monotonic()
            answer = _exchange(process, question, seconds + GRACE_SECONDS, hurry)
            if answer is not None and answer != LATE:
                return answer
            tried = time.monotonic() - start
            if answer is None:
                self._end(process)
            if tried >= COMPILE_SECONDS:
                return {"error": f"the constraint is refused: it takes more than {COMPILE_SECONDS:g} s to compile"}
            if answer == LATE or tried >= seconds:
                return LATE
        return {"error": "the constraint is refused: compiling it takes more memory than is allowed"}

    def close(self) -> None:
        with self._changing:
            self._closed = True
            if self._process is not None:
                _kill(self._process)  # the thread that waits for its answer sees it end

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process or self._spawn()
        if not self._ready:
            if _exchange(process, asdict(self._vocabulary()), START_SECONDS) is None:
                self._end(process)
                raise EngineFailure("the worker that compiles constraints does not start")
            self._ready = True
        return process

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._changing:
            if self._closed:
                raise EngineFailure("the server is shutting down")
            # -P: a folder in the current directory must not take the place of a module of the same name.
            command = [sys.executable, "-P", "-m", "qserve.runtime.grammar_worker"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
            )
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
            return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        _kill(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        with self._changing:
            self._process, self._ready = None, False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker and the child that may work for it, which is in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _exchange(
    process: subprocess.Popen[bytes],
    message: dict[str, Any],
    seconds: float,
    hurry: Callable[[], bool] = lambda: False,
) -> dict[str, str] | None:
    """Send a line and read one. None if the process is gone or late. When ``hurry()``, an empty line is sent too."""
    assert process.stdin is not None and process.stdout is not None
    began = time.monotonic()
    deadline, look = began + seconds, began + TURN_SECONDS
    given, taken = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(given, False)
    left = memoryview(json.dumps(message).encode() + b"\n")
    line = bytearray()
    try:
        while left and _wait(given, select.POLLOUT, deadline):
            left = left[os.write(given, left) :]
        while not _wait(taken, select.POLLIN, min(look, deadline)) and look < deadline:
            told, look = hurry(), time.monotonic() + LOOK_SECONDS
            if told:
                os.write(given, b"\n")
                break
        while not line.endswith(b"\n") and _wait(taken, select.POLLIN, deadline):
            if not (part := os.read(taken, 1 << 16)):
                return None
            line += part
    except BrokenPipeError:
        return None
    return json.loads(line) if line.endswith(b"\n") else None


def _wait(descriptor: int, event: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
