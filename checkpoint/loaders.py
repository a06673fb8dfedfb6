"""Which loaders would accept a checkpoint, and why others would refuse it.

The limits are those that each loader publishes; none is imported. They are checked before calibration starts, so that
hours of work never end in files that load nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.formats.compressed_tensors_config import layout
from qserve.checkpoint.formats.format import FUSED, Format, Schemes, Shapes, is_embedding
from qserve.checkpoint.grid import E2M1, INTEGERS, TRELLIS
from qserve.checkpoint.spec import MICROSCALED, MXFP8, ActivationScheme, QuantSpec, WeightScheme

# Group sizes of the Marlin kernels, and the multiples of outputs and inputs they need.
_GROUPS = (-1, 32, 64, 128)
_MARLIN_OUT, _MARLIN_IN = 64, 128
# What CUTLASS's products of 4-bit floats need.
_FP4_STEP = 32
# Integers of 4 bits whose inputs are e4m3 numbers: what the kernel for Hopper takes.
_W4AFP8 = WeightScheme(4, 128), ActivationScheme("fp8")
_MXFP8 = MXFP8, ActivationScheme("fp8", "group", group_size=32)
_EXPERT = re.compile(r"\.experts\.\d+\.")
# Experts of GPT-OSS: gate and up are one linear, its rows in turn. Other loaders know it by the stack of all experts.
_JOINED_EXPERT = re.compile(r"\.experts\.\d+\.gate_up_proj")
_UNSTACKED = "experts of this family are loaded from stacks of a layer, in 16 bits or MXFP4, not quantized one by one"
_OWN = "trellis codes are a layout of qserve's own"
_GGUF = "it has llama.cpp's blocks, of which qserve convert --format gguf makes a file"
_FOUR_BITS = "inputs are rounded to four bits where the GPU multiplies those (Blackwell)"
_SKIPPED = "experts of this family are not skipped where their linears are named one by one"


@dataclass(frozen=True)
class LoaderVerdict:
    """Whether ``loader`` accepts the checkpoint; ``reason`` says why not, or what it needs, or is empty."""

    loader: str
    accepts: bool
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.loader} {'loads it' if self.accepts else 'refuses it'}{self.reason and ': '}{self.reason}"


@dataclass(frozen=True)
class _Case:
    """A checkpoint to judge: ``schemes`` has the packed modules among ``shapes``."""

    spec: QuantSpec
    schemes: Schemes
    shapes: Shapes
    format: Format

    @property
    def head_is_packed(self) -> bool:
        return "lm_head" in self.schemes

    def kinds(self) -> Iterable[tuple[str, WeightScheme, ActivationScheme | None]]:
        """(module, scheme, activations) of every packed module."""
        return ((module, scheme, self.spec.activations_of(module)) for module, scheme in self.schemes.items())


def verdicts(
    spec: QuantSpec, shapes: Shapes, loaders: Iterable[str] | None = None, *, format: Format
) -> list[LoaderVerdict]:
    """The verdict of each loader on ``spec`` for modules of ``shapes`` (module -> (out, in)) in ``format``.

    Raises ``UsageError`` for a loader that is not known.
    """
    chosen = list(LOADERS if loaders is None else loaders)
    unknown = [loader for loader in chosen if loader not in LOADERS]
    if unknown:
        raise UsageError(f"unknown loader {unknown[0]!r}; known: {', '.join(LOADERS)}")
    schemes = {module: scheme for module in shapes if (scheme := spec.scheme_of(module)) is not None}
    case = _Case(spec, schemes, shapes, format)
    limit = format.limit(spec, schemes, shapes)
    own = next((f"{module}: {_OWN}" for module, scheme in schemes.items() if scheme.grid is TRELLIS), None)
    result = []
    for loader in chosen:
        refusal, note = LOADERS[loader]
        reason = limit or (own if loader != "qserve" else None) or refusal(case)
        result.append(LoaderVerdict(loader, reason is None, reason or note(case)))
    return result


def _qserve(case: _Case) -> str | None:
    return None


def _vllm(case: _Case) -> str | None:
    return _served(case, heads_of_kv=True, small_inputs=True, newer=True)


def _sglang(case: _Case) -> str | None:
    return _served(case, heads_of_kv=False, small_inputs=case.format.name.startswith("gptq"), newer=False)


def _served(case: _Case, *, heads_of_kv: bool, small_inputs: bool, newer: bool) -> str | None:
    """The limits of vLLM, which SGLang took over. ``small_inputs``: symmetric weights that Marlin cannot take run in a
    slower kernel; ``newer``: also 4-bit floats under inputs that
    are not rounded, 4-bit integers under fp8, and MXFP8."""
    kv_cache = case.spec.kv_cache
    if case.format.name == "gguf":
        return _GGUF
    if kv_cache is not None and kv_cache.dtype == "int8":
        return "a KV cache in int8 is not supported, only in fp8"
    if kv_cache is not None and kv_cache.granularity == "head" and not heads_of_kv:
        return "KV-cache scales must be per tensor"
    if case.head_is_packed and not case.format.name.startswith("gptq"):
        return f"lm_head: the output layer is not loaded packed from {case.format.name}"
    for module in filter(_JOINED_EXPERT.search, case.shapes):
        return f"{module}: {_UNSTACKED if module in case.schemes else _SKIPPED}"
    for module, scheme, activations in case.kinds():
        if is_embedding(module):
            return f"{module}: an embedding is not loaded packed"
        if activations is None and scheme.grid is INTEGERS:
            reason = _integers(case, module, scheme, small_inputs=small_inputs)
        elif scheme.grid is E2M1:
            reason = _four_bit_floats(scheme, activations, case.shapes[module], alone=newer)
        else:
            reason = _rounded_inputs(scheme, activations, case.shapes[module], newer=newer)
        if reason is not None:
            return f"{module}: {reason}"
    return _unlike_siblings(case) or _undivided(case)


def _integers(case: _Case, module: str, scheme: WeightScheme, *, small_inputs: bool) -> str | None:
    """Integer weights with inputs in floating point: Marlin, or a slower kernel."""
    out, inp = case.shapes[module]
    gptq, awq = case.format.name.startswith("gptq"), case.format.name == "awq"
    if gptq and not scheme.symmetric:
        return "GPTQ weights must be symmetric (--sym)"
    if scheme.bits not in (4, 8) or (scheme.bits == 8 and not scheme.symmetric):
        return f"weights must have 4 or 8 bits (8 only symmetric), not {scheme}"
    if scheme.group_size not in _GROUPS:
        return f"groups must be of 32, 64 or 128 or the whole input, not {scheme.group_size}"
    if not awq and not (small_inputs and scheme.symmetric) and not _fits_marlin(case.shapes[module]):
        return f"[{out}, {inp}]: the kernel needs outputs in multiples of {_MARLIN_OUT} and inputs of {_MARLIN_IN}"
    return None


def _four_bit_floats(
    scheme: WeightScheme, activations: ActivationScheme | None, shape: tuple[int, int], *, alone: bool
) -> str | None:
    """Marlin, or with inputs in four bits the tensor cores of a Blackwell GPU."""
    if activations is None and not alone:
        return f"{scheme} weights are loaded where inputs are in four bits, too"
    out, inp = (_MARLIN_OUT, _MARLIN_IN) if activations is None else (_FP4_STEP, _FP4_STEP)
    if shape[0] % out or shape[1] % inp:
        return f"{list(shape)}: the kernel needs outputs in multiples of {out} and inputs of {inp}"
    return None


def _rounded_inputs(
    scheme: WeightScheme, activations: ActivationScheme | None, shape: tuple[int, int], *, newer: bool
) -> str | None:
    """int8 x int8, fp8 x fp8, or fp8 weights alone; ``newer``: 4 bits x fp8 and MXFP8, too."""
    if newer and (scheme, activations) in (_W4AFP8, _MXFP8):
        return None
    block = scheme.rows not in (1, -1)
    if scheme.group_size != -1 and not block:
        return f"weights must have scales per channel, per tensor or per block where inputs are rounded, not {scheme}"
    if block and (scheme.rows, scheme.group_size) != (128, 128):
        return f"blocks must be of 128x128, not {scheme}"
    if block and (shape[0] % 128 or shape[1] % 128):
        return f"{list(shape)}: with blocks both sizes must be multiples of 128"
    if activations is None:
        return None
    if scheme.grid is INTEGERS and (scheme.bits != 8 or not scheme.symmetric or activations.grid is not INTEGERS):
        return f"rounded inputs need symmetric weights of 8 bits, not {scheme}"
    if (activations.granularity == "group") != block:
        return f"inputs per {activations.granularity} do not go with {scheme}"
    if activations.granularity == "tensor" and activations.dynamic and activations.grid is INTEGERS:
        return "inputs per tensor must have static scales"
    return None


def _fits_marlin(shape: tuple[int, int]) -> bool:
    return shape[0] % _MARLIN_OUT == 0 and shape[1] % _MARLIN_IN == 0


def _unlike_siblings(case: _Case) -> str | None:
    """Loaders fuse q, k and v into one linear, and gate and up into another; a fused linear has one scheme."""
    spec = case.spec
    for module in case.shapes:
        parent, _, leaf = module.rpartition(".")
        for fused, siblings in FUSED.items():
            for name in (f"{parent}.{sibling}" for sibling in siblings if leaf in siblings):
                kinds = {(spec.scheme_of(m), spec.scheme_of(m) and spec.activations_of(m)) for m in (name, module)}
                if name in case.shapes and len(kinds) > 1:
                    return f"{module} and {name} must share one scheme, as they are fused into {fused}"
    return None


def _transformers(case: _Case) -> str | None:
    name = case.format.name
    for module in filter(_JOINED_EXPERT.search, case.schemes):
        return f"{module}: {_UNSTACKED}"
    if name == "gguf":
        return _GGUF
    if name == "compressed-tensors":
        return _transformers_compressed(case)
    if case.head_is_packed:
        return "lm_head: the output layer is not loaded packed"
    if name == "fp8":
        return _transformers_fp8(case)
    if name.startswith("gptq"):
        # transformers gives every linear of the decoder blocks the global scheme and does not read "dynamic".
        for module in case.shapes:
            if module != "lm_head" and case.schemes.get(module) != case.spec.weights:
                return f"{module}: every linear must have the one global scheme"
    if case.spec.weights.group_size not in _GROUPS:
        return f"groups must be of 32, 64 or 128 or the whole input, not {case.spec.weights.group_size}"
    return _undivided(case)


def _transformers_compressed(case: _Case) -> str | None:
    """The limits of transformers 5.23 with compressed-tensors 0.20. It reads stacked experts, and modules that are
    dequantized while loading, by one scheme alone: that of the first group in the configuration."""
    weights, stored = case.spec.weights, layout(case.spec.weights, case.spec.activations)
    for module in filter(_EXPERT.search, case.schemes):
        if case.schemes[module] != weights:
            return f"{module}: all experts must have the one global scheme"
        kept = weights in MICROSCALED or weights.rows not in (1, -1) or stored == "int-quantized"
        if kept or not weights.symmetric:
            return f"{module}: experts are loaded from packed symmetric integers, or from fp8 per channel or tensor"
    if at_once := _dequantized_at_once(case):
        for module, scheme, activations in case.kinds():
            if scheme != weights or layout(scheme, activations) != stored:
                return f"{module}: every module must have the one global scheme where {at_once}"
    return None


def _dequantized_at_once(case: _Case) -> str | None:
    """Why transformers must dequantize while loading, or None: it looks for an embedding's plain weight, and for zero
    points of one byte each."""
    for module, scheme, activations in case.kinds():
        if is_embedding(module):
            return "an embedding is packed"
        if not scheme.symmetric and layout(scheme, activations) == "pack-quantized":
            return "weights have zero points"
    return None


def _transformers_fp8(case: _Case) -> str | None:
    if case.spec.weights.rows == -1:
        return "scales per tensor are looked for under other names; write blocks, or compressed-tensors"
    rows, columns = case.spec.weights.rows, case.spec.weights.group_size
    for module in case.schemes:
        out, inp = case.shapes[module]
        if out % rows or inp % columns:
            return f"{module} [{out}, {inp}]: blocks of {rows}x{columns} must divide it"
    return None


def _undivided(case: _Case) -> str | None:
    for module, scheme in case.schemes.items():
        if case.shapes[module][1] % scheme.group_width(case.shapes[module][1]):
            return f"{module}: groups of {scheme.group_size} do not divide its input of {case.shapes[module][1]}"
    return None


def _no_note(case: _Case) -> str:
    return ""


def _not_for_marlin(case: _Case) -> str | None:
    for module, scheme, activations in case.kinds():
        if scheme.grid is INTEGERS and activations is None and not _fits_marlin(case.shapes[module]):
            return (f"{module} {list(case.shapes[module])} runs in a slower kernel, as Marlin takes multiples of "
                    f"{_MARLIN_OUT} x {_MARLIN_IN}")
    return None


def _vllm_note(case: _Case) -> str:
    if slow := _not_for_marlin(case):
        return f"needs --dtype float16: {slow}"
    if case.spec.activations is not None and case.spec.activations.grid is E2M1:
        return _FOUR_BITS
    if (case.spec.weights, case.spec.activations) == _W4AFP8:
        return "for Hopper GPUs alone"
    if case.format.name == "fp8" and case.spec.weights.rows == -1:
        return "fused siblings are rounded again to one scale per tensor"
    return ""


def _sglang_note(case: _Case) -> str:
    if case.spec.activations is not None and case.spec.activations.grid is E2M1:
        return _FOUR_BITS
    slow = _not_for_marlin(case) if case.format.name.startswith("gptq") else None
    return f"needs --quantization gptq: {slow}" if slow else ""


def _transformers_note(case: _Case) -> str:
    if case.format.name == "compressed-tensors":
        return f"needs the package compressed-tensors{_since(case)}{_how(case)}"
    if case.format.name == "fp8":
        return "needs a GPU with fp8; dequantizes elsewhere"
    return "needs the packages optimum and gptqmodel"


def _since(case: _Case) -> str:
    """Versions before 0.18 left the last bits of a word free where codes do not fill it."""
    split = sorted({
        scheme.bits for _, scheme, activations in case.kinds()
        if layout(scheme, activations) == "pack-quantized" and 32 % scheme.bits
    })  # fmt: skip
    return f" from 0.18 on for {' and '.join(map(str, split))} bits" if split else ""


def _how(case: _Case) -> str:
    """How transformers must be told to load it, or nothing."""
    if (at_once := _dequantized_at_once(case)) is None:
        return ""
    lost = ", which leaves out the scales of the KV cache" if case.spec.kv_cache else ""
    return f", and quantization_config=CompressedTensorsConfig(dequantize=True) as {at_once}{lost}"


LOADERS: dict[str, tuple[Callable[[_Case], str | None], Callable[[_Case], str]]] = {
    "qserve": (_qserve, _no_note),
    "vllm": (_vllm, _vllm_note),
    "sglang": (_sglang, _sglang_note),
    "transformers": (_transformers, _transformers_note),
}
