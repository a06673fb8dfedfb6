"""``AcceptanceRates``: how often guesses were right, lately."""

from __future__ import annotations

_PRIOR = 8.0  # how many guesses a prior outweighs


class AcceptanceRates:
    """One rate for each kind of guess, 0 to ``kinds`` - 1. When ``halved`` guesses of a kind were counted, all of them
    count half from then on."""

    def __init__(self, kinds: int, halved: int) -> None:
        self.right, self.tried, self._halved = [0.0] * kinds, [0.0] * kinds, halved

    def note(self, kind: int, right: bool) -> None:
        self.right[kind] += right
        self.tried[kind] += 1
        if self.tried[kind] >= self._halved:
            self.right[kind] /= 2
            self.tried[kind] /= 2

    def rate(self, kind: int, prior: float) -> float:
        """What is believed of the next guess. ``prior`` is believed before any is known."""
        return (self.right[kind] + _PRIOR * prior) / (self.tried[kind] + _PRIOR)
