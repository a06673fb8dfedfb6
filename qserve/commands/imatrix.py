"""``qserve imatrix``: llama.cpp's importance matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qserve import console
from qserve.commands.options import Overwrite
from qserve.commands.quantize_options import Calibration, Offload, Samples, Seed, SequenceLength
from qserve.quantize.job import QuantizeJob

_JOB = QuantizeJob()


def imatrix(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Any model that llama.cpp has a file of.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file: imatrix.gguf.")],
    calibration: Calibration = _JOB.calibration or "none",
    samples: Samples = _JOB.samples,
    sequence_length: SequenceLength = _JOB.sequence_length,
    seed: Seed = _JOB.seed,
    overwrite: Overwrite = False,
    offload: Offload = _JOB.offload,
) -> None:
    """Write MODEL's importance matrix, as llama-imatrix does: llama-quantize --imatrix weighs errors by it.

    Run it on the model in floating point. It needs the memory of one block, and the time of one pass of the text.
    """
    from qserve import steps

    job = QuantizeJob(
        calibration=None if calibration == "none" else calibration,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
        overwrite=overwrite,
        offload=offload,
    )
    console.line(steps.imatrix(steps.open_source(model, base=True), out, job))
