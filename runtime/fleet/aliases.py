"""``Aliases``: names that stand for one of several models, by weights: a canary gets 5 of 100 requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping


class Aliases:
    """``weights``: of each alias, its models and how many of their sum each gets."""

    def __init__(self, weights: Mapping[str, Mapping[str, float]]) -> None:
        self._weights = weights

    @property
    def names(self) -> Collection[str]:
        return self._weights.keys()

    def target(self, name: str, key: str, ready: Callable[[str], object]) -> str:
        """The model for a request. Equal keys get equal models, so a session stays with its own.

        A model that is not ready gets nothing while another one is. Raises ``KeyError`` for no alias.
        """
        weights = self._weights[name]
        open_ones = {model: weight for model, weight in weights.items() if weight and ready(model)}
        chosen = open_ones or {model: weight for model, weight in weights.items() if weight}
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"alias").digest()
        point = int.from_bytes(digest) / 2**64 * sum(chosen.values())
        for model, weight in chosen.items():
            point -= weight
            if point < 0:
                return model
        return next(reversed(chosen))  # where the sum was rounded
