"""Tunes scales so that the whole model predicts what the float model does: Adam on the Kullback-Leibler divergence of
the next-token distributions, with every code fixed.

The whole causal LM is in memory. So this sees errors that add up or cancel across layers and blocks, which rounding by
layers or blocks cannot see.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qserve.calibration.head import head_input
from qserve.calibration.products import fast_products
from qserve.checkpoint.grid import INTEGERS, TRELLIS
from qserve.checkpoint.parts import Keep, Part
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.quantize.scales import storable
from qserve.quantize.signround import Progress, trainable

_TRAVEL = 0.05  # how far all steps together can move a scale, as a fraction of it; with 0.2 unseen text got worse
_GAIN = 0.99  # of a round's divergence: a round that gains less is the last
STEPS, BATCH = 120, 2
JUDGED = 16
"""Windows on which the result must be better than the start."""

More = Callable[[int, float], int]
"""Gets the steps of a round, and the seconds that one took. Gives the steps of the next round, or 0."""


@dataclass(frozen=True)
class Examples:
    """``windows`` int64 [samples, length], and ``targets``: ``head_inputs`` of the float model for them."""

    windows: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Distilled:
    """The weights, the divergence (nats) over the windows that judge before and after, and how many steps led there."""

    weights: dict[str, QuantizedWeight]
    before: float
    after: float
    steps: int = 0


def most_windows(hours: float | None) -> int:
    """Windows that are learned from at most: those of the first round, or with ``hours`` of longer ones."""
    return STEPS * BATCH * (1 if hours is None else 4)


@torch.no_grad()
def head_inputs(model: nn.Module, windows: Tensor, *, batch: int = 2) -> Tensor:
    """The input of a causal LM's output layer, float32 [samples, length, hidden], for int64 [samples, length]."""
    return torch.cat([head_input(model, part).float() for part in windows.split(batch)])


def distill(
    model: nn.Module,
    linears: Mapping[str, nn.Linear],
    packed: Mapping[str, QuantizedWeight],
    seen: Examples,
    judge: Examples,
    *,
    steps: int = STEPS,
    more: More | None = None,
    batch: int = BATCH,
    seed: int = 0,
    progress: Progress | None = None,
    kept: Part | None = None,
    keep: Keep | None = None,
    keep_every: int = 1,
) -> Distilled:
    """``packed``, the weights of ``linears``, with better scales; codes and zero points stay.

    model     a transformers causal LM in float32 that holds ``linears``; its embedding and output layer are the float
              model's, even if they will be quantized
    seen      what is learned from; the targets are of one output layer, which both models have
    judge     what says whether that helped
    more      asked behind each round that gained, of which ``steps`` are the first; the next starts from its scales
    progress  is told (steps done, steps until the end of the round)
    keep      gets the state that the next steps need, every ``keep_every`` steps; ``kept`` is the last such state of
              the same descent, to go on from

    Each step takes ``batch`` windows. If the divergence over ``judge`` does not fall, the result is ``packed``, and
    where a later round does not make it fall, that of the round before. Weights in fp8, with scales shared among
    outputs, or with a ``g_idx`` come back as they are. Afterwards the model holds the result. It takes three times the
    memory of the model's weights, and the activations of ``batch`` windows in every layer.
    """
    for name, start in packed.items():
        linears[name].weight.data = start.dequantize()
    scaled = {name: _Scaled(linears[name], weight) for name, weight in packed.items() if _has_scales(weight)}
    before = _judge(model, judge, batch) if kept is None else kept.extra["before"]
    if not scaled:
        return Distilled(dict(packed), before, before)
    best, done, total, round_, seconds = before, 0, 0, 0, 0.0
    states: Mapping[str, Tensor] = {}
    if kept is not None:
        extra = kept.extra
        best, round_, seconds = extra["best"], extra["round"], extra["seconds"]
        done, steps, total = extra["steps"], extra["of"], extra["total"]
        states = kept.load()
    with trainable(model, [weight.linear for weight in scaled.values()]):
        while steps:
            optimizer = torch.optim.Adam([each.multiplier for each in scaled.values()], betas=(0.9, 0.95), eps=1e-16)
            for name, weight in scaled.items():
                weight.begin(name, states, optimizer)
            states, began, first = {}, time.perf_counter(), done  # what was loaded is freed
            for step, chosen in enumerate(_batches(len(seen.windows), steps, batch, seed + round_)):
                if step < done:
                    continue
                at = chosen.to(seen.windows.device)
                _divergence(model, seen.windows[at], seen.targets[at]).backward()
                for weight in scaled.values():
                    weight.take_gradient()
                rate = _TRAVEL * 2 * (1 - step / steps) / (steps + 1)  # adds up to the travel
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
                for weight in scaled.values():
                    weight.install()
                seconds = (time.perf_counter() - began) / (step + 1 - first)
                if keep is not None and (step + 1) % keep_every == 0:
                    every = (weight.states(name, optimizer, round_ > 0) for name, weight in scaled.items())
                    where = {"round": round_, "steps": step + 1, "of": steps, "total": total}
                    keep(chain.from_iterable(every), {"before": before, "best": best, "seconds": seconds, **where})
                if progress is not None:
                    progress(total + step + 1, total + steps)
            after = _judge(model, judge, batch)
            gained = after < best  # false where either is NaN
            for weight in scaled.values():
                weight.end(gained)
            if not gained:
                break
            last, best, total = best, after, total + steps
            steps = more(steps, seconds) if more is not None and after < _GAIN * last else 0
            round_, done = round_ + 1, 0
    result = dict(packed)
    for name, weight in scaled.items():
        if total:
            result[name] = weight.result()
        linears[name].weight.data = result[name].dequantize()
    return Distilled(result, before, best, total)


def _batches(count: int, steps: int, batch: int, seed: int) -> Iterator[Tensor]:
    """``steps`` times ``batch`` of ``count`` windows: all in random order before one comes again."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(steps):
        if len(order) < batch:
            order += torch.randperm(count, generator=generator, device="cpu").tolist()
        chosen, order = order[:batch], order[batch:]
        yield torch.tensor(chosen)


def _has_scales(packed: QuantizedWeight) -> bool:
    """Whether each scale multiplies integers of one output and consecutive inputs."""
    return packed.scheme.grid in (INTEGERS, TRELLIS) and packed.scheme.rows == 1 and packed.g_idx is None


class _Scaled:
    """One linear while its scales are learned.

    steps       [out, groups, width]: codes counted from their zero points, in as few bytes as hold them
    multiplier  float32 [out, groups], multiplies the first scales
    best        the multiplier behind the last round that gained
    """

    def __init__(self, linear: nn.Linear, packed: QuantizedWeight) -> None:
        self.linear, self.packed = linear, packed
        steps = replace(packed, stored=packed.codes, scales=torch.ones_like(packed.scales)).dequantize()
        small = packed.scheme.bits < 8 or packed.zeros is None
        self.steps = steps.view(*packed.scales.shape, -1).to(torch.int8 if small else torch.int16)
        self.multiplier = torch.ones_like(packed.scales)
        self.best = self.multiplier.clone()

    def take_gradient(self) -> None:
        gradient, self.linear.weight.grad = self.linear.weight.grad, None
        self.multiplier.grad = None
        if gradient is not None:  # else an expert that none of these tokens reached
            along = (gradient.view_as(self.steps) * self.steps).sum(dim=-1)
            self.multiplier.grad = along * self.packed.scales

    def states(self, name: str, optimizer: torch.optim.Adam, later: bool) -> Iterator[tuple[str, Tensor]]:
        """What ``begin`` needs, under ``name``: the multiplier, and Adam's moments of its gradient once it had one.
        ``later``: than the first round."""
        yield f"{name}.multiplier", self.multiplier.cpu()
        if later:
            yield f"{name}.best", self.best.cpu()
        for part, tensor in optimizer.state[self.multiplier].items():
            yield f"{name}.{part}", tensor.cpu()

    def begin(self, name: str, states: Mapping[str, Tensor], optimizer: torch.optim.Adam) -> None:
        """Begin a round, or go on in the middle of one."""
        if states:
            self.multiplier.copy_(states[f"{name}.multiplier"])
            self.best.copy_(states.get(f"{name}.best", self.best))
            parts = ("step", "exp_avg", "exp_avg_sq")
            found = {part: states[where] for part in parts if (where := f"{name}.{part}") in states}
            # Adam counts its steps on the CPU.
            optimizer.state[self.multiplier] = {
                part: state if part == "step" else state.to(self.multiplier.device) for part, state in found.items()
            }
        self.install()

    def end(self, gained: bool) -> None:
        """End a round: the next one starts from the best."""
        if gained:
            self.best.copy_(self.multiplier)
        else:
            self.multiplier.copy_(self.best)

    def install(self) -> None:
        weight = self.linear.weight.data
        torch.mul(self.steps, self._scales()[..., None], out=weight.view_as(self.steps))

    def result(self) -> QuantizedWeight:
        return replace(self.packed, scales=self._scales())

    def _scales(self) -> Tensor:
        return storable(self.packed.scales * self.multiplier)


def _head(model: nn.Module) -> nn.Module:
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    return head


def _divergence(model: nn.Module, windows: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens. Changes to the logits after the output layer are left out on both sides."""
    head, seen = _head(model), []
    handle = head.register_forward_hook(lambda _, args, output: seen.append(output))
    try:
        with fast_products():
            model(input_ids=windows, use_cache=False)
    finally:
        handle.remove()
    with torch.no_grad(), fast_products():
        target = head(targets).float().flatten(0, 1).log_softmax(-1)
    return F.kl_div(seen[0].float().flatten(0, 1).log_softmax(-1), target, reduction="batchmean", log_target=True)


@torch.no_grad()
def _judge(model: nn.Module, judge: Examples, batch: int) -> float:
    parts = zip(judge.windows.split(batch), judge.targets.split(batch), strict=True)
    return sum(float(_divergence(model, *part)) * len(part[0]) for part in parts) / len(judge.windows)
