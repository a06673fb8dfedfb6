"""``Partial``: the finished part of an interrupted measurement, in a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from qserve.checkpoint.errors import DataError, QServeError
from qserve.checkpoint.files import write_atomically

_EVERY = 20.0  # seconds between two writes


class Partial:
    """The results of the first pieces of a measurement that ``key`` identifies: models, text, settings, version.

    If the file at ``path`` is something else or belongs to another measurement, it is refused with a ``DataError``, or,
    with ``replaces``, overwritten.
    """

    def __init__(self, path: Path, key: str, *, replaces: bool = False) -> None:
        self.path = path
        self._key, self._replaces = key, replaces
        self._saved = time.monotonic()

    def load(self) -> tuple[int, list[dict[str, Tensor]]]:
        """The number of finished pieces, and their results as one part; (0, []) where there is no file."""
        if not self.path.exists():
            return 0, []
        try:
            return self._read()
        except DataError:
            if self._replaces:
                return 0, []
            raise

    def _read(self) -> tuple[int, list[dict[str, Tensor]]]:
        try:
            with safe_open(self.path, "pt") as file:
                metadata = file.metadata() or {}
                part = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DataError(f"{self.path} cannot be resumed from: {error}") from None
        if metadata.get("key") != self._key:
            raise DataError(
                f"{self.path} belongs to another measurement (other models, text, settings or version): "
                "delete it, or name another file"
            )
        return int(metadata["done"]), [part]

    def keep(self, done: int, parts: Sequence[dict[str, Tensor]]) -> None:
        """``save``, if the last time was long enough ago."""
        if time.monotonic() - self._saved >= _EVERY:
            self.save(done, parts)

    def save(self, done: int, parts: Sequence[dict[str, Tensor]]) -> None:
        if not done:
            return
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, save(joined, {"key": self._key, "done": str(done)}))
        except OSError as error:
            raise QServeError(f"cannot write {self.path}: {error.strerror or error}") from None
        self._saved = time.monotonic()

    def remove(self) -> None:
        """Remove the file: the measurement is complete."""
        self.path.unlink(missing_ok=True)
