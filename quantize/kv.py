"""The static numbers with which keys and values are cached: scales, and the centre of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.calibration.kv import KVRecorder
from qserve.checkpoint.kv import KEY_CENTER
from qserve.checkpoint.spec import KVScheme
from qserve.quantize.layer import static_scales


def kv_scale(absmax: Tensor, scheme: KVScheme) -> Tensor:
    """float32 [1] or, per head, [heads]; positive.

    absmax: float32 [heads], the largest magnitude of the keys (after their rotation) or values of each KV head.
    Codes are value / scale, rounded to int8 (-127..127) or e4m3.
    """
    return static_scales(absmax if scheme.granularity == "head" else absmax.amax().reshape(1), scheme.grid)


def recorded(recorder: KVRecorder, block: str, scheme: KVScheme) -> dict[str, Tensor]:
    """The scales of the attention inside ``block`` and the centre of its keys, under the names of a checkpoint.

    The centre is the mean key of each head. Some channels of a key hardly change from token to token. A part common to
    all keys shifts all scores of a query alike, which the softmax does not see; without it the rest keeps more bits.
    Attention with a soft cap or with sinks does see it, and gets no centre. e4m3 scales are made for keys as they are,
    since other readers use them without the centre. A cache with scales for each token needs none here. A block without
    keys has nothing.
    """
    if recorder.is_recurrent:
        return {}
    keys, values = recorder.absmax()
    mean, spread = recorder.key_mean(), recorder.key_spread()
    if not bool(spread.isfinite().all()):
        mean = torch.zeros_like(mean)
    elif scheme.dtype == "int8" and not recorder.shift_matters:
        keys = spread
    found = {} if recorder.shift_matters else {f"{block}.{recorder.attention}.{KEY_CENTER}": mean}
    if scheme.dynamic:
        return found
    for letter, absmax in zip("kv", (keys, values), strict=True):
        scale = kv_scale(absmax, scheme)
        # Per head: a scale for each of [heads, tokens, head_dim], as other readers expect.
        shaped = scale[:, None, None] if scheme.granularity == "head" else scale
        found[f"{block}.{recorder.attention}.{letter}_scale"] = shaped
    return found
