"""Which scheme each linear gets: the one asked for, a smaller group where its group does not divide, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.grid import E4M3, INTEGERS, TRELLIS
from qserve.checkpoint.spec import MICROSCALED, QuantSpec, WeightScheme
from qserve.quantize.job import QuantizeJob

# Group sizes that kernels are written for, the largest first.
_GROUP_SIZES = (128, 64, 32, 16, 8)


@dataclass(frozen=True)
class Shapes:
    """(out, in) of every linear inside the blocks, and of the embedding, which the output head shares.

    ``tied``: the head has no weight of its own. ``kept`` are linears that always stay in floating point: routers, those
    outside the blocks, and a head with another name than ``lm_head``. ``as_stored`` are linears whose weights are
    written as the model stores them: the scheme of each, None in floating point.
    """

    linears: Mapping[str, tuple[int, int]]
    embedding: str
    embedding_shape: tuple[int, int]
    tied: bool
    kept: tuple[str, ...] = ()
    as_stored: Mapping[str, WeightScheme | None] = field(default_factory=dict)

    def of(self, spec: QuantSpec) -> dict[str, tuple[int, int]]:
        """Every module that may be packed under ``spec``."""
        found = dict(self.linears)
        for module in ("lm_head", self.embedding):
            if module in spec.overrides:
                found[module] = self.embedding_shape
        return found


def assign(
    job: QuantizeJob, shapes: Shapes, chosen: Mapping[str, WeightScheme | None] | None = None
) -> tuple[QuantSpec, tuple[str, ...]]:
    """The specification for ``shapes``, and a line for each deviation. ``chosen`` is what mixed precision or a recipe
    decided, with None for linears that it keeps in 16-bit floats; a recipe decides on embedding and head, too.

    Raises ``UsageError`` where nothing would be quantized.
    """
    overrides: dict[str, WeightScheme] = {}
    ignored: list[str] = []
    falls: dict[tuple[int, int, int], int] = {}
    skipped: dict[tuple[int, int], int] = {}
    for module, (out, inp) in shapes.linears.items():
        wanted = (chosen or {}).get(module, job.weights)
        if (stored := shapes.as_stored.get(module)) is not None:
            overrides[module] = stored
            continue
        if wanted is None or module in shapes.as_stored:
            ignored.append(module)
            continue
        # Blocks, and weights with int8 inputs, need whole bytes only.
        packed = wanted in MICROSCALED or (job.activations is None and job.recipe is None)
        unit = word_values(wanted) if packed else 1
        if out % unit or inp % unit:
            ignored.append(module)
            skipped[out, inp] = skipped.get((out, inp), 0) + 1
            continue
        size = group_size_for(inp, wanted.group_size) if wanted.rows == 1 else wanted.group_size
        if size != wanted.group_size:
            fall = wanted.group_size, inp, size
            falls[fall] = falls.get(fall, 0) + 1
        scheme = replace(wanted, group_size=size)
        if scheme != job.weights:
            overrides[module] = scheme
    if len(ignored) == len(shapes.linears) and not skipped:
        raise UsageError("every linear would be kept in 16-bit floats; lower --target-bits or raise --max-kl")
    if len(ignored) == len(shapes.linears):
        raise UsageError(
            f"no linear can be quantized to {job.weights}: none has sizes that are multiples of "
            f"{word_values(job.weights)}"
        )
    notices = [
        f"groups of {wanted_size} do not divide an input of {inp}: {count} linears use "
        + (f"groups of {size}" if size > 0 else "one scale per channel")
        for (wanted_size, inp, size), count in falls.items()
    ]
    notices += [
        f"{count} linears of {out} x {inp} stay in floating point: packed storage needs multiples of "
        f"{word_values(job.weights)}"
        for (out, inp), count in skipped.items()
    ]
    outer = {"lm_head": job.head_bits, shapes.embedding: job.embedding_bits}
    outer_size = min(job.group_size, 64) if job.group_size > 0 else 64
    for module, bits in outer.items():
        if bits:
            overrides[module] = WeightScheme(bits, group_size_for(shapes.embedding_shape[1], outer_size))
    if job.recipe is not None and chosen is not None:
        overrides |= {module: blocks for module in outer if (blocks := chosen.get(module)) is not None}
    if "lm_head" not in overrides:
        ignored.insert(0, "lm_head")
        if job.embedding_bits and shapes.tied:
            notices.append(f"the output head is the embedding, which is stored in {job.embedding_bits} bits")
        elif shapes.tied and shapes.embedding not in overrides:
            notices.append("the output head is the embedding, which keeps its precision")
    elif shapes.tied:
        twice = job.head_bits == job.embedding_bits
        notices.append(
            f"the output head was the embedding; it becomes a layer of its own in {job.head_bits} bits"
            + (f"; --embeddings {job.embedding_bits} alone would store the same numbers once" if twice else "")
        )
    spec = QuantSpec(
        method="signround" if job.learns_rounding else job.algorithm.name,
        weights=job.weights,
        activations=job.activations,
        kv_cache=job.kv_scheme,
        overrides=overrides,
        ignored=(*ignored, *shapes.kept),
        float_inputs=(
            *(module for module in outer if module in overrides),
            *(module for module, stored in shapes.as_stored.items() if stored is not None),
        ),
    )
    return spec, tuple(notices)


def word_values(scheme: WeightScheme) -> int:
    """The number of values that fill whole 32-bit words: both sizes of a weight must be multiples of it."""
    if scheme in MICROSCALED:
        return scheme.group_size
    if scheme.grid is E4M3:
        return 1
    if scheme.grid is TRELLIS:
        return 16  # whole tiles
    if scheme.grid is not INTEGERS:
        raise UsageError(f"no method rounds weights to {scheme}")
    return {2: 16, 3: 32, 4: 8, 5: 1, 6: 1, 8: 4}[scheme.bits]


def group_size_for(in_features: int, wanted: int) -> int:
    """``wanted`` where it divides ``in_features``, else the largest smaller size of the kernels that does, else -1 (per
    channel)."""
    if wanted == -1 or in_features % wanted == 0:
        return wanted
    return next((size for size in _GROUP_SIZES if size < wanted and in_features % size == 0), -1)
