"""Walks a model one decoder block at a time with the calibration text, and lets a caller replace weights on the way, so
that later blocks see quantized activations (true-sequential).

It decides the order of blocks and what is in memory; what happens within a block is in ``Visit``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor, nn

from qserve.calibration.activations import Activations
from qserve.calibration.experts import reach_every_expert
from qserve.calibration.groups import shared_inputs
from qserve.calibration.skeleton import Call, Skeleton
from qserve.calibration.visit import DRY_TOKENS, Visit
from qserve.runtime import heap

# How much the process may grow beyond its size after the first block before memory is returned.
_KEPT = 1.3


def walk(
    skeleton: Skeleton,
    windows: Tensor | None,
    *,
    samples_at_once: int | None = None,
    float_samples: int = 0,
    offload: Path | None = None,
) -> Iterator[Visit]:
    """Visit every block in order; one is in memory at a time, on a GPU with the next one behind it.

    ``windows`` int64 [samples, length]; None visits without running anything (statistics are then None).
    ``samples_at_once`` go through a block together; None takes all. For the first ``float_samples`` the float model
    is followed beside the quantized one. ``offload`` is a directory for the hidden states, which otherwise stay in
    memory.
    """
    inputs: Activations | None = None
    floats: Activations | None = None
    calls: list[Call] = []
    short: list[Call] = []
    count = 0
    if windows is not None:
        count = min(samples_at_once or len(windows), len(windows))
        samples, length = windows.shape
        inputs = Activations(samples, length, skeleton.hidden_size, offload, skeleton.device)
        calls, short = skeleton.stem(windows, DRY_TOKENS, inputs)
        if float_samples:
            shape = min(float_samples, samples), length, skeleton.hidden_size
            floats = Activations(*shape, offload, skeleton.device)
            for row in range(floats.shape[0]):
                floats.write(row, inputs.read(row, row + 1))
    total = len(skeleton.blocks)
    # Workers use buffers of the same sizes in every block, so freed memory is kept; each block leaves a bit more.
    whole = inputs is not None and count >= inputs.shape[0]
    enough = 0
    reads_ahead = inputs is not None and skeleton.device.type != "cpu"  # a CPU has enough to do
    with heap.kept() if whole else nullcontext(), ThreadPoolExecutor(1) as reader:
        ahead: Future[nn.Module] | None = None
        for index in range(total):
            block = skeleton.block(index) if inputs is None else ahead.result() if ahead else skeleton.load(index)
            ahead = reader.submit(skeleton.load, index + 1) if reads_ahead and index + 1 < total else None
            visit = Visit(index, total, skeleton.blocks[index], block, skeleton.linears(index))
            if inputs is None:
                visit.load = skeleton.load_linear
            else:
                reach_every_expert(block, inputs.shape[0] * inputs.shape[1])
                visit.inputs, visit.samples_at_once = inputs, count
                visit.call, visit.short_call = calls[index], short[index]
                visit.floats, visit.float_block = floats, copy_sharing_weights(block) if floats is not None else None
                visit.groups = shared_inputs(block, visit.linears, visit.short_inputs(), short[index])
            yield visit
            visit.finish()
            skeleton.unload(index)
            resident = psutil.Process().memory_info().rss
            enough = enough or int(_KEPT * resident)
            if not whole or resident > enough:
                heap.release()


def copy_sharing_weights(block: nn.Module) -> nn.Module:
    """A copy of ``block`` whose parameters share its memory until they are replaced."""
    shared: dict[int, Any] = {id(p): nn.Parameter(p.data, False) for p in block.parameters()}
    return copy.deepcopy(block, shared | {id(b): b for b in block.buffers()})
