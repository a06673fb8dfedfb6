"""From a model to a checkpoint: refuse what cannot work, calibrate, quantize block by block, measure, publish.

Knows the order of things; does not know how a weight is rounded, how text becomes statistics, nor what is
measured (the caller hands in a function for that).
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from qserve.calibration.blocks import Visit, walk
from qserve.calibration.text import load_text
from qserve.calibration.windows import calibration_windows
from qserve.checkpoint.card import QualityCard, write_card
from qserve.checkpoint.errors import GateFailed, UsageError
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.writer import CheckpointWriter
from qserve.quantize.forecast import peak_bytes, require_memory
from qserve.quantize.job import ProgressEvent, QuantizeJob, QuantizeReport
from qserve.quantize.layer import LayerReport
from qserve.quantize.mixed import Choice, Mixed
from qserve.quantize.prepare import Preparation, arrange, narrow, prepare
from qserve.quantize.rest import write_rest
from qserve.quantize.rounding import BlockQuantizer, BlockResult, restore

Progress = Callable[[ProgressEvent], None]
Measure = Callable[[Path], QualityCard | None]
Accept = Callable[[QualityCard], None]

_PLAN = "plan"


def run(
    source: ModelSource,
    out: Path,
    job: QuantizeJob,
    *,
    progress: Progress | None = None,
    measure: Measure | None = None,
    accept: Accept | None = None,
) -> QuantizeReport:
    """Quantize ``source`` into a checkpoint directory ``out``, which appears complete or not at all.

    ``measure`` gets the finished checkpoint before it is moved to ``out``; a card it returns is stored inside.
    ``accept`` may refuse that card (``GateFailed``); then nothing is left behind. Everything that can be refused is
    refused before calibration, see ``prepare``; text raises ``DataError``. What a killed or interrupted run had done
    is kept beside ``out``, and the same call goes on from there with the same result.
    """
    started = time.perf_counter()
    tell = progress or (lambda event: None)
    if job.max_kl is not None and measure is None:
        raise UsageError("the smallest checkpoint within a divergence needs a measurement of it")
    prepared = prepare(source, out, job)
    windows, text_hash = _windows(source, job)
    require_memory(prepared.forecast, job)
    mixed = Mixed(prepared, windows, tell) if job.mixed and windows is not None else None
    fingerprint = _fingerprint(source, job, text_hash)
    while True:
        with CheckpointWriter(
            out,
            overwrite=job.overwrite,
            expected_bytes=prepared.forecast.checkpoint_bytes,
            format=prepared.format,
            fingerprint=fingerprint,
        ) as writer:
            if mixed is not None:
                prepared = arrange(prepared.skeleton, job, prepared.dtype, _choice(mixed, writer).schemes)
            _announce(prepared, writer, tell)
            reports = _quantize(prepared, windows, writer, tell)
            staged = writer.seal()
            tell(ProgressEvent("write", 1, 1))
            card = None
            if measure is not None:
                tell(ProgressEvent("measure", 0, 1))
                card = measure(staged)
                tell(ProgressEvent("measure", 1, 1))
            if card is not None:
                if mixed is not None and mixed.wants_another(card):
                    writer.discard()
                    continue
                if accept is not None:
                    _accept(card, accept, writer)
                write_card(staged, card)
            writer.finish()
            break
    return QuantizeReport(
        spec=prepared.spec,
        format=prepared.format.name,
        layers=tuple(reports),
        notices=(*prepared.notices, *(mixed.choice.reasons if mixed else ())),
        verdicts=prepared.verdicts,
        forecast=prepared.forecast,
        seconds=time.perf_counter() - started,
        peak_bytes=peak_bytes(),
        calibration_sha256=text_hash,
        card=card,
        tried=mixed.tried if mixed else (),
    )


def _accept(card: QualityCard, accept: Accept, writer: CheckpointWriter) -> None:
    try:
        accept(card)
    except GateFailed:
        writer.discard()  # the same job would fail again
        raise


def _choice(mixed: Mixed, writer: CheckpointWriter) -> Choice:
    """What mixed precision decided: now, or in the run that is being resumed."""
    if _PLAN in writer.committed():
        return mixed.resume(writer.part(_PLAN)[1])
    choice = mixed.choose()
    writer.commit(_PLAN, choice.to_json())
    return choice


def _announce(prepared: Preparation, writer: CheckpointWriter, tell: Progress) -> None:
    done = [key for key in writer.committed() if key != _PLAN]
    lines = prepared.lines()
    if done:
        lines.append(f"resuming        {len(done)} of {len(prepared.skeleton.blocks)} blocks are done")
    for text in lines:
        tell(ProgressEvent("prepare", 1, 1, prepared.forecast.seconds, text))


def _quantize(
    prepared: Preparation, windows: Tensor | None, writer: CheckpointWriter, tell: Progress
) -> list[LayerReport]:
    job, skeleton = prepared.job, prepared.skeleton
    quantizer = BlockQuantizer(prepared.spec, job, prepared.dtype)
    reports: list[LayerReport] = []
    written: set[str] = set()
    tell(ProgressEvent("quantize", 0, len(skeleton.blocks), prepared.forecast.seconds))
    start, first = time.perf_counter(), 0
    finished = [name for name in skeleton.blocks if name in writer.committed()]
    at_once = prepared.forecast.samples_at_once
    if finished:  # sums in another order would end in other bits
        at_once = writer.part(finished[0])[1]["samples_at_once"]
    offload = writer.directory.parent if job.offload else None
    walking = walk(skeleton, windows, samples_at_once=at_once, float_samples=job.float_samples, offload=offload)
    for visit in walking:
        if visit.name in finished:
            result = _restore(visit, prepared, writer)
            start, first = time.perf_counter(), visit.index + 1
        else:
            result = quantizer.run(visit)
            _commit(visit, result, at_once, prepared, writer)
        reports += result.reports
        written |= result.dense.keys()
        done = visit.index + 1
        if done > first:
            remaining = (time.perf_counter() - start) / (done - first) * (visit.total - done)
            tell(ProgressEvent("quantize", done, visit.total, remaining))
    tell(ProgressEvent("write", 0, 1))
    return reports + write_rest(prepared, written, writer)


def _commit(
    visit: Visit, result: BlockResult, samples_at_once: int, prepared: Preparation, writer: CheckpointWriter
) -> None:
    for module, packed in result.packed.items():
        writer.put_linear(module, packed)
    for name, tensor in result.dense.items():
        # Scales of the KV cache are float32 in every format.
        kept = tensor if name.endswith("_scale") else narrow(name, tensor, prepared.dtype)
        writer.put(name, kept)
    writer.commit(visit.name, {
        "reports": [report.to_json() for report in result.reports],
        "packed": list(result.packed),
        "dense": list(result.dense),
        "samples_at_once": samples_at_once,
    })  # fmt: skip


def _restore(visit: Visit, prepared: Preparation, writer: CheckpointWriter) -> BlockResult:
    """A block that an earlier run finished: what it wrote, put into the block again."""
    tensors, extra = writer.part(visit.name)
    result = BlockResult(reports=[LayerReport.from_json(report) for report in extra["reports"]])
    for module in extra["packed"]:
        parts = {name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")}
        scheme = prepared.spec.scheme_of(module)
        assert scheme is not None
        result.packed[module] = prepared.format.unpack(parts, scheme, prepared.spec.activations_of(module))
    result.dense = {name: tensors[name] for name in extra["dense"]}
    restore(visit, result)
    return result


def _windows(source: ModelSource, job: QuantizeJob) -> tuple[Tensor | None, str | None]:
    if job.calibration is None:
        return None, None
    text = load_text(job.calibration, "calibrate")
    token_ids = source.tokenizer()(text.text, add_special_tokens=False, verbose=False)["input_ids"]
    return calibration_windows(token_ids, job.samples, job.sequence_length, job.seed), text.sha256


def _fingerprint(source: ModelSource, job: QuantizeJob, text_hash: str | None) -> str:
    """Everything that the numbers of the result depend on."""
    numbers = dataclasses.replace(job, overwrite=False, max_memory=None, loaders=(), offload=False)
    versions = [f"{package} {version(package)}" for package in ("qserve-llm", "torch", "transformers")]
    content = repr((numbers, source.sha256(), text_hash, versions, torch.get_num_threads()))
    return hashlib.sha256(content.encode()).hexdigest()
