"""``GGUF_SCHEMES``: what the blocks of llama.cpp's files hold, by their names there.

``X_0`` are symmetric and ``X_1`` have a minimum, in groups of 32 with a float16 each. The K-quants have two-level
scales: integers beside a float16 for every 256 inputs. The source is ggml's description of its own structures.
"""

from __future__ import annotations

from qserve.checkpoint.grid import AFFINE
from qserve.checkpoint.spec import WeightScheme


def _with_minimum(bits: int, scale_bits: int = 0) -> WeightScheme:
    return WeightScheme(bits, 32, symmetric=False, dtype=AFFINE.name, scale_bits=scale_bits)


GGUF_SCHEMES = {
    "Q4_0": WeightScheme(4, 32),
    "Q4_1": _with_minimum(4),
    "Q5_0": WeightScheme(5, 32),
    "Q5_1": _with_minimum(5),
    "Q8_0": WeightScheme(8, 32),
    "Q3_K": WeightScheme(3, 16, scale_bits=6),
    "Q4_K": _with_minimum(4, 6),
    "Q5_K": _with_minimum(5, 6),
    "Q6_K": WeightScheme(6, 16, scale_bits=8),
}
