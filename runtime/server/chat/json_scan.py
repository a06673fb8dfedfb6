"""``JsonScan``: where a JSON object that arrives in pieces ends. Knows brackets and strings, not values."""

from __future__ import annotations

import re

# Inside a string a quote or a backslash matters. Outside, whatever is not part of a number, a word or white space.
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r"[^\s\w+\-.,:]")


class JsonScan:
    """Looks for the end of an object, each character once.

    ``depth``: brackets that are open before the first character. ``broken`` says that the object ended not by its
    bracket but before a character that no JSON has there.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self._at = 0
        self.broken = False

    def find(self, buffer: str) -> int | None:
        """The index after the object in a buffer that only ever grew since the last call; None: not there yet."""
        while self._at < len(buffer):
            if self._escaped:
                self._escaped = False
                self._at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(buffer, self._at)
            if found is None:
                break
            self._at = found.end()
            if self._in_string:
                self._escaped = found[0] == "\\"
                self._in_string = self._escaped
            elif found[0] == '"':
                self._in_string = True
            elif found[0] in "{[":
                self._depth += 1
            elif found[0] in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
            else:
                self.broken = True
                return found.start()
        self._at = max(self._at, len(buffer))
        return None

    def dropped(self) -> None:
        """The buffer was emptied; the next one begins where it ended."""
        self._at = 0
