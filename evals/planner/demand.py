"""What is asked of a server: ``Traffic`` and ``Slo``, and how both are written on a command line.

Knows units of time and rates; does not know models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qserve.checkpoint.errors import UsageError

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_PER = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Slo:
    """Limits in seconds: until the first token, and from one token of an output to the next."""

    ttft: float = 0.5
    tpot: float = 0.05

    def __str__(self) -> str:
        return f"ttft={self.ttft * 1e3:g}ms,tpot={self.tpot * 1e3:g}ms"


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


def parse_slo(text: str) -> Slo:
    """``ttft=500ms,tpot=50ms``; what is not named has its default. Raises ``UsageError``."""
    return Slo(**{key: parse_duration(key, value) for key, value in _pairs(text, "--slo", ("ttft", "tpot")).items()})


def parse_traffic(text: str) -> Traffic:
    """``rate=10/s,prompt=2048,output=256``; rates also per min, h or d. Raises ``UsageError``."""
    pairs = _pairs(text, "--traffic", ("rate", "prompt", "output"))
    default = Traffic()
    return Traffic(
        rate=_rate(pairs["rate"]) if "rate" in pairs else default.rate,
        prompt=_tokens("prompt", pairs["prompt"]) if "prompt" in pairs else default.prompt,
        output=_tokens("output", pairs["output"]) if "output" in pairs else default.output,
    )


def parse_duration(name: str, text: str) -> float:
    """``500ms``, ``2s`` or ``800us`` in seconds. Raises ``UsageError`` that says ``name``."""
    number = text.rstrip("mus ")
    seconds = _number(number) * _SECONDS.get(text[len(number) :].strip(), math.nan)
    if not 0 < seconds < 86400:
        raise UsageError(f"{name} must be a time as 500ms or 2s, not {text!r}")
    return seconds


def _pairs(text: str, option: str, known: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known or key in pairs:
            raise UsageError(f"{option} is {', '.join(f'{name}=...' for name in known)}, each once, not {text!r}")
        pairs[key] = value
    return pairs


def _rate(text: str) -> float:
    number, _, per = text.partition("/")
    rate = _number(number) / _PER.get(per.strip() or "s", math.nan)
    if not 0 < rate < 1e9:
        raise UsageError(f"rate must be requests as 10/s or 600/min, not {text!r}")
    return rate


def _tokens(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1):
        raise UsageError(f"{key} must be a number of tokens, not {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
