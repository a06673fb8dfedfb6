"""``JsonScan``: finds the end of a JSON object that arrives in pieces, by its brackets and strings alone."""

from __future__ import annotations

import re

# Inside a string a quote or a backslash matters. Outside, any character that is not part of a number, a word or white
# space does.
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r"[^\s\w+\-.,:]")


class JsonScan:
    """Looks for the end of an object, and at each character once.

    ``depth``: brackets that are open before the first character. ``broken``: the object did not end with its bracket
    but before a character that JSON cannot have there.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self._at = 0
        self.broken = False

    def find(self, buffer: str) -> int | None:
        """The index after the object, None while it has not ended. Between calls the buffer may only grow."""
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
