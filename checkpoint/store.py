"""``StoredModel`` and ``find_models``: the models on this machine, wherever they lie.

It looks in directories, in the hub's cache and for the demo model, and reads headers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qserve.checkpoint.bucket import cached
from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.demo import DEMOS, demo_path
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.source import open_model
from qserve.checkpoint.summary import summarize

DEPTH = 2


@dataclass(frozen=True)
class StoredModel:
    """``name`` is the MODEL argument of other commands, ``modified`` in seconds since 1970, ``bytes`` those on disk.

    ``problem`` says why a checkpoint cannot be read; then format, bits and card are unknown. Or it says that the card
    is of other weights; then the card is left out.
    """

    name: str
    path: Path
    bytes: int
    modified: float
    format: str = ""
    bits_per_weight: float | None = None
    card: QualityCard | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": str(self.path),
            "format": self.format or None,
            "bits_per_weight": self.bits_per_weight,
            "bytes": self.bytes,
            "modified": datetime.fromtimestamp(self.modified, UTC).isoformat(timespec="seconds"),
            "quality_card": None if self.card is None else self.card.to_json(),
            "problem": self.problem,
        }


def find_models(directories: list[Path]) -> Iterator[StoredModel]:
    """The models in ``directories`` and two levels below, in the hub's cache, from buckets, and the demo models.

    From the hub's cache come only models that qserve can read. Raises ``CheckpointError`` for what is not a directory.
    """
    seen: set[Path] = set()
    for directory in directories:
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory")
        for path in _candidates(directory, DEPTH):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield _describe(path, str(path))
    yield from _cached_models()
    yield from (_describe(path, url) for url, path in cached())
    for name, model in DEMOS.items():
        path = demo_path(model)
        if path.is_file() and not (demo := _describe(path, name)).problem:
            yield demo


def _candidates(directory: Path, depth: int) -> Iterator[Path]:
    """Model directories and GGUF files; hidden directories (unfinished work) and links to directories are skipped."""
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return
    names = {entry.name for entry in entries}
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        yield directory
        return
    for entry in entries:
        if entry.suffix == ".gguf" and entry.is_file():
            yield entry
        elif depth and not entry.name.startswith(".") and entry.is_dir() and not entry.is_symlink():
            yield from _candidates(entry, depth - 1)


def _cached_models() -> Iterator[StoredModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = sorted(scan_cache_dir(constants.HF_HUB_CACHE).repos, key=lambda repo: repo.repo_id)
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type != "model":
            continue
        for revision in sorted(repo.revisions, key=lambda revision: revision.last_modified, reverse=True):
            paths = list(_candidates(revision.snapshot_path, 0))
            refs = sorted(revision.refs)
            suffix = "" if "main" in refs else f"@{refs[0] if refs else revision.commit_hash}"
            for path in paths:
                # If there are several GGUF files, each is named by its path.
                found = _describe(path, f"{repo.repo_id}{suffix}" if len(paths) == 1 else str(path))
                if found.format:
                    yield found


def _describe(path: Path, name: str) -> StoredModel:
    # Links of the hub's cache point to the files that take the space.
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
    stats = [file.stat() for file in files]
    size, modified = sum(stat.st_size for stat in stats), max(stat.st_mtime for stat in stats)
    try:
        source = open_model(path, offline=True)
        summary = summarize(source)
    except CheckpointError as error:
        return StoredModel(name, path, size, modified, problem=str(error))
    format = summary.format or "hf"
    problem = source.card_problem() if isinstance(source, HFDirectory) else None
    card = source.card if problem is None else None
    return StoredModel(name, path, size, modified, format, summary.bits_per_weight, card, problem)
