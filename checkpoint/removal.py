"""``Removal``: what ``qserve rm`` is about to remove, found and checked before anything is touched.

Only what qserve wrote, measured or cached is found. The command asks the user.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from qserve.checkpoint.card import CARD_FILE
from qserve.checkpoint.demo import DEMOS, demo_path
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import sync, write_error
from qserve.checkpoint.hub import PATTERNS, is_hub_id, split_hub_id
from qserve.checkpoint.manifest import MANIFEST, read_manifest

# Files that a published checkpoint may also hold, besides those of the hub's patterns.
_BESIDE = (*PATTERNS, "*.md", "LICENSE*", ".gitattributes")


@dataclass(frozen=True)
class Removal:
    """``what`` is a line for people, ``bytes`` the space that becomes free. ``run`` raises ``CheckpointError``."""

    what: str
    bytes: int
    run: Callable[[], None]


def find_removal(model: str) -> Removal:
    """Find what ``model`` names, in the order in which ``open_model`` would.

    Raises ``CheckpointError`` unless it is a checkpoint that qserve wrote or measured, a model in the hub's cache, or
    the demo.
    """
    path = Path(model).expanduser()
    if model in DEMOS and not path.is_dir():
        return _demo(model)
    if path.is_dir():
        return _directory(path)
    if path.is_file():
        raise CheckpointError(f"{path} is a file that qserve did not write; remove it yourself")
    if is_hub_id(model):
        return _cached(model)
    raise CheckpointError(f"{model} does not exist; qserve list shows what is there")


def _demo(model: str) -> Removal:
    path = demo_path(DEMOS[model])
    if not path.is_file():
        raise CheckpointError(f"the demo model is not in {path.parent}")
    return Removal(f"the demo model, {path}", path.stat().st_size, lambda: _unlink(path))


def _directory(path: Path) -> Removal:
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link; give the directory itself, {path.resolve()}")
    if not (path / MANIFEST).is_file() and not (path / CARD_FILE).is_file():
        raise CheckpointError(
            f"{path} is no checkpoint that qserve wrote: it has neither {MANIFEST} nor {CARD_FILE}; remove it yourself"
        )
    manifest = read_manifest(path) or {}
    entries = sorted(path.iterdir())
    for entry in entries:
        known = entry.name in manifest or any(fnmatchcase(entry.name, pattern) for pattern in _BESIDE)
        if entry.is_dir() or not known:
            raise CheckpointError(f"{path} also holds {entry.name}, which is not of the checkpoint; move it away first")
    size = sum(entry.lstat().st_size for entry in entries)
    return Removal(f"the checkpoint {path}, {len(entries)} files", size, lambda: _remove_directory(path))


def _cached(model: str) -> Removal:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    model_id, revision = split_hub_id(model)
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        raise CheckpointError(f"{model} is neither a local path nor in the hub cache") from None
    commits = [
        found.commit_hash
        for repo in cache.repos
        if (repo.repo_type, repo.repo_id) == ("model", model_id)
        for found in repo.revisions
        if revision is None or revision in found.refs or revision == found.commit_hash
    ]
    if not commits:
        raise CheckpointError(f"{model} is neither a local path nor in the hub cache")
    strategy = cache.delete_revisions(*commits)
    return Removal(f"{model} from the hub cache", strategy.expected_freed_size, strategy.execute)


def _remove_directory(path: Path) -> None:
    """Rename it first, so that whatever happens nobody finds half a checkpoint under its name."""
    path = path.absolute()
    doomed = path.with_name(f".{path.name}.{secrets.token_hex(4)}.removed")
    try:
        os.rename(path, doomed)
        sync(doomed.parent)
        shutil.rmtree(doomed)
    except OSError as error:
        raise write_error(path, error) from None


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        raise write_error(path, error) from None
