"""Log lines: as text for people or as JSON objects for machines, one a line, with the id of the request they belong to.

Nothing here ever sees a prompt, an output or a key: ``event`` writes the fields that it is given.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from qserve.checkpoint.errors import UsageError

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)

_PLAIN = re.compile(r"[\w.:/+@{}#,-]+", re.ASCII)


def configure(log_format: str, level: str, stream: TextIO | None = None) -> None:
    """Send the lines of this process to ``stream`` (standard error), uvicorn's and warnings among them.

    Lines of other packages are shown from ``WARNING`` on. Only the command line calls this: a program that contains
    the server keeps its own logging.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    for name in ("qserve", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())


def start(log_format: str, level: str, note: Callable[[str], None]) -> Callable[[str], None]:
    """``configure`` for a command. Returns what takes its notes: ``note`` in text, a line of the log in JSON.

    Raises ``UsageError`` for an unknown format or level.
    """
    for option, value, known in (("--log-format", log_format, FORMATS), ("--log-level", level, LEVELS)):
        if value not in known:
            raise UsageError(f"{option} must be one of {', '.join(known)}, not {value!r:.80}")
    configure(log_format, level)
    return note if log_format == "text" else logging.getLogger("qserve.run").info


def event(logger: logging.Logger, message: str, level: int = logging.INFO, **fields: Any) -> None:
    """One line; fields that are None are left out."""
    if logger.isEnabledFor(level):
        given = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, message, extra={"fields": given})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    request_id = current_request_id.get()
    return fields if request_id is None or "request_id" in fields else {"request_id": request_id, **fields}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Text(logging.Formatter):
    """``TIME LEVEL logger: message key=value ...``; a value with spaces or control characters is quoted."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")  # one message, one line
        pairs = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {message}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _quoted(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
