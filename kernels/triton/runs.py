"""A step divided into the work of layers that keep states of sequences: runs of tokens, and chunks of those."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qserve.kernels.executor import Step
from qserve.kernels.triton.schedule import Numbers

CHUNK = 64
"""Tokens that the gated delta rule takes at a time."""


@dataclass(frozen=True)
class Runs:
    """All int32.

    runs    [runs, 3]: first row, tokens, slot of the state; those that go token by token, then the longest first
    chunks  [chunks, 2]: first row, tokens: every ``CHUNK`` of the other runs
    saves   [tokens]: those of the step, -1 where it has none
    single  how many runs go token by token
    """

    runs: Numbers
    chunks: Numbers
    saves: Numbers
    single: int


def runs_of(step: Step, *, chunked: bool) -> Runs:
    """A run for each sequence. ``chunked``: those of several tokens are taken by chunks, which begin at their first."""
    assert step.state_slots is not None, "the step says where the states of its sequences are"
    starts = step.seq_start.numpy()
    lengths = np.diff(starts)
    several = (lengths > 1) & chunked
    order = np.lexsort((-lengths, several))
    runs = np.stack([starts[:-1], lengths, step.state_slots.numpy()], 1)[order].astype(np.int32)
    single = len(runs) - int(several.sum())
    chunks = [
        (row, min(CHUNK, begin + tokens - row))
        for begin, tokens, _ in runs[single:].tolist() for row in range(begin, begin + tokens, CHUNK)
    ]  # fmt: skip
    saves = np.full(step.tokens, -1, np.int32) if step.state_saves is None else step.state_saves.numpy()
    return Runs(runs, np.array(chunks, np.int32).reshape(-1, 2), saves, single)
