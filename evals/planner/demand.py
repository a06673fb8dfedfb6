"""``Traffic``: the load on a server, and how it is written on a command line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qserve.checkpoint.errors import UsageError
from qserve.evals.slo import parse_number, parse_pairs

_PER = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Traffic:
    """``rate`` in requests per second, ``prompt`` and ``output`` in tokens of a request."""

    rate: float = 1.0
    prompt: int = 1024
    output: int = 256

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    def __str__(self) -> str:
        return f"rate={self.rate:g}/s,prompt={self.prompt},output={self.output}"


def parse_traffic(text: str) -> Traffic:
    """``rate=10/s,prompt=2048,output=256``; rates also per min, h or d. Raises ``UsageError``."""
    pairs = parse_pairs(text, "--traffic", ("rate", "prompt", "output"))
    default = Traffic()
    return Traffic(
        rate=_rate(pairs["rate"]) if "rate" in pairs else default.rate,
        prompt=_tokens("prompt", pairs["prompt"]) if "prompt" in pairs else default.prompt,
        output=_tokens("output", pairs["output"]) if "output" in pairs else default.output,
    )


def _rate(text: str) -> float:
    number, _, per = text.partition("/")
    rate = parse_number(number) / _PER.get(per.strip() or "s", math.nan)
    if not 0 < rate < 1e9:
        raise UsageError(f"rate must be requests as 10/s or 600/min, not {text!r}")
    return rate


def _tokens(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1):
        raise UsageError(f"{key} must be a number of tokens, not {text!r}")
    return int(text)
