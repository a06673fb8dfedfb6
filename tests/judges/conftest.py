"""A real server in a process of its own, and judges that others wrote, each in its environment.

A judge is a program that knows the server's address and the model's name; the scripts in ``scripts`` import nothing
of qserve. See ``tests/environments.py`` for how to make the environments.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from qserve.checkpoint.demo import demo_path
from tests.runtime.fleet.ray_fleet import FleetProcess

VARIABLE = "QSERVE_JUDGES"
SCRIPTS = Path(__file__).parent / "scripts"
# No judge asks anybody but the server.
SETTINGS = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LANGSMITH_TRACING": "false", "NO_PROXY": "127.0.0.1", "OPENAI_API_KEY": "none"}


FLEET = """
port = {port}

[models.judged]
model = "{model}"
replicas = 2
version = "{version}"
options = ["--kv-cache-memory", "256MiB"]
"""


@dataclass(frozen=True)
class Served:
    """``model`` is the MODEL argument that the server was started with, ``name`` what requests call it."""

    url: str
    model: str
    name: str


@pytest.fixture(scope="session")
def environment() -> Callable[[str], Path]:
    """``environment(name)``: where it is; skips the test where it was not made."""

    def find(name: str) -> Path:
        home = os.environ.get(VARIABLE)
        if not home:
            pytest.skip(f"{VARIABLE} is not set: make the environments with tests/environments.py judges DIR")
        if not (Path(home) / name / "complete.json").exists():
            pytest.skip(f"{home}/{name} is not complete; make it with tests/environments.py judges {home} {name}")
        return Path(home).absolute() / name

    return find


@pytest.fixture(scope="session")
def judge() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``judge(command)``: what it thinks of the server is its exit status. A name ending in ``.py`` is a script's."""

    def run(command: Sequence[object], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        words = [str(SCRIPTS / word) if str(word).endswith(".py") else str(word) for word in command]
        return subprocess.run(
            words, cwd=cwd, env={**os.environ, **SETTINGS}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=280,
        )

    return run


@pytest.fixture(scope="session")
def served(tiny_model: Path) -> Iterator[Served]:
    with serving(tiny_model) as server:
        yield server


@pytest.fixture(scope="session", params=["server", "fleet"])
def anywhere(request: pytest.FixtureRequest) -> Served:
    """One server, then a fleet of two replicas on Ray: clients see no difference."""
    found: Served = request.getfixturevalue("served" if request.param == "server" else "fleet")
    return found


@pytest.fixture(scope="session")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = "demo" if demo_path().exists() else str(tiny_model)
    running = FleetProcess(tmp_path_factory.mktemp("fleet"), FLEET, model=model)
    try:
        yield Served(f"{running.url}/v1", model, "judged")
    finally:
        running.kill()


@contextmanager
def serving(tiny_model: Path) -> Iterator[Served]:
    """``python -m qserve run`` with the demo model where it is, else the tiny one."""
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} is not set")
    model = "demo" if demo_path().exists() else str(tiny_model)
    command = ["run", model, "--port", "0", "--served-model-name", "judged", "--kv-cache-memory", "256MiB"]
    with subprocess.Popen(
        [sys.executable, "-m", "qserve", *command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        try:
            lines: list[str] = []
            for line in process.stderr:
                lines.append(line)
                if address := re.search(r"http://\S+/v1", line):
                    break
            else:
                pytest.fail("the server did not start:\n" + "".join(lines))
            # Nobody reads what comes later, and a full pipe would stop the server.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield Served(address[0], model, "judged")
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
