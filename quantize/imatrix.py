"""llama.cpp's importance matrix, by which its quantizer weighs errors: the file that ``llama-imatrix`` makes, too.

For every matrix of the model it holds the sum of the squares of each input, and of how many tokens that is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import Keys
from torch import Tensor

from qserve.calibration.float_walk import FloatWalk
from qserve.calibration.skeleton import Skeleton
from qserve.calibration.text import SELF
from qserve.checkpoint.calibration_record import CalibrationRecord
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.files import whole
from qserve.checkpoint.gguf_metadata import writable
from qserve.checkpoint.gguf_tensors import file_tensors
from qserve.checkpoint.gguf_writer import moved_columns
from qserve.checkpoint.source import ModelSource
from qserve.quantize.job import QuantizeJob
from qserve.quantize.prepare import device_of
from qserve.quantize.report import Progress, ProgressEvent
from qserve.quantize.windows import given_windows, written_windows

Sums = dict[str, dict[int, tuple[Tensor, int]]]
"""Of a tensor of the file, for each matrix stacked in it: sums of squares float32 [in], and of how many tokens."""


def write_imatrix(source: ModelSource, out: Path, job: QuantizeJob, progress: Progress | None = None) -> int:
    """Write the file ``out``, which appears complete or not at all, and return for how many tensors it is. Of ``job``
    its text, samples, ``overwrite`` and ``offload`` count.

    Raises ``UsageError`` for a family that llama.cpp has no file of and for a job without text, ``CheckpointError``
    where ``out`` cannot be written, and ``DataError`` for bad text.
    """
    tell = progress or (lambda event: None)
    if out.is_dir() or (out.exists() and not job.overwrite):
        raise CheckpointError(f"{out} exists; choose another name or pass --overwrite")
    if job.text is None:
        raise UsageError("an importance matrix is made of text: --calibration self, builtin or a file")
    writable(source.config, source.name)
    with whole(out) as partial:
        partial.touch()  # a place that cannot be written is found before the work
        windows, record = written_windows(source, job, tell) if job.text == SELF else given_windows(source, job)
        assert windows is not None and record is not None
        started = time.perf_counter()

        def told(done: int, total: int) -> None:
            tell(ProgressEvent("imatrix", done, total, (time.perf_counter() - started) / done * (total - done)))

        found = sums(Skeleton(source, device_of(job)), windows, told, out.parent if job.offload else None)
        _write(partial, found, windows, record)
    return len(found)


@torch.no_grad()
def sums(
    skeleton: Skeleton, windows: Tensor, progress: Callable[[int, int], None], offload: Path | None = None
) -> Sums:
    """What the linears of blocks are given while ``windows`` int64 [samples, length] go through the model, by the names
    of llama.cpp's tensors. One block is in memory at a time; ``offload`` is a directory for hidden states."""
    stored = file_tensors(skeleton.source.config, skeleton.source.has)
    walk = FloatWalk(skeleton, windows, offload, hessian=False)
    found: Sums = {}
    for index in range(len(skeleton.blocks)):
        skeleton.load(index)
        for linears, stats in walk.enter(index):
            for place in (stored[f"{linear}.weight"] for linear in linears if f"{linear}.weight" in stored):
                columns = moved_columns(place)
                if columns is None and not place.keeps_rows:
                    continue  # the file has a product of it in its place
                squares = stats.diagonal.cpu() * (stats.tokens / 2)
                for name in place.names:
                    ordered = squares if columns is None else squares[columns]
                    found.setdefault(name, {})[place.place or 0] = ordered, stats.tokens
        skeleton.unload(index)
        progress(index + 1, len(skeleton.blocks))
    return found


def _write(path: Path, found: Sums, windows: Tensor, record: CalibrationRecord) -> None:
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array(Keys.IMatrix.DATASETS, [record.data_name])
    writer.add_uint32(Keys.IMatrix.CHUNK_COUNT, windows.shape[0])
    writer.add_uint32(Keys.IMatrix.CHUNK_SIZE, windows.shape[1])
    for name, matrices in sorted(found.items()):
        width = len(next(iter(matrices.values()))[0])
        # An expert that no token reached counts 0, which llama.cpp takes for equal importance.
        squares, counts = (np.zeros((max(matrices) + 1, n), np.float32) for n in (width, 1))
        for place, (total, tokens) in matrices.items():
            squares[place], counts[place] = total.numpy(), tokens
        writer.add_tensor(f"{name}.in_sum2", squares)
        writer.add_tensor(f"{name}.counts", counts)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
