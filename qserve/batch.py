"""``run_batch``: the requests of a file through the server's own routes, in this process and without a socket.

The format is that of OpenAI's batches. The routes answer the requests, so every answer is the server's.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qserve.checkpoint.errors import DataError, QServeError
from qserve.runtime.client.thread_host import ThreadHost
from qserve.runtime.server.app import create_app
from qserve.runtime.server.batches.answer_file import AnswerFile
from qserve.runtime.server.batches.lines import Line, read_lines
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.inprocess import post
from qserve.runtime.server.service import Service

if TYPE_CHECKING:
    from qserve.runtime.engine import Engine

Json = dict[str, Any]


@dataclass
class BatchReport:
    """``lines`` of IN: ``skipped`` were answered by an earlier run, ``failed`` are among the ``answered``."""

    lines: int = 0
    skipped: int = 0
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def summary(self) -> list[str]:
        earlier = f", {self.skipped:,} were answered before" if self.skipped else ""
        speed = self.completion_tokens / self.seconds if self.seconds else 0.0
        return [
            f"{self.lines:,} lines: {self.answered - self.failed:,} answered, {self.failed:,} failed{earlier}",
            f"{self.prompt_tokens:,} prompt and {self.completion_tokens:,} output tokens in {self.seconds:.1f} s: "
            f"{speed:.1f} output tokens/s",
        ]


def check_lines(path: Path) -> int:
    """The number of lines. Raises ``DataError`` where there are none, or a custom id occurs twice."""
    seen: dict[str, int] = {}
    count = 0
    for line in read_lines(path):
        count += 1
        if line.custom_id is None:
            continue
        if (first := seen.setdefault(line.custom_id, line.number)) != line.number:
            raise DataError(f"{path}: lines {first} and {line.number} both have the custom_id {line.custom_id!r:.80}")
    if not count:
        raise DataError(f"{path} holds no request")
    return count


def is_done(path: Path, out: AnswerFile) -> bool:
    """Whether every line has its answer."""
    return all(line.key in out.done for line in read_lines(path))


def run_batch(
    engine: Engine,
    lines_path: Path,
    out: AnswerFile,
    *,
    model_name: str | None = None,
    update: Callable[[int, int], None] = lambda done, total: None,
) -> BatchReport:
    """Answer every line that ``out`` has no answer to. ``update(done, total)`` counts lines.

    Raises ``QServeError`` where the engine cannot go on; the answers so far are kept.
    """
    run = _Run(engine, lines_path, out, model_name, update)
    try:
        return asyncio.run(run.run())
    finally:
        run.service.close()


class _Run:
    """Keeps as many lines in flight as may wait in the engine's queue, and writes each answer as it ends."""

    def __init__(
        self,
        engine: Engine,
        path: Path,
        out: AnswerFile,
        model_name: str | None,
        update: Callable[[int, int], None],
    ) -> None:
        self.service = Service(ThreadHost(engine), ServerConfig(model_name=model_name))
        self._app = create_app(self.service)
        self._path = path
        self._out = out
        self._update = update
        self._report = BatchReport(lines=check_lines(path))
        self._lines = self._open_lines()
        self._refused: deque[asyncio.Future[None]] = deque()  # lines that the full queue sent back
        self._in_flight = 0

    async def run(self) -> BatchReport:
        began = time.perf_counter()
        self.service.engine.start()
        try:
            workers = min(self.service.max_waiting, self._report.lines)
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(self._work())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._report.seconds = time.perf_counter() - began
        return self._report

    def _open_lines(self) -> Iterator[Line]:
        for line in read_lines(self._path):
            if line.key in self._out.done:
                self._report.skipped += 1
                self._tell()
            else:
                yield line

    async def _work(self) -> None:
        for line in self._lines:
            if line.problem is not None:
                self._write(line.answer(None, {"code": "invalid_request", "message": line.problem}), failed=True)
            else:
                await self._answer(line)

    async def _answer(self, line: Line) -> None:
        while True:
            self._in_flight += 1
            try:
                status, content = await post(self._app, line.url, line.body)
            finally:
                self._in_flight -= 1
            if not self.service.engine.alive:
                raise QServeError("the engine has stopped; its log says why. Run this again to go on")
            if status not in (429, 503) or not self._in_flight:
                break
            place = asyncio.get_running_loop().create_future()
            self._refused.append(place)
            await place
        if self._refused:  # the room of this one is free again, enough for one of them
            self._refused.popleft().set_result(None)
        response = {"status_code": status, "request_id": f"req_{secrets.token_hex(16)}", "body": json.loads(content)}
        usage = response["body"].get("usage") or {}
        self._report.prompt_tokens += usage.get("prompt_tokens") or 0
        self._report.completion_tokens += usage.get("completion_tokens") or 0
        self._write(line.answer(response), failed=status != 200)

    def _write(self, answer: Json, *, failed: bool) -> None:
        self._out.append(answer)
        self._report.answered += 1
        self._report.failed += failed
        self._tell()

    def _tell(self) -> None:
        self._update(self._report.skipped + self._report.answered, self._report.lines)
