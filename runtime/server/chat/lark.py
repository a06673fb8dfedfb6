"""``Rules``: a grammar in the Lark dialect of llguidance, which is compiled elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from qserve.runtime.constraint import Constraint

_TEXT = r"/(.|\n)*/"
# The spacing that models are trained to write. With free white space a weak model writes it until its tokens are spent.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Rules:
    """Collects rules of a grammar; most methods return expressions."""

    def __init__(self, token_of: Callable[[str], int | None]) -> None:
        self._token_of = token_of
        self._rules = [f"TEXT: {_TEXT}"]

    def append(self, rule: str) -> None:
        self._rules.append(rule)

    def constraint(self, start: str) -> Constraint:
        return Constraint("lark", "\n".join([f"start: {start}", *self._rules]) + "\n", "tools")

    def text_until(self, name: str, marker: str) -> None:
        """A rule for any text up to its first marker. It is lazy: after that marker the other rules must hold."""
        self.append(f"{name}_text[lazy]: TEXT {literal(marker)}")
        token = self._token_of(marker)
        self.append(f"{name}: {name}_text" + ("" if token is None else f" | TEXT <[{token}]>"))

    def marker(self, text: str) -> str:
        token = self._token_of(text)
        return literal(text) if token is None else f"({literal(text)} | <[{token}]>)"


def json_rule(schema: Mapping[str, Any], strict: bool) -> str:
    """JSON of the schema, whose parts that a grammar cannot express are left out unless ``strict``."""
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING | {'lenient': not strict}}, ensure_ascii=False)}"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
