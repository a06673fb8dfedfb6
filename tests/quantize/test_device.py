"""Quantizing on another device than the CPU: on one that pretends here, on a GPU where there is one (``-m gpu``)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from qserve.calibration.skeleton import Skeleton
from qserve.calibration.text import Text, load_text
from qserve.calibration.visit import Visit
from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.checkpoint.hf import HFDirectory
from qserve.kernels import native
from qserve.quantize import forecast, pipeline, prepare, windows
from qserve.quantize.block import BlockQuantizer, BlockResult
from qserve.quantize.imatrix import sums
from qserve.quantize.job import QuantizeJob
from qserve.quantize.report import QuantizeReport
from tests.pretend_device import pretended
from tests.tiny_model import save_tiny_model

# Without gradients, which the device that pretends has none of.
JOBS: dict[str, dict[str, Any]] = {
    "gptq": dict(),
    "in the order of the inputs, from disk": dict(effort="fast", act_order=False, offload=True),
    "awq asymmetric": dict(method="awq", symmetric=False),
    "a head and a cache": dict(head_bits=8, kv_cache="int8", kv_granularity="head"),
    "fp8 by gptq": dict(scheme="fp8-static", method="gptq"),
    "nvfp4": dict(scheme="nvfp4"),
    "w8a8": dict(scheme="w8a8"),
    "hqq": dict(method="hqq", symmetric=False),
    "mixed": dict(target_bits=4.5),
    "without text": dict(method="rtn", calibration=None),
}
QUICK = "gptq", "without text"
LEARNED: dict[str, dict[str, Any]] = {"yaqa": dict(method="yaqa"), "best": dict(effort="best")}
TRELLIS: dict[str, dict[str, Any]] = {"trellis": dict(scheme="trellis")}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HFDirectory:
    def shortened(name: str, split: Any) -> Text:
        text = load_text(name, split)
        return dataclasses.replace(text, text=text.text[:20_000])

    monkeypatch.setattr(windows, "load_text", shortened)
    if not torch.cuda.is_available():  # matrices that tell a GPU's speed take a CPU minutes
        monkeypatch.setattr(forecast, "_speed", lambda device: forecast._Speed(1e12, 1e12, 1e12))
    return HFDirectory(save_tiny_model(tmp_path / "model", width=32, layers=2))


def quantized(source: HFDirectory, out: Path, options: dict[str, Any], device: str = "cpu") -> QuantizeReport:
    job: dict[str, Any] = dict(samples=16, sequence_length=32, group_size=32, calibration="builtin", device=device)
    return pipeline.run(source, out, QuantizeJob(**job | options))


def compare(found: QuantizeReport, expected: QuantizeReport, folders: tuple[Path, Path], *, within: float) -> None:
    """The same choices, errors that differ by chance alone, and weights that stand for nearly the same numbers: the
    first ones ``within`` so much, those behind them within a quarter. Attention may be computed in another way on a
    device, and in a model as small as this one code that moves for it moves a tenth of what is behind it."""
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert (one.module, one.scheme, one.fallback) == (other.module, other.scheme, other.fallback)
        assert one.error == pytest.approx(other.error, rel=0.2, abs=1e-4), one.module
    here, there = (HFDirectory(folder) for folder in folders)
    # A scale that moves between layers changes their weights and not what the model computes.
    for name in () if "awq" in found.spec.method or "smooth" in found.spec.method else here.linears():
        ours, theirs = here.linear(name).dequantize(), there.linear(name).dequantize()
        first = name.endswith(("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"))
        assert float((ours - theirs).norm() / theirs.norm()) < (within if first else max(within, 0.25)), name


@pytest.mark.parametrize("options", [
    options if name in QUICK else pytest.param(options, marks=pytest.mark.slow) for name, options in JOBS.items()
], ids=JOBS)  # fmt: skip
def test_tensors_move_as_they_must(
    options: dict[str, Any], source: HFDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "missing", lambda: "as on a GPU, torch computes")
    expected = quantized(source, tmp_path / "cpu", options)
    with pretended(monkeypatch) as device:
        monkeypatch.setattr(prepare, "device_of", lambda job: device)
        monkeypatch.setattr(forecast, "_free_bytes", lambda device: 1 << 34)
        found = quantized(source, tmp_path / "there", options)
    assert found.forecast.device_bytes > 0 and expected.forecast.device_bytes == 0
    compare(found, expected, (tmp_path / "there", tmp_path / "cpu"), within=0.03)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_there(
    source: HFDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, blocks = BlockQuantizer.run, []

    def interrupted(self: BlockQuantizer, visit: Visit) -> BlockResult:
        blocks.append(visit.index)
        if blocks == [0, 1]:
            raise KeyboardInterrupt
        return run(self, visit)

    with pretended(monkeypatch) as device:
        monkeypatch.setattr(prepare, "device_of", lambda job: device)
        monkeypatch.setattr(forecast, "_free_bytes", lambda device: 1 << 34)
        quantized(source, tmp_path / "whole", {"bits": 4})
        monkeypatch.setattr(BlockQuantizer, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quantized(source, tmp_path / "out", {"bits": 4})
        quantized(source, tmp_path / "out", {"bits": 4})
    assert blocks == [0, 1, 1]
    whole, found = (HFDirectory(tmp_path / name) for name in ("whole", "out"))
    for name in whole.linears():
        assert torch.equal(found.linear(name).codes, whole.linear(name).codes), name


def test_an_importance_matrix_is_the_same_there(source: HFDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qserve.kernels.products.multiplied", lambda device=None: torch.float32)  # as that device does
    tokens = torch.randint(3, 300, (4, 32), generator=torch.Generator().manual_seed(0))
    expected = sums(Skeleton(source), tokens, lambda done, total: None)
    with pretended(monkeypatch) as device:
        found = sums(Skeleton(source, device), tokens, lambda done, total: None)
    assert found.keys() == expected.keys() and found
    for name, places in expected.items():
        torch.testing.assert_close(found[name][0][0], places[0][0], rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("options", (every := JOBS | LEARNED | TRELLIS).values(), ids=every)
def test_a_gpu_gives_the_same(options: dict[str, Any], source: HFDirectory, tmp_path: Path) -> None:
    expected = quantized(source, tmp_path / "cpu", options)
    found = quantized(source, tmp_path / "gpu", options, "cuda")
    # Two ways to round to 4 bits, in blocks that were given the inputs of another rounding. Others would be 1.4 apart.
    compare(found, expected, (tmp_path / "gpu", tmp_path / "cpu"), within=0.3)


@pytest.mark.parametrize("gpus, device, said", [
    (0, "cuda", "torch sees no GPU here"),
    (2, "cuda:2", "cuda:0 to cuda:1"),
    (2, "cuda:x", "cuda:0 to cuda:1"),
])  # fmt: skip
def test_a_gpu_that_is_not_there_is_refused(
    gpus: int, device: str, said: str, source: HFDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(prepare, "triton_missing", lambda: None)
    with pytest.raises(UsageError, match=f"--device {device}: .*{said}.*leave it out"):
        quantized(source, tmp_path / "out", {}, device)
    assert not (tmp_path / "out").exists()


def test_the_device_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(prepare, "triton_missing", lambda: None)
    chosen = {name: str(prepare.device_of(QuantizeJob(device=name))) for name in ("auto", "cpu", "cuda", "cuda:1")}
    assert chosen == {"auto": "cuda:0", "cpu": "cpu", "cuda": "cuda:0", "cuda:1": "cuda:1"}
    monkeypatch.setattr(prepare, "triton_missing", lambda: "the GPU has compute capability 6.1")
    assert prepare.device_of(QuantizeJob()).type == "cpu"
    with pytest.raises(UsageError, match="--device cuda: the GPU has compute capability 6"):
        prepare.device_of(QuantizeJob(device="cuda"))
    for unknown in ("tpu", "cpu:1", "auto:0", ""):
        with pytest.raises(UsageError, match=f"--device must be one of auto, cpu, cuda, not '{unknown}'"):
            QuantizeJob(device=unknown)


def test_a_job_that_a_gpu_has_no_room_for_is_refused(
    source: HFDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended(monkeypatch) as device:
        monkeypatch.setattr(prepare, "device_of", lambda job: device)
        monkeypatch.setattr(forecast, "_free_bytes", lambda device: 1 << 16)
        with pytest.raises(CapacityError, match="MiB of the GPU's memory are needed and 0 MiB are free"):
            quantized(source, tmp_path / "out", {})
