"""Quantizes in a process that kills itself at a moment of its work.

A fork of a process that has imported all of this already: to import takes longer than most of these runs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pkgutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers.models.qwen2.modeling_qwen2  # noqa: F401  what would be imported when a model is made

from qserve.calibration import visit
from qserve.checkpoint.hf import HFDirectory
from qserve.quantize import pipeline, signround
from qserve.quantize.job import QuantizeJob

FRESH = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Ended:
    """``events``: (phase, done, total) of the progress that was told."""

    status: int
    events: Sequence[tuple[str, int, int]]


def quantize(
    model: Path, out: Path, options: Mapping[str, object], *, after: int = 0, places: Sequence[str] = (),
    fresh: bool = False,
) -> Ended:
    """``model`` into ``out``, killed when one of ``places`` (``module:owner.function``) is called for the time
    ``after``. ``fresh``: by a process whose hashes, and so the order of its sets, are its own."""
    log = out.with_suffix(".log")
    log.write_text("")
    process = (FRESH if fresh else FORK).Process(target=_run, args=(model, out, dict(options), after, places, log))
    process.start()
    process.join()
    assert process.exitcode is not None
    lines = log.read_text().splitlines()
    log.unlink()
    return Ended(process.exitcode, [tuple(json.loads(line)) for line in lines])


def _run(
    model: Path, out: Path, options: dict[str, Any], after: int, places: Sequence[str], log: Path
) -> None:
    visit._at_once = lambda: 2  # type: ignore[assignment]
    signround.ITERATIONS = 20  # by which tuning is kept; the learning itself goes on as long as ever
    left = after

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for place in places:
        owner, _, name = place.rpartition(".")
        holder = pkgutil.resolve_name(owner)
        setattr(holder, name, counted(getattr(holder, name)))
    with log.open("w") as told:
        def tell(event: Any) -> None:
            print(json.dumps([event.phase, event.done, event.total]), file=told, flush=True)

        pipeline.run(HFDirectory(model), out, QuantizeJob(**options), progress=tell)
