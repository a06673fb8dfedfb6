"""The tool that chooses constants on validation text and reports on test text."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from qserve.quantize import fitted

ROOT = Path(__file__).resolve().parents[2]


def test_a_constant_is_chosen_on_one_text_and_reported_on_another(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for start, name in enumerate(("calibration", "validation", "test")):
        words = " ".join(f"w{n}" for n in range(1000 * start, 1000 * start + 150))
        (tmp_path / f"{name}.txt").write_text(words)
    texts = [each for name in ("calibration", "validation", "test") for each in (f"--{name}", tmp_path / f"{name}.txt")]
    options = "--bits 3 --group-size 32 --samples 4 --sequence-length 64 --effort fast"
    command = ["SHRINKAGE", "0,50", tiny_model, tmp_path / "out", *texts, "--tokens", 256, "--window", 64]
    command += ["--options", options]
    main = runpy.run_path(str(ROOT / "docs/notes/fitted-constants/choose.py"))["main"]
    chosen = main([str(each) for each in command])
    made = {value: tmp_path / "out" / f"SHRINKAGE-{value}-validation.json" for value in ("0", "0.1", "50")}
    values = {
        name: next(each["value"] for each in json.loads(path.read_text())["metrics"] if each["name"] == "kl_mean")
        for name, path in made.items()
    }
    assert len(set(values.values())) == 3 and f"{chosen:g}" == min(values, key=lambda name: values[name])
    tested = sorted(path.name for path in (tmp_path / "out").glob("*-test.json"))
    assert tested == sorted({f"SHRINKAGE-{chosen:g}-test.json", "SHRINKAGE-0.1-test.json"})
    assert fitted.SHRINKAGE.value == 0.1, "only changed while a checkpoint is made"
    assert "on the validation text" in capsys.readouterr().out
