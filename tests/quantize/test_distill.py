from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from qserve.checkpoint.spec import WeightScheme
from qserve.checkpoint.writer import CheckpointWriter
from qserve.quantize import distill, rtn

SCHEMES = [WeightScheme(3, 32), WeightScheme(4, 32, symmetric=False), WeightScheme(3, -1)]


class Case:
    """A tiny random model rounded to nearest, and what it predicted before."""

    def __init__(self, scheme=SCHEMES[0]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=80, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
            num_hidden_layers=2, initializer_range=0.25,
        )
        self.model = LlamaForCausalLM(config).eval()
        self.windows = torch.randint(0, 80, (48, 16))
        self.targets = distill.head_inputs(self.model, self.windows, batch=7)
        self.linears = {n: m for n, m in self.model.model.named_modules() if isinstance(m, nn.Linear)}
        self.packed = {n: rtn.quantize(m.weight.detach(), None, scheme).weight for n, m in self.linears.items()}

    @torch.no_grad()
    def divergence(self, packed, part=slice(0, 48)):
        for name, weight in packed.items():
            self.linears[name].weight.data = weight.dequantize()
        got = self.model(input_ids=self.windows[part]).logits.log_softmax(-1)
        want = self.model.lm_head(self.targets[part]).log_softmax(-1)
        return float((want.exp() * (want - got)).sum(-1).mean())

    def distill(self, part=slice(0, 48), judge=slice(0, 16), **options):
        seen, judge = (distill.Examples(self.windows[each], self.targets[each]) for each in (part, judge))
        options = {"steps": 30, "batch": 8, **options}
        return distill.distill(self.model, self.linears, self.packed, seen, judge, **options)

    def run(self, part=slice(0, 48), **options):
        return self.distill(part, **options).weights


def test_head_inputs_give_the_logits():
    case = Case()
    with torch.no_grad():
        difference = case.model.lm_head(case.targets) - case.model(input_ids=case.windows).logits
        assert difference.square().mean() < 0.01  # of logits around 2; the targets may come of products in bfloat16
    assert case.targets.dtype == torch.float32 and case.targets.shape == (48, 16, 64)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_predictions_on_unseen_text_come_closer_and_only_scales_change(scheme):
    case = Case(scheme)
    seen, unseen = slice(0, 32), slice(32, 48)
    before = [case.divergence(case.packed, part) for part in (seen, unseen)]
    result = case.run(seen)
    held = {name: linear.weight.detach().clone() for name, linear in case.linears.items()}
    assert case.divergence(result, seen) < 0.97 * before[0]
    assert case.divergence(result, unseen) < before[1]
    for name, weight in result.items():
        weight.check()
        assert torch.equal(weight.codes, case.packed[name].codes)
        assert torch.equal(weight.scales, weight.scales.half().float())
        assert torch.equal(held[name], weight.dequantize())


def test_the_same_seed_gives_the_same_scales():
    first, again = (Case().run(steps=6, seed=3) for _ in range(2))
    assert all(torch.equal(first[name].scales, again[name].scales) for name in first)


def test_stopped_anywhere_it_goes_on_to_the_same_scales(tmp_path):
    told = []

    def stopped_at(step):
        def progress(done, total):
            told.append(done)
            if done == step:
                raise KeyboardInterrupt

        return progress

    def descend(case, **options):
        return case.distill(steps=7, batch=20, seed=3, **options)

    expected = descend(Case())
    for step in (1, 3, 6, 0):
        with suppress(KeyboardInterrupt), CheckpointWriter(tmp_path / "out", facts={"name": "job"}) as writer:
            state, keep = writer.kept("scales"), partial(writer.keep, "scales")
            case = Case()
            found = descend(case, progress=stopped_at(step), kept=state, keep=keep, keep_every=2)
            assert step == 0 and (found.before, found.after) == (expected.before, expected.after)
    assert told == [1, 1, 2, 3, 3, 4, 5, 6, 7]  # no more than the one after the last that was kept
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name].scales, weight.scales)
        assert torch.equal(case.linears[name].weight, weight.dequantize())


@pytest.mark.slow
def test_rounds_go_on_from_the_best_while_there_are_more():
    case, asked = Case(), []

    def more(steps, seconds):
        asked.append((steps, seconds > 0))
        return 2 * steps if len(asked) < 3 else 0

    found = case.distill(judge=slice(0, 48), steps=10, more=more)
    assert asked == [(10, True), (20, True), (40, True)] and found.steps == 70
    first = Case().distill(judge=slice(0, 48), steps=10)
    assert found.before == first.before and found.after < first.after < first.before
    assert case.divergence(found.weights) == pytest.approx(found.after, rel=0.05)


def test_a_round_that_loses_is_taken_back(monkeypatch):
    judged = iter([1.0, 0.5, 0.6])
    case = Case()
    expected = Case().run(steps=5)
    monkeypatch.setattr(distill, "_judge", lambda *_: next(judged))
    found = case.distill(steps=5, more=lambda steps, _: steps)
    assert (found.before, found.after, found.steps) == (1.0, 0.5, 5)
    for name, weight in expected.items():
        assert torch.equal(found.weights[name].scales, weight.scales)
        assert torch.equal(case.linears[name].weight, weight.dequantize())


def test_a_round_that_gains_little_is_the_last(monkeypatch):
    judged = iter([1.0, 0.5, 0.499])
    monkeypatch.setattr(distill, "_judge", lambda *_: next(judged))
    found = Case().distill(steps=2, more=lambda steps, _: steps)
    assert (found.after, found.steps) == (0.499, 4)


def test_stopped_in_a_later_round_it_goes_on_to_the_same_scales(tmp_path):
    def descend(case, **options):
        return case.distill(steps=5, seed=3, more=lambda steps, _: 6 if steps == 5 else 0, **options)

    def stop(done, total):
        if done == 9:
            raise KeyboardInterrupt

    expected = descend(Case())
    assert expected.steps == 11
    for progress in (stop, None):
        with suppress(KeyboardInterrupt), CheckpointWriter(tmp_path / "out", facts={"name": "job"}) as writer:
            state, keep = writer.kept("scales"), partial(writer.keep, "scales")
            case = Case()
            found = descend(case, progress=progress, kept=state, keep=keep, keep_every=2)
    assert (found.before, found.after, found.steps) == (expected.before, expected.after, 11)
    assert state is not None and (state.extra["round"], state.extra["steps"], state.extra["total"]) == (1, 4, 5)
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name].scales, weight.scales)


def test_a_descent_that_fails_changes_nothing(monkeypatch):
    monkeypatch.setattr(distill, "_TRAVEL", 5.0)
    case = Case()
    result = case.run(steps=3)
    assert all(torch.equal(result[name].scales, weight.scales) for name, weight in case.packed.items())
    assert all(torch.equal(case.linears[name].weight, weight.dequantize()) for name, weight in case.packed.items())


def test_targets_that_are_not_finite_change_nothing():
    case = Case()
    case.targets[0, 0, 0] = float("nan")
    result = case.run(steps=2)
    assert all(torch.equal(result[name].scales, weight.scales) for name, weight in case.packed.items())


def test_what_cannot_be_learned_stays_and_progress_is_told():
    case = Case()
    name = next(iter(case.packed))
    case.packed[name] = replace(case.packed[name], g_idx=(torch.arange(64) // 32).to(torch.int32))
    told = []
    with torch.no_grad():
        result = case.run(steps=3, progress=lambda done, total: told.append((done, total)))
    assert result[name] is case.packed[name]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert all(parameter.grad is None for parameter in case.model.parameters())
