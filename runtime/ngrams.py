"""``NGramIndex``: a text that grows, and where its newest tokens came before.

An index costs one dictionary entry for each token, and a lookup compares a few places. A suffix automaton would find
the same matches up to ``longest``, with a dictionary for each token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PLACES = 16
"""Earlier places that a lookup compares, newest first: few enough for a few microseconds."""


class NGramIndex:
    """``tokens`` is the text. N-grams of ``shortest`` tokens are looked up, and matches are compared up to ``longest``.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.tokens: list[int] = []
        self._shortest, self._longest = shortest, longest
        self._newest: dict[tuple[int, ...], int] = {}  # the position behind the last place of an n-gram
        self._earlier: list[int] = []  # for each token, the position behind the place before of its n-gram; 0 for none

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens``."""
        text, newest, earlier, shortest = self.tokens, self._newest, self._earlier, self._shortest
        for token in tokens:
            text.append(token)
            key = tuple(text[-shortest:])
            earlier.append(newest.get(key, 0))
            newest[key] = len(text)

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """Where the end of ``text`` came before in this index: the position behind the longest match, the newest of
        several, and its length; (0, 0) for none. ``text`` may be the index's own, which does not match itself."""
        tokens, earlier, last = self.tokens, self._earlier, len(text) - 1
        end = self._newest.get(tuple(text[-self._shortest :]), 0) if last + 1 >= self._shortest else 0
        if end and text is tokens:
            end = earlier[end - 1]
        found = length = 0
        for _ in range(PLACES):
            if not end:
                break
            most, count = min(self._longest, end, last + 1), self._shortest
            while count < most and text[last - count] == tokens[end - 1 - count]:
                count += 1
            if count > length:
                found, length = end, count
                if count == self._longest:
                    break
            end = earlier[end - 1]
        return found, length
