"""A tiny model with a tokenizer, dense and packed, made once per session: no network, no downloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from qserve.checkpoint.source import open_model
from qserve.evals.reliability.tiny import save_tiny_model
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model directory. Not to be written to."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_packed(tiny_model: Path) -> Path:
    """The same model at 4 bits, groups of 32. Not to be written to."""
    out = tiny_model.parent / "tiny-w4"
    pipeline.run(open_model(tiny_model), out, QuantizeJob(method="rtn", group_size=32, calibration=None))
    return out
