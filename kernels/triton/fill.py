"""Token ids that only the device knows: the newest tokens, put where a step refers to them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton.launch import at

BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def fill_kernel(ids_ptr, sampled_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < count, other=0)
    token = tl.load(sampled_ptr + (-1 - ids), mask=ids < 0, other=0)
    tl.store(ids_ptr + at, tl.maximum(token, 0), mask=ids < 0)


def fill(ids: Tensor, sampled: Tensor, count: int) -> None:
    """In place: each of the first ``count`` ids that is -1 - i becomes ``sampled[i]``, or 0 where that is negative, as
    after a NaN. Both int32."""
    at(fill_kernel, (triton.cdiv(count, BLOCK),))(ids, sampled, count, BLOCK, num_warps=4)
