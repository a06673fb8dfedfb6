"""Pieces of text to score: consecutive or sliding windows of one text, or documents one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.checkpoint.errors import DataError


@dataclass(frozen=True)
class Piece:
    """``tokens`` int64 [n] are read together; those from place ``first`` (at least 1) on count. ``unit`` is the window
    or document to which they belong, which a confidence interval takes as one observation."""

    tokens: Tensor
    first: int
    unit: int

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.first


def of_windows(windows: Tensor, leading: int = 0) -> list[Piece]:
    """Each row of int64 [n, length] by itself. Its ``leading`` tokens do not count, nor a first token that nothing
    predicts."""
    return [Piece(window, max(1, leading), unit) for unit, window in enumerate(windows)]


def sliding(
    token_ids: Sequence[int], tokens: int, window: int, stride: int, leading: Sequence[int] = ()
) -> list[Piece]:
    """Windows that begin every ``stride`` tokens within the first ``tokens``. Each token counts once, in the first
    window that holds it. So all but those of the first window have at least ``window - stride`` tokens before them.
    Each window begins with the tokens ``leading``, which do not count.

    Raises ``DataError`` where the text is too short.
    """
    width = window - len(leading)  # of text
    stride = min(stride, width)
    count = (tokens - window) // stride + 1
    needed = width + (count - 1) * stride
    if count < 1 or len(token_ids) < needed:
        raise DataError(
            f"{max(count, 1)} windows of {window} tokens, one every {stride}, need {max(needed, width):,} tokens, "
            f"the text has {len(token_ids):,}; lower --tokens or give more text"
        )
    ids = torch.as_tensor(token_ids[:needed], dtype=torch.int64)
    return [
        Piece(
            torch.cat([torch.tensor([*leading], dtype=torch.int64), ids[unit * stride : unit * stride + width]]),
            max(1, len(leading) if unit == 0 else window - stride),
            unit,
        )
        for unit in range(count)
    ]


def of_documents(
    documents: Sequence[Sequence[int]], tokens: int, window: int, leading: Sequence[int] = ()
) -> list[Piece]:
    """The first documents that have ``tokens`` tokens together; long ones in parts of ``window``, read separately. Each
    part begins with the tokens ``leading``, which do not count.

    A document is skipped where nothing comes before its only token. Raises ``DataError`` where nothing is left.
    """
    pieces: list[Piece] = []
    left, begin = tokens, torch.tensor([*leading], dtype=torch.int64)
    for unit, document in enumerate(documents):
        ids = torch.as_tensor(document[:left], dtype=torch.int64)
        parts = [torch.cat([begin, part]) for part in ids.split(window - len(begin))]
        pieces += [Piece(part, max(1, len(begin)), unit) for part in parts if len(part) > max(1, len(begin))]
        left -= len(ids)
        if left <= 0:
            break
    if not pieces:
        raise DataError("no document has two tokens: there is nothing to predict")
    return pieces
