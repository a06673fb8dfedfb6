"""Parts of the demo. All of it runs in CI, on the real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from qserve import steps
from qserve.checkpoint.demo import GEMMA, terms_path
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.source import open_model
from qserve.commands.demo import demo
from qserve.demo import _introduce
from qserve.runtime.config import EngineConfig
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle, claim_socket


def test_an_unknown_demo_model_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="--model of the demo must be smollm2 or gemma, not 'phi'"):
        demo(model="phi")


def test_terms_are_shown(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _introduce(open_model(tiny_model), GEMMA)
    shown = " ".join(capsys.readouterr().err.split())
    assert "Gemma Terms of Use" in shown and terms_path(GEMMA).name in shown


@pytest.mark.parametrize("chat", [True, False])
def test_a_model_without_a_template_goes_on_with_the_text(
    chat: bool, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = steps.load(open_model(tiny_model), EngineConfig(max_model_len=128))
    sock = claim_socket("127.0.0.1", 0)
    with ServerHandle(engine, config=ServerConfig(model_name="demo"), sock=sock) as server:
        steps.ask(server.url, "demo", "the quick brown", chat=chat)
    assert capsys.readouterr().out.strip()
