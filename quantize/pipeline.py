"""From a model to a checkpoint: refuse what cannot work, calibrate, quantize block by block, tune, measure, publish."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qserve.calibration.blocks import walk
from qserve.calibration.head import head_importance
from qserve.calibration.kv import KVRecorder
from qserve.calibration.output_gradients import output_gradients
from qserve.calibration.products import fast_products
from qserve.calibration.skeleton import Skeleton
from qserve.calibration.stats import LayerStats
from qserve.calibration.text import SELF
from qserve.calibration.visit import Visit
from qserve.checkpoint.calibration_record import CALIBRATION_FILE, CalibrationRecord
from qserve.checkpoint.card import QualityCard, write_card
from qserve.checkpoint.errors import GateFailed, UsageError
from qserve.checkpoint.files import file_sha256
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.kv import is_kv
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.spec import KVScheme
from qserve.checkpoint.unpacked import Unpacked
from qserve.checkpoint.writer import CheckpointWriter, check_out
from qserve.kernels import native
from qserve.kernels.executor import CPU
from qserve.quantize import distill, signround, yaqa
from qserve.quantize.block import BlockQuantizer, BlockResult, restore
from qserve.quantize.forecast import peak_bytes, require_memory
from qserve.quantize.job import QuantizeJob
from qserve.quantize.kv import recorded
from qserve.quantize.layer import LayerReport
from qserve.quantize.mixed.precision import Assignment, MixedPrecision
from qserve.quantize.prepare import Preparation, arrange, check_blocks, described, narrow, prepare
from qserve.quantize.report import Progress, ProgressEvent, QuantizeReport
from qserve.quantize.rest import write_rest
from qserve.quantize.windows import given_windows, tuning_windows, written_windows
from qserve.runtime import heap

Measure = Callable[[Path, Path], QualityCard | None]
Accept = Callable[[QualityCard], None]
Permit = Callable[[CalibrationRecord | None], None]

_PLAN, _SCALES, _LAST, _HEAD = "plan", "scales", "last attempt", "head"


def run(
    source: ModelSource,
    out: Path,
    job: QuantizeJob,
    *,
    progress: Progress | None = None,
    measure: Measure | None = None,
    accept: Accept | None = None,
    permit: Permit | None = None,
) -> QuantizeReport:
    """Quantize ``source`` into a checkpoint directory ``out``, which appears complete or not at all.

    ``measure`` gets the finished checkpoint before it is moved to ``out``, and a path where it may keep its state for
    the same call in a run that resumes. A card that it returns is stored in the checkpoint. ``accept`` may refuse that
    card (``GateFailed``); then nothing is published. ``permit`` may refuse the text that will be calibrated on.
    Everything that can be refused is refused before calibration, see ``prepare``; bad text raises ``DataError``. The
    work of a run that was killed, interrupted or refused is kept beside ``out``, and the same call goes on from there
    with the same result: at most about one block's work is lost.
    """
    started = time.perf_counter()
    heap.one_arena()
    tell = progress or (lambda event: None)
    if job.max_kl is not None and measure is None:
        raise UsageError("the smallest checkpoint within a divergence needs a measurement of it")
    prepared, windows, record = _prepare(source, out, job)
    if job.text is not None:  # without text the blocks are read at once, and little work is lost before the damage
        check_blocks(prepared.skeleton)
    if job.text == SELF:
        windows, record = written_windows(source, job, tell)
    if permit is not None:
        permit(record)
    expected = prepared.forecast
    offload = out.parent if job.offload else None
    mixed = MixedPrecision(prepared, windows, tell, offload) if job.mixed and windows is not None else None
    with CheckpointWriter(
        out,
        overwrite=job.overwrite,
        expected_bytes=expected.checkpoint_bytes,
        kept_bytes=expected.kept_bytes,
        format=prepared.format,
        facts=_facts(source, job, prepared.skeleton.device, windows, record),
    ) as writer:
        for other in writer.others():
            tell(ProgressEvent("prepare", 0, 1, message=f"note            {other}"))
        while True:
            if mixed is not None:
                prepared = arrange(prepared.skeleton, job, prepared.dtype, _assignment(mixed, writer).schemes)
            until = None if job.hours is None else started + 3600 * job.hours
            made = _write(prepared, windows, record, writer, tell, until)
            card = None if measure is None else _measure(measure, made, writer, tell)
            refusal = None if card is None or accept is None else _refusal(card, accept)
            if card is None or mixed is None or not _another(mixed, card, refusal is None, writer):
                break
        if refusal is not None:
            raise refusal
        if card is not None:
            write_card(made.directory, card)
        writer.finish()
    return QuantizeReport(
        spec=prepared.spec,
        format=prepared.format.name,
        layers=tuple(made.layers),
        notices=prepared.notices + (mixed.assignment.reasons if mixed else ()) + made.notices,
        verdicts=prepared.verdicts,
        forecast=expected,
        bits_per_weight=prepared.bits_per_weight,
        checkpoint_bytes=made.stored_bytes,
        seconds=time.perf_counter() - started,
        peak_bytes=peak_bytes(),
        calibration_sha256=None if record is None else record.data_sha256,
        card=card,
        tried=mixed.tried if mixed else (),
    )


def check(source: ModelSource, out: Path, job: QuantizeJob) -> Preparation:
    """What ``run`` would do. Raises what ``run`` would raise before calibration, except for damage inside the blocks,
    which are not read. Writes nothing."""
    prepared, _, _ = _prepare(source, out, job)
    expected = prepared.forecast
    check_out(
        out, overwrite=job.overwrite, expected_bytes=expected.checkpoint_bytes, kept_bytes=expected.kept_bytes
    )
    return prepared


def _prepare(
    source: ModelSource, out: Path, job: QuantizeJob
) -> tuple[Preparation, Tensor | None, CalibrationRecord | None]:
    """The preparation; the calibration windows and what they are, unless the model has yet to write them."""
    prepared = prepare(source, out, job)
    windows, record = given_windows(source, job)
    require_memory(prepared.forecast, job, prepared.skeleton.device)
    return prepared, windows, record


@dataclass(frozen=True)
class _Written:
    """A checkpoint that is complete but not yet published: a report for each linear, and what tuning gained."""

    directory: Path
    layers: list[LayerReport]
    notices: tuple[str, ...]
    stored_bytes: int


def _write(
    prepared: Preparation,
    windows: Tensor | None,
    record: CalibrationRecord | None,
    writer: CheckpointWriter,
    tell: Progress,
    until: float | None,
) -> _Written:
    """Write the blocks, then the tuned scales of all where the job wants that, then the tensors outside the blocks."""
    _announce(prepared, writer, tell)
    layers, written, distills = _quantize(prepared, windows, writer, tell)
    notices: tuple[str, ...] = ()
    if distills:
        assert windows is not None
        notices = (_distill(prepared, windows, writer, tell, until),)
        heap.release()
    tell(ProgressEvent("write", 0, 1))
    importance = torch.tensor(writer.part(_HEAD)[1]["importance"]) if _HEAD in writer.committed() else None
    layers += write_rest(prepared, written, writer, importance)
    if record is not None:
        writer.put_json(CALIBRATION_FILE, record.to_json())
    staged = writer.seal()
    stored_bytes = HFDirectory(staged).stored_bytes()
    tell(ProgressEvent("write", 1, 1))
    return _Written(staged, layers, notices, stored_bytes)


def _measure(measure: Measure, made: _Written, writer: CheckpointWriter, tell: Progress) -> QualityCard | None:
    tell(ProgressEvent("measure", 0, 1))
    card = measure(made.directory, writer.unfinished)
    tell(ProgressEvent("measure", 1, 1))
    return card


def _refusal(card: QualityCard, accept: Accept) -> GateFailed | None:
    try:
        accept(card)
    except GateFailed as failed:
        return failed
    return None


def _another(mixed: MixedPrecision, card: QualityCard, passed: bool, writer: CheckpointWriter) -> bool:
    """Whether another checkpoint is to be made after the one of ``card``; then it is chosen. The smallest that
    ``passed`` its gates is never lost."""
    match mixed.after(card, passed):
        case "again" | "smaller" as step:
            writer.restart(_PLAN, mixed.to_json(), set_aside=step == "smaller")
        case "back":
            writer.go_back()
            writer.commit(_LAST, mixed.to_json())
        case "done":
            return False
    return True


def _assignment(mixed: MixedPrecision, writer: CheckpointWriter) -> Assignment:
    """The decision of mixed precision: made now, or in the run that is being resumed."""
    if state := [key for key in (_LAST, _PLAN) if key in writer.committed()]:
        mixed.resume(writer.part(state[0])[1])
    else:
        mixed.measure(writer.kept(_PLAN), partial(writer.keep, _PLAN))
        mixed.choose()
        writer.commit(_PLAN, mixed.to_json())
    return mixed.assignment


def _announce(prepared: Preparation, writer: CheckpointWriter, tell: Progress) -> None:
    done = [key for key in writer.committed() if key in prepared.skeleton.blocks]
    lines = prepared.lines()
    if done:
        lines.append(f"resuming        {len(done)} of {len(prepared.skeleton.blocks)} blocks are done")
    for text in lines:
        tell(ProgressEvent("prepare", 1, 1, prepared.forecast.seconds, text))


def _quantize(
    prepared: Preparation, windows: Tensor | None, writer: CheckpointWriter, tell: Progress
) -> tuple[list[LayerReport], set[str], bool]:
    """Quantize every block. Returns a line for each linear, the names of the dense tensors that were written, and
    whether the scales are tuned after that: a run that resumes keeps to what the first one could afford."""
    job, skeleton = prepared.job, prepared.skeleton
    finished = [name for name in skeleton.blocks if name in writer.committed()]
    outputs: dict[str, LayerStats] = {}
    if job.algorithm.outputs and windows is not None and len(finished) < len(skeleton.blocks):
        outputs = _gradients(prepared, windows, tell)
    stored, device = prepared.shapes.as_stored, skeleton.device
    quantizer = BlockQuantizer(prepared.spec, job, prepared.dtype, stored, outputs, device)
    reports: list[LayerReport] = []
    written: set[str] = set()
    tell(ProgressEvent("quantize", 0, len(skeleton.blocks), prepared.forecast.seconds))
    start, first = time.perf_counter(), 0
    at_once, distills = prepared.forecast.samples_at_once, prepared.forecast.distills
    if finished:  # sums in another order would give other bits
        extra = writer.part(finished[0])[1]
        at_once, distills = extra["samples_at_once"], extra["distills"]
    offload = writer.directory.parent if job.offload else None
    wants_head = windows is not None and "lm_head" in prepared.spec.overrides and _HEAD not in writer.committed()
    if len(finished) == len(skeleton.blocks) and not wants_head:
        windows = None  # nothing is left that needs them
    walking = walk(skeleton, windows, samples_at_once=at_once, float_samples=job.float_samples, offload=offload)
    decided = {"samples_at_once": at_once, "distills": distills}
    with ThreadPoolExecutor(1) as writing:  # while a GPU computes the next block
        committed: Future[None] | None = None
        for visit in walking:
            if visit.name in finished:
                result = _stored(visit.name, prepared, writer)
                if visit.inputs is not None:
                    restore(visit.name, visit.block, visit.linears, result)
                start, first = time.perf_counter(), visit.index + 1
            else:
                result = quantizer.run(visit)
                if committed is not None:
                    committed.result()
                committed = writing.submit(_commit, visit, result, decided, prepared, writer)
                if device.type == "cpu":
                    committed.result()
            reports += result.reports
            written |= result.dense.keys()
            del result  # frees a block of codes before the next one is made
            done = visit.index + 1
            if done > first:
                remaining = (time.perf_counter() - start) / (done - first) * (visit.total - done)
                tell(ProgressEvent("quantize", done, visit.total, remaining))
        if committed is not None:
            committed.result()
    if wants_head:
        assert visit.inputs is not None  # now the last block's outputs
        writer.commit(_HEAD, {"importance": head_importance(skeleton, visit.inputs).tolist()})
    return reports, written, distills


def _gradients(prepared: Preparation, windows: Tensor, tell: Progress) -> dict[str, LayerStats]:
    """Of the float model by the outputs of its linears; a run that resumes computes them again."""
    skeleton = Skeleton(prepared.skeleton.source, prepared.skeleton.device)  # the walk needs one that is empty
    model, linears = skeleton.load_all(), dict[str, nn.Linear]()
    for index in range(len(skeleton.blocks)):
        own = skeleton.linears(index).items()
        linears |= {name: each for name, each in own if yaqa.couples(each.out_features, each.in_features)}
    count = min(len(windows), yaqa.SAMPLES)
    chosen = windows[torch.arange(count) * len(windows) // count].to(skeleton.device)
    started = time.perf_counter()

    def progress(done: int, total: int) -> None:
        remaining = (time.perf_counter() - started) / done * (total - done)
        tell(ProgressEvent("gradients", done, total, remaining))

    tell(ProgressEvent("gradients", 0, count))
    with torch.device(skeleton.device):
        found = output_gradients(model, linears, chosen, seed=prepared.job.seed, progress=progress)
    del model, linears, skeleton
    heap.release()
    return found


def _commit(
    visit: Visit, result: BlockResult, decided: dict[str, Any], prepared: Preparation, writer: CheckpointWriter
) -> None:
    for module, packed in result.packed.items():
        writer.put_linear(module, packed)
    source = prepared.skeleton.source
    for module in visit.linears:
        if prepared.shapes.as_stored.get(module) is not None and isinstance(source, Unpacked):
            writer.put_linear(module, source.stored(module))
    for name, tensor in result.dense.items():
        # The tensors of the KV cache are float32 in every format.
        kept = tensor if is_kv(name) else narrow(prepared.skeleton.source, name, tensor, prepared.dtype)
        writer.put(name, prepared.skeleton.as_stored(name, kept))
    writer.commit(visit.name, {
        "reports": [report.to_json() for report in result.reports],
        "packed": list(result.packed),
        "dense": list(result.dense),
        **decided,
    })  # fmt: skip


def _stored(name: str, prepared: Preparation, writer: CheckpointWriter) -> BlockResult:
    """A block that was finished in this run or an earlier one, read back."""
    tensors, extra = writer.part(name)
    result = BlockResult(reports=[LayerReport.from_json(report) for report in extra["reports"]])
    for module in extra["packed"]:
        parts = {name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")}
        scheme = prepared.spec.scheme_of(module)
        assert scheme is not None
        result.packed[module] = prepared.format.unpack(parts, scheme, prepared.spec.activations_of(module))
    result.dense = {name: prepared.skeleton.as_stored(name, tensors[name]) for name in extra["dense"]}
    return result


def _distill(
    prepared: Preparation, windows: Tensor, writer: CheckpointWriter, tell: Progress, until: float | None
) -> str:
    """Tune the scales of all blocks again, for the predictions of the whole model. Returns a line about it. ``until``:
    a time of ``perf_counter``."""
    if _SCALES not in writer.committed():
        tell(ProgressEvent("distill", 0, distill.STEPS))
        source, device = prepared.skeleton.source, prepared.skeleton.device
        skeleton = Skeleton(source, device)  # the walk has taken the other one apart
        model, windows = skeleton.load_all(), windows.to(device)
        parts = tuning_windows(source, prepared.job, windows.to(CPU))
        held_out = not torch.equal(parts[1], windows[: len(parts[1])].to(CPU))
        # The targets are computed again in a run that resumes, like hidden states.
        seen, judge = (
            distill.Examples(part.to(device), distill.head_inputs(model, part.to(device))) for part in parts
        )
        linears: dict[str, nn.Linear] = {}
        packed: dict[str, QuantizedWeight] = {}
        for index, name in enumerate(skeleton.blocks):
            result = _stored(name, prepared, writer)
            restore(name, skeleton.block(index), skeleton.linears(index), result)
            linears |= skeleton.linears(index)
            packed |= {module: weight.to(device) for module, weight in result.packed.items()}
        started, kept = time.perf_counter(), writer.kept(_SCALES)
        first = 0 if kept is None else kept.extra["total"] + kept.extra["steps"]

        def progress(done: int, total: int) -> None:
            now = time.perf_counter()
            remaining = (now - started) / (done - first) * (total - done) if until is None else max(0.0, until - now)
            tell(ProgressEvent("distill", done, total, remaining))

        tuned = distill.distill(
            model,
            linears,
            packed,
            seen,
            judge,
            more=None if until is None else partial(_more_steps, until),
            seed=prepared.job.seed,
            progress=progress,
            kept=kept,
            keep=partial(writer.keep, _SCALES),
            # About as often as a block was finished, which took ``ITERATIONS`` steps through that block alone.
            keep_every=max(1, signround.ITERATIONS // len(skeleton.blocks)),
        )
        for module, weight in tuned.weights.items():
            writer.replace_linear(module, packed[module].to(CPU), weight.to(CPU))
        if prepared.spec.kv_cache is not None:
            for name, numbers in _kv_numbers(skeleton, windows, prepared.spec.kv_cache).items():
                writer.put(name, numbers, replace=True)
        text = "text that was held out" if held_out else "calibration text"
        writer.commit(_SCALES, {"before": tuned.before, "after": tuned.after, "steps": tuned.steps, "text": text})
    found = writer.part(_SCALES)[1]
    before, after = found["before"], found["after"]
    if after < before:
        line = (
            f"scales tuned end to end in {found['steps']:,} steps: divergence on {found['text']} {before:.3g}, "
            f"then {after:.3g}"
        )
    else:
        line = f"scales tuned end to end were no better, so they are as they were: divergence {before:.3g}"
    tell(ProgressEvent("distill", 1, 1, 0.0, line))
    return line


def _more_steps(until: float, steps: int, seconds: float) -> int:
    """Twice as many as in the last round, which took ``seconds`` each, or as many as there is time for; none where
    those are few."""
    possible = int((until - time.perf_counter()) / max(seconds, 1e-9))
    return min(2 * steps, possible) if possible >= distill.STEPS // 2 else 0


@torch.no_grad()
def _kv_numbers(skeleton: Skeleton, windows: Tensor, scheme: KVScheme) -> dict[str, Tensor]:
    """The numbers of every block's cache, as the model in memory fills it."""
    with ExitStack() as stack, fast_products():
        recorders = [stack.enter_context(KVRecorder(skeleton.block(i))) for i in range(len(skeleton.blocks))]
        for part in windows.split(distill.BATCH):
            skeleton.model.base_model(input_ids=part, use_cache=False)
    found: dict[str, Tensor] = {}
    for name, recorder in zip(skeleton.blocks, recorders, strict=True):
        found |= {part: numbers.cpu() for part, numbers in recorded(recorder, name, scheme).items()}
    return found


def _facts(
    source: ModelSource,
    job: QuantizeJob,
    device: torch.device,
    windows: Tensor | None,
    record: CalibrationRecord | None,
) -> dict[str, str]:
    """Everything that the numbers of the result depend on. Loaders can only refuse a uniform scheme, but they decide
    what mixed precision chooses from, and the format. A run with another limit goes on from the last attempt."""
    options = dataclasses.asdict(job)
    for unrelated in ("hours", "overwrite", "max_memory", "offload", "device", *(() if job.mixed else ("loaders",))):
        del options[unrelated]
    options |= {"loaders": sorted(job.loaders)} if job.mixed else {}
    options["max_kl"] = job.max_kl is not None
    facts = {name: str(value) for name, value in options.items()}
    facts |= {f"version of {package}": version(package) for package in ("qserve-llm", "torch", "transformers")}
    return facts | {
        "model": source.sha256(),
        "tokenizer": _tokenizer_hash(source),
        "text": str(record and record.data_sha256),
        "calibration tokens": "" if windows is None else hashlib.sha256(windows.numpy().tobytes()).hexdigest(),
        "kernels": native.missing() or native.best_isa(),
        "device": described(device),
        "threads": str(torch.get_num_threads()),
    }


def _tokenizer_hash(source: ModelSource) -> str:
    """A hash of the files that a checkpoint gets: tokens are counted by the same ones from start to end."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as directory:
        source.save_tokenizer(Path(directory))
        for path in sorted(Path(directory).iterdir()):
            digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()
