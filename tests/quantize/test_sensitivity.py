"""Divergences of one rounded unit at a time, against rounding it in the whole model."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig, MixtralConfig

from qserve.calibration.skeleton import Skeleton
from qserve.calibration.stats import LayerStats
from qserve.checkpoint.formats import format_named
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.checkpoint.writer import CheckpointWriter
from qserve.quantize import fitted, gptq, rtn
from qserve.quantize.fitted import Fitted
from qserve.quantize.job import QuantizeJob
from qserve.quantize.mixed import sensitivity
from qserve.quantize.mixed.probe import Probe
from qserve.quantize.mixed.rounders import Compensated
from qserve.quantize.mixed.sensitivity import Compensation, excerpt, measure
from qserve.quantize.mixed.units import Unit, candidates, offered, units

SCHEMES = (WeightScheme(3, 32), WeightScheme(4, 32), WeightScheme(6, 32))
Q, K, V, OUT, GATE, UP, DOWN = (
    f"model.layers.1.{name}"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                 "mlp.up_proj", "mlp.down_proj")
)  # fmt: skip


def windows() -> Tensor:
    return torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def divergence(path: Path, unit: Unit, scheme: WeightScheme, text: Tensor | None = None) -> float:
    """Mean KL of the whole model with only ``unit`` rounded: to nearest, or by GPTQ for ``text``."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    linears = {name: model.get_submodule(name) for name in unit}
    stats = {name: LayerStats(linear.in_features, hessian=text is not None) for name, linear in linears.items()}
    hooks = [
        linear.register_forward_pre_hook(lambda _, args, name=name: stats[name].update(args[0]))
        for name, linear in linears.items()
    ]
    model(windows() if text is None else text)
    for hook in hooks:
        hook.remove()
    p = model(windows()).logits.log_softmax(-1)
    method = rtn.quantize if text is None else gptq.quantize
    for name, linear in linears.items():
        rounded = method(linear.weight.data, stats[name], scheme).weight.dequantize()
        linear.weight = torch.nn.Parameter(rounded)  # a tied embedding keeps its own
    q = model(windows()).logits.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@torch.no_grad()
def made_up_divergence(path: Path, unit: Unit, scheme: WeightScheme, text: Tensor) -> float:
    """The same by GPTQ where the linears behind ``unit`` in its block then become what fits the float model best; those
    that add to the residual stream, what brings it nearest to that model's."""
    model, base = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for _ in range(2))
    block = unit[0].rpartition(".layers.")[0] + ".layers." + unit[0].split(".layers.")[1].split(".")[0]
    stages = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"],
              ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]  # fmt: skip
    groups = [[f"{block}.{name}" for name in stage] for stage in stages]

    def inputs(of: torch.nn.Module, name: str) -> Tensor:
        seen: list[Tensor] = []
        hook = of.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        of(text)
        hook.remove()
        return seen[0].flatten(0, -2)

    for name in unit:
        linear = model.get_submodule(name)
        stats = LayerStats(linear.in_features)
        stats.update(inputs(base, name))
        linear.weight = torch.nn.Parameter(gptq.quantize(linear.weight.data, stats, scheme).weight.dequantize())
    for group in groups[groups.index(list(unit)) + 1 :]:
        now, before = inputs(model, group[0]).double(), inputs(base, group[0]).double()
        square = now.t() @ now
        mean = float(square.diagonal().mean())
        square.diagonal().mul_(1.1 + 1.4 * square.shape[0] / len(now)).add_(0.01 * mean)
        norm = {"o_proj": "input_layernorm", "down_proj": "post_attention_layernorm"}.get(group[0].rpartition(".")[2])
        gone = inputs(base, f"{block}.{norm}") - inputs(model, f"{block}.{norm}") if norm else torch.zeros(1)
        for name in group:
            linear = model.get_submodule(name)
            weight = linear.weight.data.double()
            change = torch.linalg.solve(square, now.t() @ ((before - now) @ weight.t() + gone)).t()
            linear.weight = torch.nn.Parameter((weight + fitted.MADE_UP.value * change).float())
    p, q = (each(windows()).logits.log_softmax(-1) for each in (base, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


def all_units(skeleton: Skeleton) -> dict[Unit, tuple[WeightScheme, ...]]:
    return dict.fromkeys(units(skeleton.shapes), SCHEMES)


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_the_measured_candidate_costs_what_it_costs_in_the_whole_model(model, request):
    path = request.getfixturevalue(model)
    skeleton = Skeleton(HFDirectory(path))
    offered: dict = dict(all_units(skeleton))
    if model == "qwen2":  # its output layer is its own
        offered["lm_head",] = (None, WeightScheme(4, 32), WeightScheme(8, 32))
    found = measure(skeleton, windows(), offered, around=4.5)
    assert {unit.modules for unit in found} == offered.keys()
    for unit in found:
        four = next(each for each in unit.candidates if each.scheme == WeightScheme(4, 32))
        assert four.kl == pytest.approx(divergence(path, unit.modules, WeightScheme(4, 32)), rel=1e-3, abs=1e-7)
        assert four.kl > 0
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


def test_other_candidates_are_predicted_in_proportion(llama):
    skeleton = Skeleton(HFDirectory(llama))
    for unit in measure(skeleton, windows(), all_units(skeleton), around=4.5):
        kl = {each.scheme: each.kl for each in unit.candidates}
        assert kl[SCHEMES[0]] > kl[SCHEMES[1]] > kl[SCHEMES[2]] > 0
        # Second order: what is predicted for 6 bits from 4 is what 6 bits cost. (At 3 bits this model is far gone.)
        actual = divergence(llama, unit.modules, SCHEMES[2])
        assert kl[SCHEMES[2]] == pytest.approx(actual, rel=0.5), unit.modules


@pytest.mark.usefixtures("gptq_alone")
@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_with_error_compensation_what_gptq_costs_is_measured(model, request, monkeypatch):
    monkeypatch.setattr("qserve.kernels.products.multiplied", lambda device=None: torch.float32)
    path = request.getfixturevalue(model)
    skeleton = Skeleton(HFDirectory(path))
    text = torch.cat([windows(), torch.randint(0, 256, (9, 24), generator=torch.Generator().manual_seed(2))])
    offered = all_units(skeleton)
    found = measure(skeleton, windows(), offered, around=4.5, compensation=Compensation(text, follows=False))
    nearest = measure(skeleton, windows(), offered, around=4.5)
    assert [unit.modules for unit in found] == [unit.modules for unit in nearest]
    for unit in found:
        kl = {each.scheme: each.kl for each in unit.candidates}
        assert kl[SCHEMES[0]] > kl[SCHEMES[1]] > kl[SCHEMES[2]] > 0
        expected = divergence(path, unit.modules, SCHEMES[1], text)
        # Sums in another order may round a number next to a tie the other way.
        assert kl[SCHEMES[1]] == pytest.approx(expected, rel=0.05, abs=3e-8), unit.modules


@pytest.mark.usefixtures("gptq_alone")
@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_where_the_float_model_is_followed_the_linears_behind_make_up_for_it(model, request, monkeypatch):
    monkeypatch.setattr("qserve.kernels.products.multiplied", lambda device=None: torch.float32)
    monkeypatch.setattr(fitted, "EVENING", Fitted(1.0, "nothing"))
    monkeypatch.setattr(fitted, "ALL_AT_ONCE", Fitted(1.0, "nothing"))
    path = request.getfixturevalue(model)
    skeleton = Skeleton(HFDirectory(path))
    text = torch.cat([windows(), torch.randint(0, 256, (9, 24), generator=torch.Generator().manual_seed(2))])
    offered = all_units(skeleton)
    found = measure(skeleton, windows(), offered, around=4.5, compensation=Compensation(text))
    alone = measure(skeleton, windows(), offered, around=4.5, compensation=Compensation(text, follows=False))
    for unit, by_itself in zip(found, alone, strict=True):
        both = (unit.candidates, by_itself.candidates)
        kl, without = (next(each.kl for each in some if each.scheme == SCHEMES[1]) for some in both)
        expected = made_up_divergence(path, unit.modules, SCHEMES[1], text)
        assert kl == pytest.approx(expected, rel=0.05, abs=5e-8), unit.modules
        assert (kl == without) == unit.modules[0].endswith("down_proj")  # nothing is behind it


@pytest.mark.parametrize("tokens", [96, 1000])
def test_what_rounding_cancels_out_by_chance_is_not_counted_on(tokens):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(tokens, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    weight = torch.randn(24, 64, generator=generator)
    stats = LayerStats(64)
    stats.update(inputs)
    rounder = Compensated(stats, act_order=True)
    for scheme in SCHEMES:
        change = (rounder.round(weight, scheme) - weight).double()
        hessian = 2 / tokens * inputs.double().t() @ inputs.double()
        own = float((change @ hessian).mul(change).sum())
        hessian.diagonal().mul_(1.1 + 1.4 * 64 / tokens)
        assert own < rounder.error(weight, scheme) == pytest.approx(
            float((change @ hessian).mul(change).sum()), rel=1e-3
        )


def test_what_is_rounded_to_nearest_for_infinite_inputs_has_an_error_of_its_own():
    stats = LayerStats(64)
    stats.update(torch.full((8, 64), torch.inf))
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    rounder = Compensated(stats, act_order=True)
    change = rounder.round(weight, SCHEMES[1]) - weight
    assert rounder.error(weight, SCHEMES[1]) == pytest.approx(float(change.square().sum()))


def test_differences_between_units_are_evened_but_for_experts():
    def probe(name: str) -> Probe:
        return Probe((name,), (name,), SCHEMES, (30, 40, 60), (1.0, 0.25, 0.02), 10, 1)

    probes = [probe(f"model.layers.{index}.mlp.up_proj") for index in range(4)]
    first, most, least, nothing = sensitivity._evened(probes, [1.0, 4.0, 0.25, 0.0], 2.0)
    assert most / first == pytest.approx(4**0.75) and least / first == pytest.approx(0.25**0.75) and nothing == 0.0
    assert first == pytest.approx(2.0 * (5.25 / 4) ** 0.25)
    probes.append(probe("model.layers.0.block_sparse_moe.experts.3.w1"))
    assert sensitivity._evened(probes, [1.0, 4.0, 0.25, 0.0, 1e-3], 2.0) == [first, most, least, nothing, 1e-3]


def test_sizes_are_stored_bits_in_order(qwen2):
    skeleton = Skeleton(HFDirectory(qwen2))
    (head,) = measure(skeleton, windows(), {("lm_head",): (None, WeightScheme(8, 32))})
    assert head.weights == 258 * 96 and [each.scheme for each in head.candidates] == [WeightScheme(8, 32), None]
    assert head.candidates[0].bits == WeightScheme(8, 32).storage_bits(258, 96)
    assert (head.candidates[1].bits, head.candidates[1].kl) == (16 * head.weights, 0.0)
    (qkv,) = measure(skeleton, windows(), {(Q, K, V): SCHEMES})
    shapes = [skeleton.shapes[name] for name in (Q, K, V)]
    assert [each.bits for each in qkv.candidates] == [sum(s.storage_bits(*shape) for shape in shapes) for s in SCHEMES]


def test_states_on_disk_change_nothing(llama, tmp_path):
    skeleton, steps = Skeleton(HFDirectory(llama)), []
    inside = measure(skeleton, windows(), all_units(skeleton), progress=lambda *step: steps.append(step))
    assert measure(skeleton, windows(), all_units(skeleton), offload=tmp_path) == inside
    assert steps == [(n, 5) for n in range(1, 6)] and list(tmp_path.iterdir()) == []
    followed = [
        measure(skeleton, windows(), all_units(skeleton), compensation=Compensation(windows()), offload=offload)
        for offload in (None, tmp_path)
    ]
    assert followed[0] == followed[1] != inside and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [dict(), dict(offloaded=True), dict(compensated=True)], ids=str)
def test_stopped_anywhere_it_goes_on_and_finds_the_same(qwen2, tmp_path, options):
    skeleton = Skeleton(HFDirectory(qwen2))
    offered: dict = {**all_units(skeleton), ("lm_head",): (None, WeightScheme(4, 32), WeightScheme(8, 32))}
    settings = dict(
        compensation=None if options.get("offloaded") else Compensation(windows(), follows="compensated" in options),
        offload=tmp_path if options.get("offloaded") else None,
        activations=ActivationScheme("int8") if not options else None,
    )
    told: list[int] = []

    def stopped_at(step: int):
        def progress(done: int, total: int) -> None:
            told.append(done)
            if done == step:
                raise KeyboardInterrupt

        return progress

    expected = measure(skeleton, windows(), offered, **settings)
    for step in (1, 2, 3, 4, 0):  # the second block, then two of three samples, then to the end
        with suppress(KeyboardInterrupt), CheckpointWriter(tmp_path / "out", facts={"name": "job"}) as writer:
            files = list((tmp_path / ".out.partial").glob("*/parts/*"))
            assert [path.name for path in files] == (["00001.state"] if told else [])
            found = measure(
                Skeleton(HFDirectory(qwen2)), windows(), offered, **settings, progress=stopped_at(step),
                kept=writer.kept("plan"), keep=partial(writer.keep, "plan"),
            )  # fmt: skip
            assert step == 0 and found == expected
    assert told == [1, 2, 3, 4, 5]  # nothing was done twice


@pytest.mark.parametrize(
    ("config", "behind"),
    [
        (MixtralConfig(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=2, num_local_experts=4), "self_attn.q_proj"),
        (GPTNeoXConfig(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                       num_attention_heads=4), "mlp.dense_h_to_4h"),
    ],
    ids=["experts", "parallel attention"],
)  # fmt: skip
def test_other_blocks_are_followed_as_far_as_rows_can_be_matched(config, behind, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    skeleton = Skeleton(HFDirectory(tmp_path))
    text = torch.cat([windows()] * 3)
    found, alone = (
        measure(skeleton, windows(), all_units(skeleton), around=4.5, compensation=Compensation(text, follows=follows))
        for follows in (True, False)
    )
    assert [unit.modules for unit in found] == [unit.modules for unit in alone] == list(all_units(skeleton))
    kl = {unit.modules[0]: (unit.candidates[0].kl, before.candidates[0].kl) for unit, before in zip(found, alone)}
    for name, (followed, before) in kl.items():
        if "experts" in name:
            assert followed == before > 0
        elif name.endswith(behind):
            assert 0 < followed != before


def test_units_are_what_loaders_fuse():
    experts = [f"model.layers.0.mlp.experts.{n}.{w}" for n in range(3) for w in ("gate_proj", "up_proj", "down_proj")]
    assert units([Q, K, V, OUT, GATE, UP, DOWN, "lm_head", *experts, "transformer.h.0.attn.c_attn"]) == [
        (Q, K, V), (OUT,), (GATE, UP), (DOWN,), ("lm_head",), tuple(experts), ("transformer.h.0.attn.c_attn",)
    ]  # fmt: skip


def test_candidates_are_what_format_and_loaders_take():
    shapes = {Q: (576, 576), K: (192, 576), V: (192, 576), DOWN: (576, 1536), OUT: (30, 30)}
    found = candidates(shapes, format_named("gptq"), ("qserve",))
    assert found.keys() == {(Q, K, V), (DOWN,)}
    assert {(s.bits, s.group_size) for s in found[Q, K, V]} == {
        (2, 32), (2, 64), (3, 32), (3, 64), (4, 32), (4, 64), (4, -1), (8, 64), (8, -1)
    }  # fmt: skip
    assert {(s.bits, s.group_size) for s in found[DOWN,]} == {
        (bits, size) for bits in (2, 3, 4) for size in (32, 64, 128)
    } | {(4, -1), (8, 128), (8, -1)}
    widest = candidates(shapes, format_named("compressed-tensors"), ("qserve",))[DOWN,]
    assert {(s.bits, s.group_size) for s in widest if s.bits in (5, 6)} == {
        (5, 32), (5, 64), (5, 128), (5, -1), (6, 128), (6, -1)
    }  # fmt: skip
    for_vllm = candidates(shapes, format_named("gptq"), ("qserve", "vllm"))
    assert {s.bits for s in for_vllm[DOWN,]} == {4, 8}


@pytest.mark.parametrize("asked, widths", [
    (dict(target_bits=4.25), {4, 8}), (dict(target_bits=6.0), {4, 8}), (dict(target_bits=4.0), {2, 3, 4, 8}),
    (dict(target_bits=3.7), {2, 3, 4, 8}), (dict(max_kl=0.03), {2, 3, 4, 8}),
])  # fmt: skip
def test_a_size_that_most_loaders_read_is_made_of_what_they_read(asked, widths):
    shapes = {Q: (576, 576), K: (192, 576), V: (192, 576), DOWN: (576, 1536)}
    found = offered(QuantizeJob(**asked), shapes, format_named("gptq"))
    assert found.keys() == {(Q, K, V), (DOWN,)}
    assert {scheme.bits for schemes in found.values() for scheme in schemes} == widths


def test_the_excerpt_is_small():
    assert excerpt(torch.zeros(128, 512)).numel() <= 512 and excerpt(torch.zeros(2, 16)).shape == (2, 16)
