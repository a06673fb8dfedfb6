"""Which scheme each linear gets: the one asked for, a smaller group where that does not divide, or none.

Knows shapes; does not know weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.quantize.job import QuantizeJob

# Group sizes that kernels are written for, the largest first.
_GROUP_SIZES = (128, 64, 32, 16, 8)


def plan(job: QuantizeJob, shapes: Mapping[str, tuple[int, int]]) -> tuple[QuantSpec, tuple[str, ...]]:
    """The specification for linears of ``shapes`` (module -> (out, in)), and a line for each deviation.

    Raises ``UsageError`` where nothing would be quantized.
    """
    overrides: dict[str, WeightScheme] = {}
    ignored: list[str] = []
    falls: dict[tuple[int, int], int] = {}
    skipped: dict[tuple[int, int], int] = {}
    # What fills whole 32-bit words; at 3 bits only 32 values do.
    unit = 32 if job.bits == 3 else 32 // job.bits
    for module, (out, inp) in shapes.items():
        if out % unit or inp % unit:
            ignored.append(module)
            skipped[out, inp] = skipped.get((out, inp), 0) + 1
        elif (size := group_size_for(inp, job.group_size)) != job.group_size:
            overrides[module] = replace(job.scheme, group_size=size)
            falls[inp, size] = falls.get((inp, size), 0) + 1
    if len(ignored) == len(shapes):
        raise UsageError(f"no linear can be quantized to {job.bits} bits: none has sizes that are multiples of {unit}")
    notices = [
        f"groups of {job.group_size} do not divide an input of {inp}: {count} linears use "
        + (f"groups of {size}" if size > 0 else "one scale per channel")
        for (inp, size), count in falls.items()
    ]
    notices += [
        f"{count} linears of {out} x {inp} stay in floating point: {job.bits}-bit storage needs multiples of {unit}"
        for (out, inp), count in skipped.items()
    ]
    spec = QuantSpec(
        method=job.method, weights=job.scheme, overrides=overrides, ignored=("lm_head", *ignored)
    )
    return spec, tuple(notices)


def group_size_for(in_features: int, wanted: int) -> int:
    """``wanted`` where it divides ``in_features``, else the largest smaller size of those kernels know that
    does, else -1 (per channel)."""
    if wanted == -1 or in_features % wanted == 0:
        return wanted
    return next((size for size in _GROUP_SIZES if size < wanted and in_features % size == 0), -1)
