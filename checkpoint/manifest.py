"""``manifest.json``: size and SHA-256 of every file of a checkpoint that qserve wrote.

The quality card is left out: it is written after the rest is final.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qserve.checkpoint.card import CARD_FILE
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import file_sha256, read_json_object, write_atomically

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    sha256: str


def read_manifest(directory: Path) -> dict[str, FileEntry] | None:
    """The entries by file name, or None where the directory has no manifest."""
    path = directory / MANIFEST
    return _entries(read_json_object(path), str(path)) if path.exists() else None


def parse_manifest(content: bytes, where: str) -> dict[str, FileEntry]:
    """The entries of a manifest that is not a file. ``where`` is named in errors."""
    try:
        return _entries(json.loads(content), where)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{where} is no valid JSON") from None


def _entries(content: Any, where: str) -> dict[str, FileEntry]:
    try:
        return {str(name): FileEntry(int(entry["bytes"]), str(entry["sha256"]))
                for name, entry in content["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f'{where} is malformed: it must map "files" to sizes and hashes') from None


def write_manifest(directory: Path) -> None:
    """Hash every file that lies directly in ``directory`` and write the manifest."""
    files = sorted(p for p in directory.iterdir() if p.is_file() and p.name not in (MANIFEST, CARD_FILE))
    entries = {path.name: asdict(FileEntry(path.stat().st_size, file_sha256(path))) for path in files}
    content = json.dumps({"files": entries}, indent=2) + "\n"
    write_atomically(directory / MANIFEST, content.encode())


def verify_manifest(directory: Path) -> None:
    """Raise ``CheckpointError`` for the first file that is missing or differs from the manifest."""
    for name, entry in (read_manifest(directory) or {}).items():
        path = directory / name
        if Path(name).name != name or not path.is_file():
            raise CheckpointError(f"{path} is missing, listed in {MANIFEST}; fetch or write it again")
        if path.stat().st_size != entry.bytes or file_sha256(path) != entry.sha256:
            raise CheckpointError(f"{path} differs from its hash in {MANIFEST}; fetch or write it again")
