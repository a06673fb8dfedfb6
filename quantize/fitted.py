"""Numbers that were fitted, with what they were fitted to: another model or machine may want others.

Knows no model. What can be derived or counted stands where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """``value`` is what fitted best ``to`` the models and machines named."""

    value: float
    to: str


_SMALL = "SmolLM2-135M-Instruct, two cores with AVX-512"

# Rounding (docs/notes/quantization.md). By how much each input's own variance is raised, relative to itself, for what
# calibration text tells of no other text; and on top of that times inputs / tokens, for chance in correlations.
SHRINKAGE = Fitted(0.1, _SMALL)
SHRINKAGE_BY_CHANCE = Fitted(1.4, _SMALL)

# Mixed precision. Where the float model is followed, later blocks make up for more of what costs more, which one block
# does not show: of the differences in cost per weight this power is left. And rounded all at once, linears make up for
# less than they do for one: what weights cost together is this many times the sum.
EVENING = Fitted(0.75, _SMALL)
ALL_AT_ONCE = Fitted(1.7, _SMALL)

# Forecast of time. What attention and narrow matrices add to the products of calibration; passes over what a linear
# puts out that are made beside it; multiplications that searching the scales of one weight and rounding it are worth.
OVERHEAD = Fitted(1.2, f"{_SMALL}, bfloat16 and float32")
PASSES = Fitted(3.0, f"{_SMALL}, bfloat16 and float32")
SCALE_SEARCH = Fitted(3000, f"{_SMALL}, bfloat16 and float32")
# A forward and a backward are three products, and take the time of more.
LEARNING_STEP = Fitted(4.4, _SMALL)
# What variants of an excerpt, a few windows each, take of the time that their products would in one piece.
SMALL_BATCHES = Fitted(3.0, _SMALL)
# Products of GPTQ by weight and input: what follows the float model, then the sweep and what is left of the error. By
# cube of the inputs: factor and inverse of a Hessian, by halves.
FOLLOWING = Fitted(3.0, "a linear of 28,672 inputs")
SWEEP = Fitted(2.0, "a linear of 28,672 inputs")
INVERSE = Fitted(2 / 3, "a linear of 28,672 inputs")
