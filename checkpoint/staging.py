"""``Staging``: the hidden directory beside OUT in which a checkpoint is made, held by one process at a time.

This file has its layout, the lock, and the renames that put a checkpoint in its place:

    .NAME.partial/
        lock          locked as long as a process works here; a killed one holds no lock
        0123456789ab/     the work of one job, named by its facts; a directory for each job that was not finished
            facts.json    what tells it from other jobs
            parts/        00001, 00002 and so on; 00003.state is the state of unfinished work on the third
            passed/       the parts of an earlier attempt, to which the job may go back
            checkpoint/   made from the parts, renamed to OUT at the end
            unfinished    the state of a measurement of the checkpoint before that rename, for a run that resumes
        replaced/     the old OUT, only between the two renames of an overwrite
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import read_json_object, sync, write_atomically
from qserve.checkpoint.parts import Part, read_part

Facts = Mapping[str, str]
"""What the bytes of a checkpoint depend on, by name: a job. Two jobs with the same facts write the same bytes."""

_NOBODY = "unnamed"  # the work of a job without facts; no run could go on from it
_FACTS = "facts.json"


@dataclass(frozen=True)
class OtherWork:
    """Unfinished work of another job for the same OUT, and the names of the facts that differ (none if unknown)."""

    path: Path
    nbytes: int
    differs: tuple[str, ...]

    def __str__(self) -> str:
        what = f"with other {', '.join(self.differs)}" if self.differs else "of another job"
        return (
            f"unfinished work {what} is kept in {self.path} ({self.nbytes / 2**20:,.0f} MiB): "
            "its own command goes on from it; delete it if it is not wanted"
        )


class Staging:
    """Opening takes the lock, and puts back what an overwrite killed halfway had moved aside.

    Raises ``CheckpointError`` where another process holds it, ``OSError``.
    """

    def __init__(self, out: Path, facts: Facts | None) -> None:
        self._out = out
        self._facts = facts
        self.fingerprint = None if facts is None else fingerprint(facts)
        self._root = _beside(out)
        self.path = self._root / (_NOBODY if self.fingerprint is None else self.fingerprint[:12])
        self.checkpoint = self.path / "checkpoint"
        self.unfinished = self.path / "unfinished"
        self._parts = self.path / "parts"
        self._passed = self.path / "passed"
        self._dropped = self.path / "dropped"
        self._replaced = self._root / "replaced"
        self._lock = self._acquire()
        try:
            self._recover()
            for work in self._works():  # no run could go on from it, or it was published
                if work.name == _NOBODY or not (work / "checkpoint").exists():
                    shutil.rmtree(work)
        except BaseException:
            os.close(self._lock)
            raise

    def _acquire(self) -> int:
        path = self._root / "lock"
        while True:
            self._root.mkdir(exist_ok=True)
            # The holder of the lock may remove the directory at any moment, and with it the file opened or locked here.
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                        return descriptor
                except BlockingIOError:
                    os.close(descriptor)
                    raise CheckpointError(
                        f"another process is writing {self._out}; wait for it or choose another directory"
                    ) from None
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)

    def _recover(self) -> None:
        if not self._replaced.exists():
            return
        if self._out.exists() and any(self._out.iterdir()):
            shutil.rmtree(self._replaced)
        else:
            os.rename(self._replaced, self._out)
            sync(self._out.parent)

    def _works(self) -> list[Path]:
        return [path for path in self._root.iterdir() if path.is_dir() and path != self._replaced]

    def others(self) -> list[OtherWork]:
        """The work of other jobs for OUT, which stays until somebody removes it."""
        own = self._facts or {}
        found = []
        for path in sorted(self._works()):
            if path == self.path:
                continue
            try:
                facts = read_json_object(path / _FACTS)
            except CheckpointError:
                facts = {}
            names = [name for name in {**own, **facts} if own.get(name) != facts.get(name)] if own and facts else []
            found.append(OtherWork(path, _nbytes(path), tuple(names)))
        return found

    def leftover(self) -> int:
        """Bytes of this job that lie here already."""
        return _nbytes(self.path)

    def open(self) -> tuple[list[Part], Part | None]:
        """The parts that this job committed, and the state of work on the next; all else of it is removed.

        They end before the first part that is damaged or does not follow, since later parts depend on it.
        """
        self.path.mkdir(exist_ok=True)
        self.checkpoint.mkdir(exist_ok=True)  # the first: without it the work counts as finished
        if self._facts is not None:
            write_atomically(self.path / _FACTS, json.dumps(dict(self._facts), indent=2).encode())
        parts, state = self._read()
        if not parts and self._passed.exists():
            self.go_back()
            parts, state = self._read()
        if not parts:
            self._forget_unfinished()
        self._parts.mkdir(exist_ok=True)
        self.sweep([*parts, state] if state else parts)
        shutil.rmtree(self._dropped, ignore_errors=True)
        for directory in (self._parts, self.path, self._root, self._out.parent):
            sync(directory)
        return parts, state

    def _read(self) -> tuple[list[Part], Part | None]:
        parts: list[Part] = []
        if self.fingerprint is None:
            return parts, None
        follows = self.fingerprint
        while part := _following(self.part(len(parts) + 1), follows):
            parts.append(part)
            follows = part.digest
        return parts, _following(self.state(len(parts) + 1), follows)

    def set_aside(self) -> None:
        """Keep the parts for ``go_back``, and go on without any. A crash before the next part is committed undoes it.
        """
        shutil.rmtree(self._passed, ignore_errors=True)
        os.rename(self._parts, self._passed)
        self._parts.mkdir()

    def go_back(self) -> None:
        """Replace the parts by those that were set aside."""
        shutil.rmtree(self._dropped, ignore_errors=True)
        if self._parts.exists():
            os.rename(self._parts, self._dropped)
        os.rename(self._passed, self._parts)

    def sweep(self, kept: Iterable[Part]) -> None:
        """Leave nothing but the parts and states ``kept``."""
        paths = {part.path for part in kept}
        for path in self._parts.iterdir():
            if path not in paths:
                path.unlink()
        self._clear()

    def part(self, number: int) -> Path:
        """The path of part ``number``, counted from 1."""
        return self._parts / f"{number:05d}"

    def state(self, number: int) -> Path:
        """The path of the state of unfinished work on part ``number``."""
        return self._parts / f"{number:05d}.state"

    def publish(self) -> None:
        """Rename the checkpoint to OUT. An old one there is moved aside first and put back if that fails, so
        that one of the two is always complete on disk."""
        for path in self.checkpoint.iterdir():
            sync(path)
        sync(self.checkpoint)
        if self._out.exists() and any(self._out.iterdir()):
            os.rename(self._out, self._replaced)
            sync(self._root)
        try:
            os.rename(self.checkpoint, self._out)
        except BaseException:  # an interrupt too
            self._recover()
            raise
        sync(self._out.parent)

    def close(self, *, keep: bool) -> None:
        """Give the lock back and remove the work of this job; ``keep`` leaves committed parts, unless they were
        published."""
        try:
            if keep and self.checkpoint.exists():
                with suppress(OSError):
                    self._clear()
                return
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):
                self._recover()
                if not self._works():
                    # The lock goes last: until then nobody else can begin here.
                    (self._root / "lock").unlink()
                    self._root.rmdir()
        finally:
            os.close(self._lock)

    def _forget_unfinished(self) -> None:
        """Remove ``unfinished``, and what a kill left while it was written."""
        for path in self.path.glob(f"*{self.unfinished.name}*"):
            path.unlink()

    def _clear(self) -> None:
        """Empty the checkpoint and keep its directory, which tells unfinished work from finished."""
        for path in self.checkpoint.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def fingerprint(facts: Facts) -> str:
    """A hash that two jobs share only if they write the same bytes."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()


def leftover(out: Path) -> int:
    """Bytes that lie beside ``out`` already."""
    return _nbytes(_beside(out))


def _following(path: Path, follows: str) -> Part | None:
    try:
        part = read_part(path)
    except CheckpointError:
        return None
    return part if part.follows == follows and part.key is not None else None


def _nbytes(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())


def _beside(out: Path) -> Path:
    return out.parent / f".{out.name}.partial"
