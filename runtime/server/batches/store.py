"""``BatchStore``: files and batches in a directory, each owned by one key. What it returns survives a restart."""

from __future__ import annotations

import fcntl
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.files import read_json_object, write_atomically
from qserve.runtime.server.batches.records import Batch, StoredFile
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.limits.shared_pool import SharedPool

MAX_FILES = 1000  # of one key
MAX_UNFINISHED = 100  # batches of one key that have not ended
MAX_BATCHES = 1000  # of one key; those that ended longest ago are forgotten
WINDOW = 24 * 3600  # seconds in which a batch is answered, or expires

Kept = TypeVar("Kept", StoredFile, Batch)


class BatchStore:
    """All of its methods belong to one thread. One process uses a directory at a time.

    ``size``: bytes of all files; a key may have as much as it leaves to the others. Raises ``UsageError`` where the
    directory is in use or cannot be, and ``CheckpointError`` where it holds what is no record.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self._directory = directory
        try:
            for name in ("files", "batches"):
                (directory / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (directory / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"--batch-dir {directory} is in use by another server; choose another") from None
        except OSError as error:
            raise UsageError(f"--batch-dir {directory} cannot be used: {error.strerror or error}") from None
        self._room = SharedPool(size)
        files = (StoredFile(**record) for record in self._records("files"))
        self.files = {file.id: file for file in sorted(files, key=lambda file: file.created_at)}
        batches = (Batch.of(record) for record in self._records("batches"))
        self.batches = {batch.id: batch for batch in sorted(batches, key=lambda batch: batch.created_at)}
        self._sweep()
        for file in self.files.values():
            self._room.restore(file.owner, file.bytes)
        for batch in self.batches.values():
            if not batch.has_ended and (path := self.answers_path(batch)).exists():
                self._room.restore(batch.owner, path.stat().st_size)

    def close(self) -> None:
        self._lock.close()

    def take(self, owner: str, amount: int) -> None:
        """Room for so many more bytes. Raises ``APIError`` where there is none."""
        if not self._room.take(owner, amount):
            raise APIError(
                413, "there is no room left for files of this key: delete some, or raise --batch-dir-size",
                code="no_room",
            )  # fmt: skip

    def give_back(self, owner: str, amount: int) -> None:
        self._room.give_back(owner, amount)

    def new_path(self) -> Path:
        """For a file that is being written; ``add_file`` takes it, and a restart removes it."""
        return self._directory / "files" / f"{secrets.token_hex(12)}.part"

    def check_count(self, owner: str) -> None:
        """Raises ``APIError`` where a key has as many files as it may."""
        if sum(file.owner == owner for file in self.files.values()) >= MAX_FILES:
            raise APIError(413, f"there are {MAX_FILES} files of this key; delete some", code="too_many_files")

    def add_file(
        self, part: Path, owner: str, filename: str, purpose: str, id: str | None = None
    ) -> StoredFile:
        """A complete file, whose bytes are taken already. ``id``: a new one unless given; the file of that id is
        replaced."""
        id = id or f"file-{secrets.token_hex(12)}"
        file = StoredFile(id, owner, filename, part.stat().st_size, purpose, int(time.time()))
        part.rename(self.path(file))
        write_atomically(self._record("files", file.id), json.dumps(asdict(file)).encode())
        self.files[file.id] = file
        return file

    def path(self, file: StoredFile) -> Path:
        return self._directory / "files" / f"{file.id}.jsonl"

    def file(self, owner: str, id: str) -> StoredFile:
        """Raises ``APIError`` 404, also for the file of another."""
        return _owned(self.files, owner, id, "file")

    def delete_file(self, owner: str, id: str) -> None:
        file = self.file(owner, id)
        if any(batch.input_file_id == id and not batch.has_ended for batch in self.batches.values()):
            raise APIError(409, f"file {id} is being read by a batch; cancel that first", code="file_in_use")
        self._record("files", id).unlink(missing_ok=True)  # first: a file without a record is swept
        self.path(file).unlink(missing_ok=True)
        del self.files[id]
        self._room.give_back(owner, file.bytes)

    def add_batch(self, owner: str, endpoint: str, input_file_id: str, metadata: dict[str, str] | None) -> Batch:
        if self.file(owner, input_file_id).purpose != "batch":
            raise APIError(400, "the input file of a batch has the purpose batch", param="input_file_id")
        own = [batch for batch in self.batches.values() if batch.owner == owner]
        if sum(not batch.has_ended for batch in own) >= MAX_UNFINISHED:
            raise APIError(
                429, f"this key has {MAX_UNFINISHED} batches that have not ended", code="rate_limit_exceeded",
                headers={"Retry-After": "60"},
            )  # fmt: skip
        self.check_count(owner)
        ended = [batch for batch in own if batch.has_ended]
        for batch in ended[: max(0, len(own) + 1 - MAX_BATCHES)]:
            self._record("batches", batch.id).unlink(missing_ok=True)
            del self.batches[batch.id]
        now = int(time.time())
        batch = Batch(
            f"batch_{secrets.token_hex(12)}", owner, endpoint, input_file_id, now, now + WINDOW, metadata
        )
        self.batches[batch.id] = batch
        self.save(batch)
        return batch

    def batch(self, owner: str, id: str) -> Batch:
        """Raises ``APIError`` 404, also for the batch of another."""
        return _owned(self.batches, owner, id, "batch")

    def save(self, batch: Batch) -> None:
        write_atomically(self._record("batches", batch.id), json.dumps(batch.to_record()).encode())

    def answers_path(self, batch: Batch) -> Path:
        """The file of the answers so far, while a batch has not ended."""
        return self._directory / "batches" / f"{batch.id}.answers.jsonl"

    def check(self) -> None:
        self._room.check()
        paths = {path.name for path in (self._directory / "files").iterdir() if path.suffix != ".part"}
        assert paths == {name for id in self.files for name in (f"{id}.json", f"{id}.jsonl")}

    def _record(self, kind: str, id: str) -> Path:
        return self._directory / kind / f"{id}.json"

    def _records(self, kind: str) -> Iterator[dict[str, Any]]:
        for path in (self._directory / kind).glob("*.json"):
            record = read_json_object(path)
            if record.get("id") != path.stem:
                raise CheckpointError(f"{path} is no record of a server; choose another --batch-dir")
            yield record

    def _sweep(self) -> None:
        """Remove what a crash left half done."""
        for path in (self._directory / "files").iterdir():
            if path.suffix == ".part" or (path.suffix == ".jsonl" and path.stem not in self.files):
                path.unlink(missing_ok=True)
        for id in [id for id, file in self.files.items() if not self.path(file).exists()]:
            self._record("files", id).unlink(missing_ok=True)
            del self.files[id]
        for path in (self._directory / "batches").glob("*.answers.jsonl"):
            batch = self.batches.get(path.name.removesuffix(".answers.jsonl"))
            if batch is None or batch.has_ended:
                path.unlink(missing_ok=True)


class Room:
    """Bytes that are taken for something unfinished. What is not kept in the end is given back."""

    def __init__(self, store: BatchStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._taken = 0

    def take(self, amount: int) -> None:
        """Raises ``APIError`` where there is no room."""
        self._store.take(self._owner, amount)
        self._taken += amount

    def keep(self, amount: int) -> None:
        """Leave ``amount`` of the bytes to a file that has been made of them."""
        self._taken -= amount

    def close(self) -> None:
        self._store.give_back(self._owner, self._taken)


def _owned(found: dict[str, Kept], owner: str, id: str, what: str) -> Kept:
    item = found.get(id)
    if item is None or item.owner != owner:
        raise APIError(404, f"there is no {what} {id!r:.100}", code=f"{what}_not_found")
    return item
