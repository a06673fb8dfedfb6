"""``CheckpointWriter``: a checkpoint directory that appears whole or not at all, made in durable steps.

Tensors go straight to parts on disk, and from there to shards in small pieces, so writing takes no memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from qserve.checkpoint.container import TensorBytes, write_safetensors
from qserve.checkpoint.errors import CheckpointError, GateFailed
from qserve.checkpoint.files import write_error
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.formats.format import Format
from qserve.checkpoint.kv import KEY_CENTER
from qserve.checkpoint.manifest import write_manifest
from qserve.checkpoint.parts import Part, PartWriter, read_part
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.safetensors_index import ASIDE, INDEX, SINGLE
from qserve.checkpoint.staging import Facts, OtherWork, Staging, leftover


class CheckpointWriter:
    """Write a checkpoint to ``out``: ``with CheckpointWriter(out) as w: w.put(name, tensor); w.finish()``.

    Until ``finish`` everything lies in a hidden directory beside ``out``. ``facts`` are all that the checkpoint's bytes
    depend on. With them each ``commit`` is a step that is not lost: the committed parts stay if the block is left
    unfinished or the process is killed, and a writer with the same facts finds them (``resumed`` of them, see
    ``committed`` and ``part``). Longer work can be kept on the way to its commit (see ``keep``); a measurement of the
    sealed checkpoint keeps its state in the file ``unfinished``. The work of other jobs for ``out`` stays (see
    ``others``).

    Tensors are stored in the order in which they were put, in ``model.safetensors`` or in numbered shards of at
    most ``shard_bytes`` (or one tensor, where that is larger) with an index. The free space is checked
    first: it must hold twice ``expected_bytes``, for the parts and the shards made from them, or ``expected_bytes`` and
    ``kept_bytes`` (see ``keep``), where that is more. With ``overwrite`` a checkpoint at ``out`` is replaced at
    ``finish`` and kept until then. Only one process can write to ``out`` at a time. Raises ``CheckpointError``.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        overwrite: bool = False,
        shard_bytes: int = 4 << 30,
        expected_bytes: int | None = None,
        kept_bytes: int = 0,
        format: Format = FORMATS["gptq"],
        facts: Facts | None = None,
    ) -> None:
        # Resolved, so that a link at OUT is followed and not replaced.
        self.out = Path(os.path.expanduser(out)).resolve()
        self._overwrite = overwrite
        self._shard_bytes = shard_bytes
        self._format = format
        self._part: PartWriter | None = None
        self._sealed = self._finished = False
        with self._guard():
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._staging = Staging(self.out, facts)
            self.directory, self.unfinished = self._staging.checkpoint, self._staging.unfinished
            try:
                check_out(self.out, overwrite=overwrite, expected_bytes=expected_bytes, kept_bytes=kept_bytes,
                          reused=self._staging.leftover())  # fmt: skip
                self._open_parts()
            except BaseException:
                # Unfinished work of an earlier run stays; without its directory there is none.
                self._staging.close(keep=self.directory.exists())
                raise
        self.resumed = len(self._parts)

    def _open_parts(self) -> None:
        self._parts, self._state = self._staging.open()
        self._committed = {tensor.name for part in self._parts for tensor in part.tensors}
        self._names = set(self._committed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        something = self._state is not None or bool(self.committed())
        keep = self._staging.fingerprint is not None and something and not self._finished
        if self._part is not None:
            self._part.abandon()
        self._staging.close(keep=keep)
        if keep and isinstance(error, GateFailed):
            error.add_note(f"{self.out} is not published; what was made is kept in {self._staging.path}")
        elif keep and error is not None:
            error.add_note(f"what is done is kept in {self._staging.path}: run the same command again to go on")

    def put(self, name: str, tensor: Tensor, *, replace: bool = False) -> None:
        """Write one tensor to the current part; it is on its way to the disk when this returns. With ``replace`` it
        takes the place of one in a committed part."""
        if self._sealed:
            raise ValueError(f"{name} is put after the checkpoint was sealed")
        if replace and name not in self._committed:
            raise ValueError(f"{name} replaces nothing")
        if name in self._names and not replace:
            raise CheckpointError(f"the tensor {name} is written twice")
        self._names.add(name)
        with self._guard():
            self._current().add(name, tensor)

    def put_linear(self, module: str, weight: QuantizedWeight) -> None:
        """Add one quantized linear in the checkpoint's format, as ``module.qweight`` and so on."""
        for part, tensor in self._pack(module, weight).items():
            self.put(f"{module}.{part}", tensor)

    def replace_linear(self, module: str, before: QuantizedWeight, after: QuantizedWeight) -> None:
        """Replace the tensors of a linear that differ; it is in a committed part as ``before``."""
        old = self._pack(module, before)
        for part, tensor in self._pack(module, after).items():
            if not torch.equal(tensor, old[part]):
                self.put(f"{module}.{part}", tensor, replace=True)

    def _pack(self, module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        try:
            weight.check()
            return self._format.pack(weight)
        except CheckpointError as error:
            raise CheckpointError(f"{module} cannot be written: {error}") from None

    def put_json(self, filename: str, content: object) -> None:
        """Add a JSON file; NaN and infinity are refused (``ValueError``), since other readers refuse them.

        It belongs to no part: a run that resumes puts it again.
        """
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        with self._guard():
            (self.directory / filename).write_text(text, encoding="utf-8")

    def commit(self, key: str, extra: dict[str, Any] | None = None) -> None:
        """Make the tensors since the last commit one durable part, with ``extra`` (JSON) beside them.

        Tensors after the last commit are written by ``seal``, and lost if the process is killed before.
        """
        if key in self.committed():
            raise ValueError(f"the part {key} is committed twice")
        self._commit(key, extra or {})

    def committed(self) -> list[str]:
        """The keys of the parts that are safe, those of an earlier run included, in order."""
        return [part.key for part in self._parts if part.key is not None]

    def part(self, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and the ``extra`` of a committed part, read back; ``CheckpointError`` where it is damaged."""
        part = read_part({part.key: part.path for part in self._parts}[key])
        return part.load(), part.extra

    def keep(self, key: str, tensors: Iterable[tuple[str, Tensor]], extra: dict[str, Any]) -> None:
        """Make ``tensors`` and ``extra`` (JSON) durable, so that unfinished work on ``key``, the next part, can go on
        from them (see ``kept``). They replace what was kept before, are no part, and are gone after the next commit."""
        with self._guard():
            state = PartWriter(self._staging.state(len(self._parts) + 1))
            try:
                for name, tensor in tensors:
                    state.add(name, tensor)
                self._state = state.commit(key, self._follows(), extra)
            except BaseException:
                state.abandon()
                raise

    def kept(self, key: str) -> Part | None:
        """What was kept last of the work on the part ``key``, in this run or an earlier one."""
        return self._state if self._state is not None and self._state.key == key else None

    def others(self) -> list[OtherWork]:
        """Unfinished work of other jobs for ``out``. Nothing here removes it."""
        with self._guard():
            return self._staging.others()

    def restart(self, key: str, extra: dict[str, Any], *, set_aside: bool = False) -> None:
        """Replace all parts by one, ``key``, without tensors. After a crash there are the old parts or this one.
        ``set_aside``: keep the old ones for ``go_back``."""
        with self._guard():
            if set_aside:
                self._staging.set_aside()
            first = PartWriter(self._staging.part(1)).commit(key, self._staging.fingerprint, extra)
            self._staging.sweep([first])
        self._parts, self._state, self._sealed = [first], None, False
        self._committed, self._names = set(), set()

    def go_back(self) -> None:
        """Replace all parts by those that were set aside."""
        with self._guard():
            self._staging.go_back()
            self._open_parts()
        self._sealed = False

    def seal(self) -> Path:
        """Write the shards, the index and the manifest; the directory can now be read as a checkpoint.

        Nothing can be put after that, except a quality card, which is not in the manifest.
        """
        if not self._sealed:
            if self._part is not None:
                self._commit(None, {})
            with self._guard():
                self._write_shards()
                write_manifest(self.directory)
            self._sealed = True
        return self.directory

    def finish(self) -> None:
        """Seal, make everything durable and rename it to OUT."""
        self.seal()
        with self._guard():
            check_out(self.out, overwrite=self._overwrite)  # again: somebody may have put something there meanwhile
            self._staging.publish()
        self._finished = True

    def _current(self) -> PartWriter:
        if self._part is None:
            self._part = PartWriter(self._staging.part(len(self._parts) + 1))
        return self._part

    def _commit(self, key: str | None, extra: dict[str, Any]) -> None:
        with self._guard():
            self._parts.append(self._current().commit(key, self._follows(), extra))
            if self._state is not None:
                self._state.path.unlink()
                self._state = None
        self._committed |= self._names
        self._part = None

    def _follows(self) -> str | None:
        return self._parts[-1].digest if self._parts else self._staging.fingerprint

    def _write_shards(self) -> None:
        """Write the shards. The parts stay until the checkpoint is in its place, so this can be done again."""
        # A replaced tensor keeps its place in the order.
        stored = {tensor.name: tensor for part in self._parts for tensor in part.tensors}
        aside = [stored.pop(name) for name in list(stored) if name.endswith(f".{KEY_CENTER}")]
        if aside:
            write_safetensors(self.directory / ASIDE, aside)
        shards = _shards(list(stored.values()), self._shard_bytes)
        weight_map: dict[str, str] = {}
        for number, tensors in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_safetensors(self.directory / name, tensors)
            weight_map |= dict.fromkeys((tensor.name for tensor in tensors), name)
        if len(shards) > 1:
            size = sum(tensor.nbytes for tensors in shards for tensor in tensors)
            self.put_json(INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Errors of the disk become one line."""
        try:
            yield
        except OSError as error:
            raise write_error(self.out, error) from None


def _shards(tensors: list[TensorBytes], limit: int) -> list[list[TensorBytes]]:
    shards: list[list[TensorBytes]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def check_out(
    out: Path, *, overwrite: bool, expected_bytes: int | None = None, kept_bytes: int = 0, reused: int | None = None
) -> None:
    """Raise ``CheckpointError`` where a checkpoint of ``expected_bytes`` cannot be put at ``out``, with ``kept_bytes``
    of unfinished work beside it on the way. ``reused`` bytes lie there already; None takes all unfinished work for this
    job's. Writes nothing."""
    out = Path(os.path.expanduser(out)).resolve()
    existing = next(path for path in out.parents if path.exists())
    if not existing.is_dir():
        raise CheckpointError(f"{out} cannot be written: {existing} is a file; choose another directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise CheckpointError(f"{out} cannot be written: {existing} is write-protected; choose another directory")
    _check_replaceable(out, overwrite)
    if expected_bytes is None:
        return
    free = shutil.disk_usage(existing).free + (leftover(out) if reused is None else reused)
    needed, why = 2 * expected_bytes, "the checkpoint twice, while it is put together"
    if kept_bytes > expected_bytes:
        needed, why = expected_bytes + kept_bytes, "the checkpoint, and what a run goes on from after a kill"
    if needed > free:
        raise CheckpointError(
            f"no space left for {out}: {needed / 2**20:,.0f} MiB needed ({why}), {free / 2**20:,.0f} MiB free; "
            "free some space or choose another directory"
        )


def _check_replaceable(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise CheckpointError(f"{out} is a file; choose a directory for the checkpoint")
    if os.path.ismount(out):
        raise CheckpointError(f"{out} is a mount point, which cannot be replaced; choose a directory inside")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(f"{out} exists and is not empty; choose another directory or pass --overwrite")
    if not (out / "config.json").exists():
        raise CheckpointError(f"{out} is no checkpoint (no config.json), so it is not overwritten")
    strange = [path.name for path in out.iterdir() if path.is_dir() or path.suffix == ".gguf"]
    if strange:
        raise CheckpointError(f"{out} holds {strange[0]}, which is no part of a checkpoint: not overwritten")
    if not os.access(out, os.W_OK):
        raise CheckpointError(f"{out} is write-protected, so it is not overwritten; choose another directory")
