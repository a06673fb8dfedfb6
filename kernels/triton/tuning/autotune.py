"""``--autotune``: the products of a loaded model, each with the best configuration for this GPU.

A configuration is timed once and then remembered in the user's cache, in a file for each GPU, Triton version and source
of the kernels. Every model adds to that file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from qserve.checkpoint.cache_dir import cache_dir
from qserve.checkpoint.errors import CheckpointError
from qserve.kernels.threads import default_threads
from qserve.kernels.triton.target import Target
from qserve.kernels.triton.tuning.configs import BUCKETS, bucket_of
from qserve.kernels.triton.tuning.stopwatch import Stopwatch
from qserve.kernels.triton.tuning.tune import REFUSALS, Tunable, Tuner, configure, rows_of
from qserve.kernels.triton.tuning.tuned import InUse, Measured, TunedFile, begin, file_of, kernels_hash, read

COMMAND = "--autotune"
LIMIT = 600.0
"""The most seconds. Products that had no turn keep their configuration, and are timed at the next start."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Autotuned:
    """The result: ``timed`` now, ``known`` before, ``left`` for the next start. ``notes``: problems with the cache."""

    path: Path
    timed: int
    known: int
    left: int
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The result for people."""
        left = f", {self.left} are left for the next start" if self.left else ""
        return [f"{self.timed} timed now, {self.known} known from {self.path}{left}", *self.notes]


def cache_file(target: Target) -> Path:
    """The file that keeps what was measured for a GPU."""
    found = file_of(target, cache_dir() / "tuned")
    return found.with_name(f"{found.stem}-{kernels_hash()}.json")


def tuner(device: torch.device) -> Tuner:
    """A tuner for ``device`` that ends after ``LIMIT`` seconds."""
    return Tuner(Stopwatch(device), default_threads(), time.monotonic() + LIMIT)


def by_key(products: Sequence[Tunable]) -> dict[str, list[Tunable]]:
    """Equal products together."""
    found: dict[str, list[Tunable]] = {}
    for product in products:
        found.setdefault(product.key, []).append(product)
    return found


def autotune(
    products: Sequence[Tunable], target: Target, tuner: Tuner, path: Path,
    progress: Progress | None = None,
) -> Autotuned:  # fmt: skip
    """Configure every product for all numbers of rows that may come, and remember in ``path`` what had to be timed.

    A cache that cannot be read is replaced, and one that cannot be written is not kept; both become notes.
    """
    notes: list[str] = []
    held = begin(target, COMMAND)
    if path.exists():
        try:
            held = read(path, target)
        except CheckpointError as error:
            notes.append(f"made again: {error}")
    work = [(key, group, bucket) for key, group in by_key(products).items() for bucket in BUCKETS
            if bucket <= bucket_of(len(group[0].op.x))]  # fmt: skip
    timed = known = 0
    for done, (key, group, bucket) in enumerate(work):
        if progress:
            progress(done, len(work))
        found = held.entries.get(key, {}).get(bucket)
        if found is not None and _runs(group, bucket, found):
            known += 1
        elif (measured := tuner.tune(group, bucket)) is not None:
            timed += 1
            held.entries.setdefault(key, {})[bucket] = measured
            if (fault := _save(held, path)) is not None and fault not in notes:
                notes.append(fault)
    if progress:
        progress(len(work), len(work))
    for product in products:
        product.configure({})  # all share the largest workspace that one of them took
    return Autotuned(path, timed, known, len(work) - timed - known, tuple(notes))


def prove(products: Sequence[Tunable], gpu: Target, table: InUse) -> None:
    """Launch every configuration that ``table`` has for ``products`` once. Where this GPU refuses one, that is noted in
    ``table``, and the products get the default."""
    for key, group in by_key(products).items():
        found: Mapping[int, Measured] = {} if table.file is None else table.file.entries.get(key, {})
        for bucket, measured in found.items():
            used = bucket <= bucket_of(len(group[0].op.x)) and (key, bucket) not in table.refused
            if used and not _runs(group, bucket, measured):
                table.refused[key, bucket] = "the GPU has too few registers or too little shared memory for it"
                configure(group, bucket, group[0].config_for(rows_of(bucket, group[0]), gpu, False))


def _runs(group: Sequence[Tunable], bucket: int, measured: Measured) -> bool:
    """Whether the products can use a configuration; if so, they have it from now on."""
    first = group[0]
    if not first.fits(measured.config):
        return False
    before = first.configs[bucket]
    configure(group, bucket, measured.config)
    try:
        first.run(rows_of(bucket, first))
    except REFUSALS:
        configure(group, bucket, before)
        return False
    return True


def _save(held: TunedFile, path: Path) -> str | None:
    """Write the file; returns None, or why it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held.write(path)
    except (CheckpointError, OSError) as error:
        return f"not kept: {error}"
    return None
