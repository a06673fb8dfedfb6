"""``Slo``: what counts as fast enough, and how it is written on a command line."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from qserve.checkpoint.errors import UsageError

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Slo:
    """A service level objective, in seconds: until the first token, and from one token of an output to the next."""

    ttft: float = 0.5
    tpot: float = 0.05

    def __str__(self) -> str:
        return f"ttft={self.ttft * 1e3:g}ms,tpot={self.tpot * 1e3:g}ms"


UNLIMITED = Slo(math.inf, math.inf)


def parse_slo(text: str, default: Slo = Slo()) -> Slo:
    """``ttft=500ms,tpot=50ms``; objectives that are not named are as in ``default``. Raises ``UsageError``."""
    pairs = parse_pairs(text, "--slo", ("ttft", "tpot"))
    return replace(default, **{key: parse_duration(key, value) for key, value in pairs.items()})


def parse_duration(name: str, text: str) -> float:
    """``500ms``, ``2s`` or ``800us`` in seconds. Raises ``UsageError`` that names ``name``."""
    number = text.rstrip("mus ")
    seconds = parse_number(number) * _SECONDS.get(text[len(number) :].strip(), math.nan)
    if not 0 < seconds < 86400:
        raise UsageError(f"{name} must be a time as 500ms or 2s, not {text!r}")
    return seconds


def parse_pairs(text: str, option: str, known: tuple[str, ...]) -> dict[str, str]:
    """``a=1,b=2``, each key at most once. Raises ``UsageError``."""
    pairs: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known or key in pairs:
            raise UsageError(f"{option} is {', '.join(f'{name}=...' for name in known)}, each once, not {text!r}")
        pairs[key] = value
    return pairs


def parse_number(text: str) -> float:
    """The number that ``text`` says; NaN where it says none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
