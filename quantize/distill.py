"""Tunes scales so that the whole model predicts what the float model does: Adam on the Kullback-Leibler divergence of
the next-token distributions, with every code fixed.

The whole causal LM is in memory. So this sees errors that add up or cancel across layers and blocks, which rounding by
layers or blocks cannot see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
_JUDGED = 16  # windows on which the result must be better than the start
STEPS, BATCH = 120, 2


@dataclass(frozen=True)
class Distilled:
    """The weights, and the divergence (nats) over the first windows before and after."""

    weights: dict[str, QuantizedWeight]
    before: float
    after: float


@torch.no_grad()
def head_inputs(model: nn.Module, windows: Tensor, *, batch: int = 2) -> Tensor:
    """The input of a causal LM's output layer, float32 [samples, length, hidden], for int64 [samples, length]."""
    return torch.cat([head_input(model, part).float() for part in windows.split(batch)])


def distill(
    model: nn.Module,
    linears: Mapping[str, nn.Linear],
    packed: Mapping[str, QuantizedWeight],
    windows: Tensor,
    targets: Tensor,
    *,
    steps: int = STEPS,
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
    windows   int64 [samples, length]
    targets   ``head_inputs`` of the float model for ``windows``; both models have one output layer
    progress  is told (steps done, ``steps``)
    keep      gets the state that the next steps need, every ``keep_every`` steps; ``kept`` is the last such state of
              the same descent, to go on from

    Each step takes ``batch`` windows. If the divergence over the first windows does not fall, the result is
    ``packed``. Weights in fp8, with scales shared among outputs, or with a ``g_idx`` come back as they are. Afterwards
    the model holds the result. It takes three times the memory of the model's weights, and the activations of
    ``batch`` windows in every layer.
    """
    for name, start in packed.items():
        linears[name].weight.data = start.dequantize()
    scaled = {name: _Scaled(linears[name], weight) for name, weight in packed.items() if _has_scales(weight)}
    generator = torch.Generator().manual_seed(seed)
    before = _judge(model, windows, targets, batch) if kept is None else kept.extra["before"]
    if not scaled:
        return Distilled(dict(packed), before, before)
    optimizer = torch.optim.Adam([weight.multiplier for weight in scaled.values()], betas=(0.9, 0.95), eps=1e-16)
    order: list[int] = []
    done = 0
    if kept is not None:
        done, states = kept.extra["steps"], kept.load()
        for name, weight in scaled.items():
            weight.resume(name, states, optimizer)
        del states
    with trainable(model, [weight.linear for weight in scaled.values()]):
        for step in range(steps):
            if len(order) < batch:
                order += torch.randperm(len(windows), generator=generator, device="cpu").tolist()
            chosen, order = torch.tensor(order[:batch], device=windows.device), order[batch:]
            if step < done:
                continue
            _divergence(model, windows[chosen], targets[chosen]).backward()
            for weight in scaled.values():
                weight.take_gradient()
            optimizer.param_groups[0]["lr"] = _TRAVEL * 2 * (1 - step / steps) / (steps + 1)  # adds up to the travel
            optimizer.step()
            for weight in scaled.values():
                weight.install()
            if keep is not None and (step + 1) % keep_every == 0:
                every = (weight.states(name, optimizer) for name, weight in scaled.items())
                keep(chain.from_iterable(every), {"steps": step + 1, "before": before})
            if progress is not None:
                progress(step + 1, steps)
    after = _judge(model, windows, targets, batch)
    better = after < before  # false where either is NaN
    result = dict(packed)
    for name, weight in scaled.items():
        if better:
            result[name] = weight.result()
        linears[name].weight.data = result[name].dequantize()
    return Distilled(result, before, after if better else before)


def _has_scales(packed: QuantizedWeight) -> bool:
    """Whether each scale multiplies integers of one output and consecutive inputs."""
    return packed.scheme.grid in (INTEGERS, TRELLIS) and packed.scheme.rows == 1 and packed.g_idx is None


class _Scaled:
    """One linear while its scales are learned.

    steps       [out, groups, width]: codes counted from their zero points, in as few bytes as hold them
    multiplier  float32 [out, groups], multiplies the first scales
    """

    def __init__(self, linear: nn.Linear, packed: QuantizedWeight) -> None:
        self.linear, self.packed = linear, packed
        steps = replace(packed, stored=packed.codes, scales=torch.ones_like(packed.scales)).dequantize()
        small = packed.scheme.bits < 8 or packed.zeros is None
        self.steps = steps.view(*packed.scales.shape, -1).to(torch.int8 if small else torch.int16)
        self.multiplier = torch.ones_like(packed.scales)

    def take_gradient(self) -> None:
        gradient, self.linear.weight.grad = self.linear.weight.grad, None
        self.multiplier.grad = None
        if gradient is not None:  # else an expert that none of these tokens reached
            along = (gradient.view_as(self.steps) * self.steps).sum(dim=-1)
            self.multiplier.grad = along * self.packed.scales

    def states(self, name: str, optimizer: torch.optim.Adam) -> Iterator[tuple[str, Tensor]]:
        """What ``resume`` needs, under ``name``: the multiplier, and Adam's moments of its gradient once it had one."""
        yield f"{name}.multiplier", self.multiplier.cpu()
        for part, tensor in optimizer.state[self.multiplier].items():
            yield f"{name}.{part}", tensor.cpu()

    def resume(self, name: str, states: Mapping[str, Tensor], optimizer: torch.optim.Adam) -> None:
        self.multiplier.copy_(states[f"{name}.multiplier"])
        parts = ("step", "exp_avg", "exp_avg_sq")
        found = {part: states[where] for part in parts if (where := f"{name}.{part}") in states}
        # Adam counts its steps on the CPU.
        optimizer.state[self.multiplier] = {
            part: state if part == "step" else state.to(self.multiplier.device) for part, state in found.items()
        }
        self.install()

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
def _judge(model: nn.Module, windows: Tensor, targets: Tensor, batch: int) -> float:
    parts = zip(windows[:_JUDGED].split(batch), targets[:_JUDGED].split(batch), strict=True)
    return sum(float(_divergence(model, *part)) * len(part[0]) for part in parts) / min(_JUDGED, len(windows))
