"""A tiny model with a tokenizer, dense and packed, made once per session: no network, no downloads."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Models are tiny: a second thread of torch's costs more than it gives, in the programs that tests start too.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available() and "EMULATED_SM" not in os.environ:
    # Triton decides when it is imported, and kernels when they are, whether they are compiled or interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

from qserve.checkpoint.source import open_model
from qserve.kernels import native
from qserve.kernels.threads import default_threads
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob
from qserve.runtime import engine
from tests.tiny_model import save_tiny_model

# In CI a change is judged and not its luck: examples, and draws of requests without a seed, are the same every time.
# Everywhere else they are new ones. How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("any machine")


class _OneSeed:
    def getrandbits(self, bits: int) -> int:
        return 7


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--isa", choices=native.ISAS, help="the CPU kernels that run where none are named: a lesser set")
    help = "what slow tests and judges take a sample of: GPU kernels that are compiled and emulated, and requests"
    parser.addoption("--everything", action="store_true", help=help)


def pytest_configure(config: pytest.Config) -> None:
    if "CI" in os.environ:
        # Not a stream of seeds: what ran before in this process would choose from it.
        engine.SystemRandom = _OneSeed  # type: ignore[misc,assignment]
    if isa := config.getoption("--isa"):
        if isa not in native.available():
            raise pytest.UsageError(f"--isa {isa}: this machine has {', '.join(native.available())}")
        native.best_isa = lambda: isa


@pytest.hookimpl(optionalhook=True)  # pytest-xdist need not be there
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process for each core; none where only files and tests are named, which are over before one has started."""
    named = all(Path(each.partition("::")[0]).is_file() for each in config.args)
    return 0 if named else min(default_threads(), 8)


def _start_alike() -> None:
    """Whichever tests ran before in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _start_alike()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    _start_alike()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that may take longest begin first: none of them is alone at the end."""
    def allowed(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return max(300.0, marker.args[0] if marker else 0)

    items.sort(key=allowed, reverse=True)


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
