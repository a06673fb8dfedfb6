"""``Preparation``: everything that is known, and can be refused, before calibration starts.

It checks what would stop a job later: options, shapes, loaders, damage, memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from qserve.calibration.skeleton import Skeleton, is_finite
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.families import FAMILIES
from qserve.checkpoint.formats import default_format, format_named
from qserve.checkpoint.formats.format import Format
from qserve.checkpoint.gguf_metadata import writable
from qserve.checkpoint.gguf_tensors import file_tensors
from qserve.checkpoint.grid import E2M1, E4M3, GRIDS, INTEGERS
from qserve.checkpoint.loaders import LOADERS, LoaderVerdict, verdicts
from qserve.checkpoint.source import ModelSource, dense_linears
from qserve.checkpoint.spec import INT4_KV, QuantSpec, WeightScheme
from qserve.checkpoint.stacked_experts import one_by_one
from qserve.checkpoint.unpacked import Unpacked, is_in
from qserve.kernels.executor import CPU
from qserve.kernels.registry import triton_missing
from qserve.quantize.forecast import Forecast, distillation_bytes, forecast
from qserve.quantize.gguf_recipes import Recipe, schemes_of
from qserve.quantize.job import QuantizeJob
from qserve.quantize.mixed.units import Offered, of_experts, offered
from qserve.quantize.schemes import Shapes, assign
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.kv_scales import require_packed_heads


@dataclass(frozen=True)
class Preparation:
    """The plan. ``shapes``: (out, in) of every module that will or may be packed; ``dtype``: that of dense tensors;
    ``notices``: one line for each deviation from what was asked; ``offered``: what mixed precision has yet to choose
    from, until then ``spec`` has the uniform scheme there."""

    skeleton: Skeleton
    job: QuantizeJob
    shapes: Shapes
    spec: QuantSpec
    format: Format
    notices: tuple[str, ...]
    verdicts: tuple[LoaderVerdict, ...]
    forecast: Forecast
    dtype: torch.dtype
    offered: Offered = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The plan for a person."""
        schemes: dict[str, int] = {}
        undecided = {module for unit in self.offered for module in unit}
        for module in self.shapes.of(self.spec):
            name = str(self.spec.scheme_of(module) or "kept in floating point")
            if module in undecided:
                name = self._undecided()
            schemes[name] = schemes.get(name, 0) + 1
        inputs = f"; inputs {self.spec.activations}" if self.spec.activations else ""
        kv = self.spec.kv_cache
        cache = f"; KV cache {kv}" if kv else ""
        found = self.forecast
        memory = f"{found.peak_bytes / 2**20:,.0f} MiB of memory"
        if found.device_bytes:
            memory += f" and {found.device_bytes / 2**20:,.0f} MiB of the GPU's"
        return [
            f"method          {self.spec.method}, {self.job.tokens:,} calibration tokens",
            "weights         " + ", ".join(f"{count} x {name}" for name, count in schemes.items()) + inputs + cache,
            f"format          {self.format.name}",
            *([] if self.skeleton.device.type == "cpu" else [f"device          {described(self.skeleton.device)}"]),
            f"expecting       {_duration(found.seconds)}, {memory} "
            f"({found.samples_at_once} samples at once), a checkpoint of {'at most ' if self.offered else ''}"
            f"{found.checkpoint_bytes / 2**20:,.1f} MiB",
            *(f"note            {notice}" for notice in self.notices),
            *(f"loaders         {verdict}" for verdict in self.verdicts),
        ]

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight of the linears inside the blocks, scales included; floats count 16."""
        bits, weights = 0, 0
        for module, (out, inp) in self.shapes.linears.items():
            scheme = self.spec.scheme_of(module)
            zeros = self.format.symmetric_zeros
            bits += 16 * out * inp if scheme is None else scheme.storage_bits(out, inp, symmetric_zeros=zeros)
            weights += out * inp
        return bits / weights

    def _undecided(self) -> str:
        if self.job.target_bits is not None:
            return f"chosen per module, {self.job.target_bits:g} bits on average"
        return f"chosen per module, the fewest bits within a divergence of {self.job.max_kl:g}"


def prepare(source: ModelSource, out: Path, job: QuantizeJob) -> Preparation:
    """Refuse here everything that can be refused: ``UsageError`` for options, ``CapacityError`` for memory,
    ``CheckpointError`` for the model. Reads the dense tensors once."""
    if is_in(source, *(grid for grid in GRIDS.values() if grid is not INTEGERS)):
        source = Unpacked(source)
    source = one_by_one(source)
    if source.spec is not None:
        raise UsageError(f"{source.name} is already quantized; give the model it was made from")
    if source.path.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{out} is or contains the model itself; choose another directory")
    family = FAMILIES.get(str(source.config.get("model_type")))
    if job.kv_cache is not None and family is not None and family.latent:
        raise UsageError(f"--kv-cache {job.kv_cache}: {source.name} caches latent vectors, which are kept in 16 bits; "
                         "leave it out")
    if job.kv_cache == INT4_KV.dtype:
        require_packed_heads(decoder_config(source.config, source.name).head_dim, source.name)
    longest = source.config.get("max_position_embeddings")
    if job.tokens and isinstance(longest, int) and job.sequence_length > longest:
        raise UsageError(
            f"--sequence-length {job.sequence_length} exceeds the {longest} positions that {source.name} knows"
        )
    source.tokenizer()  # a checkpoint without one could not be served
    skeleton = Skeleton(source, device_of(job))
    dtype = torch.bfloat16 if source.dtype() == torch.bfloat16 else torch.float16
    prepared = arrange(skeleton, job, dtype)
    _check_rest(source, skeleton, dtype)
    return prepared


def device_of(job: QuantizeJob) -> torch.device:
    """Where ``job`` computes. Raises ``UsageError`` for a GPU that is missing or too old for the Triton kernels."""
    gpus = torch.cuda.device_count()
    missing = triton_missing() if gpus else "torch sees no GPU here"
    if job.device == "cpu" or (job.device == "auto" and missing):
        return CPU
    number = job.device.partition(":")[2] or "0"
    if missing is None and not (number.isdecimal() and int(number) < gpus):
        missing = f"the GPUs that torch sees are cuda:0 to cuda:{gpus - 1}"
    if missing is not None:
        raise UsageError(f"--device {job.device}: {missing}; leave it out to take what there is")
    return torch.device("cuda", int(number))


def arrange(
    skeleton: Skeleton, job: QuantizeJob, dtype: torch.dtype, chosen: Mapping[str, WeightScheme | None] | None = None
) -> Preparation:
    """Plan, format, verdicts and forecast; ``chosen`` is what mixed precision decided. Raises ``UsageError``."""
    shapes = _shapes(skeleton, job)
    deviations: tuple[str, ...] = ()
    if job.recipe is not None:
        chosen, deviations = _by_recipe(job.recipe, skeleton.source, shapes)
    spec, notices = assign(job, shapes, chosen)
    notices += deviations
    format = _format(spec, skeleton, shapes, job)
    judged = judge(spec, skeleton, shapes, job.loaders, format)
    for verdict in judged:
        if verdict.loader in job.loaders and not verdict.accepts:
            raise UsageError(f"{verdict.loader} would refuse this checkpoint: {verdict.reason}")
    choices = offered(job, skeleton.shapes, format) if chosen is None else {}
    if job.mixed and chosen is None and not choices:
        raise UsageError(
            f"no linear can have several schemes in the format {format.name} for {', '.join(job.loaders)}; "
            "choose another --format or --for"
        )
    few = sorted({each.bits for schemes in choices.values() for each in schemes if each} - {4, 8})
    if few and not {"vllm", "sglang"} & set(job.loaders):
        bits = ", ".join(map(str, few))
        dense = " and ".join(str(each) for each in few if 32 % each)
        others = f"; others need compressed-tensors 0.18 for {dense}" if dense else ""
        said = f"vllm and sglang do not load {bits} bits, which may be chosen: --for vllm leaves them out"
        notices += (said + others,)
    expected = forecast(job, skeleton, shapes, spec, format, choices)
    if job.effort == "best" and not expected.distills:
        needed = distillation_bytes(job, skeleton) / 2**20
        notices += (f"scales will not be tuned end to end: the whole model would take {needed:,.0f} MiB",)
    return Preparation(skeleton, job, shapes, spec, format, notices, judged, expected, dtype, choices)


def _by_recipe(
    recipe: Recipe, source: ModelSource, shapes: Shapes
) -> tuple[dict[str, WeightScheme | None], tuple[str, ...]]:
    """``schemes_of`` for the linears, the embedding, and an output layer of its own."""
    writable(source.config, source.name)
    outer = (shapes.embedding,) if shapes.tied else (shapes.embedding, "lm_head")
    every = {**shapes.linears, **dict.fromkeys(outer, shapes.embedding_shape)}
    return schemes_of(recipe, file_tensors(source.config, source.has), every)


def _format(spec: QuantSpec, skeleton: Skeleton, shapes: Shapes, job: QuantizeJob) -> Format:
    if job.format != "auto":
        return format_named(job.format)
    if job.mixed and job.symmetric:
        # It does not store zero points that are all the same, so their bits go to the codes.
        denser = format_named("compressed-tensors")
        if all(verdict.accepts for verdict in judge(spec, skeleton, shapes, job.loaders, denser)[: len(job.loaders)]):
            return denser
    return default_format(spec)


def judge(
    spec: QuantSpec, skeleton: Skeleton, shapes: Shapes, loaders: tuple[str, ...], format: Format
) -> tuple[LoaderVerdict, ...]:
    """The verdict of every known loader on ``spec``, those that must accept it first."""
    every = (*loaders, *(name for name in LOADERS if name not in loaders))
    judged = verdicts(spec, shapes.of(spec), every, format=format)
    if skeleton.transposed and not format.name.startswith("gptq"):
        why = f"{min(skeleton.transposed)} is a Conv1D, which it loads packed from GPTQ alone (--format gptq)"
        judged = [replace(v, accepts=False, reason=why) if v.loader == "transformers" else v for v in judged]
    try:
        decoder_config(skeleton.source.config, skeleton.source.name)
    except CheckpointError as error:
        note = f"the native decoder does not serve it, transformers may (docs/models.md): {error}"
        judged = [replace(v, reason=note) if v.loader == "qserve" and v.accepts else v for v in judged]
    return tuple(judged)


def _shapes(skeleton: Skeleton, job: QuantizeJob) -> Shapes:
    model = skeleton.model
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    if job.head_bits and (head is None or names.get(id(head)) != "lm_head"):
        raise UsageError(f"{skeleton.source.name} has no output layer lm_head that --head could quantize")
    out, inp = embedding.weight.shape
    lookups = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    others = [name for name in dense_linears(skeleton.source) if name not in skeleton.shapes and name not in lookups]
    if head is not None:
        others.append(names[id(head)])
    kept = dict.fromkeys(name for name in (*skeleton.routers, *others) if name != "lm_head")
    stored = _as_stored(skeleton) if job.keep_experts else {}
    return Shapes(skeleton.shapes, names[id(embedding)], (int(out), int(inp)), tied, tuple(kept), stored)


def _as_stored(skeleton: Skeleton) -> dict[str, WeightScheme | None]:
    """The linears of experts, with the scheme of each that is stored in one which kernels and a format have."""
    source = skeleton.source
    found: dict[str, WeightScheme | None] = {module: None for module in skeleton.shapes if of_experts((module,))}
    if not found:
        raise UsageError(f"{source.name} has no experts that --keep-experts could keep")
    if isinstance(source, Unpacked):
        for module in found:
            scheme = source.scheme_of(module)
            found[module] = scheme if scheme and scheme.grid in (E2M1, E4M3) else None
    return found


def _check_rest(source: ModelSource, skeleton: Skeleton, dtype: torch.dtype) -> None:
    """Check the tensors that are only copied: damage there would otherwise be found after hours, or by users."""
    for part in (source.config, source.generation_config()):
        try:
            json.dumps(part, allow_nan=False)
        except ValueError:
            raise CheckpointError(f"{source.name}: its configuration holds NaN or infinity") from None
    inside = _weights(skeleton)
    for name in source.names():
        if name not in inside:
            narrow(source, name, source.tensor(name), dtype)


def check_blocks(skeleton: Skeleton) -> None:
    """Raise ``CheckpointError`` for NaN or infinity in a linear, which calibration might find only after hours. Reads
    the linears once, one at a time; that is faster than hashing the same files."""
    inside = _weights(skeleton)
    for name in skeleton.source.names():
        if name in inside:
            _require_finite(name, skeleton.source.tensor(name))


def _weights(skeleton: Skeleton) -> set[str]:
    """The names of the weights that are quantized."""
    return {f"{module}.weight" for module in skeleton.shapes}


def narrow(source: ModelSource, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` as it is written: floats become ``dtype``, but in a bfloat16 model what is stored in float32: that was
    chosen on purpose.

    Raises ``CheckpointError`` for NaN, infinity, and what ``dtype`` cannot hold.
    """
    narrowed = tensor
    if tensor.is_floating_point() and (dtype == torch.float16 or not source.keeps_float32(name)):
        narrowed = tensor.to(dtype)
    _require_finite(name, tensor)
    if narrowed is not tensor and not is_finite(narrowed):
        advice = "convert the model to bfloat16 first" if dtype == torch.float16 else "the model is damaged"
        raise CheckpointError(f"{name} holds values that {str(dtype).removeprefix('torch.')} cannot; {advice}")
    return narrowed


def _require_finite(name: str, tensor: torch.Tensor) -> None:
    if not is_finite(tensor):
        raise CheckpointError(f"{name} holds NaN or infinity: the model is damaged; fetch or convert it again")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def described(device: torch.device) -> str:
    """``cpu``, or a GPU with its model, as ``cuda:0 (NVIDIA H200)``."""
    return str(device) if device.type != "cuda" else f"{device} ({torch.cuda.get_device_name(device)})"
