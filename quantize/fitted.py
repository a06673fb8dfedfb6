"""Numbers that were fitted, with what they were fitted to: another model or machine may want others.

Numbers that can be derived or counted are not here but where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """``value`` is what fitted best ``to`` the models and machines named."""

    value: float
    to: str


_SMALL = "SmolLM2-135M-Instruct, two cores with AVX-512"

# Rounding (docs/notes/quantization.md). How much each input's own variance is raised, relative to itself: first because
# other texts differ from the calibration text; and, times inputs / tokens, for correlations that are there by chance.
SHRINKAGE = Fitted(0.1, _SMALL)
SHRINKAGE_BY_CHANCE = Fitted(1.4, _SMALL)
# Of what earlier layers lost and a layer could make up for, by the calibration text: the share that it makes up for.
MADE_UP = Fitted(0.85, _SMALL)

# Mixed precision. Where the float model is followed, later blocks make up for more of the larger costs, which one block
# does not show: ratios of costs per weight are raised to this power. And when all linears are rounded, they make up
# for less than they do for one: the cost of all together is this many times the sum.
EVENING = Fitted(0.75, _SMALL)
ALL_AT_ONCE = Fitted(1.7, _SMALL)

# Forecast of time. The factor that attention and narrow matrices add to the products of calibration; passes over a
# linear's output besides its product; the multiplications that searching scales and rounding cost for one weight.
OVERHEAD = Fitted(1.2, f"{_SMALL}, bfloat16 and float32")
PASSES = Fitted(3.0, f"{_SMALL}, bfloat16 and float32")
SCALE_SEARCH = Fitted(3000, f"{_SMALL}, bfloat16 and float32")
# The same for two-level scales on top of that: between those of symmetric numbers and those with minima.
SUPERBLOCK_SEARCH = Fitted(8000, "linears of 2,048 inputs, two cores with AVX2")
# A forward and a backward pass are three products, but take the time of more.
LEARNING_STEP = Fitted(4.4, _SMALL)
# The time of a token that the model writes, 64 texts at once, relative to that of a token's products in calibration.
WRITING = Fitted(1.1, _SMALL)
# The time of variants of an excerpt, a few windows each, relative to that of their products in one piece.
SMALL_BATCHES = Fitted(3.0, _SMALL)
# Products of GPTQ, per weight and input: following the float model; then the sweep and the remaining error. Per cube of
# the inputs: factor and inverse of a Hessian, by halves.
FOLLOWING = Fitted(3.0, "a linear of 28,672 inputs")
SWEEP = Fitted(2.0, "a linear of 28,672 inputs")
DESCENT = Fitted(3.5, "linears of 576 and 1,536 inputs, two cores with AVX2")  # each turn of codes and scales
INVERSE = Fitted(2 / 3, "a linear of 28,672 inputs")
# Seconds for each weight that a GPU takes besides: kernels that are over before the next one is launched, and what the
# host does.
ON_A_GPU = Fitted(9e-9, "blocks in the shapes of Llama-3 8B and 70B, one H200")
# The multiplications that trellis codes cost for one weight: the best path through 4,096 states, twice.
TRELLIS = Fitted(65_000, "SmolLM2-135M-Instruct, two cores with AVX2")
