"""``BatchRunner``: answers the lines of batches by the application that answers everybody, behind everybody else."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from qserve.checkpoint.errors import QServeError
from qserve.runtime.request import MAX_PRIORITY
from qserve.runtime.server.batches.answer_file import AnswerFile, is_failure
from qserve.runtime.server.batches.lines import Json, Line, read_lines
from qserve.runtime.server.batches.records import Batch
from qserve.runtime.server.batches.store import BatchStore
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.http.inprocess import post
from qserve.runtime.server.limits.keys import ApiKey, KeyRing
from qserve.runtime.server.telemetry.logs import event

logger = logging.getLogger(__name__)

MAX_LINES = 50_000  # as OpenAI's
MAX_ERRORS = 100  # of a file that are told
IN_PROGRESS = 4  # batches at once
IN_FLIGHT = 16  # lines of each
PAUSE = 1.0  # seconds before a line is asked again that found no room; doubled up to MAX_PAUSE
MAX_PAUSE = 15.0
NAME = "batches"  # of the caller where there are no keys
EXPIRED = "batch_expired"
_AGAIN = (429, 502, 503)  # full, or a replica is gone


class BatchRunner:
    """Works on the batches of ``store`` while ``run`` does, for whoever has a key in ``keys``. What is not answered
    when it stops is answered after the next start."""

    def __init__(self, store: BatchStore, keys: KeyRing) -> None:
        self.store = store
        self._keys = keys
        self._news = asyncio.Event()
        self._stops: dict[str, asyncio.Event] = {}  # of the batches in progress

    def added(self) -> None:
        """Wake the runner for a new batch."""
        self._news.set()

    def cancel(self, batch: Batch) -> None:
        """End a batch; what is answered already stays. Raises ``APIError`` 409 for one that has ended."""
        if batch.has_ended or batch.status == "finalizing":
            raise APIError(409, f"batch {batch.id} is {batch.status}, and cannot be cancelled", code="batch_ended")
        if batch.status != "cancelling":
            batch.become("cancelling", time.time())
            self.store.save(batch)
        if stop := self._stops.get(batch.id):
            stop.set()

    async def run(self, app: ASGIApp, ending: Callable[[], bool]) -> None:
        """Answer lines by ``app``; does not return. When it is cancelled, batches stay as they are. Once the server is
        ``ending``, answers may be those of requests that ended with it, and do not count."""
        self._app, self._ending = app, ending
        async with asyncio.TaskGroup() as group:
            while True:
                self._news.clear()
                while len(self._stops) < IN_PROGRESS and (batch := self._next()) is not None:
                    self._stops[batch.id] = asyncio.Event()
                    group.create_task(self._work(batch))
                await self._news.wait()

    def _next(self) -> Batch | None:
        """The oldest batch of the key that has the fewest in progress."""
        waiting = [batch for id, batch in self.store.batches.items() if not batch.has_ended and id not in self._stops]
        running = Counter(self.store.batches[id].owner for id in self._stops)
        return min(waiting, key=lambda batch: (running[batch.owner], batch.created_at), default=None)

    async def _work(self, batch: Batch) -> None:
        try:
            await self._answer(batch)
        except (QServeError, APIError, OSError) as error:  # such as a disk that is full
            self._fail(batch, [_error("batch_failed", str(error))])
        except Exception:  # a defect: it must not end the others
            logger.exception("batch %s failed", batch.id)
            self._fail(batch, [_error("batch_failed", "the server failed on this batch; its log says why")])
        finally:
            del self._stops[batch.id]
            self._news.set()

    def _fail(self, batch: Batch, errors: list[Json]) -> None:
        path = self.store.answers_path(batch)
        if path.exists():
            self.store.give_back(batch.owner, path.stat().st_size)
            path.unlink()
        batch.errors = errors
        self._become(batch, "failed")

    def _become(self, batch: Batch, status: str) -> None:
        batch.become(status, time.time())
        with suppress(QServeError):  # the disk is full: in memory it is right, and after a restart it goes on
            self.store.save(batch)
        event(logger, "batch", batch=batch.id, state=status)

    async def _answer(self, batch: Batch) -> None:
        if batch.status == "validating":
            source = self.store.path(self.store.file(batch.owner, batch.input_file_id))
            batch.total, problems = await asyncio.to_thread(_examine, source, batch.endpoint)
            if problems:
                self._fail(batch, problems)
                return
            if batch.status == "validating":  # it was not cancelled meanwhile
                self._become(batch, "in_progress")
        with await asyncio.to_thread(AnswerFile, self.store.answers_path(batch)) as out:
            batch.answered, batch.failed = len(out.done), out.num_failed
            if batch.status == "in_progress":
                try:
                    await self._answer_lines(batch, out)
                    if batch.status == "in_progress" and batch.answered < batch.total:
                        await self._expire(batch, out)
                except (QServeError, APIError) as error:  # what is answered is not lost
                    batch.errors = [_error("batch_failed", str(error))]
        if batch.status == "cancelling":
            end = "cancelled"
        else:
            codes = {error["code"] for error in batch.errors}
            end = "expired" if EXPIRED in codes else "failed" if codes else "completed"
            self._become(batch, "finalizing")
        await self._publish(batch)
        self._become(batch, end)
        with suppress(OSError):
            self.store.answers_path(batch).unlink()

    async def _answer_lines(self, batch: Batch, out: AnswerFile) -> None:
        """Until all are answered, or the batch is cancelled or expires."""
        key = self._keys.named(batch.owner) if self._keys else ApiKey(NAME, b"")
        if key is None or (batch.owner and not self._keys):
            raise QServeError(f"the API key {batch.owner!r} does not exist any more")
        count = IN_FLIGHT
        if key.max_requests is not None:  # most of them are for requests that somebody waits for
            count = max(1, min(count, key.max_requests // (2 * IN_PROGRESS)))
        key = replace(key, priority=MAX_PRIORITY)
        source = self.store.path(self.store.file(batch.owner, batch.input_file_id))
        lines = (line for line in read_lines(source) if line.key not in out.done)
        workers = [asyncio.ensure_future(self._worker(batch, lines, key, out)) for _ in range(count)]
        stop = asyncio.ensure_future(self._stops[batch.id].wait())
        working = asyncio.gather(*workers)
        try:
            await asyncio.wait(
                (working, stop), timeout=batch.expires_at - time.time(), return_when=asyncio.FIRST_COMPLETED
            )
            if working.done():
                working.result()
        finally:
            for task in (stop, *workers):
                task.cancel()
            await asyncio.gather(working, *workers, return_exceptions=True)

    async def _expire(self, batch: Batch, out: AnswerFile) -> None:
        """Say so of every line that has no answer."""
        message = "the batch expired before this request was answered"
        for line in read_lines(self.store.path(self.store.file(batch.owner, batch.input_file_id))):
            if line.key not in out.done:
                answer = line.answer(None, {"code": EXPIRED, "message": message})
                out.append(answer, partial(self.store.take, batch.owner))
                await asyncio.sleep(0)  # other requests go on
        batch.answered, batch.failed = len(out.done), out.num_failed
        batch.errors = [_error(EXPIRED, "the batch expired before all of its requests were answered")]

    async def _worker(self, batch: Batch, lines: Iterator[Line], key: ApiKey, out: AnswerFile) -> None:
        for line in lines:
            pause = PAUSE
            while True:
                status, content = await post(self._app, line.url, line.body, key)
                if self._ending():
                    await asyncio.get_running_loop().create_future()  # until this is cancelled
                if status not in _AGAIN:
                    break
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)
            body = json.loads(content)
            answer = line.answer({"status_code": status, "request_id": f"req_{secrets.token_hex(16)}", "body": body})
            out.append(answer, partial(self.store.take, batch.owner))
            batch.answered, batch.failed = len(out.done), out.num_failed

    async def _publish(self, batch: Batch) -> None:
        """Make files of the answers: those that are errors get one of their own."""
        paths = self.store.new_path(), self.store.new_path()
        await asyncio.to_thread(_divide, self.store.answers_path(batch), *paths)
        made: list[str | None] = []
        for path, name in zip(paths, ("output", "error")):
            if path.stat().st_size:  # ids of their own: after a crash the same files are made once more
                id = f"file-{batch.id.removeprefix('batch_')}-{name}"
                made.append(self.store.add_file(path, batch.owner, f"{batch.id}_{name}.jsonl", "batch_output", id).id)
            else:
                path.unlink()
                made.append(None)
        batch.output_file_id, batch.error_file_id = made


def _error(code: str, message: str, number: int | None = None, param: str | None = None) -> Json:
    """An entry of the errors of a batch."""
    return {"code": code, "message": message, "param": param, "line": number}


def _examine(path: Path, endpoint: str) -> tuple[int, list[Json]]:
    """How many lines there are, and what is wrong with them."""
    problems: list[Json] = []
    seen: set[str] = set()
    count = 0
    for line in read_lines(path):
        count += 1
        if count > MAX_LINES:
            problems.append(_error("too_many_tasks", f"a batch has {MAX_LINES:,} lines at most"))
        elif line.problem is not None:
            problems.append(_error("invalid_request", line.problem, line.number))
        elif line.url != endpoint:
            message = f"line {line.number}: url must be {endpoint}"
            problems.append(_error("mismatched_endpoint", message, line.number, "url"))
        elif line.custom_id in seen:
            message = f"line {line.number}: custom_id {line.custom_id!r:.80} was there before"
            problems.append(_error("duplicate_custom_id", message, line.number, "custom_id"))
        seen.add(line.custom_id or "")
        if len(problems) >= MAX_ERRORS or count > MAX_LINES:
            break
    if not count:
        problems.append(_error("empty_file", "the file holds no request"))
    return count, problems


def _divide(answers: Path, good: Path, bad: Path) -> None:
    with answers.open("rb") as file, good.open("xb") as output, bad.open("xb") as errors:
        for line in file:
            (errors if is_failure(json.loads(line)) else output).write(line)
