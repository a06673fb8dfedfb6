"""``Pool``: the hidden states of a prompt as one vector: an embedding of length 1, or the logits of its classes.

Sums run row by row in float64, so the vector does not depend on how the rows were cut into pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.checkpoint.files import read_json_object
from qserve.checkpoint.source import ModelSource


class Pool:
    """``kind`` mean (over all positions), last (position) or classify: ``head`` float64 [classes, width] times the last
    position."""

    def __init__(self, kind: str, head: Tensor | None = None) -> None:
        self._kind = kind
        self._head = head
        self._sum: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """float32 [n, width], the rows of the next n positions; the caller may overwrite them afterwards."""
        if self._kind != "mean":
            self._sum = rows[-1].double()
            return
        for row in rows.double():
            self._sum = row.clone() if self._sum is None else self._sum.add_(row)

    def vector(self) -> list[float]:
        """float32: the logits [classes] of ``classify``, else [width] of Euclidean length 1, or zeros for a zero
        vector. Raises ``ValueError`` for NaN."""
        assert self._sum is not None, "no position was added"
        if not self._sum.isfinite().all():
            raise ValueError("the hidden states are not finite")
        if self._head is not None:
            return list((self._head @ self._sum).float().tolist())
        return list(torch.nn.functional.normalize(self._sum, dim=0).float().tolist())


def stated_pooling(source: ModelSource) -> str | None:
    """mean or last, where an embedding model says so in the file of sentence-transformers; else None."""
    path = source.path / "1_Pooling" / "config.json"
    if not path.exists():
        return None
    stated = read_json_object(path)
    kinds = {"mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}
    mode = {"mean": "mean", "lasttoken": "last"}.get(str(stated.get("pooling_mode")))
    return mode or next((kind for kind, name in kinds.items() if stated.get(name) is True), None)
