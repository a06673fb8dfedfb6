"""Token windows cut from one long text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qserve.checkpoint.errors import DataError


def calibration_windows(
    token_ids: Sequence[int], samples: int, length: int, seed: int, leading: Sequence[int] = ()
) -> Tensor:
    """int64 [samples, length]: windows that do not overlap, at random places, in random order. Each begins with the
    tokens ``leading``, as requests do.

    The text is divided into ``samples`` random gaps between windows, so every part of it is as likely to be
    read and a seed gives the same windows on every machine. Raises ``DataError`` where the text is too short.
    """
    what = f"{samples:,} samples of {length:,} tokens"
    length -= len(leading)
    _require(len(token_ids), samples * length, what, "--samples or --sequence-length")
    generator = torch.Generator().manual_seed(seed)
    spare = len(token_ids) - samples * length
    cuts = torch.randint(0, spare + 1, (samples,), generator=generator).sort().values
    starts = cuts + torch.arange(samples) * length
    starts = starts[torch.randperm(samples, generator=generator)]
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    return _begun(ids[starts[:, None] + torch.arange(length)], leading)


def evaluation_windows(token_ids: Sequence[int], tokens: int, length: int, leading: Sequence[int] = ()) -> Tensor:
    """int64 [tokens // length, length]: consecutive windows from the beginning of one text. Each begins with the tokens
    ``leading``, as requests do.

    ``tokens`` is rounded down to whole windows. Raises ``DataError`` where the text is too short or ``tokens``
    does not fill one window.
    """
    count = tokens // length
    if count < 1:
        raise DataError(f"{tokens:,} tokens do not fill one window of {length:,}; raise --tokens")
    what = f"{count} windows of {length} tokens"
    length -= len(leading)
    _require(len(token_ids), count * length, what, "--tokens")
    return _begun(torch.as_tensor(token_ids[: count * length], dtype=torch.int64).reshape(count, length), leading)


def _begun(windows: Tensor, leading: Sequence[int]) -> Tensor:
    return torch.cat([torch.tensor([*leading], dtype=torch.int64).expand(len(windows), -1), windows], dim=1)


def _require(there: int, needed: int, what: str, flag: str) -> None:
    if needed < 1:
        raise DataError(f"{what} is nothing; {flag} must be at least 1")
    if there < needed:
        raise DataError(f"{what} need {needed:,} tokens, the text has {there:,}; lower {flag} or give more text")
