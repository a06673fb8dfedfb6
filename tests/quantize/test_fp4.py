"""Weights as e2m1 numbers: their scales, what error compensation gains, and a checkpoint of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.grid import E2M1
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.loaders import verdicts
from qserve.checkpoint.spec import MXFP4, NVFP4, QuantSpec, WeightScheme
from qserve.kernels import native
from qserve.quantize import fp4, gptq, pipeline, rtn
from qserve.quantize.job import QuantizeJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from tests.quantize.test_gptq import layer

SCHEMES = pytest.mark.parametrize("scheme", [NVFP4, MXFP4], ids=["NVFP4", "MXFP4"])
SMALL: dict[str, Any] = dict(samples=4, sequence_length=32, calibration="builtin")


def stats_of(x: torch.Tensor) -> LayerStats:
    stats = LayerStats(x.shape[1], hessian=True)
    stats.update(x)
    return stats


@pytest.mark.parametrize("compiled", [True, False])
@SCHEMES
def test_weights_that_the_numbers_hold_come_back_exactly(scheme: WeightScheme, compiled: bool, monkeypatch) -> None:
    if not compiled:
        monkeypatch.setattr(native, "missing", lambda: "left out")
    numbers = E2M1.numbers(torch.randint(0, 16, (50, 96), dtype=torch.uint8))
    numbers[:, ::16] = 6
    sizes = torch.exp2(torch.randint(-3, 3, (50, 96 // scheme.group_size)))
    if scheme == NVFP4:
        sizes = sizes * (1 + torch.randint(0, 8, sizes.shape) / 8)
    weight = numbers * sizes.repeat_interleave(scheme.group_size, 1) * 2.0**-9
    packed = rtn.quantize(weight, None, scheme).weight
    packed.check()
    assert torch.equal(packed.dequantize(), weight)


@SCHEMES
def test_scales_are_nearly_the_best_that_can_be_stored(scheme: WeightScheme) -> None:
    weight, importance = torch.randn(40, 64), torch.rand(64).square()
    scales = fp4.search(weight, importance, scheme)
    shared = fp4.global_scale(scales, scheme)

    def errors(scales: torch.Tensor) -> torch.Tensor:
        spread = scales.repeat_interleave(scheme.group_size, 1)
        lost = E2M1.numbers(fp4.encode(weight / spread)).mul(spread).sub(weight).square().mul(importance)
        return lost.view(40, -1, scheme.group_size).sum(2)

    best = errors(scales)
    least = torch.stack([errors(fp4.storable(scales * step, shared)) for step in torch.arange(0.2, 4, 0.01).tolist()])
    assert float(best.sum()) < 1.003 * float(least.amin(0).sum())
    absmax = fp4.storable(weight.view(40, -1, scheme.group_size).abs().amax(2) / 6, shared)
    assert float(best.sum()) < 0.8 * float(errors(absmax).sum())


@SCHEMES
def test_storable_numbers_are_the_nearest_ones(scheme: WeightScheme) -> None:
    shared = 64.0 if scheme == NVFP4 else None
    wanted = torch.cat([torch.logspace(-4, 0.7, 300), torch.tensor([0.0, -1.0, 1e30])])
    found = fp4.storable(wanted, shared)
    assert torch.equal(fp4.storable(found, shared), found) and bool((found > 0).all() & found.isfinite().all())
    if shared is None:
        every = torch.exp2(torch.arange(-40, 40))
    else:
        every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / shared
    nearest = (wanted[:300, None] - every).abs().amin(1)
    torch.testing.assert_close((wanted - found)[:300].abs(), nearest)


def test_the_global_scale_serves_all_outputs() -> None:
    """It is the same for all parts of a weight that were rounded together, and a power of two."""
    weight = torch.randn(200, 64) * torch.logspace(-3, 0, 200)[:, None]
    stats = stats_of(torch.randn(500, 64))
    result = gptq.quantize(weight, stats, NVFP4)
    shared = result.weight.global_scale
    assert shared is not None and 224 < float(result.weight.scales.max()) * shared <= 448
    assert torch.equal(torch.tensor(shared).frexp().mantissa, torch.tensor(0.5))
    assert result.rows(0, 64).weight.global_scale == result.rows(64, 200).weight.global_scale == shared
    numbers = result.weight.scales * shared
    assert torch.equal(numbers, numbers.to(torch.float8_e4m3fn).float())


@SCHEMES
def test_each_step_loses_less(scheme: WeightScheme) -> None:
    weight, _, stats = layer(out=96, inp=128, seed=1)
    inverse = gptq.inverse_of(stats)
    nearest = float(rtn.quantize(weight, stats, scheme).error.sum())
    swept = float(gptq.quantize_with(inverse, weight, stats, scheme, descends=False).error.sum())
    descended = float(gptq.quantize(weight, stats, scheme).error.sum())
    assert descended < 0.9 * swept < 0.9 * 0.9 * nearest


@SCHEMES
def test_zero_tiny_huge_and_broken_weights(scheme: WeightScheme) -> None:
    weight = torch.randn(40, 64)
    weight[0], weight[1], weight[2, 5] = 0, 1e-38, 1e4
    for method in (rtn.quantize, gptq.quantize):
        packed = method(weight, stats_of(torch.randn(300, 64)), scheme).weight
        packed.check()
        assert bool((packed.scales > 0).all()) and int(packed.dequantize()[0].count_nonzero()) == 0
    assert rtn.quantize(torch.zeros(4, 64), None, scheme).weight.dequantize().count_nonzero() == 0
    dead = stats_of(torch.zeros(300, 64))
    gptq.quantize(weight, dead, scheme).weight.check()
    broken = stats_of(torch.full((300, 64), torch.nan))
    assert gptq.quantize(weight, broken, scheme).fallback


@pytest.mark.slow
@pytest.mark.usefixtures("little_text")
@pytest.mark.parametrize(("name", "options"), [
    ("nvfp4", {}), ("nvfp4", dict(method="rtn")), ("nvfp4", dict(method="gptq")),
    ("nvfp4a16", dict(method="awq+gptq")),
    *((name, options) for name in ("nvfp4a16", "mxfp4a16")
      for options in (dict(), dict(method="yaqa"), dict(method="rtn", calibration=None))),
], ids=str)  # fmt: skip
def test_a_model_is_quantized_and_served(name: str, options: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    job = QuantizeJob(**{**SMALL, "scheme": name, **options})
    report = pipeline.run(HFDirectory(llama), tmp_path / "out", job)
    read = HFDirectory(tmp_path / "out")
    read.verify()
    assert read.spec is not None and read.spec.weights == job.weights
    assert report.format == "compressed-tensors" and not any(each.fallback for each in report.layers)
    stored = load_file(tmp_path / "out/model.safetensors")
    shared = {name: float(part) for name, part in stored.items() if name.endswith("weight_global_scale")}
    assert bool(shared) == (name != "mxfp4a16") and read.spec.activations == job.activations
    assert any(each.endswith("input_global_scale") for each in stored) == (name == "nvfp4")
    for module in read.linears() if shared else ():
        for one, other in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
            alike = f"{module}.weight_global_scale".replace(one, other)
            assert shared[f"{module}.weight_global_scale"] == shared[alike]  # loaders fuse them
    scored = []
    for kernels in ("reference", "auto"):
        engine = Engine(read, EngineConfig(kv_cache_memory=1 << 18, threads=2, kernels=kernels, kv_cache_dtype="fp16"))
        scored.append(torch.cat([logprobs for _, logprobs in engine.score(list(range(1, 65)))]))
    assert float((scored[0] - scored[1]).abs().max()) < 0.05


def test_outliers_of_inputs_move_into_weights_and_gptq_makes_up_for_both() -> None:
    """What a norm gives is divided where outliers are, for inputs in four bits lose most there."""
    from qserve.checkpoint.spec import NVFP4_INPUTS
    from qserve.kernels.reference import round_input
    from qserve.quantize import smoothquant
    from qserve.quantize.layer import static_scales

    torch.manual_seed(0)
    x = torch.randn(1500, 96) * torch.logspace(-0.5, 0.5, 96)[torch.randperm(96)]
    x[:, ::16] *= 12
    weight = torch.randn(64, 96)
    stats = LayerStats(96, hessian=True, sample_rows=256)
    stats.update(x[:1000])

    def lost(scale: torch.Tensor) -> float:
        found = gptq.quantize(weight * scale, stats.divided(scale), NVFP4).weight.dequantize()
        step = float(static_scales((stats.absmax / scale).max(), NVFP4_INPUTS.grid))
        rounded = round_input(x[1000:] / scale, NVFP4_INPUTS, step)
        return float((rounded @ found.t() - x[1000:] @ weight.t()).square().sum())

    scale = smoothquant.search([weight], stats, NVFP4, NVFP4_INPUTS)
    assert scale is not None and lost(scale) < 0.8 * lost(torch.ones(96))


@pytest.mark.parametrize(("options", "words"), [
    (dict(method="hqq", symmetric=False), "hqq finds zero points, which --scheme nvfp4a16 has none of"),
    (dict(method="smoothquant+gptq"), "smoothquant.gptq is for rounded inputs"),
    (dict(effort="best"), "--effort best is for weights alone"), (dict(target_bits=4.0), "mixed precision is for"),
    (dict(scheme="nvfp4", calibration=None, method="rtn"), "--scheme nvfp4 needs calibration text"),
    (dict(scheme="nvfp4", method="yaqa"), "yaqa is for weights alone"),
])  # fmt: skip
def test_options_that_make_no_sense_with_it(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        QuantizeJob(**{"scheme": "nvfp4a16", **options})


def test_inputs_that_groups_do_not_divide_stay_in_floating_point() -> None:
    from qserve.quantize.schemes import Shapes, assign

    shapes = Shapes({"a": (64, 64), "b": (64, 40), "c": (64, 48)}, "embed", (100, 64), tied=True)
    for name, kept in (("nvfp4a16", {"b"}), ("mxfp4a16", {"b", "c"}), ("mxfp8", {"b", "c"})):
        spec, notices = assign(QuantizeJob(scheme=name), shapes)
        assert kept == {module for module in "abc" if spec.scheme_of(module) is None}
        assert any("stay in floating point" in notice for notice in notices)


def test_who_loads_it() -> None:
    from qserve.checkpoint.formats import COMPRESSED_TENSORS

    def accepted(spec: QuantSpec, shape: tuple[int, int]) -> set[str]:
        judged = verdicts(spec, {"model.a": shape}, format=COMPRESSED_TENSORS)
        return {verdict.loader for verdict in judged if verdict.accepts}

    for scheme in (NVFP4, MXFP4):
        assert accepted(QuantSpec("gptq", scheme), (512, 256)) == {"qserve", "vllm", "transformers"}
        assert accepted(QuantSpec("gptq", scheme), (96, 256)) == {"qserve", "transformers"}
    both = QuantSpec("gptq", NVFP4, QuantizeJob(scheme="nvfp4").activations)
    assert accepted(both, (96, 160)) == {"qserve", "vllm", "sglang", "transformers"}
    assert accepted(both, (96, 144)) == {"qserve", "transformers"}
    hopper = QuantizeJob(scheme="w4afp8")
    both = QuantSpec("gptq", hopper.weights, hopper.activations)
    assert accepted(both, (96, 256)) == {"qserve", "vllm", "transformers"}
    (vllm,) = verdicts(both, {"model.a": (96, 256)}, ["vllm"], format=COMPRESSED_TENSORS)
    assert "Hopper" in vllm.reason
    mxfp8 = QuantizeJob(scheme="mxfp8")
    both = QuantSpec("rtn", mxfp8.weights, mxfp8.activations)
    assert accepted(both, (96, 256)) == {"qserve", "vllm", "transformers"}
    smaller = QuantSpec("gptq", WeightScheme(4, 64), hopper.activations)
    assert accepted(smaller, (96, 256)) == {"qserve", "transformers"}
