"""``LocalModel``: a server of one model in a process of its own, which runs while requests want it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from qserve.runtime.server.telemetry.logs import event

logger = logging.getLogger(__name__)

BACKOFF = 0.5  # seconds before a process that ended by itself is started again; doubled each time
MAX_BACKOFF = 60.0
STEADY = 60.0  # seconds of service after which an end is the first one again
GRACE = 10.0  # seconds that a process may take to end when it is told to
TICK = 0.2
MAX_LINE = 1 << 16  # bytes of a line of its log


class LocalModel:
    """Starts ``command`` when it is wanted. It must listen at ``path`` and end with its standard input, so that no
    process stays when this one is killed.

    All methods belong to one event loop; ``run`` does the work.

    Attributes:
        starts: how often the process was started.
        failure: why it could not be loaded; None where the last start went well or has not ended.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        path: Path,
        unload_after: float | None = None,
        prefix: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``unload_after``: seconds without a request after which the process ends; None keeps it. ``prefix``: what
        stands before each line of its log. ``environment``: of the process; None for our own."""
        self.name = name
        self.url = f"unix:{path}"
        self.starts = 0
        self.failure: str | None = None
        self._command = command
        self._path = path
        self._unload_after = unload_after
        self._prefix = prefix
        self._environment = environment
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._used = 0.0
        self._served = False
        self._process: asyncio.subprocess.Process | None = None  # one that is meant to serve
        self._last_line = ""

    @property
    def listens(self) -> bool:
        """Whether there is somebody to ask."""
        return self._process is not None and self._path.exists()

    def want(self) -> None:
        """A request needs it now."""
        self._used = time.monotonic()
        self._wanted.set()

    def loaded(self) -> None:
        """Its process takes requests."""
        self._served = True

    async def run(self, became: Callable[[str], None], load: Callable[[], int]) -> None:
        """Start the process as often as it takes; does not return. ``became`` is told ``unloaded``, ``loading`` or
        ``failed``; ``load`` is how many requests it has."""
        backoff = BACKOFF
        while True:
            if not self._wanted.is_set():
                became("unloaded")
                await self._wanted.wait()
            self.failure = None
            became("loading")
            began, self._served = time.monotonic(), False
            try:
                if await self._is_used_up(load):
                    self._wanted.clear()
                    became("unloaded")  # at once: its process gets no more requests
                    event(logger, "model unloaded", model=self.name)
                    continue
            except OSError as error:
                self._last_line = error.strerror or str(error)
            finally:
                await self._stop()
            backoff = BACKOFF if self._served and time.monotonic() - began > STEADY else backoff
            event(logger, "model process ended", logging.ERROR, model=self.name, restart_seconds=backoff)
            if not self._served:
                self.failure = self._last_line or "its process ended"
            became("loading" if self._served else "failed")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF)

    async def _is_used_up(self, load: Callable[[], int]) -> bool:
        """Return when the process has ended, or True when nobody has used it for too long."""
        process = await self._start()
        while not await _ended(process, TICK):
            if load() or not self._served:
                self._used = time.monotonic()
            elif self._unload_after is not None and time.monotonic() - self._used >= self._unload_after:
                return True
        return False

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            if not await _ended(process, GRACE):
                process.kill()
                await process.wait()
        await asyncio.wait([self._log], timeout=1.0)  # what that process started may hold the pipe for a moment
        self._log.cancel()
        self._path.unlink(missing_ok=True)  # of a process that was killed

    async def _start(self) -> asyncio.subprocess.Process:
        self.starts += 1
        # A session of its own: Ctrl-C is for this process, which ends the others when their requests have ended.
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            limit=MAX_LINE,
            start_new_session=True,
        )
        self._log = asyncio.create_task(self._pass_on(self._process))
        return self._process

    async def _pass_on(self, process: asyncio.subprocess.Process) -> None:
        """Its log, line by line, to our own."""
        assert process.stderr is not None
        while not process.stderr.at_eof():
            try:
                line = (await process.stderr.readline()).decode(errors="replace").rstrip()
            except ValueError:
                line = "a line of more than 64 KiB is left out"
            if line:
                self._last_line = line
                print(f"{self._prefix}{line}", file=sys.stderr, flush=True)


async def _ended(process: asyncio.subprocess.Process, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)
    return process.returncode is not None
