"""Client libraries of others: users get our answers as these libraries read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.judges

SCRIPTS = Path(__file__).parent / "scripts"


def test_the_javascript_sdk(environment, judge, anywhere) -> None:
    home = environment("javascript")
    shutil.copy(SCRIPTS / "openai_sdk.mjs", home)  # modules are found from where the script lies
    done = judge(["node", home / "openai_sdk.mjs", anywhere.url, anywhere.name], cwd=home)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    "script", ["litellm_client.py", "langchain_chat.py", "instructor_client.py", "anthropic_sdk.py"]
)
def test_a_python_client(environment, judge, anywhere, script) -> None:
    python = environment("clients") / "bin" / "python"
    done = judge([python, script, anywhere.url, anywhere.name])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
