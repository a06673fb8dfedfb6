"""The command line in ``deploy/Containerfile``, run on a local model without the image."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

CONTAINERFILE = Path(__file__).parents[2] / "deploy" / "Containerfile"
MODEL = "/models/model"  # where the image expects one


def instructions() -> dict[str, str]:
    """The last instruction of each kind in the final stage, which is what a container has."""
    text = CONTAINERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    final = text[text.rindex("\nFROM ") :]
    return {match[1]: match[2].strip() for match in re.finditer(r"(?m)^([A-Z]+)\s+(.*)$", final)}


def environment(given: dict[str, str]) -> dict[str, str]:
    """The variables of ``ENV``, with this environment's programs where the image has its own."""
    pairs = dict(word.partition("=")[::2] for word in shlex.split(given["ENV"]))
    assert pairs.pop("PATH") == "/opt/qserve/bin:$PATH"
    return {**os.environ, **pairs, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.slow
def test_the_image_starts_is_healthy_and_stops(tiny_model: Path, tmp_path: Path) -> None:
    given = instructions()
    command = json.loads(given["ENTRYPOINT"]) + json.loads(given["CMD"])
    assert command.count(MODEL) == 1 and "--port" not in command and given["EXPOSE"] == "8000"
    command[command.index(MODEL)] = str(tiny_model)
    with subprocess.Popen(
        [*command, "--port", "0"], env=environment(given), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lines = map(json.loads, process.stderr)  # --log-format json: every line of it
            ready = next(line for line in lines if line["message"] == "ready")
            assert ready["address"] == "0.0.0.0"
            check = json.loads(re.sub(r"^.*?CMD\s+", "", given["HEALTHCHECK"]))
            check = [word.replace(":8000/", f":{ready['port']}/") for word in check]
            subprocess.run(check, check=True, env=environment(given), timeout=60)
            body = json.dumps({"prompt": "the", "max_tokens": 3}).encode()
            url = f"http://127.0.0.1:{ready['port']}/v1/completions"
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["choices"]
            process.send_signal(getattr(signal, given["STOPSIGNAL"]))
            assert [line["message"] for line in lines][-1] == "ended"
            assert process.wait(60) == 0
        finally:
            process.kill()
