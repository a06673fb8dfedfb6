"""``FleetProcess``: a fleet on Ray, started by its command in an environment of its own.

``tests/environments.py fleet DIR`` makes that: Ray brings packages that others must do without.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from qserve.evals.bench.client import Client
from qserve.runtime.server.http.listening import claim_socket

ROOT = Path(__file__).parents[3]
VARIABLE = "QSERVE_FLEET"
TOKEN = secrets.token_hex(32)  # else Ray leaves one in the home directory


def environment() -> Path:
    """Skips the test where there is none."""
    home = os.environ.get(VARIABLE)
    if not home or not (Path(home) / "ray" / "complete.json").exists():
        pytest.skip(f"{VARIABLE} names no environment: make it with tests/environments.py fleet DIR")
    return Path(home).absolute() / "ray"


class FleetProcess:
    """``qserve fleet FILE`` and what its processes do."""

    def __init__(self, folder: Path, text: str, **values: object) -> None:
        """``text``: of its file, in which ``port``, ``version`` and ``values`` are written."""
        self._text, self._values = text, values
        with claim_socket("127.0.0.1", 0) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.file = folder / "fleet.toml"
        self.write("1")
        variables = {"PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [environment() / "bin/python", "-m", "qserve", "fleet", str(self.file)],
            env=os.environ | variables, cwd=folder, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.until(lambda: any("the fleet serves" in line for line in self.lines), 270, "it starts")

    def kill(self) -> None:
        """Ray's processes and ours end with it."""
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def write(self, version: str) -> None:
        self.file.write_text(self._text.format(port=self.port, version=version, **self._values))

    def until(self, true: Callable[[], bool], seconds: float, what: str) -> float:
        """Seconds until it is true."""
        began = time.monotonic()
        while not true():
            assert self.process.poll() is None, "".join(self.lines)
            assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}\n" + "".join(self.lines)
            time.sleep(0.1)
        return time.monotonic() - began

    def ask(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"} | headers)
        with urllib.request.urlopen(request, timeout=90) as answer:
            content: dict[str, Any] = json.load(answer)
        return content

    def replicas(self, model: str) -> list[str]:
        """Addresses of those that take requests."""
        listed = self.ask("/v1/replicas")["data"]
        return [each["id"] for each in listed if model in each["models"] and each["takes_requests"]]

    def servers(self, model: str) -> dict[int, psutil.Process]:
        """By process id."""
        found = {}
        for each in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = each.cmdline()
            except psutil.Error:
                continue
            if "--served-model-name" in line and line[line.index("--served-model-name") + 1] == model:
                found[each.pid] = each
        return found

    async def streams(self, model: str, count: int, tokens: int, meanwhile: Callable[[], None]) -> list[Any]:
        client = Client(f"{self.url}/v1", timeout=120)
        body = {"model": model, "max_tokens": tokens, "ignore_eos": True}
        asked = [
            asyncio.create_task(client.stream(body | {"prompt": f"{i} the quick brown fox"}, "completions"))
            for i in range(count)
        ]
        await asyncio.sleep(1.0)
        meanwhile()
        return await asyncio.gather(*asked)
