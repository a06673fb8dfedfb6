"""``RowSampling``: how the token of a row is drawn; ``draw_rows`` draws the tokens of many rows on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.kernels import abi, native
from qserve.kernels.threads import default_threads

_CANDIDATES = 512  # enough for nearly every top-p; sorting a whole vocabulary costs ten times as much


@dataclass(frozen=True)
class RowSampling:
    """``point`` in [0, 1) picks the token; the rest is as in ``SamplingParams``, with ``top_k`` 0 for all."""

    point: float
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_ranked(self) -> bool:
        """Whether tokens are kept by their rank, and the point runs through them in that order."""
        return self.top_k > 0 or self.top_p < 1.0


def draw_rows(
    rows: Sequence[Tensor], draws: Sequence[RowSampling], *, threads: int | None = None, isa: native.Isa | None = None
) -> list[int]:
    """The token of each row, float32 [vocab] without NaN and with a token above minus infinity. All rows have one
    vocabulary. A row's token depends on no other row and not on ``threads``. The computation is that of
    ``qs_row_sampling`` in ``csrc/qserve.h``; without a library it is that of ``draw_reference``.

    The two differ for a point within about 1e-6 of the end of a token's share, and in the order of equal logits.
    """
    if not rows or native.missing():
        return [draw_reference(row, draw) for row, draw in zip(rows, draws, strict=True)]
    rows = [row.contiguous() for row in rows]
    vocab = len(rows[0])
    if any(row.dtype != torch.float32 or len(row) != vocab for row in rows):
        raise ValueError("rows to draw from are float32 and of one length")
    addresses = torch.tensor([row.data_ptr() for row in rows])
    numbers = torch.tensor([(d.point, d.temperature, d.top_p, d.min_p) for d in draws], dtype=torch.float64)
    point, temperature, top_p, min_p = numbers.t().contiguous()
    top_k = torch.tensor([d.top_k for d in draws], dtype=torch.int32)
    tokens = torch.empty(len(rows), dtype=torch.int32)
    named = {"rows": addresses, "point": point, "temperature": temperature, "top_p": top_p, "min_p": min_p}
    op = abi.RowSampling(
        **{name: native.address(tensor) for name, tensor in (named | {"top_k": top_k, "tokens": tokens}).items()},
        vocab=vocab,
    )
    # Waking a thread takes about as long as drawing from this many logits.
    threads = min(threads or default_threads(), max(1, vocab * len(rows) >> 16))
    native.run_pieces(native.library().qs_draw_rows, op, len(rows), threads, isa)
    drawn: list[int] = tokens.tolist()
    return drawn


def draw_reference(row: Tensor, draw: RowSampling) -> int:
    """The token of one row, in torch, with weights in float64."""
    scaled = (row.double() / draw.temperature).clamp_(max=1e300)  # a tiny temperature must not reach infinity
    if draw.top_k == 1:
        return int(scaled.argmax())
    order: Tensor | None = None
    if draw.top_k:
        scaled, order = scaled.topk(min(draw.top_k, len(row)))
    weights = scaled.softmax(-1)
    if draw.top_p < 1.0:
        if order is None:
            weights, order = _most_likely(weights, draw.top_p)
        # Keep a token while those before it have not reached top_p: the smallest set that does.
        weights = torch.where(weights.cumsum(-1) - weights < draw.top_p * (1 - 1e-9), weights, 0.0)
    if draw.min_p > 0.0:
        weights = torch.where(weights >= draw.min_p * weights.max(), weights, 0.0)
    mass = weights.cumsum(-1)
    index = int(torch.searchsorted(mass, draw.point * mass[-1], right=True))
    # Rounding can carry the point to the very end, past the last token with any weight.
    index = min(index, int(weights.nonzero()[-1]))
    return index if order is None else int(order[index])


def _most_likely(weights: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """Weights in falling order with their tokens: a few candidates where they hold ``mass``, else all."""
    top, order = weights.topk(min(_CANDIDATES, len(weights)))
    if float(top.sum()) >= mass:
        return top, order
    return weights.sort(descending=True, stable=True)
