"""``StopChecker``: ends a text at stop strings."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Passes text on until one of ``stops`` appears in it; ``matched`` then says which.

    Text that may be the beginning of a stop string is held back until that is known. The match that ends first counts,
    and among those that end together the longest, so the result does not depend on how text was cut.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """``include``: the stop string itself is passed on too."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def append(self, text: str) -> str:
        """Take new text; return what may be passed on. Nothing is passed on after a match."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
