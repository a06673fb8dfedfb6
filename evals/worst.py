"""The tokens at which a model is farthest from its base, for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qserve.evals.divergence import Divergence
from qserve.evals.pieces import Piece
from qserve.evals.report import Section, visible


@dataclass(frozen=True)
class WorstToken:
    """One position of the text. Texts are as the tokenizer decodes them: line breaks, markup and all.

    context      what both models had just read
    expected     the token that follows in the text
    kl           KL(base || model) of the next-token distributions, in nats
    base_choice, base_probability    the base's first choice and its probability, 0 to 1
    choice, probability              the same of the model
    """

    context: str
    expected: str
    kl: float
    base_choice: str
    base_probability: float
    choice: str
    probability: float


def worst_tokens(
    found: Divergence, pieces: Sequence[Piece], tokenizer: Any, *, count: int = 20, context: int = 16
) -> tuple[WorstToken, ...]:
    """The ``count`` tokens of ``pieces`` where ``found`` is largest, in falling order, the first of equals first, with
    at most ``context`` tokens before each."""
    ends = torch.tensor([piece.scored for piece in pieces]).cumsum(0)
    order = found.kl.sort(descending=True, stable=True).indices[:count]
    texts = [pieces[number].tokens for number in torch.searchsorted(ends, order, right=True).tolist()]

    def worst(tokens: torch.Tensor, index: int) -> WorstToken:
        place = int(found.position[index])
        return WorstToken(
            tokenizer.decode(tokens[max(0, place - context) : place].tolist()),
            tokenizer.decode([int(tokens[place])]),
            float(found.kl[index]),
            tokenizer.decode([int(found.base_choice[index])]),
            float(found.confidence[index]),
            tokenizer.decode([int(found.choice[index])]),
            float(found.probability[index]),
        )

    return tuple(map(worst, texts, order.tolist()))


def section(tokens: Sequence[WorstToken]) -> Section:
    header = ("context", "expected", "KL (nats)", "base's first choice", "this model's first choice")
    return Section("Tokens with the largest divergence", header, tuple(map(_row, tokens)))


def _row(token: WorstToken) -> tuple[str, ...]:
    return (
        "…" + visible(token.context),
        visible(token.expected, "␣"),
        f"{token.kl:.3f}",
        f"{visible(token.base_choice, '␣')} ({token.base_probability:.1%})",
        f"{visible(token.choice, '␣')} ({token.probability:.1%})",
    )
