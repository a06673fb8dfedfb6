"""``StoredFile`` and ``Batch``: what the store keeps of each, and the objects of OpenAI's API that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

Json = dict[str, Any]

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
ENDED = ("completed", "failed", "expired", "cancelled")
_TIMES = {  # which time a state sets
    "in_progress": "in_progress_at", "finalizing": "finalizing_at", "completed": "completed_at", "failed": "failed_at",
    "expired": "expired_at", "cancelling": "cancelling_at", "cancelled": "cancelled_at",
}  # fmt: skip


@dataclass(frozen=True)
class StoredFile:
    """``owner``: the name of the key whose file it is, empty where there are no keys. Times are seconds since 1970."""

    id: str
    owner: str
    filename: str
    bytes: int
    purpose: str
    created_at: int

    def to_json(self) -> Json:
        return {"object": "file", **{name: getattr(self, name) for name in _SHOWN}, "status": "processed"}


_SHOWN = ("id", "filename", "bytes", "purpose", "created_at")


@dataclass
class Batch:
    """``total``, ``answered`` and ``failed`` count its lines; those that failed are among the answered."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    errors: list[Json] = field(default_factory=list)
    times: dict[str, int] = field(default_factory=dict)
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    answered: int = 0
    failed: int = 0

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Batch:
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in record.items() if name in known})

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def become(self, status: str, now: float) -> None:
        self.status = status
        self.times[_TIMES[status]] = int(now)

    def to_record(self) -> Json:
        return asdict(self)

    def to_json(self) -> Json:
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.times.get(name) for name in _TIMES.values()},
            "request_counts": {
                "total": self.total, "completed": self.answered - self.failed, "failed": self.failed
            },
            "metadata": self.metadata,
        }  # fmt: skip
