"""How far a model is from its base at each token, and where: by position, and by how sure the base was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError, DataError
from qserve.checkpoint.source import ModelSource
from qserve.evals.partial import Partial
from qserve.evals.pieces import Piece
from qserve.evals.reference import Reference, Rows

Progress = Callable[[int, int], None]
Chunks = Iterable[tuple[int, Tensor]]
# Rows that are compared at a time, so few that intermediate values stay in the cache.
_TOGETHER = 8


class Scorer(Protocol):
    """Gives each token of a text its probability: an ``Engine``, or a ``TransformersScorer``."""

    source: ModelSource
    model_name: str
    vocab_size: int
    tokenizer: Any

    def score(self, tokens: list[int]) -> Iterator[tuple[int, Tensor]]:
        """``(position, float32 [n, vocab])``: row i holds the log-probabilities of the token at position + i + 1."""
        ...


@dataclass
class Divergence:
    """Values for each scored token. Negative log-likelihoods (nats) and KL(base || model) (nats), float64. The first
    choice of base and model, int64, and the probability that each gives to its own, float64. The token's place in its
    piece, and the window or document to which it belongs, int64. Pieces follow each other in their order."""

    base_nll: Tensor
    nll: Tensor
    kl: Tensor
    base_choice: Tensor
    choice: Tensor
    confidence: Tensor
    probability: Tensor
    position: Tensor
    unit: Tensor

    @property
    def tokens(self) -> int:
        return len(self.nll)

    @property
    def agree(self) -> Tensor:
        """Whether the first choices are the same, float64 [tokens], 0 or 1."""
        return (self.base_choice == self.choice).double()

    def tensors(self) -> dict[str, Tensor]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def by_unit(self, *values: Tensor, where: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sums of ``values`` float64 [units, len(values)] and token counts float64 [units], over the tokens ``where``.
        """
        units, index = self.unit.unique(return_inverse=True)
        if where is not None:
            index, values = index[where], tuple(value[where] for value in values)
        counts = torch.zeros(len(units), dtype=torch.float64).index_add_(0, index, torch.ones(len(index)).double())
        sums = torch.zeros(len(units), len(values), dtype=torch.float64)
        return sums.index_add_(0, index, torch.stack(values, 1)), counts


def compare(
    base: Scorer | Reference,
    model: Scorer,
    pieces: Sequence[Piece],
    progress: Progress | None = None,
    partial: Partial | None = None,
) -> Divergence:
    """Score ``pieces`` with both, or with the model alone where the base's distributions are recorded.

    Only one chunk of log-probabilities of each is in memory. ``partial`` keeps finished results and returns those of an
    earlier run: the result is the same. Raises ``CheckpointError`` where a model computes NaN.
    """
    if base.vocab_size != model.vocab_size:
        raise DataError(
            f"{base.model_name} has {base.vocab_size} tokens and {model.model_name} {model.vocab_size}: "
            "they cannot be compared token by token"
        )
    done, parts = (0, []) if partial is None else partial.load()
    try:
        for number in range(done, len(pieces)):
            piece = pieces[number]
            chunks = model.score(piece.tokens.tolist())
            found = _recorded(base, number, piece, chunks) if isinstance(base, Reference) else (
                _beside(base, piece, chunks)
            )  # fmt: skip
            parts.append(_joined(found, piece))
            done = number + 1
            if progress:
                progress(done, len(pieces))
            if partial is not None:
                partial.keep(done, parts)
    except BaseException:  # Ctrl-C too
        if partial is not None:
            partial.save(done, parts)
        raise
    result = Divergence(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    for scorer, values in ((base, result.base_nll), (model, result.nll)):
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{scorer.model_name} computes NaN or infinity: the checkpoint is damaged")
        if float(values.mean()) > 700.0:  # exp of it would overflow
            raise CheckpointError(f"{scorer.model_name} gives the text no probability: the checkpoint is damaged")
    return result


def _joined(found: Iterable[tuple[Tensor, ...]], piece: Piece) -> dict[str, Tensor]:
    names = [item.name for item in fields(Divergence)][:7]
    joined = {name: torch.cat(values) for name, values in zip(names, zip(*found))}
    joined["position"] = torch.arange(piece.first, len(piece.tokens))
    joined["unit"] = torch.full_like(joined["position"], piece.unit)
    return joined


def _beside(base: Scorer, piece: Piece, chunks: Chunks) -> Iterator[tuple[Tensor, ...]]:
    for (start, p), (other, q) in zip(base.score(piece.tokens.tolist()), chunks, strict=True):
        if start != other or p.shape != q.shape:
            raise DataError("the two models are scored in different chunks: give them the same token budget")
        rows = Rows.of(piece, start, len(p))
        together = (each.split(_TOGETHER) for each in (p[rows.chunk], q[rows.chunk], rows.following[:, None]))
        yield from map(_between, *together)


def _between(p: Tensor, q: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    kl = (p.exp() * (p - q)).sum(-1, dtype=torch.float64).clamp_min(0.0)
    (sure, first), (own, choice) = p.max(-1), q.max(-1)
    base_nll, nll = -p.gather(1, index)[:, 0].double(), -q.gather(1, index)[:, 0].double()
    return base_nll, nll, kl, first, choice, sure.double().exp(), own.double().exp()


def _recorded(reference: Reference, number: int, piece: Piece, chunks: Chunks) -> Iterator[tuple[Tensor, ...]]:
    """The base's likeliest tokens one by one, all others as one; by the log-sum inequality never above the true KL."""
    for start, q in chunks:
        rows = Rows.of(piece, start, len(q))
        q, at = q[rows.chunk], reference.rows(number, rows)
        ids, p = reference.ids[at].long(), reference.logprobs[at].double()
        p_rest = reference.rest[at].double()
        q_rest = q.exp().scatter_(1, ids, 0.0).sum(-1, dtype=torch.float64).clamp_min(1e-300).log()
        kl = (p.exp() * (p - q.gather(1, ids).double())).sum(-1)
        kl = kl + torch.where(p_rest > -600.0, p_rest.exp() * (p_rest - q_rest), 0.0)
        nll = -q.gather(1, rows.following[:, None])[:, 0].double()
        own, choice = q.max(-1)
        base_nll = -reference.following[at].double()
        yield base_nll, nll, kl.clamp_min(0.0), ids[:, 0], choice, p[:, 0].exp(), own.double().exp()
