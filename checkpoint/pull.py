"""``RemoteModel``: chooses the files of a model on the hub, fetches them into the hub's cache and checks their hashes.

Whole files in the cache are not fetched again, so a pull that was interrupted goes on with the file it was at.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import file_sha256
from qserve.checkpoint.hub import IGNORED, PATTERNS, hub_errors, is_hub_id, split_hub_id

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
POLL_SECONDS = 0.2

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub describes it: large ones by SHA-256, others by git's hash. None where the hub does not say."""

    name: str
    bytes: int
    sha256: str | None
    blob_id: str | None

    def matches(self, path: Path) -> bool:
        """Whether ``path`` has the bytes that the hub says."""
        if path.stat().st_size != self.bytes:
            return False
        if self.sha256 is not None:
            return file_sha256(path) == self.sha256
        if self.blob_id is None:
            return True
        blob = b"blob %d\0" % self.bytes + path.read_bytes()
        return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == self.blob_id


@dataclass(frozen=True)
class RemoteModel:
    """The files of one commit that make a model; ``text`` is how the user named it."""

    text: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def pull(self, progress: Progress = lambda done, total: None) -> tuple[Path, int]:
        """Fetch what is missing and check everything; returns the model's path and the number of bytes fetched.

        Raises ``CheckpointError``, also where a file still differs from its hash after it was fetched again; that
        file is removed.
        """
        from huggingface_hub import hf_hub_download, snapshot_download

        model_id, revision = split_hub_id(self.text)
        missing = [file for file in self.files if self._cached(file) is None]
        self._require_space(sum(file.bytes for file in missing))
        fetched = done = 0
        for file in self.files:
            with hub_errors(self.text), self._watched(progress, done):
                path = Path(hf_hub_download(model_id, file.name, revision=self.commit))
                came = file in missing
                if not file.matches(path):
                    path = Path(hf_hub_download(model_id, file.name, revision=self.commit, force_download=True))
                    came = True
                    if not file.matches(path):
                        path.resolve().unlink()
                        path.unlink(missing_ok=True)
                        raise CheckpointError(f"{self.text}: {file.name} differs from its hash on the hub; try again")
            fetched += file.bytes if came else 0
            done += file.bytes
            progress(done, self.bytes)
        names = [file.name for file in self.files]
        with hub_errors(self.text):  # fetches nothing more: it tells the cache which commit the revision is
            directory = Path(snapshot_download(model_id, revision=revision, allow_patterns=names))
        if directory.name != self.commit:  # what it fetched then was not checked
            raise CheckpointError(f"{self.text} changed on the hub while it was fetched; try again")
        return directory / names[0] if names[0].endswith(".gguf") else directory, fetched

    def _cached(self, file: RemoteFile) -> str | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(split_hub_id(self.text)[0], file.name, revision=self.commit)
        return found if isinstance(found, str) else None

    def _require_space(self, needed: int) -> None:
        place = _cache()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if needed > free:
            raise CheckpointError(
                f"no space left for {self.text} in {_cache()}: {needed >> 20:,} MiB needed, {free >> 20:,} MiB free; "
                "free some space or set HF_HOME to another directory"
            )

    @contextmanager
    def _watched(self, progress: Progress, done: int) -> Iterator[None]:
        """Report ``done`` and the bytes of the file being fetched; the hub's library shows them only in its own bar."""
        blobs = _cache() / f"models--{split_hub_id(self.text)[0].replace('/', '--')}" / "blobs"
        left_over = set(blobs.glob("*.incomplete"))
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(POLL_SECONDS):
                new = sum(_size(path) for path in blobs.glob("*.incomplete") if path not in left_over)
                progress(min(done + new, self.bytes), self.bytes)

        thread = threading.Thread(target=watch, name="qserve-pull", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def find_remote(text: str, gguf: str | None = None) -> RemoteModel:
    """Ask the hub what ``text`` (an id, with or without ``@revision``) holds, and choose the files of a model.

    They are its safetensors with the files that belong to them, or else its one GGUF file; ``gguf`` names one of
    several. Raises ``CheckpointError`` where there is no such model, or none that qserve reads.
    """
    from huggingface_hub import HfApi

    if not is_hub_id(text):
        raise CheckpointError(f"{text} is no model id; give one such as org/name or org/name@revision, or demo")
    model_id, revision = split_hub_id(text)
    with hub_errors(text):
        info = HfApi().model_info(model_id, revision=revision, files_metadata=True)
    files = {
        file.rfilename: RemoteFile(
            file.rfilename, file.size or 0, None if file.lfs is None else file.lfs.sha256, file.blob_id
        )
        for file in info.siblings or ()
    }
    assert info.sha is not None
    return RemoteModel(text, info.sha, tuple(files[name] for name in choose(text, sorted(files), gguf)))


def choose(text: str, names: Sequence[str], gguf: str | None = None) -> list[str]:
    """The files of a model among the ``names`` of its repository."""
    ggufs = [name for name in names if name.endswith(".gguf") and "/" not in name]
    if gguf is not None:
        if gguf not in ggufs:
            raise CheckpointError(f"{text} has no file {gguf}; GGUF files there: {_listed(ggufs)}")
        return [gguf]
    wanted = [name for name in names if _matches(name, PATTERNS) and not _matches(name, IGNORED)]
    if any(name.endswith(".safetensors") for name in wanted):
        return wanted
    if len(ggufs) > 1:
        raise CheckpointError(f"{text} holds {len(ggufs)} GGUF files; choose one with --file: {_listed(ggufs)}")
    if ggufs:
        return ggufs
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        raise CheckpointError(
            f"{text} holds its weights only as pickles ({_listed(pickles)}), which can run code and are never "
            "fetched; look for a copy with safetensors"
        )
    raise CheckpointError(f"{text} holds neither safetensors nor GGUF files at its top")


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") if names else "none"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it was completed meanwhile
        return 0
