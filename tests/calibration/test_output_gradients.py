"""Gradients by the outputs of linears, gathered as the models' own code computes them."""

import torch
import torch.nn.functional as F

from qserve.calibration.output_gradients import draw, output_gradients
from qserve.calibration.skeleton import Skeleton
from qserve.checkpoint.source import open_model


def model_of(path):
    skeleton = Skeleton(open_model(path))
    model = skeleton.load_all()
    return model, {name: linear for i in range(len(skeleton.blocks)) for name, linear in skeleton.linears(i).items()}


def test_they_are_those_of_the_drawn_tokens(tiny_model, monkeypatch):
    """Against autograd over the whole model, with the very tokens that were drawn."""
    model, linears = model_of(tiny_model)
    windows = torch.randint(0, 100, (3, 17), generator=torch.Generator().manual_seed(1))
    drawn = []

    def noted(*args):
        drawn.append(draw(*args))
        return drawn[-1]

    monkeypatch.setattr("qserve.calibration.output_gradients.draw", noted)
    monkeypatch.setattr("qserve.kernels.products.multiplied", lambda device=None: torch.float32)  # as autograd here
    monkeypatch.setattr("qserve.calibration.output_gradients.PIECE", 5)
    before = {name: linear.weight.clone() for name, linear in linears.items()}
    told = []
    found = output_gradients(model, linears, windows, progress=lambda *done: told.append(done))
    assert told == [(1, 3), (2, 3), (3, 3)] and found.keys() == linears.keys()
    tokens = torch.cat(drawn).view(3, 17)
    expected = {name: torch.zeros(linear.out_features, linear.out_features) for name, linear in linears.items()}
    for window, targets in zip(windows, tokens, strict=True):
        outputs = {}
        handles = [
            linear.register_forward_hook(lambda _, args, out, name=name, to=outputs: to.update({name: out}))
            for name, linear in linears.items()
        ]
        logits = model(input_ids=window[None]).logits[0]
        loss = F.cross_entropy(logits, targets, reduction="sum")
        gradients = torch.autograd.grad(loss, list(outputs.values()))
        for name, gradient in zip(outputs, gradients, strict=True):
            expected[name] += gradient[0].t() @ gradient[0]
        for handle in handles:
            handle.remove()
    for name, stats in found.items():
        assert stats.tokens == 51
        wanted = 2 / 51 * expected[name]
        assert float((stats.hessian - wanted).norm() / wanted.norm()) < 1e-4, name
    assert all(torch.equal(linear.weight, before[name]) and linear.weight.grad is None
               for name, linear in linears.items())  # fmt: skip


def test_the_seed_decides(tiny_model):
    model, linears = model_of(tiny_model)
    windows = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(1))
    name = next(iter(linears))
    one, same, other = (output_gradients(model, linears, windows, seed=seed)[name].hessian for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_they_foretell_the_divergence(tiny_model):
    """A small random change of a layer's outputs diverges by half of what the Hessian of the divergence says: g is the
    gradient, and the statistics have twice its second moment."""
    model, linears = model_of(tiny_model)
    generator = torch.Generator().manual_seed(2)
    windows = torch.randint(0, 100, (64, 24), generator=generator)
    name = next(name for name in linears if "down_proj" in name)
    fisher = output_gradients(model, {name: linears[name]}, windows)[name].hessian / 2
    size = 1e-2 / float(fisher.diagonal().mean()) ** 0.5 / len(fisher) ** 0.5
    noise = size * torch.randn(64, 24, len(fisher), generator=generator)
    with torch.no_grad():
        base = model(input_ids=windows).logits.log_softmax(-1)
        handle = linears[name].register_forward_hook(lambda _, args, out: out + noise)
        moved = model(input_ids=windows).logits.log_softmax(-1)
        handle.remove()
    divergence = float((base.exp() * (base - moved)).sum(-1).mean())
    expected = 0.5 * size**2 * float(fisher.diagonal().sum())
    assert 0.7 < divergence / expected < 1.4


def test_tokens_are_drawn_as_often_as_they_are_likely():
    chances = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25, 0.0]]).expand(40_000, -1)
    drawn = draw(chances, torch.Generator().manual_seed(0))
    assert drawn.shape == (40_000, 1)
    counts = drawn.flatten().bincount(minlength=6) / len(drawn)
    assert counts[[0, 2, 5]].sum() == 0 and torch.allclose(counts, chances[0], atol=0.01)
    assert 0 <= int(draw(torch.full((1, 6), torch.nan), torch.Generator())) < 6
