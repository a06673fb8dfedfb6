"""The program for a GPU session: its parts have limits, and one that fails or is late lets the others run."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from qserve.kernels.triton.tuning import tuned

pytest_plugins = "pytester"
PROGRAM = Path(__file__).parent / "gpu_session.py"


def session(
    monkeypatch: pytest.MonkeyPatch, *arguments: object, parts: dict[str, list[str]], machine: str = "print('{}')"
) -> tuple[int, list[str]]:
    """Run it with these commands instead of its own: the exit code, and which were asked for."""
    program: dict[str, Any] = runpy.run_path(str(PROGRAM))
    asked: list[str] = []

    class Commands(dict[str, list[str]]):
        def __getitem__(self, name: str) -> list[str]:
            asked.append(name)
            return super().__getitem__(name)

    main = program["main"]
    # Whatever the machine does meanwhile, the others have hours.
    main.__globals__["MACHINE"] = machine
    main.__globals__["SHARES"] = {"tests": 5000.0, "tune": 1.0, "kernels": 5000.0}
    main.__globals__["commands"] = lambda *_: Commands(parts)
    monkeypatch.setattr(sys, "argv", ["gpu_session.py", *map(str, arguments), "--tiny"])
    return main(), asked


@pytest.mark.slow
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
    made = program["commands"](tmp_path, ["tests"], False, dict.fromkeys(program["SHARES"], 100.0))
    assert list(made) == list(program["SHARES"])
    for name in ("tests", "tune", "kernels", "whole-model"):
        option = "--seconds" if name == "tests" else "--limit"
        assert made[name][made[name].index(option) + 1] == "85", "told to end before it is ended"
    assert program["DATA"].resolve() == tuned.DATA.resolve()


@pytest.mark.slow
def test_a_machine_without_a_compiler_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    machine = runpy.run_path(str(PROGRAM))["MACHINE"]
    code, asked = session(monkeypatch, tmp_path, "--parts", "tests", parts={"tests": ["-c", ""]}, machine=machine)
    assert (code, asked) == (2, []) and "CC names no-such-compiler" in capsys.readouterr().out


@pytest.mark.slow
def test_wheels_are_installed_without_a_network_or_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = runpy.run_path(str(PROGRAM))
    site, folder = tmp_path / "site", tmp_path / "wheels"
    site.mkdir()
    wheel(folder / "carried-1.0-py3-none-any.whl", {"carried/__init__.py": "answer = 42\n"})
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    path = program["prepare"](site, folder)
    found = """
import carried, qserve.kernels.ops as ops
from importlib.metadata import version
print(carried.answer, ops.__file__, version("qserve-llm"))
"""
    environment = {**os.environ, "PYTHONPATH": path, "CC": "false"}
    command = [sys.executable, "-c", found]
    done = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, check=True)
    answer, place, version = done.stdout.split()
    assert answer == "42" and version and Path(place).resolve() == PROGRAM.parents[3] / "kernels" / "ops.py"


def wheel(path: Path, files: dict[str, str], needs: tuple[str, ...] = ()) -> None:
    """A package of these files that asks for ``needs``."""
    path.parent.mkdir(exist_ok=True)
    name, version = path.name.split("-")[:2]
    about = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in needs]
    files = {**files, f"{about}/METADATA": "\n".join(lines) + "\n", f"{about}/RECORD": "",
             f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}  # fmt: skip
    with zipfile.ZipFile(path, "w") as made:
        for each, content in files.items():
            made.writestr(each, content)


def test_what_wheels_ask_for_travels_too(tmp_path: Path) -> None:
    """Of what the machine has not, with the conditions of its Python; a wheel of another machine is a fault."""
    program = runpy.run_path(str(PROGRAM.parent / "wheels.py"))
    asked = {"first": ("second>=2", "there", "old; python_version < '3.12'", "extra; extra == 'fast'"),
             "second": ("third[fast]",), "third": ("late; extra == 'fast'",), "late": ()}  # fmt: skip

    def download(need: Requirement, folder: Path) -> Path:
        tag = "cp311-cp311-manylinux_2_17_x86_64" if need.name == "late" else "py3-none-any"
        path = folder / f"{need.name}-2.0-{tag}.whl"
        wheel(path, {}, asked[need.name])
        return path

    program["collect"].__globals__["download"] = download
    faults = program["collect"](tmp_path, frozenset({"there"}), [Requirement("first")])
    assert {each.name.partition("-")[0] for each in tmp_path.iterdir()} == set(asked)
    assert faults == ["late-2.0-cp311-cp311-manylinux_2_17_x86_64.whl is for another machine"]


@pytest.mark.slow
def test_another_process_goes_on_where_a_test_breaks_one(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("""
        import os
        import pytest

        @pytest.mark.parametrize("n", range(3))
        def test_one(n):
            if n == 1:
                os._exit(9)

        def test_two(): pass
    """)
    monkeypatch.setenv("PYTHONPATH", str(PROGRAM.parents[3]))
    done = pytester.runpytest_subprocess("-n", "1", "-p", "tests.kernels.triton.deadline")
    done.assert_outcomes(passed=3, failed=1)


@pytest.mark.slow
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
    monkeypatch.setenv("PYTHONPATH", str(PROGRAM.parents[3]))
    for seconds, result in (("0", "skipped"), ("1000", "passed")):
        done = pytester.runpytest_subprocess("-v", "-rs", "-p", "tests.kernels.triton.deadline", "--seconds", seconds)
        lines = [line.partition("::")[2] for line in done.outlines if "::test" in line]
        assert [line.split()[0][5:] for line in lines] == ["first[0]", "second[0]", "first[1]", "second[1]"]
        assert done.parseoutcomes() == {result: 4} and done.ret == 0
