from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from qserve.calibration.skeleton import Call
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize import rtn, signround

SCHEMES = [
    WeightScheme(3, 32), WeightScheme(4, 32, symmetric=False), WeightScheme(2, -1), WeightScheme(4, -1, symmetric=False)
]


class Case:
    """A random decoder block rounded to nearest, and what it does to random hidden states."""

    def __init__(self, scheme=SCHEMES[0], samples=16, length=12):
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1
        )
        config._attn_implementation = "sdpa"
        self.block = LlamaDecoderLayer(config, 0).eval()
        for parameter in self.block.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.2)
        self.inputs = torch.randn(samples, length, 64) * (torch.rand(64) * 3 + 0.2)
        rope = LlamaRotaryEmbedding(config)(self.inputs, torch.arange(length)[None])
        self.call = Call((), {"position_embeddings": rope, "attention_mask": None})
        self.linears = {n: m for n, m in self.block.named_modules() if isinstance(m, nn.Linear)}
        self.original = {name: linear.weight.detach().clone() for name, linear in self.linears.items()}
        self.packed = {name: rtn.quantize(weight, None, scheme).weight for name, weight in self.original.items()}
        self.targets = self.output()

    @torch.no_grad()
    def output(self):
        result = self.block(self.inputs, **self.call.kwargs)
        return result[0] if isinstance(result, tuple) else result

    def loss(self, packed):
        for name, weight in packed.items():
            self.linears[name].weight.data = weight.dequantize()
        error = (self.output() - self.targets).square().mean(-1) / self.targets.square().mean(-1)
        return float(error.mean())

    def tune(self, **options):
        return signround.tune(
            self.block, self.linears, self.packed, self.original, self.inputs, self.targets, self.call,
            **{"iterations": 40, "batch": 4, **options},
        )


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_block_gets_clearly_better_and_its_weights_stay_legal(scheme):
    case = Case(scheme)
    before = case.loss(case.packed)
    tuned = case.tune()
    held = {name: linear.weight.detach().clone() for name, linear in case.linears.items()}
    assert case.loss(tuned) < 0.8 * before
    for name, weight in tuned.items():
        weight.check()
        assert weight.scheme == scheme
        assert torch.equal(weight.scales, weight.scales.half().float())
        assert not torch.equal(weight.codes, case.packed[name].codes)
        assert not torch.equal(weight.scales, case.packed[name].scales)
        if not scheme.symmetric:
            assert torch.equal(weight.zeros, case.packed[name].zeros)
        assert torch.equal(held[name], weight.dequantize())  # the block holds what was returned


def test_it_generalizes_to_inputs_it_did_not_see():
    case = Case(samples=48)
    unseen_inputs, unseen_targets = case.inputs[32:], case.targets[32:]
    case.inputs, case.targets = case.inputs[:32], case.targets[:32]
    tuned = case.tune()
    case.inputs, case.targets = unseen_inputs, unseen_targets
    assert case.loss(tuned) < case.loss(case.packed)


def test_the_same_seed_gives_the_same_weights():
    first, again, other = Case().tune(seed=1), Case().tune(seed=1), Case().tune(seed=2)
    same = [all(torch.equal(first[n].codes, run[n].codes) for n in first) for run in (again, other)]
    assert same == [True, False]
    assert all(torch.equal(first[name].scales, again[name].scales) for name in first)


def test_a_perfect_start_is_returned():
    case = Case(WeightScheme(8, 32))
    case.loss(case.packed)
    case.targets = case.output()
    case.original = {name: weight.dequantize() for name, weight in case.packed.items()}
    tuned = case.tune(iterations=6)
    assert all(torch.equal(tuned[name].codes, weight.codes) for name, weight in case.packed.items())
    assert all(torch.equal(tuned[name].scales, weight.scales) for name, weight in case.packed.items())


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_never_rises(seed, monkeypatch):
    monkeypatch.setattr(signround, "_TRAVEL", 20.0)  # a descent that must fail
    case = Case(WeightScheme(4, 32))
    before = case.loss(case.packed)
    assert case.loss(case.tune(iterations=4, seed=seed)) <= before


def test_inputs_that_are_not_finite_change_nothing():
    case = Case()
    case.inputs[3, 5, 7] = float("nan")
    tuned = case.tune(iterations=4)
    assert all(torch.equal(tuned[name].codes, weight.codes) for name, weight in case.packed.items())


def test_what_cannot_be_learned_comes_back_as_it_was():
    case = Case()
    name = "mlp.up_proj"
    inputs = case.packed[name].codes.shape[1]
    case.packed[name] = replace(case.packed[name], g_idx=(torch.arange(inputs) // 32).to(torch.int32))
    partly = {key: case.packed[key] for key in (name, "self_attn.q_proj")}  # the other linears stay in float
    case.packed = partly
    tuned = case.tune(iterations=10)
    assert tuned[name] is partly[name]
    assert torch.equal(case.linears["mlp.down_proj"].weight, case.original["mlp.down_proj"])
    assert tuned["self_attn.q_proj"] is not partly["self_attn.q_proj"]


def test_the_block_is_left_as_trainable_as_it_was_and_progress_is_told():
    case = Case()
    case.block.requires_grad_(False)
    case.linears["mlp.up_proj"].weight.requires_grad_(True)
    told = []
    with torch.no_grad():  # a caller that calibrates
        case.tune(iterations=5, batch=7, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 5) for done in range(1, 6)]
    assert [n for n, p in case.block.named_parameters() if p.requires_grad] == ["mlp.up_proj.weight"]
    assert all(parameter.grad is None for parameter in case.block.parameters())
