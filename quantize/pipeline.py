"""From a model to a checkpoint: refuse what cannot work, calibrate, quantize block by block, measure, publish.

Knows the order of things; does not know how a weight is rounded, how text becomes statistics, nor what is
measured (the caller hands in a function for that).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qserve.calibration.blocks import walk
from qserve.calibration.skeleton import Skeleton
from qserve.calibration.stats import LayerStats
from qserve.calibration.text import load_text
from qserve.calibration.windows import calibration_windows
from qserve.checkpoint.card import QualityCard, write_card
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.gptq_format import config_of
from qserve.checkpoint.loaders import LOADERS, LoaderVerdict, verdicts
from qserve.checkpoint.packed import PackedWeight
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.checkpoint.writer import CheckpointWriter
from qserve.quantize import gptq, rtn
from qserve.quantize.forecast import forecast, peak_bytes, require_memory
from qserve.quantize.job import ProgressEvent, QuantizeJob, QuantizeReport
from qserve.quantize.layer import LayerReport, Quantized
from qserve.quantize.plan import plan
from qserve.runtime.models.config import decoder_config

Progress = Callable[[ProgressEvent], None]
Measure = Callable[[Path], QualityCard | None]


def run(
    source: ModelSource,
    out: Path,
    job: QuantizeJob,
    *,
    progress: Progress | None = None,
    measure: Measure | None = None,
) -> QuantizeReport:
    """Quantize ``source`` into a checkpoint directory ``out``, which appears complete or not at all.

    ``measure`` gets the finished checkpoint before it is moved to ``out``; a card it returns is stored inside,
    and what it raises (``GateFailed``) leaves nothing behind. Everything that can be refused is refused before
    calibration: ``UsageError`` for options, ``DataError`` for text, ``CapacityError`` for memory,
    ``CheckpointError`` for the model or ``out``.
    """
    started = time.perf_counter()
    tell = progress or (lambda event: None)
    if source.spec is not None:
        raise UsageError(f"{source.name} is already quantized; give the model it was made from")
    if source.path.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{out} is or contains the model itself; choose another directory")
    source.tokenizer()  # a checkpoint without one could not be served
    skeleton = Skeleton(source)
    spec, notices = plan(job, skeleton.shapes)
    judged = _judge(spec, skeleton, job)
    _check_rest(source, skeleton)
    expected = forecast(job, skeleton, spec)
    with CheckpointWriter(
        out, overwrite=job.overwrite, expected_bytes=expected.checkpoint_bytes, version=job.version
    ) as writer:
        windows, text_hash = _windows(source, job)
        require_memory(expected, job)
        for notice in (
            f"expecting {_duration(expected.seconds)} and {expected.peak_bytes / 2**20:,.0f} MiB of memory",
            *notices,
        ):
            tell(ProgressEvent("prepare", 1, 1, expected.seconds, notice))
        rounding = _Rounding(source, spec, job, writer)
        _quantize(skeleton, windows, rounding, job, expected.seconds, tell)
        tell(ProgressEvent("write", 0, 1))
        _write_rest(source, config_of(spec, job.version), rounding.quantized, writer)
        staged = writer.seal()
        tell(ProgressEvent("write", 1, 1))
        card = None
        if measure is not None:
            tell(ProgressEvent("measure", 0, 1))
            card = measure(staged)
            if card is not None:
                write_card(staged, card)
            tell(ProgressEvent("measure", 1, 1))
        writer.finish()
    return QuantizeReport(
        spec=spec,
        layers=tuple(rounding.reports),
        notices=notices,
        verdicts=judged,
        forecast=expected,
        seconds=time.perf_counter() - started,
        peak_bytes=peak_bytes(),
        calibration_sha256=text_hash,
        card=card,
    )


class _Rounding:
    """The pipeline's side of the walk: rounds what it is handed, writes it, and returns what was written."""

    def __init__(self, source: ModelSource, spec: QuantSpec, job: QuantizeJob, writer: CheckpointWriter) -> None:
        self.source, self.spec, self.job, self.writer = source, spec, job, writer
        self.reports: list[LayerReport] = []
        self.quantized: set[str] = set()

    def __call__(self, names: list[str], weights: list[Tensor], stats: LayerStats | None) -> Sequence[Tensor]:
        replaced = dict(zip(names, weights, strict=True))
        by_scheme: dict[WeightScheme, list[str]] = {}
        for name in names:
            if (scheme := self.spec.scheme_of(name)) is not None:
                by_scheme.setdefault(scheme, []).append(name)
        for scheme, members in by_scheme.items():
            # They share one Hessian, so they are rounded as one weight: rows do not touch each other.
            result = self._round(torch.cat([replaced[name] for name in members]), stats, scheme)
            row = 0
            for name in members:
                part = result.rows(row, row + len(replaced[name]))
                row += len(replaced[name])
                self._write(name, part.weight)
                self.reports.append(part.report(name))
                replaced[name] = part.weight.dequantize()
        return list(replaced.values())

    def _round(self, weight: Tensor, stats: LayerStats | None, scheme: WeightScheme) -> Quantized:
        if self.job.method == "rtn":
            return rtn.quantize(weight, stats, scheme)
        if stats is None:
            return rtn.quantize(weight, None, scheme, fallback="rounded to nearest: calibration never reached it")
        return gptq.quantize(weight, stats, scheme, act_order=self.job.act_order)

    def _write(self, name: str, packed: PackedWeight) -> None:
        if self.source.has(f"{name}.bias"):
            packed = replace(packed, bias=self.source.tensor(f"{name}.bias").to(torch.float32))
        self.writer.put_linear(name, packed)
        self.quantized.add(name)


def _judge(spec: QuantSpec, skeleton: Skeleton, job: QuantizeJob) -> tuple[LoaderVerdict, ...]:
    """What every known loader says; raises ``UsageError`` where one that must accept refuses."""
    every = (*job.loaders, *(name for name in LOADERS if name not in job.loaders))
    judged = verdicts(spec, skeleton.shapes, every, version=job.version)
    try:
        decoder_config(skeleton.source.config, skeleton.source.name)
    except CheckpointError as error:
        judged = [LoaderVerdict("qserve", False, str(error)) if v.loader == "qserve" else v for v in judged]
    for verdict in judged:
        if verdict.loader in job.loaders and not verdict.accepts:
            raise UsageError(f"{verdict.loader} would refuse this checkpoint: {verdict.reason}")
    return tuple(judged)


def _check_rest(source: ModelSource, skeleton: Skeleton) -> None:
    """What is copied and not calibrated: damage there would otherwise be found after hours, or by users."""
    for part in (source.config, source.generation_config()):
        try:
            json.dumps(part, allow_nan=False)
        except ValueError:
            raise CheckpointError(f"{source.name}: its configuration holds NaN or infinity") from None
    quantized = {f"{module}.weight" for module in skeleton.shapes}
    dtype = _kept_dtype(source)
    for name in source.names():
        if name not in quantized:
            _narrow(name, source.tensor(name), dtype)


def _windows(source: ModelSource, job: QuantizeJob) -> tuple[Tensor | None, str | None]:
    if job.calibration is None:
        return None, None
    longest = source.config.get("max_position_embeddings")
    if isinstance(longest, int) and job.sequence_length > longest:
        raise UsageError(
            f"--sequence-length {job.sequence_length} exceeds the {longest} positions that {source.name} knows"
        )
    text = load_text(job.calibration, "calibrate")
    token_ids = source.tokenizer()(text.text, add_special_tokens=False, verbose=False)["input_ids"]
    return calibration_windows(token_ids, job.samples, job.sequence_length, job.seed), text.sha256


def _quantize(
    skeleton: Skeleton, windows: Tensor | None, rounding: _Rounding, job: QuantizeJob, seconds: float, tell: Progress
) -> None:
    tell(ProgressEvent("quantize", 0, len(skeleton.blocks), seconds))
    start = time.perf_counter()
    for step in walk(skeleton, windows, rounding, hessian=job.method == "gptq"):
        done = step.index + 1
        remaining = (time.perf_counter() - start) / done * (step.total - done)
        tell(ProgressEvent("quantize", done, step.total, remaining))


def _write_rest(
    source: ModelSource, quantization: dict[str, Any], quantized: set[str], writer: CheckpointWriter
) -> None:
    """Everything that is not a quantized linear: dense tensors, configuration, tokenizer."""
    packed = {f"{module}.{part}" for module in quantized for part in ("weight", "bias")}
    dtype = _kept_dtype(source)
    for name in source.names():
        if name not in packed:
            writer.put(name, _narrow(name, source.tensor(name), dtype))
    dtype_name = str(dtype).removeprefix("torch.")
    config: dict[str, Any] = {
        **source.config, "dtype": dtype_name, "torch_dtype": dtype_name, "quantization_config": quantization
    }
    writer.put_json("config.json", config)
    writer.put_json("quantize_config.json", quantization)
    if generation := source.generation_config():
        writer.put_json("generation_config.json", generation)
    source.save_tokenizer(writer.directory)


def _kept_dtype(source: ModelSource) -> torch.dtype:
    return torch.bfloat16 if source.dtype() == torch.bfloat16 else torch.float16


def _narrow(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats become float16 where the model is not natively bfloat16 (there, float32 was chosen on purpose)."""
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{name} holds NaN or infinity: the model is damaged")
    if dtype != torch.float16 or not tensor.is_floating_point():
        return tensor
    narrow = tensor.to(dtype)
    if not bool(torch.isfinite(narrow).all()):
        raise CheckpointError(f"{name} holds values that float16 cannot; convert the model to bfloat16 first")
    return narrow


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
