"""Trellis codes: the path that the encoder finds, what error compensation gains by it, and a model of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import WeightScheme
from qserve.checkpoint.trellis import RING, STATE_BITS, PackedTrellis, codes_of_states, states_of_symbols
from qserve.kernels import native, rounding
from qserve.quantize import block, gptq, pipeline, rtn, trellis
from qserve.quantize.job import QuantizeJob
from qserve.quantize.layer import LayerResult
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams
from tests.quantize.test_gptq import layer, loss

BITS = pytest.mark.parametrize("bits", [2, 3, 4])
c_kernels = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
SMALL: dict[str, Any] = dict(
    scheme="trellis", bits=2, samples=4, sequence_length=32, group_size=32, calibration="builtin"
)


def scheme_of(bits: int, group: int = 64) -> WeightScheme:
    return WeightScheme(bits, group, dtype="trellis")


def problem(out: int, inp: int, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A weight, its scales, the factor of its inverse Hessian, and the order of inputs in that."""
    weight, _, stats = layer(out=out, inp=inp, seed=bits)
    inverse = gptq.inverse_of(stats)
    assert inverse.factor is not None and not torch.equal(inverse.order, torch.arange(inp))
    return weight, trellis.group_scales(weight, stats.diagonal, scheme_of(bits, 8)), inverse.factor.upper, inverse.order


def numbers_of(symbols: Tensor, bits: int) -> Tensor:
    return scheme_of(bits).grid.numbers(codes_of_states(states_of_symbols(symbols, bits)))


@c_kernels
@BITS
@pytest.mark.parametrize(
    ("out", "inp", "compensates"), [(64, 40, True), (80, 16, True), (100, 40, True), (100, 16, False)]
)
def test_the_sweep_is_that_of_torch(bits: int, out: int, inp: int, compensates: bool) -> None:
    weight, scales, upper, order = problem(out, inp, bits)
    factor = upper if compensates else None
    expected = trellis.sweep_with_torch(weight, scales, factor, order, scheme_of(bits, 8))
    for isa in native.available():
        found = rounding.trellis_sweep(weight, factor, order, scales, bits, isa=isa, threads=2)
        assert torch.equal(found, expected), isa


@c_kernels
@pytest.mark.parametrize("isa", native.available())
def test_errors_are_counted_from_the_aims(isa: native.Isa) -> None:
    """Of two inputs: the second makes up for what the first loses of its aim."""
    weight, aims, scales = torch.randn(64, 2), torch.randn(64, 2), torch.full((64, 1), 0.1)
    upper, order = torch.tensor([[0.5, 0.3], [0.0, 0.7]]), torch.tensor([1, 0])
    found = rounding.trellis_sweep(weight, upper, order, scales, 3, aims=aims, isa=isa)
    lost = aims[:, 1] - numbers_of(found[0, 1], 3) * 0.1
    later = torch.stack([weight[:, 0] - 0.3 * lost / 0.5, weight[:, 1]], 1)
    alone = rounding.trellis_sweep(later, None, order, scales, 3, isa=isa)
    assert torch.equal(found, alone)
    assert not torch.equal(found, rounding.trellis_sweep(weight, upper, order, scales, 3, isa=isa))


@c_kernels
def test_neither_threads_nor_other_rings_change_a_ring() -> None:
    weight, scales, upper, order = problem(200, 40, 2)
    found = rounding.trellis_sweep(weight, upper, order, scales, 2, threads=1)
    assert torch.equal(found, rounding.trellis_sweep(weight, upper, order, scales, 2, threads=3))
    part = slice(64, 192)
    assert torch.equal(found[1:3], rounding.trellis_sweep(weight[part], upper, order, scales[part], 2))
    with pytest.raises(ValueError, match="no sweep"):
        rounding.trellis_sweep(weight, upper, order, scales[:3], 2)


def rings(bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Eight rings of numbers, what an error of each costs, and the symbols found for them."""
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(8, RING, generator=generator) * trellis._DEVIATION
    scales = torch.rand(8, RING, generator=generator) + 0.1
    weight = (x * scales).flatten()[:, None]
    packed = trellis.sweep(weight, None, torch.arange(1), scales.flatten()[:, None], scheme_of(bits))
    steps = scheme_of(bits).grid.numbers(packed.unpack().view(8, RING))
    worth = scales.square()
    symbols = rounding.trellis_sweep(weight, None, torch.arange(1), scales.flatten()[:, None].contiguous(), bits)[:, 0]
    assert torch.equal(numbers_of(symbols, bits), steps)
    return x, worth, symbols


def cost(x: Tensor, worth: Tensor, symbols: Tensor, bits: int) -> Tensor:
    return ((x - numbers_of(symbols, bits)).square() * worth).sum(-1)


def greedy(x: Tensor, bits: int) -> Tensor:
    """Each weight takes the best of the numbers that those before it leave."""
    symbols, state = torch.zeros(x.shape, dtype=torch.uint8), torch.zeros(len(x), dtype=torch.int32)
    for at in range(RING):
        ways = state[:, None] >> bits | torch.arange(1 << bits, dtype=torch.int32) << (STATE_BITS - bits)
        best = (scheme_of(bits).grid.numbers(codes_of_states(ways)) - x[:, at, None]).square().argmin(1)
        symbols[:, at], state = best.to(torch.uint8), ways.gather(1, best[:, None])[:, 0]
    return symbols


@c_kernels
@BITS
def test_no_other_path_costs_less(bits: int) -> None:
    x, worth, found = rings(bits)
    least = cost(x, worth, found, bits)
    generator = torch.Generator().manual_seed(0)
    others = torch.randint(0, 1 << bits, (200, *found.shape), generator=generator).to(torch.uint8)
    assert bool((cost(x, worth, others, bits) > 5 * least).all())
    assert bool((cost(x, worth, greedy(x, bits), bits) > 4 * least).all())
    # Nor one that leaves the path and returns to it, but for where it is closed, whose state is chosen before.
    changed = found.expand(500, *found.shape).clone()
    inner = RING - STATE_BITS // bits
    for _ in range(3):
        at = torch.randint(0, inner, (500, len(found), 1), generator=generator)
        changed.scatter_(2, at, torch.randint(0, 1 << bits, at.shape, generator=generator).to(torch.uint8))
    assert bool((cost(x, worth, changed, bits) > least * (1 - 1e-5)).all())


@c_kernels
def test_the_state_at_the_seam_is_nearly_the_best() -> None:
    """Of 256. The path is the best of those that have it."""
    x, worth, found = rings(4)
    states = trellis._in_stream(torch.arange(1 << STATE_BITS, dtype=torch.int32), 4)
    numbers = scheme_of(4).grid.numbers(codes_of_states(states))
    more = []
    for one, weights, symbols in zip(x[:3], worth, found):
        every = trellis._path(one.expand(256, -1), weights.expand(256, -1), numbers, 4, torch.arange(256))
        least = float(cost(one, weights, (every & 15).to(torch.uint8), 4).min())
        more.append(float(cost(one, weights, symbols, 4)) / least)
    assert min(more) > 1 - 1e-5 and sum(more) / len(more) < 1.08


def error_of(weight: Tensor, result: LayerResult, x: Tensor) -> float:
    result.weight.check()
    assert isinstance(result.weight.stored, PackedTrellis) == (result.weight.scheme.dtype == "trellis")
    return float(loss(weight, result.weight.dequantize(), x))


@BITS
@pytest.mark.parametrize("out", [64, 100])
def test_it_loses_less_than_integers_of_as_many_bits(bits: int, out: int) -> None:
    """By error compensation, which gains as much as it does there, and without."""
    weight, x, stats = layer(out=out, inp=128)
    integers, own = WeightScheme(bits, 64), scheme_of(bits)
    found = {each: error_of(weight, gptq.quantize(weight, stats, each), x) for each in (integers, own)}
    nearest = {each: error_of(weight, rtn.quantize(weight, stats, each), x) for each in (integers, own)}
    assert found[own] < 0.75 * found[integers] and nearest[own] < 0.78 * nearest[integers]
    assert found[own] < 0.5 * nearest[own]
    result = gptq.quantize(weight, stats, own)
    measured = found[own] / float((weight.double() @ x.double().t()).square().sum())
    assert result.report("a").error == pytest.approx(measured, rel=1e-3) and result.fallback == ""


def dominated(seed: int, factor: float) -> tuple[Tensor, Tensor, LayerStats]:
    weight, x, _ = layer(out=128, inp=128, seed=seed)
    x[:, 37] *= factor
    stats = LayerStats(128)
    stats.update(x)
    return weight, x, stats


@BITS
def test_a_scale_is_that_of_the_input_that_counts_for_its_whole_group(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, gains = scheme_of(bits), torch.zeros(3, 2)
    for seed in range(3):
        weight, x, stats = dominated(seed, 30.0)
        scales, plain = (trellis.group_scales(weight, each, own) for each in (stats.diagonal, torch.ones(128)))
        ratio = scales / plain
        assert torch.equal(scales[:, 1], plain[:, 1])
        assert 0.69 < float(ratio.min()) < 0.9 < 1.1 < float(ratio.max()) < 1.41
        several = torch.ones(128).index_fill(0, torch.arange(3), 900.0)
        assert torch.equal(trellis.group_scales(weight, several, own), plain)
        with_it = [error_of(weight, method.quantize(weight, stats, own), x) for method in (gptq, rtn)]
        with monkeypatch.context() as patch:
            patch.setattr(trellis, "group_scales", lambda *_, plain=plain: plain.clone())
            without = [error_of(weight, method.quantize(weight, stats, own), x) for method in (gptq, rtn)]
        gains[seed] = torch.tensor(with_it) / torch.tensor(without)
    assert float(gains.mean(0).max()) < {2: 0.95, 3: 0.85, 4: 0.78}[bits]


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_input_of_300_times_the_others(bits: int, seed: int) -> None:
    weight, x, _ = dominated(seed, 1.0)
    x[:, 37] = 300 * x.std() * torch.randn(len(x), generator=torch.Generator().manual_seed(seed))
    stats = LayerStats(128)
    stats.update(x)
    integers, own = (gptq.quantize(weight, stats, each) for each in (WeightScheme(bits, 64), scheme_of(bits)))
    assert error_of(weight, own, x) < 0.7 * error_of(weight, integers, x)


@BITS
def test_without_statistics_every_input_counts_the_same(bits: int) -> None:
    weight, _, _ = layer(out=80, inp=64)
    result = rtn.quantize(weight, None, scheme_of(bits, 32))
    assert isinstance(result.weight.stored, PackedTrellis) and result.weight.codes.shape == (80, 64)
    most = {2: 0.09, 3: 0.025, 4: 0.008}[bits]  # a normal distribution loses 1 / 16, 1 / 64 and 1 / 256 at least
    assert 2.0 ** (-2 * bits) < result.report("a").error < most


@pytest.mark.parametrize("act_order", [True, False])
def test_weights_and_groups_of_zeros(act_order: bool) -> None:
    """Without error compensation they stay zeros; with it, what is zero may make up for what is not."""
    weight, _, stats = layer(out=80, inp=64, dead=(3, 40))
    weight[:, :32] = 0
    weight[7] = 0
    for each in (weight, torch.zeros(80, 64)):
        nearest = rtn.quantize(each, None, scheme_of(2, 32)).weight.dequantize()
        assert float(nearest[7].abs().max()) < 1e-5 and float(nearest[:, :32].abs().max()) < 1e-5
        result = gptq.quantize(each, stats, scheme_of(2, 32), act_order=act_order)
        result.weight.check()
        assert float(result.weight.dequantize()[7].abs().max()) < 1e-5
        assert float(result.error.sum()) <= 0.2 * float(result.energy.sum()) + 1e-6


def test_inputs_that_are_dead_or_not_finite() -> None:
    weight, x, stats = layer(out=80, inp=64)
    dead = LayerStats(64)
    dead.update(torch.zeros(50, 64))
    result = gptq.quantize(weight, dead, scheme_of(3, 32))
    nearest = rtn.quantize(weight, None, scheme_of(3, 32))
    assert result.dead_inputs == 64 and torch.equal(result.weight.codes, nearest.weight.codes)
    x[3, 7] = torch.nan
    stats.update(x)
    result = gptq.quantize(weight, stats, scheme_of(3, 32))
    assert "NaN" in result.fallback and torch.equal(result.weight.codes, nearest.weight.codes)
    few = LayerStats(64)
    few.update(x[10:20])
    gptq.quantize(weight, few, scheme_of(3, 32)).weight.check()


@c_kernels
@pytest.mark.parametrize("isa", native.available())
def test_what_is_not_finite_stays_in_its_ring(isa: native.Isa) -> None:
    weight, scales, upper, order = problem(128, 40, 3)
    expected = rounding.trellis_sweep(weight, upper, order, scales, 3, isa=isa)
    bad = weight.clone()
    bad[7, 5], bad[33, 0], bad[40, 39] = torch.nan, torch.inf, -torch.inf
    broken = scales.clone()
    broken[50, 1], broken[51, 0], broken[52, 0] = torch.nan, torch.inf, 0.0
    for each, spread in ((bad, scales), (weight, broken)):
        found = rounding.trellis_sweep(each, upper, order, spread, 3, isa=isa)
        assert torch.equal(found[1], expected[1]) and not torch.equal(found[0], expected[0])
        assert int(found.max()) < 8


@pytest.mark.parametrize(("options", "words"), [
    (dict(symmetric=False), "no zero points"), (dict(bits=8), "2 or 3 or 4 bits"), (dict(bits=5), "2 or 3 or 4 bits"),
    (dict(method="awq"), "--scheme trellis is for --method .*, not awq"), (dict(method="awq+gptq"), "not awq"),
    (dict(method="hqq", symmetric=False), "not hqq"), (dict(method="smoothquant"), "for rounded inputs"),
    (dict(effort="best", method="rtn"), "--effort best learns"),
    (dict(target_bits=3.0), "mixed precision is for"), (dict(max_kl=0.1), "mixed precision is for"),
    (dict(calibration=None), "gptq needs calibration"), (dict(group_size=12), "group size"),
])  # fmt: skip
def test_options_that_make_no_sense_with_it(options: dict[str, Any], words: str) -> None:
    QuantizeJob(**SMALL)
    with pytest.raises(UsageError, match=words) as caught:
        QuantizeJob(**SMALL | options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "words"), [
    *((dict(format=format), "trellis") for format in ("gptq", "gptq_v2", "awq", "fp8", "gguf")),
    (dict(loaders=("qserve", "vllm")), "vllm would refuse .*: trellis codes are a layout of qserve's own"),
])  # fmt: skip
def test_formats_and_loaders_that_lack_it(llama: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        pipeline.run(HFDirectory(llama), tmp_path / "out", QuantizeJob(**SMALL | options))
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("little_text")
@pytest.mark.parametrize(("model", "options"), [
    ("llama", {}), ("qwen2", dict(bits=3)), ("llama", dict(method="rtn", calibration=None, bits=4, head_bits=8)),
    ("qwen2", dict(effort="fast", act_order=False, kv_cache="fp8", embedding_bits=6)), ("mixtral", dict(bits=3)),
    ("llama", dict(method="yaqa")),
], ids=str)  # fmt: skip
def test_a_model_is_quantized_and_served(
    model: str, options: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    job = QuantizeJob(**SMALL | options)
    report = pipeline.run(HFDirectory(request.getfixturevalue(model)), tmp_path / "out", job)
    read = HFDirectory(tmp_path / "out")
    read.verify()
    assert read.spec is not None and read.spec.weights == job.weights and read.format is not None
    assert report.format == read.format.name == "compressed-tensors"
    assert {verdict.loader for verdict in report.verdicts if verdict.accepts} == {"qserve"}
    inner = [layer for layer in report.layers if layer.module.endswith(("_proj", ".w1", ".w2", ".w3"))]
    assert len(inner) >= 14 and all(0 < layer.error < 0.5 and not layer.fallback for layer in inner)
    assert all(isinstance(read.linear(layer.module).stored, PackedTrellis) for layer in inner)
    scored, texts = [], []
    for kernels in ("reference", "auto"):
        engine = Engine(read, EngineConfig(kv_cache_memory=1 << 18, threads=2, kernels=kernels, kv_cache_dtype="fp16"))
        logprobs = torch.cat([logprobs for _, logprobs in engine.score(list(range(1, 65)))])
        scored.append(logprobs - logprobs.mean(-1, keepdim=True))
        params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
        texts.append([output.token_ids for output in engine.generate([[5, 6, 7], [8, 9]], [params, params])])
    # Of most tokens: some choose another expert, because their inputs were rounded.
    assert float(((scored[0] - scored[1]).norm(dim=-1) / scored[0].norm(dim=-1)).median()) < 0.03
    assert model == "mixtral" or texts[0] == texts[1]


@pytest.mark.usefixtures("little_text")
@pytest.mark.parametrize("options", [{}, dict(method="rtn", calibration=None)], ids=str)
def test_a_run_that_was_interrupted_goes_on_to_the_same_bytes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    source, job = HFDirectory(llama), QuantizeJob(**SMALL | options)
    pipeline.run(source, tmp_path / "whole", job)
    original, seen = block.BlockQuantizer.run, list[str]()

    def first_only(self: block.BlockQuantizer, visit: Any) -> block.BlockResult:
        if seen:
            raise KeyboardInterrupt
        seen.append(visit.name)
        return original(self, visit)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(block.BlockQuantizer, "run", first_only)
        pipeline.run(source, tmp_path / "out", job)
    pipeline.run(source, tmp_path / "out", job)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
