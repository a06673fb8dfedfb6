"""``Staging``: the hidden directory beside OUT in which a checkpoint is made, held by one process at a time.

This file has its layout, the lock, and the renames that put a checkpoint in its place:

    .NAME.partial/
        lock          locked as long as a process works here; a killed one holds no lock
        parts/        00001, 00002 and so on; 00003.state is the state of unfinished work on the third
        checkpoint/   made from the parts, renamed to OUT at the end
        unfinished    the state of a measurement of the checkpoint before that rename, for a run that resumes
        replaced/     the old OUT, only between the two renames of an overwrite
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import sync
from qserve.checkpoint.parts import Part, read_part


class Staging:
    """Opening takes the lock, and puts back what an overwrite killed halfway had moved aside.

    Raises ``CheckpointError`` where another process holds it, ``OSError``.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self.path = _beside(out)
        self.checkpoint = self.path / "checkpoint"
        self.unfinished = self.path / "unfinished"
        self._parts = self.path / "parts"
        self._replaced = self.path / "replaced"
        self._lock = self._acquire()
        try:
            self._recover()
        except BaseException:
            os.close(self._lock)
            raise

    def _acquire(self) -> int:
        path = self.path / "lock"
        while True:
            self.path.mkdir(exist_ok=True)
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

    def open(self, fingerprint: str | None) -> tuple[list[Part], Part | None]:
        """The parts that the job ``fingerprint`` committed, and the state of work on the next; all else is removed.

        They end before the first part that is damaged or of another job, since later parts depend on it.
        """
        self._parts.mkdir(exist_ok=True)
        self.checkpoint.mkdir(exist_ok=True)
        parts: list[Part] = []
        state = None
        if fingerprint is not None:
            follows = fingerprint
            while part := _read(self.part(len(parts) + 1), follows):
                parts.append(part)
                follows = part.digest
            state = _read(self.state(len(parts) + 1), follows)
        if not parts:
            self._forget_unfinished()
        self.sweep([*parts, state] if state else parts)
        for directory in (self._parts, self.path, self._out.parent):
            sync(directory)
        return parts, state

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
            sync(self.path)
        try:
            os.rename(self.checkpoint, self._out)
        except BaseException:  # an interrupt too
            self._recover()
            raise
        sync(self._out.parent)

    def close(self, *, keep: bool) -> None:
        """Give the lock back and remove the directory; ``keep`` leaves committed parts, unless they were published."""
        try:
            if keep and self.checkpoint.exists():
                with suppress(OSError):
                    self._clear()
                return
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            shutil.rmtree(self._parts, ignore_errors=True)
            with suppress(OSError):
                self._forget_unfinished()
                self._recover()
                # The lock goes last: until then nobody else can begin here.
                (self.path / "lock").unlink()
                self.path.rmdir()
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


def _read(path: Path, follows: str) -> Part | None:
    try:
        part = read_part(path)
    except CheckpointError:
        return None
    return part if part.follows == follows and part.key is not None else None


def leftover(out: Path) -> int:
    """Bytes that lie beside ``out`` already: they are no longer needed, or will be free again."""
    return sum(path.lstat().st_size for path in _beside(out).rglob("*") if path.is_file())


def _beside(out: Path) -> Path:
    return out.parent / f".{out.name}.partial"
