"""``CostModel``: how long one step of a model takes, from what is in it.

There are two: ``RooflineCost`` from data sheets (Williams et al., "Roofline", 2009), and ``FittedCost`` from measured
steps.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

from qserve.checkpoint.errors import DataError, UsageError
from qserve.runtime.step_plan import StepPlan


class StepShape(NamedTuple):
    """The properties of a step that its cost depends on.

    tokens      input tokens, of prompts and of decodes
    rows        logit rows: sequences that sample
    prefill_kv  positions that prompt tokens attend to, their own included, summed over these tokens
    decode_kv   the same of decodes
    """

    tokens: int
    rows: int
    prefill_kv: int
    decode_kv: int


class CostModel(Protocol):
    def seconds(self, tokens: int, rows: int, prefill_kv: int, decode_kv: int) -> float:
        """The duration of a step of this ``StepShape``."""
        ...


def shape_of(plan: StepPlan) -> StepShape:
    """The shape of a plan."""
    tokens = rows = prefill_kv = decode_kv = 0
    for sequence in plan.sequences:
        rows += sequence.num_sampled
        if sequence.is_prefill:
            count = len(sequence.token_ids)
            tokens += count
            prefill_kv += count * sequence.start + count * (count + 1) // 2
        else:
            tokens += 1
            decode_kv += sequence.start + 1
    return StepShape(tokens, rows, prefill_kv, decode_kv)


@dataclass(frozen=True)
class RooflineCost:
    """A step takes the longer of its arithmetic and its memory traffic, plus the overhead.

    Attributes:
        flops: floating point operations per second.
        bandwidth: bytes of memory per second.
        parameters: of the model; each token costs two operations per parameter.
        weights: bytes that every step reads, whatever is in it.
        kv: bytes of keys and values per position; a decode reads those of all positions before it.
        attention: operations per attended position: 4 * layers * query heads * head_dim. 0 leaves them out.
        overhead: seconds of a step beside these: launches, scheduling, sampling.
    """

    flops: float
    bandwidth: float
    parameters: float
    weights: float
    kv: float
    attention: float = 0.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = "at least 0" if each.name in ("kv", "attention", "overhead") else "above 0"
            if not math.isfinite(value) or value < 0 or (value == 0 and least == "above 0"):
                raise UsageError(f"roofline: {each.name} must be a finite number {least}, not {value}")

    @classmethod
    def parse(cls, text: str) -> RooflineCost:
        """``flops=989e12,bandwidth=3.35e12,...``. Raises ``UsageError``."""
        known = {each.name for each in fields(cls)}
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                if name.strip() not in known:
                    raise ValueError
                values[name.strip()] = float(value)
            except ValueError:
                raise UsageError(
                    f"--roofline takes {', '.join(sorted(known))} as name=number with commas between, not {part!r}"
                ) from None
        missing = {each.name for each in fields(cls) if each.name not in ("attention", "overhead")} - values.keys()
        if missing:
            raise UsageError(f"--roofline lacks {', '.join(sorted(missing))}")
        return cls(**values)

    def seconds(self, tokens: int, rows: int, prefill_kv: int, decode_kv: int) -> float:
        compute = (2 * self.parameters * tokens + self.attention * (prefill_kv + decode_kv)) / self.flops
        memory = (self.weights + self.kv * (decode_kv + tokens)) / self.bandwidth
        return max(compute, memory) + self.overhead


@dataclass(frozen=True)
class FittedCost:
    """What ``fit`` found. Seconds; none is negative.

    Attributes:
        curve: (tokens, seconds) with rising tokens: the time of a step by its input tokens, as straight lines between
            the points, continued behind the last.
        per_row: for each logit row.
        per_prefill_kv: for each position that a prompt token attends to.
        per_decode_kv: for each position that a decode attends to.
        model: what was measured, for people.
        error: median relative error over the steps it was fitted to.
    """

    curve: tuple[tuple[int, float], ...]
    per_row: float
    per_prefill_kv: float
    per_decode_kv: float
    model: str = ""
    error: float = 0.0
    _table: tuple[float, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        knots = [tokens for tokens, _ in self.curve]
        numbers = (self.per_row, self.per_prefill_kv, self.per_decode_kv, *(seconds for _, seconds in self.curve))
        if len(knots) < 2 or knots[0] < 1 or any(a >= b for a, b in pairwise(knots)) or knots[-1] > 1 << 20:
            raise DataError("a fitted cost needs at least two points with rising tokens")
        if any(not math.isfinite(number) or number < 0 for number in numbers) or self.curve[0][1] <= 0:
            raise DataError("a fitted cost needs finite coefficients, none of them negative, and steps that take time")
        object.__setattr__(self, "_table", tuple(self._by_tokens(tokens) for tokens in range(knots[-1] + 1)))

    def seconds(self, tokens: int, rows: int, prefill_kv: int, decode_kv: int) -> float:
        table = self._table
        base = table[tokens] if tokens < len(table) else self._by_tokens(tokens)
        return base + self.per_row * rows + self.per_prefill_kv * prefill_kv + self.per_decode_kv * decode_kv

    def _by_tokens(self, tokens: int) -> float:
        return sum(
            weight * self.curve[index][1] for index, weight in hats([k for k, _ in self.curve], tokens)
        )

    def to_json(self) -> dict[str, object]:
        return {key: value for key, value in asdict(self).items() if key != "_table"}

    @classmethod
    def load(cls, path: Path) -> FittedCost:
        """Read what ``--fit`` wrote. Raises ``DataError``."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if unknown := content.keys() - {each.name for each in fields(cls) if each.init}:
                raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
            return cls(
                tuple((int(tokens), float(seconds)) for tokens, seconds in content["curve"]),
                float(content["per_row"]),
                float(content["per_prefill_kv"]),
                float(content["per_decode_kv"]),
                str(content.get("model", "")),
                float(content.get("error", 0.0)),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise DataError(f"{path} is no cost model that qserve simulate --fit wrote: {error}") from None


def hats(knots: list[int], tokens: int) -> list[tuple[int, float]]:
    """A number of tokens as (index, weight) of the knots beside it, for linear interpolation.

    Below the first knot all weight is on the first; beyond the last the last two are extrapolated.
    """
    if tokens <= knots[0]:
        return [(0, 1.0)]
    right = min(bisect_right(knots, tokens), len(knots) - 1)
    share = (tokens - knots[right - 1]) / (knots[right] - knots[right - 1])
    return [(right - 1, 1.0 - share), (right, share)]
