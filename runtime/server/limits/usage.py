"""``Usage``: the tokens that each caller has used, as ``/v1/usage`` of a server and of a router shows them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

MOST = 10_000
"""Callers that are remembered: a server without keys believes whatever name it is told."""


@dataclass
class Usage:
    """``tokens`` of prompts and outputs by caller, who was seen last at the end; ``since``: seconds since the epoch."""

    since: float = field(default_factory=time.time)
    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, caller: str, tokens: int) -> None:
        self.tokens[caller] = self.tokens.pop(caller, 0) + tokens
        if len(self.tokens) > MOST:
            del self.tokens[next(iter(self.tokens))]

    def page(self) -> dict[str, Any]:
        data = [{"caller": name, "object": "usage", "tokens": tokens} for name, tokens in sorted(self.tokens.items())]
        return {"object": "list", "since": self.since, "data": data}
