"""The codes of a weight in the tiles of ``csrc/qserve.h``, the slow way. ``native`` has the way in C."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from qserve.checkpoint.packed_codes import Packed

LANES = 16


Tile = Callable[[Tensor | Packed, Tensor | None, Tensor], None]
"""``tile_codes_reference``, or ``tile_codes`` of the C kernels."""


def tile_codes_reference(stored: Tensor | Packed, order: Tensor | None, out: Tensor) -> None:
    """Fill ``out`` with the tiles of codes [out, in]: uint8 [tiles, k / 8, 16, 4] of nibbles where it is so small,
    [tiles, k / 4, 16, 4] of bytes otherwise. order int64 [k] names the column of each input, -1 for a code of 0; None
    for all ``in``."""
    codes = stored if isinstance(stored, Tensor) else stored.unpack()
    if order is not None:
        codes = torch.where(order < 0, 0, codes[:, order.clamp_min(0)])
    outputs, k = codes.shape
    codes = F.pad(codes, (0, 0, 0, -outputs % LANES)).contiguous()
    quads = codes.view(torch.int32).view(-1, LANES, k // 4).transpose(1, 2)  # four codes in each
    quads = quads[:, ::2] | (quads[:, 1::2] << 4) if out.shape[1] * 8 == k else quads
    out.view(torch.int32).copy_(quads[..., None])
