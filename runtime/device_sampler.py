"""``sample_rows`` draws the tokens of many rows on their device.

The reference is ``kernels.row_sampling.draw_reference``, on the CPU. Here weights are integers: their sums do not
depend on the order in which a GPU adds them, so a row's token does not depend on its neighbours. The two differ in two
cases only.
One is a point within 4e-9 of the end of a token's share (a bound on the rounding of 2 ** 17 weights; 1e-11 is usual).
The other is equal logits at a cut or in a ranking, which are ordered by token id here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qserve.kernels.row_sampling import RowSampling

_ROWS = 16
"""Rows that are drawn at a time. It bounds the memory: about 150 MB for a vocabulary of 128k."""


def sample_rows(logits: Tensor, draws: Sequence[tuple[int, RowSampling]]) -> Tensor:
    """int64 [draws], the token of each (row, draw), on the device of ``logits`` float32 [n, vocab]. Waits for nothing.
    For a row with a NaN the token is arbitrary."""
    found: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=logits.device)]
    places: list[int] = []
    for ranked in (False, True):  # only ranked draws need their rows sorted
        chosen = [place for place, (_, draw) in enumerate(draws) if draw.is_ranked == ranked]
        for begin in range(0, len(chosen), _ROWS):
            part = chosen[begin : begin + _ROWS]
            rows = logits[there([draws[place][0] for place in part], torch.int64, logits.device)]
            found.append(_tokens(rows, [draws[place][1] for place in part], ranked))
            places += part
    order = sorted(range(len(places)), key=places.__getitem__)
    return torch.cat(found)[there(order, torch.int64, logits.device)]


def there(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of ``numbers``, copied to ``device`` asynchronously: pinned memory lets the copy proceed by itself."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _unit(vocab: int) -> int:
    """The weight of the likeliest token, so small that a sum over all tokens stays below 2 ** 63."""
    return 1 << min(44, 62 - (vocab - 1).bit_length())


def _tokens(rows: Tensor, draws: Sequence[RowSampling], ranked: bool) -> Tensor:
    """int64 [n]. Each step is as in ``draw_reference``."""
    vocab, order = rows.shape[1], None
    unit = _unit(vocab)
    numbers = [
        (d.point, d.temperature, d.top_k or vocab, d.top_p * (1 - 1e-9) if d.top_p < 1.0 else 2.0, d.min_p)
        for d in draws
    ]
    point, temperature, top_k, top_p, min_p = there(numbers, torch.float64, rows.device).t()[..., None]
    if ranked:
        rows, order = rows.sort(dim=-1, descending=True, stable=True)
    scaled = (rows.double() / temperature).clamp_(max=1e300)
    scaled -= scaled.amax(-1, keepdim=True)
    weights = scaled.exp_().mul_(unit).round_().long()
    if ranked:
        weights.masked_fill_(torch.arange(vocab, device=rows.device) >= top_k, 0)
        mass = weights.cumsum(-1)
        weights.masked_fill_(mass - weights >= top_p * mass[:, -1:], 0)
    weights.masked_fill_(weights < min_p * unit, 0)
    mass = weights.cumsum(-1)
    # The product may round up to the sum itself, past the last token with any weight.
    target = torch.minimum((point * mass[:, -1:]).long(), mass[:, -1:] - 1)
    index = torch.searchsorted(mass, target, right=True).clamp_(max=vocab - 1)
    return (index if order is None else order.gather(-1, index)).flatten()
