"""A tiny model with a tokenizer, dense and packed, made once per session: no network, no downloads."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() and "EMULATED_SM" not in os.environ:
    # Triton decides when it is imported, and kernels when they are, whether they are compiled or interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

from qserve.checkpoint.source import open_model
from qserve.evals.reliability.tiny import save_tiny_model
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob


def pytest_collection_finish() -> None:
    """Thousands of tests and what they import stay until the end: the search for garbage need not go through them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()



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


@pytest.fixture(scope="module")
def plain_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every client of httpx reads the certificates that it trusts, which takes longer than most requests: none here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield
