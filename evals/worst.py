"""The tokens at which a model is farthest from its base, for people to look at.

Knows chunks of log-probabilities and a tokenizer; does not know engines, nor how a report looks.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class WorstToken:
    """One position of the text. Texts are as the tokenizer decodes them: line breaks, markup and all.

    context      what both models had read last
    expected     the token that follows in the text
    kl           KL(base || model) of the next-token distributions, in nats
    base_choice, base_probability    the base's first choice and its probability, 0 to 1
    choice, probability              the model's
    """

    context: str
    expected: str
    kl: float
    base_choice: str
    base_probability: float
    choice: str
    probability: float


@dataclass(frozen=True)
class _Found:
    context: tuple[int, ...]
    expected: int
    base: tuple[int, float]
    model: tuple[int, float]


class WorstTokens:
    """Keeps the ``count`` positions of largest divergence among all that it is shown, with ``context`` tokens each."""

    def __init__(self, count: int = 20, context: int = 16) -> None:
        self._count, self._context = count, context
        self._shown = 0
        self._heap: list[tuple[float, int, _Found]] = []  # the smallest first; of equals, the first shown stay

    def add(self, window: Tensor, start: int, p: Tensor, q: Tensor, kl: Tensor) -> None:
        """Show the rows that predict tokens ``start + 1`` and on of ``window`` int64 [length].

        p, q float [n, vocab]: log-probabilities of base and model; kl float [n].
        """
        for row in kl.topk(min(self._count, len(kl))).indices.sort().values.tolist():
            value = float(kl[row])
            if len(self._heap) == self._count and value <= self._heap[0][0]:
                continue
            end = start + row + 1
            found = _Found(
                tuple(window[max(0, end - self._context) : end].tolist()), int(window[end]), _top(p[row]), _top(q[row])
            )
            self._shown += 1
            entry = (value, -self._shown, found)
            if len(self._heap) < self._count:
                heapq.heappush(self._heap, entry)
            else:
                heapq.heapreplace(self._heap, entry)

    def decoded(self, tokenizer: Any) -> tuple[WorstToken, ...]:
        """The largest divergence first."""
        ordered = sorted(self._heap, key=lambda entry: entry[:2], reverse=True)
        return tuple(
            WorstToken(
                tokenizer.decode(list(found.context)),
                tokenizer.decode([found.expected]),
                kl,
                tokenizer.decode([found.base[0]]),
                found.base[1],
                tokenizer.decode([found.model[0]]),
                found.model[1],
            )
            for kl, _, found in ordered
        )


def _top(log_probabilities: Tensor) -> tuple[int, float]:
    value, token = log_probabilities.max(dim=-1)
    return int(token), math.exp(float(value))
