"""``Pool``: the hidden states of a prompt as one vector of length 1.

Sums run row by row in float64, so the vector does not depend on how the rows were cut into pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Pool:
    """``kind`` mean (over all positions) or last (position)."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._sum: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """float32 [n, width], the rows of the next n positions; the caller may overwrite them afterwards."""
        if self._kind == "last":
            self._sum = rows[-1].double()
            return
        for row in rows.double():
            self._sum = row.clone() if self._sum is None else self._sum.add_(row)

    def vector(self) -> list[float]:
        """[width] of Euclidean length 1, in float32; zeros for a zero vector. Raises ``ValueError`` for NaN."""
        assert self._sum is not None, "no position was added"
        if not self._sum.isfinite().all():
            raise ValueError("the hidden states are not finite")
        return list(torch.nn.functional.normalize(self._sum, dim=0).float().tolist())
