"""``Unsupported``: why a model cannot be served through transformers' modules."""

from __future__ import annotations

from qserve.checkpoint.errors import CheckpointError


class Unsupported(CheckpointError):
    """``reason``: a few words that complete "it has …" or stand in a table."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
