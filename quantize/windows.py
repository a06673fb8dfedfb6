"""The windows that a job calibrates on: of a text that was given, or of one that the model writes first."""

from __future__ import annotations

import gc
import hashlib
import time

import torch
from torch import Tensor

from qserve.calibration.generated import generated_windows
from qserve.calibration.text import SELF, Text, load_text
from qserve.calibration.windows import calibration_windows, evaluation_windows
from qserve.checkpoint.calibration_record import CalibrationRecord
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.tokenizer import leading_tokens
from qserve.quantize.distill import JUDGED, most_windows
from qserve.quantize.job import QuantizeJob
from qserve.quantize.report import Progress, ProgressEvent
from qserve.runtime import heap

_HELD_OUT = 16  # of how many tokens one is held out at most


def given_windows(source: ModelSource, job: QuantizeJob) -> tuple[Tensor | None, CalibrationRecord | None]:
    """int64 [samples, sequence length], and what they are; None where no text was given. Raises ``DataError``."""
    if job.text is None or job.text == SELF:
        return None, None
    text = load_text(job.text, "calibrate")
    windows = _of_text(text, job.samples, source, job)
    return windows, _record(text.name, text.sha256, windows, source, job)


def written_windows(source: ModelSource, job: QuantizeJob, tell: Progress) -> tuple[Tensor, CalibrationRecord]:
    """The same of ``--calibration self``: every second window is of the model's own text, the others are of the builtin
    one. Together they gave as good a model as its own text alone, in half of the time that it takes to write."""
    started = time.perf_counter()

    def progress(done: int, total: int) -> None:
        tell(ProgressEvent("generate", done, total, (time.perf_counter() - started) / done * (total - done)))

    own = generated_windows(source, (job.samples + 1) // 2, job.sequence_length, job.seed, progress)
    gc.collect()  # an engine refers to itself, and may hold the memory of a GPU
    heap.release()
    windows = own.repeat_interleave(2, 0)[: job.samples]
    if job.samples > 1:
        windows[1::2] = _of_text(load_text("builtin", "calibrate"), job.samples // 2, source, job)
    written = "".join(source.tokenizer().batch_decode(own))
    return windows, _record(SELF, hashlib.sha256(written.encode()).hexdigest(), windows, source, job)


def tuning_windows(source: ModelSource, job: QuantizeJob, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Of the text behind the calibration ``windows``: windows to tune the whole model on, in random order, and those
    that judge it, from the end of the text, where nothing else is read. Both are calibration windows where the text is
    too short for that."""
    text = load_text("builtin" if job.text == SELF or job.text is None else job.text, "calibrate")
    tokenizer = source.tokenizer()
    leading, length = leading_tokens(tokenizer), job.sequence_length
    read, held_out = _divided(text.tokens(tokenizer), job.samples, length - len(leading), job)
    if not held_out:
        return windows, windows[:JUDGED]
    judging = evaluation_windows(held_out, len(held_out) // (length - len(leading)) * length, length, leading)
    # With --hours or without, the first windows are the same: a run that resumes may have other hours.
    count = min(most_windows(hours=1), len(read) // (length - len(leading)))
    tuned = calibration_windows(read, count, length, job.seed, leading)
    if job.text == SELF:
        tuned = torch.cat([windows[::2], tuned])
    return tuned[: most_windows(job.hours)], judging


def _of_text(text: Text, samples: int, source: ModelSource, job: QuantizeJob) -> Tensor:
    tokenizer = source.tokenizer()
    leading = leading_tokens(tokenizer)
    read, _ = _divided(text.tokens(tokenizer), samples, job.sequence_length - len(leading), job)
    return calibration_windows(read, samples, job.sequence_length, job.seed, leading)


def _divided(tokens: list[int], samples: int, width: int, job: QuantizeJob) -> tuple[list[int], list[int]]:
    """``tokens`` without the windows of ``width`` that judge the tuning, and those. None are held out where nothing is
    tuned, or the rest would be too short for ``samples``."""
    count = min(JUDGED, len(tokens) // (_HELD_OUT * width)) if job.effort == "best" and width > 0 else 0
    kept = len(tokens) - count * width
    return (tokens[:kept], tokens[kept:]) if kept >= samples * width else (tokens, [])


def _record(name: str, sha256: str, windows: Tensor, source: ModelSource, job: QuantizeJob) -> CalibrationRecord:
    if job.effort == "best":
        windows = torch.cat([windows, *tuning_windows(source, job, windows)])
    read = source.tokenizer().batch_decode(windows, skip_special_tokens=True)
    return CalibrationRecord.of(name, sha256, windows.numel(), read)
