"""What would load a checkpoint in the GPTQ format, and what would refuse it and why.

Knows the published limits of each loader; does not import any of them. Asked before calibration starts, so
that hours of work never end in files that load nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.gptq_format import FUSED, Version
from qserve.checkpoint.spec import QuantSpec, WeightScheme

Shapes = Mapping[str, tuple[int, int]]
Schemes = Mapping[str, WeightScheme]
Refusal = Callable[[QuantSpec, Schemes, Shapes], str | None]

VLLM_GROUPS = (-1, 32, 64, 128)


@dataclass(frozen=True)
class LoaderVerdict:
    """Whether ``loader`` accepts the checkpoint; ``reason`` says why not, or what it needs, or is empty."""

    loader: str
    accepts: bool
    reason: str = ""


def verdicts(spec: QuantSpec, shapes: Shapes, loaders: Iterable[str] | None = None, *,
             version: Version = "gptq") -> list[LoaderVerdict]:
    """What each loader makes of ``spec`` for linears of ``shapes`` (module -> (out, in)) in the GPTQ format.

    Raises ``UsageError`` for a loader that is not known.
    """
    chosen = list(LOADERS if loaders is None else loaders)
    unknown = [loader for loader in chosen if loader not in LOADERS]
    if unknown:
        raise UsageError(f"unknown loader {unknown[0]!r}; known: {', '.join(LOADERS)}")
    schemes = {module: scheme for module in shapes if (scheme := spec.scheme_of(module)) is not None}
    limit = _format_limit(spec, schemes, shapes, version)
    result = []
    for loader in chosen:
        refusal, note = LOADERS[loader]
        reason = limit or refusal(spec, schemes, shapes)
        result.append(LoaderVerdict(loader, reason is None, reason or note))
    return result


def _format_limit(spec: QuantSpec, schemes: Schemes, shapes: Shapes, version: Version) -> str | None:
    """What no reader of the format could load."""
    if spec.activations is not None or spec.kv_cache is not None:
        return "the GPTQ format quantizes weights only"
    for module, scheme in schemes.items():
        out, inp = shapes[module]
        unit = 32 if scheme.bits == 3 else 32 // scheme.bits
        if scheme.dtype != "int":
            return f"{module}: the GPTQ format holds integers, not {scheme.dtype}"
        if inp % unit or out % unit:
            return f"{module} [{out}, {inp}]: at {scheme.bits} bits both sizes must be multiples of {unit}"
        if version == "gptq" and not scheme.symmetric:
            return f"{module}: version 1 cannot store every zero point of an asymmetric weight; write gptq_v2"
    return None


def _qserve(spec: QuantSpec, schemes: Schemes, shapes: Shapes) -> str | None:
    return None


def _vllm(spec: QuantSpec, schemes: Schemes, shapes: Shapes) -> str | None:
    for module, scheme in schemes.items():
        if not scheme.symmetric:
            return f"{module}: GPTQ weights must be symmetric (--sym)"
        if scheme.bits not in (4, 8):
            return f"{module}: GPTQ weights must have 4 or 8 bits, not {scheme.bits}"
        if scheme.group_size not in VLLM_GROUPS:
            return f"{module}: groups must be of 32, 64 or 128 or the whole input, not {scheme.group_size}"
    for module in shapes:
        parent, _, leaf = module.rpartition(".")
        for fused, siblings in FUSED.items():
            for name in (f"{parent}.{sibling}" for sibling in siblings if leaf in siblings):
                if name in shapes and spec.scheme_of(name) != spec.scheme_of(module):
                    return f"{module} and {name} must share one scheme, as they are fused into {fused}"
    return _undivided(schemes, shapes)


def _transformers(spec: QuantSpec, schemes: Schemes, shapes: Shapes) -> str | None:
    # It replaces every linear of the decoder blocks by one with the global scheme and reads no "dynamic".
    for module in shapes:
        if module == "lm_head":
            if module in schemes:
                return "lm_head: the output layer is not loaded packed"
        elif schemes.get(module) != spec.weights:
            return f"{module}: every linear must have the one global scheme"
    if spec.weights.group_size not in VLLM_GROUPS:
        return f"groups must be of 32, 64 or 128 or the whole input, not {spec.weights.group_size}"
    return _undivided(schemes, shapes)


def _undivided(schemes: Schemes, shapes: Shapes) -> str | None:
    for module, scheme in schemes.items():
        if shapes[module][1] % scheme.group_width(shapes[module][1]):
            return f"{module}: groups of {scheme.group_size} do not divide its input of {shapes[module][1]}"
    return None


LOADERS: dict[str, tuple[Refusal, str]] = {
    "qserve": (_qserve, ""),
    "vllm": (_vllm, ""),
    "transformers": (_transformers, "needs the packages optimum and gptqmodel"),
}
