"""The sizes of Llama 3: those at which a GPU's kernels are timed and tuned."""

from __future__ import annotations

SHAPES = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (28672, 4096), "8B down": (4096, 14336),
    "70B gate_up": (57344, 8192), "70B down": (8192, 28672), "70B qkv": (10240, 8192), "70B o": (8192, 8192),
}  # fmt: skip
"""(outputs, inputs) of the fused linear products."""


def adds(name: str) -> bool:
    """Whether a model adds this product to its residual stream, in float32."""
    return name.endswith((" o", " down"))
