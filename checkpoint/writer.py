"""``CheckpointWriter``: a checkpoint directory that appears whole or not at all.

Knows shards, the index, hashes and durable renames; does not know what the tensors mean. Everything is
written into a hidden directory beside OUT; ``finish`` makes it durable and renames it, leaving the block
without ``finish`` removes it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qserve.checkpoint import gptq_format
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import sync, write_error
from qserve.checkpoint.manifest import write_manifest
from qserve.checkpoint.packed import PackedWeight
from qserve.checkpoint.safetensors_index import INDEX, SINGLE


class CheckpointWriter:
    """Write a checkpoint to ``out``: ``with CheckpointWriter(out) as w: w.put(name, tensor); w.finish()``.

    At most ``shard_bytes`` of tensors are held in memory (or one tensor, where that is larger); they go to
    ``model.safetensors``, or to numbered shards with an index. ``expected_bytes`` is checked against the free
    space first. With ``overwrite`` a checkpoint at ``out`` is replaced at ``finish`` and kept until then.
    Raises ``CheckpointError``.
    """

    def __init__(self, out: str | Path, *, overwrite: bool = False, shard_bytes: int = 2 << 30,
                 expected_bytes: int | None = None, version: gptq_format.Version = "gptq") -> None:
        # Resolved, so that a link at OUT is followed and not replaced.
        self.out = Path(os.path.expanduser(out)).resolve()
        self.directory = self.out.parent / f".{self.out.name}.partial-{secrets.token_hex(4)}"
        self._shard_bytes = shard_bytes
        self._version = version
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._names: set[str] = set()
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._sealed = self._finished = False
        self._overwrite = overwrite
        self._check_out()
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.out.parent).free
            if expected_bytes is not None and expected_bytes > free:
                raise CheckpointError(
                    f"no space left for {self.out}: {expected_bytes / 2**20:,.0f} MiB needed, "
                    f"{free / 2**20:,.0f} MiB free; free some space or choose another directory"
                )
            self.directory.mkdir()
        except OSError as error:
            raise write_error(self.out, error) from None

    def _check_out(self) -> None:
        if not self.out.exists():
            return
        if not self.out.is_dir():
            raise CheckpointError(f"{self.out} is a file; choose a directory for the checkpoint")
        if os.path.ismount(self.out):
            raise CheckpointError(f"{self.out} is a mount point, which cannot be replaced; choose a directory inside")
        if not any(self.out.iterdir()):
            return
        if not self._overwrite:
            raise CheckpointError(
                f"{self.out} exists and is not empty; choose another directory or pass --overwrite"
            )
        if not (self.out / "config.json").exists():
            raise CheckpointError(f"{self.out} is no checkpoint (no config.json), so it is not overwritten")
        strange = [path.name for path in self.out.iterdir() if path.is_dir() or path.suffix == ".gguf"]
        if strange:
            raise CheckpointError(f"{self.out} holds {strange[0]}, which is no part of a checkpoint: not overwritten")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if not self._finished:
            self._pending.clear()
            shutil.rmtree(self.directory, ignore_errors=True)

    def put(self, name: str, tensor: Tensor) -> None:
        """Add one tensor; it is copied, so the caller may reuse its memory."""
        if name in self._names:
            raise CheckpointError(f"the tensor {name} is written twice")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._names.add(name)
        self._pending[name] = tensor.detach().cpu().contiguous().clone()
        self._pending_bytes += size

    def put_linear(self, module: str, weight: PackedWeight) -> None:
        """Add one quantized linear in the GPTQ format, as ``module.qweight`` and so on."""
        try:
            weight.check()
            parts = gptq_format.pack(weight, self._version)
        except CheckpointError as error:
            raise CheckpointError(f"{module} cannot be written: {error}") from None
        for part, tensor in parts.items():
            self.put(f"{module}.{part}", tensor)

    def put_json(self, filename: str, content: object) -> None:
        """Add a JSON file; NaN and infinity are refused (``ValueError``), since other readers refuse them."""
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        self._guard(lambda: (self.directory / filename).write_text(text, encoding="utf-8"))

    def seal(self) -> Path:
        """Write what is pending, the index and the manifest; the directory can now be read as a checkpoint.

        Nothing can be put after that, but a quality card may be stored, which is not in the manifest.
        """
        if not self._sealed:
            self._guard(self._complete)
            self._sealed = True
        return self.directory

    def finish(self) -> None:
        """Seal, make everything durable and move it to OUT."""
        self.seal()
        self._guard(self._publish)
        self._finished = True

    def _complete(self) -> None:
        if self._pending:
            self._flush()
        if len(self._shards) == 1:
            (self.directory / _shard(1)).rename(self.directory / SINGLE)
        elif self._shards:
            self._write_index()
        write_manifest(self.directory)

    def _publish(self) -> None:
        self._check_out()  # again: somebody may have put something there meanwhile
        for path in self.directory.iterdir():
            sync(path)
        sync(self.directory)
        self._move()

    def _write_index(self) -> None:
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            final = _shard(number, len(self._shards))
            (self.directory / _shard(number)).rename(self.directory / final)
            weight_map |= dict.fromkeys(names, final)
        self.put_json(INDEX, {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map})

    def _move(self) -> None:
        """Rename the staging directory to OUT; an old checkpoint there is moved aside first and put back
        should the rename fail, so that one of the two is always complete on disk."""
        old: Path | None = None
        if self.out.exists() and any(self.out.iterdir()):
            old = self.out.with_name(f".{self.out.name}.old-{secrets.token_hex(4)}")
            os.rename(self.out, old)
        try:
            os.rename(self.directory, self.out)
        except BaseException:  # an interrupt too
            if old is not None and not self.out.exists():
                os.rename(old, self.out)
            raise
        sync(self.out.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _flush(self) -> None:
        path = self.directory / _shard(len(self._shards) + 1)
        self._guard(lambda: save_file(self._pending, path, metadata={"format": "pt"}))
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending = {}
        self._pending_bytes = 0

    def _guard(self, write: Callable[[], Any]) -> None:
        """Run ``write``; a failure of the disk becomes one line."""
        try:
            write()
        except OSError as error:
            raise write_error(self.out, error) from None
        except SafetensorError as error:
            raise CheckpointError(_disk_line(self.out, str(error))) from None


def _shard(number: int, total: int | None = None) -> str:
    """The name of a shard; while the total is unknown, without it."""
    return f"model-{number:05d}{'' if total is None else f'-of-{total:05d}'}.safetensors"


def _disk_line(out: Path, reason: str) -> str:
    # safetensors reports the disk's errors as text: "I/O error: No space left on device (os error 28)".
    if any(text in reason for text in ("No space left", "os error 28", "File too large", "os error 27",
                                       "quota", "os error 122")):
        return f"no space left to write {out}; free some space or choose another directory"
    return f"{out} cannot be written: {reason}"
