"""``AnswerFile``: the answers of a batch, a line for each, appended so that a crash loses next to nothing."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from qserve.checkpoint.errors import DataError
from qserve.checkpoint.files import sync, write_error

SYNC_SECONDS = 2.0
ID = "batch_req_"
Key = tuple[str, str]
_BEGINNING = f'{{"id": "{ID}'.encode()


class AnswerFile:
    """Opening it takes a lock, reads what an earlier run left, and drops its last line if that was cut short.

    A context manager; on leaving, everything written is on the disk. Raises ``DataError`` where the file holds
    something else or another process writes it, and ``CheckpointError`` where it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done: set[Key] = set()
        """The requests that are answered already."""
        self.num_failed = 0
        """Those of them whose answer is an error."""
        if path.exists() and not path.is_file():  # a device has no end for appending
            raise DataError(f"{path} is no file; choose another OUT")
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise write_error(path, error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
            sync(path.absolute().parent)
        except BlockingIOError:
            self._file.close()
            raise DataError(f"another process is writing {path}; wait for it or choose another file") from None
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def append(self, answer: dict[str, Any], admit: Callable[[int], None] = lambda size: None) -> None:
        """Write one line. It survives a crash of this process at once, and a crash of the machine soon. ``admit`` is
        told its bytes before, and may raise."""
        line = json.dumps(answer, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        admit(len(line))
        self.done.add(key_of(answer))
        self.num_failed += is_failure(answer)
        try:
            self._file.write(line)
            self._file.flush()
            if time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        except OSError as error:
            raise write_error(self._path, error) from None

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                os.fsync(self._file.fileno())
        except OSError as failure:
            if kind is None:  # a full disk was already the first error
                raise write_error(self._path, failure) from None

    def _read(self) -> None:
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
                self._file.truncate(self._file.tell() - len(line))
                return
            try:
                answer = json.loads(line)
                complete = {"id", "custom_id", "response", "error"} <= answer.keys() and line.endswith(b"\n")
                self.done.add(key_of(answer))
                self.num_failed += is_failure(answer)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                complete = False
            if not complete:  # so it is not our file, and nothing in it is touched
                raise DataError(f"{self._path} line {number} is no answer of a batch; choose another OUT")


def key_of(answer: dict[str, Any]) -> Key:
    """The key of an answer in a batch: the custom id, or the place of a line that has none."""
    custom_id = answer["custom_id"]
    return ("id", str(answer["id"])) if custom_id is None else ("custom_id", str(custom_id))


def is_failure(answer: dict[str, Any]) -> bool:
    return answer["response"] is None or answer["response"]["status_code"] != 200
