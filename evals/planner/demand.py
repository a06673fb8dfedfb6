"""``Traffic``: the load on a server, and how it is written on a command line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qserve.checkpoint.errors import UsageError
from qserve.evals.slo import parse_number, parse_pairs

_PER = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Traffic:
    """``rate`` in requests per second, ``prompt`` and ``output`` in tokens of a request; ``hit`` is the share of a
    prompt whose keys and values the prefix cache still has."""

    rate: float = 1.0
    prompt: int = 1024
    output: int = 256
    hit: float = 0.0

    @property
    def computed(self) -> int:
        """Tokens of a prompt that are computed: at least the last."""
        return max(1, self.prompt - int(self.prompt * self.hit))

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    def __str__(self) -> str:
        hit = f",hit={self.hit:g}" if self.hit else ""
        return f"rate={self.rate:g}/s,prompt={self.prompt},output={self.output}{hit}"


def parse_traffic(text: str) -> Traffic:
    """``rate=10/s,prompt=2048,output=256,hit=0.5``; rates also per min, h or d. Raises ``UsageError``."""
    pairs = parse_pairs(text, "--traffic", ("rate", "prompt", "output", "hit"))
    default = Traffic()
    return Traffic(
        rate=_rate(pairs["rate"]) if "rate" in pairs else default.rate,
        prompt=_tokens("prompt", pairs["prompt"]) if "prompt" in pairs else default.prompt,
        output=_tokens("output", pairs["output"]) if "output" in pairs else default.output,
        hit=_share("hit", pairs["hit"]) if "hit" in pairs else default.hit,
    )


def _rate(text: str) -> float:
    number, _, per = text.partition("/")
    rate = parse_number(number) / _PER.get(per.strip() or "s", math.nan)
    if not 0 < rate < 1e9:
        raise UsageError(f"rate must be requests as 10/s or 600/min, not {text!r}")
    return rate


def _share(key: str, text: str) -> float:
    share = parse_number(text)
    if not 0 <= share < 1:
        raise UsageError(f"{key} must be a share as 0.5, below 1, not {text!r}")
    return share


def _tokens(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1):
        raise UsageError(f"{key} must be a number of tokens, not {text!r}")
    return int(text)
