"""The end of every product: adds the parts of a split K, the bias, and the previous output, and stores the sums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finish(
    total, out, bias, partial, arrived, tile, split, ms, ns, rows, n, stride_out, padded_n, splits,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Store a tile of sums, float32 [ms, ns].

    With a split K, every program leaves its part in ``partial`` [splits, rows, padded_n]. The last to arrive adds all
    parts in the order of K, so the result does not depend on which one it is. ``arrived`` counts them, one number for
    each tile, zero before and after.
    """
    mine = (ms < rows)[:, None]
    if SPLIT:
        at = partial + ms[:, None].to(tl.int64) * padded_n + ns[None, :]
        size = rows.to(tl.int64) * padded_n
        tl.store(at + split * size, total, mask=mine)
        tl.debug_barrier()  # the stores of all threads come before the one arrival
        done = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if done == splits - 1:
            total = tl.zeros_like(total)
            for other in range(splits):
                # Past the L1 cache, which does not see other programs' stores.
                total += tl.load(at + other * size, mask=mine, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
            _store(total, out, bias, mine, ms, ns, n, stride_out, HAS_BIAS, ACCUMULATE)
    else:
        _store(total, out, bias, mine, ms, ns, n, stride_out, HAS_BIAS, ACCUMULATE)


@triton.jit
def _store(total, out, bias, mine, ms, ns, n, stride_out, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + ns, mask=ns < n, other=0.0).to(tl.float32)[None, :]
    at = out + ms[:, None].to(tl.int64) * stride_out + ns[None, :]
    mine = mine & (ns < n)[None, :]
    if ACCUMULATE:
        total += tl.load(at, mask=mine, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=mine)
