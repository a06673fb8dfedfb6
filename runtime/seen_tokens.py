"""``SeenTokens``: which tokens a request has had and how often, counted as they come.

Penalties ask for them in every step. Counted anew each time, a context of 32,000 tokens takes 5 ms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class SeenTokens:
    """The tokens of a sequence that only grows. ``first`` are those at its beginning."""

    def __init__(self, first: Sequence[int] = ()) -> None:
        self._tokens, counts = np.unique(np.array(first, np.int64), return_counts=True)
        self._counts = counts.astype(np.float32)
        self._place = {token: place for place, token in enumerate(self._tokens.tolist())}
        self._num_outputs = 0

    def with_outputs(self, outputs: Sequence[int], draft: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """(int64 [n], float32 [n]): each token of the beginning, ``outputs`` and ``draft`` once, and how often it came.
        Valid until the next call. ``outputs`` begin with those of the last call; a draft is forgotten."""
        self._add(outputs[self._num_outputs :])
        self._num_outputs = len(outputs)
        known = len(self._place)
        tokens, counts = self._tokens[:known], self._counts[:known]
        if draft:
            drafted = Counter(draft)
            new = [token for token in drafted if token not in self._place]
            place = self._place | {token: known + index for index, token in enumerate(new)}
            tokens = np.append(tokens, np.array(new, np.int64))
            counts = np.append(counts, np.zeros(len(new), np.float32))
            counts[[place[token] for token in drafted]] += [*drafted.values()]
        return torch.from_numpy(tokens), torch.from_numpy(counts)

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._tokens):
                more = place + 16
                self._tokens = np.append(self._tokens, np.zeros(more, np.int64))
                self._counts = np.append(self._counts, np.zeros(more, np.float32))
            self._tokens[place] = token
            self._counts[place] += 1
