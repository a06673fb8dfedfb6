"""``Activations``: the hidden states of every calibration sample between two blocks, in memory or in a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from qserve.kernels.executor import CPU


class Activations:
    """float32 [samples, length, width] on ``device``, read and written a few samples at a time.

    With ``directory`` the states lie in an unnamed file there. They are read and written, not mapped: mapped pages
    would count as memory of this process.
    """

    def __init__(
        self,
        samples: int,
        length: int,
        width: int,
        directory: Path | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.shape, self.device = (samples, length, width), device
        self._memory = torch.empty(self.shape, device=device) if directory is None else None
        self._file = None if directory is None else tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self._sample_bytes = 4 * length * width

    def read(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, length, width], fewer at the end; a view where the states are in memory."""
        if self._memory is not None:
            return self._memory[start:stop]
        assert self._file is not None
        part = torch.empty(min(stop, self.shape[0]) - start, *self.shape[1:], device="cpu")
        self._file.seek(start * self._sample_bytes)
        view = memoryview(part.numpy()).cast("B")  # type: ignore[arg-type]
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise OSError("the file of offloaded activations ended early")
            done += count
        return part.to(self.device)

    def write(self, start: int, values: Tensor) -> None:
        """Store ``values`` [n, length, width] from sample ``start`` on. A whole batch in memory is kept, not copied."""
        if self._memory is not None and tuple(values.shape) == self.shape:
            self._memory = values
        elif self._memory is not None:
            self._memory[start : start + len(values)] = values
        else:
            self._store(start, values)

    def _store(self, start: int, values: Tensor) -> None:
        assert self._file is not None
        self._file.seek(start * self._sample_bytes)
        view = memoryview(values.contiguous().cpu().numpy()).cast("B")  # type: ignore[arg-type]
        done = 0
        while done < len(view):
            done += self._file.write(view[done:]) or 0
