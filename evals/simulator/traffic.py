"""``Arrival``: when a request comes, and with how many tokens: drawn from distributions, or from a recorded trace.

The same seed gives the same traffic.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qserve.checkpoint.errors import DataError, UsageError
from qserve.evals.lengths import MAX_TOKENS, Lengths


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. Seconds and tokens.

    ``prefix``: requests of one prefix start with the same ``prefix_tokens`` tokens, fewer than the prompt has.
    """

    time: float
    prompt: int
    output: int
    prefix: int = 0
    prefix_tokens: int = 0


@dataclass(frozen=True)
class Traffic:
    """Requests of a Poisson process.

    Attributes:
        rate: requests per second on average.
        requests: how many.
        burst: requests that arrive together; the bursts form the Poisson process.
        prompt, output: tokens.
        prefixes: how many prefixes the prompts share, chosen evenly; 0 shares nothing.
        prefix_tokens: the length of each; the prompt's own tokens come on top.
        max_model_len: the context; longer requests are shortened to it.
        seed: for everything that is drawn.
    """

    rate: float
    requests: int
    prompt: Lengths
    output: Lengths
    burst: int = 1
    prefixes: int = 0
    prefix_tokens: int = 0
    max_model_len: int = MAX_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise UsageError(f"--rate must be above 0 requests per second, not {self.rate}")
        if self.requests < 1 or self.burst < 1:
            raise UsageError("--requests and --burst must be at least 1")
        if self.prefixes < 0 or self.prefix_tokens < 0 or (self.prefixes > 0) != (self.prefix_tokens > 0):
            raise UsageError("--prefixes and --prefix-tokens belong together, both at least 1")
        if self.prefix_tokens > self.max_model_len - 2:
            raise UsageError(f"--prefix-tokens {self.prefix_tokens} leaves no room in --max-model-len")

    def __iter__(self) -> Iterator[Arrival]:
        draw = random.Random(self.seed)
        time, shared = 0.0, self.prefix_tokens
        for index in range(self.requests):
            if index % self.burst == 0:
                time += draw.expovariate(self.rate / self.burst)
            prompt = shared + self.prompt.draw(draw, self.max_model_len - shared - 1)
            output = self.output.draw(draw, self.max_model_len - prompt)
            prefix = 1 + draw.randrange(self.prefixes) if self.prefixes else 0
            yield Arrival(time, prompt, output, prefix, shared)


def read_trace(path: Path) -> list[Arrival]:
    """Arrivals from JSON lines ``{"arrival": s, "prompt": n, "output": n, "prefix": name, "prefix_tokens": n}``.

    The last two are optional. Times count from the first; lines may be in any order. Raises ``DataError``.
    """
    found: list[Arrival] = []
    prefixes: dict[str, int] = {}
    with path.open(encoding="utf-8", errors="strict") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found.append(_arrival(line, prefixes, f"{path}, line {number}"))
        except UnicodeDecodeError:
            raise DataError(f"{path} is not UTF-8 text") from None
    if not found:
        raise DataError(f"{path} holds no request")
    first = min(each.time for each in found)
    return sorted(
        (
            Arrival(each.time - first, each.prompt, each.output, each.prefix, each.prefix_tokens)
            for each in found
        ),
        key=lambda each: each.time,
    )


def _arrival(line: str, prefixes: dict[str, int], where: str) -> Arrival:
    try:
        content: dict[str, Any] = json.loads(line)
        time, prompt, output = content.pop("arrival"), content.pop("prompt"), content.pop("output")
        prefix, shared = content.pop("prefix", None), content.pop("prefix_tokens", 0)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise DataError(f"{where}: not an object with arrival, prompt and output") from None
    if content:
        raise DataError(f"{where}: unknown field {sorted(content)[0]!r}")
    if isinstance(time, bool) or not isinstance(time, int | float) or not -1e15 < time < 1e15:
        raise DataError(f"{where}: arrival must be a number of seconds")
    for name, value in (("prompt", prompt), ("output", output)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
            raise DataError(f"{where}: {name} must be 1..{MAX_TOKENS} tokens")
    if isinstance(shared, bool) or not isinstance(shared, int) or not 0 <= shared < prompt:
        raise DataError(f"{where}: prefix_tokens must be at least 0 and fewer than the prompt has")
    if prefix is None or not shared:
        return Arrival(float(time), prompt, output)
    return Arrival(float(time), prompt, output, prefixes.setdefault(str(prefix), len(prefixes) + 1), shared)


def prompt_tokens(arrival: Arrival, index: int) -> tuple[int, ...]:
    """Token ids that share what the prompts share, and nothing else: odd ones for prefixes, even ones for the rest."""
    own = (2 * index,) * (arrival.prompt - arrival.prefix_tokens)
    return (2 * arrival.prefix + 1,) * arrival.prefix_tokens + own
