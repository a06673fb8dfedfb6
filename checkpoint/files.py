"""Reading and writing files, with one clear line for every error: JSON, hashes, durable writes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qserve.checkpoint.errors import CheckpointError

# EFBIG is a file-size limit of the process or of the file system; for a user that means no room, too.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def read_json(path: Path) -> Any:
    """The content of a JSON file; ``CheckpointError`` where it is missing, unreadable or malformed."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch or write it again") from None


def read_json_object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def sync(path: Path) -> None:
    """Force a file's bytes, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``: after a crash it holds the old bytes or the new ones."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync(path.parent)
    except OSError as error:
        raise write_error(path, error) from None
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file beside ``path``, of its suffix, that replaces ``path`` where the block ends well and else vanishes. Raises
    ``CheckpointError`` where it cannot be written."""
    partial = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            sync(partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error) from None


def write_error(path: Path, error: OSError) -> CheckpointError:
    """The line for a failed write below or at ``path``."""
    if error.errno in _NO_SPACE:
        return CheckpointError(f"no space left to write {path}; free some space or choose another directory")
    return CheckpointError(f"{path} cannot be written: {error.strerror or error}")
