"""How long quantizing a model takes here, from its first block. Writes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from qserve.calibration.blocks import walk
from qserve.calibration.skeleton import Skeleton
from qserve.calibration.windows import calibration_windows
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.tokenizer import leading_tokens
from qserve.quantize.block import BlockQuantizer
from qserve.quantize.job import QuantizeJob
from qserve.quantize.prepare import arrange, device_of


def expected_seconds(source: ModelSource, job: QuantizeJob, token_ids: Sequence[int]) -> float:
    """Quantize the first block of ``source`` and assume that the others take as long. ``token_ids``: those of the
    calibration text. The result is thrown away."""
    leading = leading_tokens(source.tokenizer())
    windows = calibration_windows(token_ids, job.samples, job.sequence_length, job.seed, leading)
    prepared = arrange(Skeleton(source, device_of(job)), job, torch.float16)
    device = prepared.skeleton.device
    quantizer = BlockQuantizer(prepared.spec, job, prepared.dtype, prepared.shapes.as_stored, device=device)
    at_once = prepared.forecast.samples_at_once
    began = time.perf_counter()
    walking = walk(prepared.skeleton, windows, samples_at_once=at_once, float_samples=job.float_samples)
    visit = next(walking)
    first = time.perf_counter()
    quantizer.run(visit)
    next(walking, None)  # the next block is there, with its inputs
    block = time.perf_counter() - first
    return first - began + len(prepared.skeleton.blocks) * block
