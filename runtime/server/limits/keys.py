"""``ApiKey`` and ``KeyRing``: who may call, what each caller may ask for, and the file that says so.

Keys are kept as hashes only: a key itself is never stored, shown or logged.

The file is TOML with one ``[[key]]`` table for each key: ``name`` and ``sha256`` (of the key, in hex), and optional
limits: ``max_requests``, ``max_tokens_per_minute``, ``priority``, ``weight``. ``admin = true`` shows it what others do;
``router = true`` lets ``qserve route`` say for whom it asks.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from qserve.checkpoint.errors import UsageError
from qserve.runtime.request import MAX_PRIORITY

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
CALLER = "x-qserve-caller"
"""The header by which a router says for whom it asks: JSON with name, weight and priority."""


@dataclass(frozen=True)
class ApiKey:
    """One caller.

    Attributes:
        name: whose key it is; requests of equal names share cached prefixes and one share of the server.
        digest: SHA-256 of the key.
        max_requests: running and waiting at once, each choice of each prompt counted; None does not limit them.
        max_tokens_per_minute: prompt and output tokens, as a bucket of that size that refills evenly.
        priority: the best (lowest) that its requests may ask for, None for 0. Those that ask for none have it, if it
            is above 0.
        weight: its share of the server where others wait too; 2 gets twice the tokens of 1.
        admin: it may see what all callers do: the metrics, and the requests in the engine.
        router: it is that of ``qserve route``, and may say for whom it asks (``CALLER``); for itself it is an admin.
    """

    name: str
    digest: bytes = field(repr=False)
    max_requests: int | None = None
    max_tokens_per_minute: int | None = None
    priority: int | None = None
    weight: float = 1.0
    admin: bool = False
    router: bool = False

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens_per_minute"):
            if (limit := getattr(self, name)) is not None and not (_is_int(limit) and limit >= 1):
                raise UsageError(f"{name} must be an integer of at least 1, not {limit!r:.40}")
        if self.priority is not None and not (_is_int(self.priority) and abs(self.priority) <= MAX_PRIORITY):
            raise UsageError(f"priority must be an integer of -{MAX_PRIORITY} to {MAX_PRIORITY}")
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not 0.01 <= self.weight <= 100:
            raise UsageError(f"weight must be a number of 0.01 to 100, not {self.weight!r:.40}")
        for name in ("admin", "router"):
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, not {value!r:.40}")


class KeyRing:
    """The keys that are valid now: those given as text and those of the file, which can be read again.

    Those given as text are whoever started the server, and so admins.

    Raises ``UsageError`` for a malformed file and ``OSError`` for one that cannot be read.
    """

    def __init__(self, texts: Sequence[str] = (), path: Path | None = None) -> None:
        digests = [sha256(text.encode()).digest() for text in texts]
        self._given = [ApiKey(digest.hex(), digest, admin=True) for digest in digests]
        self._path = path
        self._keys = self._given + (read_keys(path) if path else [])

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: bytes) -> ApiKey | None:
        """Whose key this is, or None. Every key is compared, in constant time, which tells nothing of a near miss."""
        digest = sha256(presented).digest()
        found = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        return found[0] if found else None

    def named(self, name: str) -> ApiKey | None:
        """The key that has this name now."""
        return next((key for key in self._keys if key.name == name), None)

    def reload(self) -> bool:
        """Read the file again. If it is broken the keys stay as they are, and one line of the log says why."""
        if self._path is None:
            return False
        try:
            self._keys = self._given + read_keys(self._path)
        except (UsageError, OSError) as error:
            logger.error("the API keys stay as they were: %s", error)
            return False
        logger.info("read %d API keys from %s", len(self._keys) - len(self._given), self._path)
        return True


def caller_header(key: ApiKey) -> str:
    """The value of ``CALLER`` for the requests of a key."""
    return json.dumps({"name": key.name, "weight": key.weight, "priority": key.priority})


def forwarded_caller(value: bytes) -> ApiKey:
    """The key whose request a router forwards. The router has checked its limits. Raises ``UsageError``."""
    try:
        given = json.loads(value)
        name, weight, priority = given["name"], given["weight"], given["priority"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UsageError(f"{CALLER} must be JSON with name, weight and priority") from None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{CALLER} holds no valid name")
    return ApiKey(name, b"", weight=weight, priority=priority)


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file. ``UsageError`` where there are none: a server with an empty file must not be open to all."""
    if not (keys := _read(path)):
        raise UsageError(f"{path} holds no key; 'qserve key NAME --file {path}' adds one")
    return keys


def _read(path: Path) -> list[ApiKey]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    entries = content.pop("key", [])
    if content or not isinstance(entries, list):
        raise UsageError(f"{path} must hold [[key]] tables and nothing else")
    keys: list[ApiKey] = []
    for number, entry in enumerate(entries, 1):
        try:
            keys.append(_key(entry))
        except UsageError as error:
            raise UsageError(f"{path}: key {number}: {error}") from None
    for values, what in (([key.name for key in keys], "name"), ([key.digest for key in keys], "sha256")):
        if len(set(values)) < len(values):
            raise UsageError(f"{path}: two keys have the same {what}")
    return keys


def add_key(name: str, path: Path, *, admin: bool = False, router: bool = False) -> str:
    """Make a new key, add its hash to the file and return the key, which cannot be read from anywhere later.

    A new file can be read by its owner alone; a file that exists, even an empty one, keeps its permissions.
    """
    if path.exists() and any(key.name == name for key in _read(path)):
        raise UsageError(f"{path} has a key of the name {name!r} already")
    key = f"qs-{secrets.token_urlsafe(32)}"
    entry = {"name": name, "sha256": sha256(key.encode()).hexdigest()}
    _key(entry)
    lines = ["[[key]]", *(f'{field} = "{value}"' for field, value in entry.items()), *["admin = true"] * admin,
             *["router = true"] * router]  # fmt: skip
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as file:
        separate = "\n" if file.tell() else ""
        file.write(separate + "\n".join(lines) + "\n")
    return key


def _key(entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise UsageError("it must be a table")
    known = {"name", "sha256", *(f.name for f in fields(ApiKey))} - {"digest"}
    if unknown := sorted(entry.keys() - known):
        raise UsageError(f"unknown field {unknown[0]!r:.80}; there are {', '.join(sorted(known))}")
    name, digest = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError("name must have 1 to 64 letters, digits and . _ @ -, the first a letter or a digit")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise UsageError("sha256 must be the 64 lower-case hex digits of the key's SHA-256")
    limits = {limit: value for limit, value in entry.items() if limit not in ("name", "sha256")}
    return ApiKey(name, bytes.fromhex(digest), **limits)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
