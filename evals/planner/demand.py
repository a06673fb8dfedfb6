"""``Traffic``: the load on a server, and how it is written on a command line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qserve.checkpoint.errors import UsageError
from qserve.evals.lengths import Lengths
from qserve.evals.slo import parse_number, parse_pairs

_SAMPLES = 32  # lengths that stand for a distribution
_PER = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Traffic:
    """``rate`` in requests per second, ``prompt`` and ``output`` in tokens of a request on average.

    Attributes:
        hit: the share of a prompt whose keys and values the prefix cache still has.
        prompts, outputs: how lengths are distributed around the averages; None where all are equal.
    """

    rate: float = 1.0
    prompt: int = 1024
    output: int = 256
    hit: float = 0.0
    prompts: Lengths | None = None
    outputs: Lengths | None = None

    @property
    def computed(self) -> int:
        """Tokens of a prompt that are computed."""
        return self.computed_of(self.prompt)

    def computed_of(self, prompt: int) -> int:
        """Tokens of such a prompt that are computed: at least the last."""
        return max(1, prompt - int(prompt * self.hit))

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Lengths that stand for all prompts, each as likely."""
        return (self.prompt,) if self.prompts is None else self.prompts.spread(_SAMPLES)

    @property
    def running_output(self) -> float:
        """The output of a request that is found running: longer than the average, for long ones run for longer."""
        return float(self.output) if self.outputs is None else self.outputs.mean_square / self.outputs.mean

    @property
    def held(self) -> float:
        """Tokens of a request that is found running, at its end."""
        return self.prompt + self.running_output

    @property
    def longest(self) -> int:
        """Tokens of the longest request that is known of; a tail has no end."""
        prompt = self.prompt if self.prompts is None else self.prompts.longest
        return prompt + (self.output if self.outputs is None else self.outputs.longest)

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    def __str__(self) -> str:
        hit = f",hit={self.hit:g}" if self.hit else ""
        return f"rate={self.rate:g}/s,prompt={self.prompts or self.prompt},output={self.outputs or self.output}{hit}"


def parse_traffic(text: str) -> Traffic:
    """``rate=10/s,prompt=2048,output=256,hit=0.5``; rates also per min, h or d, tokens also as ``lognormal:200:0.8``.

    Raises ``UsageError``.
    """
    pairs = parse_pairs(text, "--traffic", ("rate", "prompt", "output", "hit"))
    default = Traffic()
    prompts, outputs = (
        Lengths.parse(pairs[key], key) if key in pairs else Lengths(mean)
        for key, mean in (("prompt", default.prompt), ("output", default.output))
    )
    return Traffic(
        rate=_rate(pairs["rate"]) if "rate" in pairs else default.rate,
        prompt=round(prompts.mean),
        output=round(outputs.mean),
        hit=_share("hit", pairs["hit"]) if "hit" in pairs else default.hit,
        prompts=None if prompts == Lengths(prompts.median) else prompts,
        outputs=None if outputs == Lengths(outputs.median) else outputs,
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
