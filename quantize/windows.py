"""The windows that a job calibrates on: of a text that was given, or of one that the model writes first."""

from __future__ import annotations

import gc
import hashlib
import time

from torch import Tensor

from qserve.calibration.generated import generated_windows
from qserve.calibration.text import SELF, Text, load_text
from qserve.calibration.windows import calibration_windows
from qserve.checkpoint.calibration_record import CalibrationRecord
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.tokenizer import leading_tokens
from qserve.quantize.job import QuantizeJob
from qserve.quantize.report import Progress, ProgressEvent
from qserve.runtime import heap


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


def _of_text(text: Text, samples: int, source: ModelSource, job: QuantizeJob) -> Tensor:
    tokenizer = source.tokenizer()
    leading = leading_tokens(tokenizer)
    return calibration_windows(text.tokens(tokenizer), samples, job.sequence_length, job.seed, leading)


def _record(name: str, sha256: str, windows: Tensor, source: ModelSource, job: QuantizeJob) -> CalibrationRecord:
    read = source.tokenizer().batch_decode(windows, skip_special_tokens=True)
    return CalibrationRecord.of(name, sha256, job.tokens, read)
