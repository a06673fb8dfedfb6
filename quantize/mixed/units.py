"""The units of mixed precision: linears that must share a scheme, and the schemes they can have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from qserve.checkpoint.formats.format import FUSED, Format
from qserve.checkpoint.grid import INTEGERS
from qserve.checkpoint.loaders import verdicts
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.quantize.job import QuantizeJob
from qserve.quantize.schemes import word_values

Unit = tuple[str, ...]
"""Linears that must share a scheme, because a loader fuses them into one."""
Offered = Mapping[Unit, Sequence[WeightScheme | None]]
"""The schemes that each unit can have; None keeps 16-bit floats."""

_GROUP_SIZES = (32, 64, 128, -1)
_USUAL_BITS = (4, 8)
"""The widths that most loaders read."""
_EXPERT = re.compile(r"(.*?\.\d+\..*?)\.\d+\.")


def units(modules: Iterable[str]) -> list[Unit]:
    """Modules grouped as loaders fuse them: q, k and v; gate and up; all experts of a block."""
    found: dict[str, list[str]] = {}
    fused = {sibling: name for name, siblings in FUSED.items() for sibling in siblings}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        experts = _EXPERT.match(f"{module}.")
        key = experts.group(1) if experts else f"{parent}.{fused.get(leaf, leaf)}"
        found.setdefault(key, []).append(module)
    return [tuple(members) for members in found.values()]


def of_experts(unit: Unit) -> bool:
    """Whether a router decides which tokens come to the unit."""
    return _EXPERT.match(f"{unit[0]}.") is not None


def offered(job: QuantizeJob, shapes: Mapping[str, tuple[int, int]], format: Format) -> Offered:
    """What mixed precision chooses from; empty where ``job`` is not mixed. A size that 4 and 8 bits can have is made of
    those."""
    if not job.mixed:
        return {}
    if job.activations is not None:
        # Where inputs are rounded too, the only other choice is to leave weights and inputs alone.
        return dict.fromkeys(units(shapes), (job.weights, None))
    every = candidates(shapes, format, job.loaders, symmetric=job.symmetric)
    usual = {unit: fit for unit, schemes in every.items() if (fit := [s for s in schemes if s.bits in _USUAL_BITS])}
    suffices = job.target_bits is not None and _fewest_bits(usual, shapes, format) <= job.target_bits
    return usual if suffices and usual.keys() == every.keys() else every


def _fewest_bits(choices: Offered, shapes: Mapping[str, tuple[int, int]], format: Format) -> float:
    """Stored bits per weight where every unit has the smallest of its ``choices``."""
    def bits(unit: Unit, scheme: WeightScheme | None) -> int:
        assert scheme is not None
        return sum(scheme.storage_bits(*shapes[each], symmetric_zeros=format.symmetric_zeros) for each in unit)

    stored = sum(min(bits(unit, scheme) for scheme in schemes) for unit, schemes in choices.items())
    return stored / max(1, sum(math.prod(shapes[each]) for unit in choices for each in unit))


def candidates(
    shapes: Mapping[str, tuple[int, int]], format: Format, loaders: Sequence[str], *, symmetric: bool = True
) -> dict[Unit, tuple[WeightScheme, ...]]:
    """For each unit of ``shapes`` (module -> (out, in)), the schemes that ``format`` can hold and all of ``loaders``
    accept. A unit without any is left out."""
    result = {}
    for unit in units(shapes):
        own = {module: shapes[module] for module in unit}
        fitting = []
        for bits in INTEGERS.bits:
            sizes = [WeightScheme(bits, size, symmetric) for size in _GROUP_SIZES]
            fit = [scheme for scheme in sizes if _fits(scheme, own, format, loaders)]
            # With many codes, small groups cost more than they save. With few, one scale is too little for an input.
            fitting += fit[-2:] if bits > 5 else [scheme for scheme in fit if bits > 3 or scheme.group_size != -1]
        if fitting:
            result[unit] = tuple(fitting)
    return result


def _fits(
    scheme: WeightScheme, shapes: Mapping[str, tuple[int, int]], format: Format, loaders: Sequence[str]
) -> bool:
    unit = word_values(scheme)
    if any(out % unit or inp % unit or inp % scheme.group_size for out, inp in shapes.values()):
        return False
    spec = QuantSpec("mixed", scheme, ignored=())
    return all(verdict.accepts for verdict in verdicts(spec, shapes, loaders, format=format))
