"""The static scales with which keys and values are cached.

Knows magnitudes and their names; does not know models, caches or formats.
"""

from __future__ import annotations

from torch import Tensor

from qserve.calibration.kv import KVRecorder
from qserve.checkpoint.spec import KVScheme
from qserve.quantize.layer import static_scales


def kv_scale(absmax: Tensor, scheme: KVScheme) -> Tensor:
    """float32 [1] or, per head, [heads]; positive.

    absmax: float32 [heads], the largest magnitude of the keys (after their rotation) or values of each KV head.
    Codes are value / scale, rounded to int8 (-127..127) or e4m3.
    """
    return static_scales(absmax if scheme.granularity == "head" else absmax.amax().reshape(1), scheme.dtype)


def recorded_scales(recorder: KVRecorder, block: str, scheme: KVScheme) -> dict[str, Tensor]:
    """The scales of the attention inside ``block``, under the names of a checkpoint."""
    found = {}
    for letter, absmax in zip("kv", recorder.absmax(), strict=True):
        scale = kv_scale(absmax, scheme)
        # Per head: a scale for each of [heads, tokens, head_dim], as other readers expect.
        shaped = scale[:, None, None] if scheme.granularity == "head" else scale
        found[f"{block}.{recorder.attention}.{letter}_scale"] = shaped
    return found
