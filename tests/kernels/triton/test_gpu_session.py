"""The program for a GPU session: its parts have limits, and one that fails or is late lets the others run."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = "pytester"
PROGRAM = Path(__file__).parent / "gpu_session.py"


def session(monkeypatch: pytest.MonkeyPatch, *arguments: object, parts: dict[str, list[str]]) -> tuple[int, list[str]]:
    """Run it with these commands instead of its own: the exit code, and which were asked for."""
    program: dict[str, Any] = runpy.run_path(str(PROGRAM))
    asked: list[str] = []

    class Commands(dict[str, list[str]]):
        def __getitem__(self, name: str) -> list[str]:
            asked.append(name)
            return super().__getitem__(name)

    main = program["main"]
    # Whatever the machine does meanwhile, the others have hours.
    main.__globals__["SHARES"] = {"tests": 5000.0, "tune": 1.0, "kernels": 5000.0}
    main.__globals__["commands"] = lambda *_: Commands(parts)
    monkeypatch.setattr(sys, "argv", ["gpu_session.py", *map(str, arguments), "--tiny"])
    return main(), asked


def test_what_fails_or_is_late_lets_the_others_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    endless = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    parts = {
        "tests": ["-c", "import sys; print('two tests failed'); sys.exit(3)"],
        "tune": ["-c", f"print('begun', flush=True); {endless}"],
        "kernels": ["-c", "print('timed')"],
    }
    code, asked = session(monkeypatch, tmp_path, "--parts", "kernels,tune,tests", "--limit", 20_000, parts=parts)
    assert code == 1 and asked == ["tests", "tune", "kernels"]
    found = json.loads((tmp_path / "session.json").read_text())["parts"]
    assert {name: each["code"] for name, each in found.items()} == {"tests": 3, "tune": 124, "kernels": 0}
    assert found["tune"]["limit"] < 10 < found["kernels"]["limit"]
    log = (tmp_path / "session.log").read_text()
    assert all(line in log for line in ("two tests failed", "begun", "timed", "=== kernels"))


def test_a_part_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        session(monkeypatch, tmp_path, "--parts", "tests,everything", parts={})


def test_every_part_has_a_share_of_the_time(tmp_path: Path) -> None:
    program = runpy.run_path(str(PROGRAM))
    assert sum(program["SHARES"].values()) > 0 and program["LIMIT"] < 600
    made = program["commands"](tmp_path, "tests", False, dict.fromkeys(program["SHARES"], 100.0))
    assert list(made) == list(program["SHARES"])
    for name in ("tests", "tune", "kernels", "whole-model"):
        option = "--seconds" if name == "tests" else "--limit"
        assert made[name][made[name].index(option) + 1] == "85", "told to end before it is ended"


def test_tests_that_are_late_are_skipped_and_all_have_a_turn_first(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parametrize("n", range(2))
        def test_first(n): pass

        @pytest.mark.parametrize("n", range(2))
        def test_second(n): pass
    """)
    monkeypatch.setenv("PYTHONPATH", str(PROGRAM.parent))
    for seconds, result in (("0", "skipped"), ("1000", "passed")):
        done = pytester.runpytest_subprocess("-v", "-rs", "-p", "deadline", "--seconds", seconds)
        lines = [line.partition("::")[2] for line in done.outlines if "::test" in line]
        assert [line.split()[0][5:] for line in lines] == ["first[0]", "second[0]", "first[1]", "second[1]"]
        assert done.parseoutcomes() == {result: 4} and done.ret == 0
