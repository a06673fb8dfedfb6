"""The terminal shows other people's texts with every character, and no markup in them counts."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from qserve import console
from qserve.cli import app

HOSTILE = "a[/b] [red]:smile: [link=x] \\[ :abc:1"


def test_nothing_is_markup_and_nothing_becomes_an_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    console.line(HOSTILE)
    console.note(HOSTILE)
    console.error(HOSTILE)
    console.table(HOSTILE, (HOSTILE, "b"), ((HOSTILE, HOSTILE),))
    shown = capsys.readouterr()
    assert shown.err == f"{HOSTILE}\nerror: {HOSTILE}\n"
    assert shown.out.count(HOSTILE) == 5


def test_a_refusal_repeats_what_was_given() -> None:
    roofline = ["--roofline", "flops=1,bandwidth=1,parameters=1,weights=1,kv=0"]
    result = CliRunner().invoke(app, ["simulate", *roofline, "--output", "lognormal:abc:1"])
    assert result.exit_code == 2 and "'lognormal:abc:1'" in result.output
