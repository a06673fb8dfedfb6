"""SignRound (Cheng et al., arXiv 2309.05516): learn which way each weight of a decoder block is rounded, and the
scales, by signed gradient descent on the error of the block's output.

It starts from good codes (GPTQ's), not from rounding to nearest, and never returns a result that is worse by its own
measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qserve.calibration.products import fast_products
from qserve.calibration.skeleton import Call
from qserve.checkpoint.grid import INTEGERS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.quantize import scales as scale_search

_TRAVEL = 0.5  # how far all steps together can go: in codes, and as a fraction of each scale
_HALF = 0.499  # within this distance of a code, rounding surely gives that code
# Error compensation puts many weights outside the cell of their code. If they started from its very edge, the noise of
# the first gradients would flip them all.
_SHRINK = 0.8
ITERATIONS = 200
_CHECKS = 2  # how often the loss over all samples decides whether to keep what the descent has reached

Progress = Callable[[int, int], None]


def tune(
    block: nn.Module,
    linears: Mapping[str, nn.Linear],
    packed: Mapping[str, QuantizedWeight],
    original: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    call: Call,
    *,
    iterations: int = ITERATIONS,
    batch: int = 2,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, QuantizedWeight]:
    """Better codes and scales for ``packed``, the weights of ``linears``, which are modules of the float32 ``block``.

    original  the weights before quantization, float32 [out, in], under the names of ``packed``
    inputs    float32 [samples, length, hidden]: what the quantized model feeds this block
    targets   float32, shaped as ``inputs``: the outputs that the block should have
    call      the block's other arguments, for one sequence
    progress  is told (iterations done, ``iterations``)

    The loss is the squared error of each token's output over the mean square of its target: the norm that follows sees
    no more than that. Each iteration takes ``batch`` samples. If the loss over all samples never falls below that of
    ``packed``, the result is ``packed``. Zero points and schemes stay. Weights in fp8, with scales shared among
    outputs, or with a ``g_idx`` come back as they are. Afterwards the block holds the result. Groups must be whole.
    """
    learned = {
        name: _Learned(linears[name], weight, original[name]) for name, weight in packed.items() if learnable(weight)
    }
    for name, weight in packed.items():
        linears[name].weight.data = weight.dequantize()
    if not learned:
        return dict(packed)
    objective = _Objective(block, inputs, targets, call)
    generator = torch.Generator().manual_seed(seed)
    check_every = -(-iterations // _CHECKS)
    # For millions of codes the signs alone are enough; the few scales gain from the history of their gradients.
    optimizer = torch.optim.Adam([weight.multiplier for weight in learned.values()], betas=(0.9, 0.95), eps=1e-16)
    with trainable(block, [weight.linear for weight in learned.values()]):
        best = objective.total(batch)
        order: list[int] = []
        for step in range(iterations):
            if len(order) < batch:
                order += torch.randperm(len(inputs), generator=generator, device="cpu").tolist()
            chosen, order = order[:batch], order[batch:]
            objective.loss(torch.tensor(chosen)).backward()
            rate = _TRAVEL * 2 * (1 - step / iterations) / (iterations + 1)  # falls linearly, adds up to the travel
            for each in learned.values():
                each.descend(rate)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            for each in learned.values():
                each.install()
            if (step + 1) % check_every == 0 or step + 1 == iterations:
                reached = objective.total(batch)
                if reached < best:
                    best = reached
                    for each in learned.values():
                        each.keep()
            if progress is not None:
                progress(step + 1, iterations)
    result = dict(packed)
    for name, each in learned.items():
        result[name] = each.kept
        linears[name].weight.data = each.kept.dequantize()
    return result


def learnable(packed: QuantizedWeight) -> bool:
    """Whether it holds integers, and each scale belongs to one output and consecutive inputs."""
    return packed.scheme.grid is INTEGERS and packed.scheme.rows == 1 and packed.g_idx is None


class _Objective:
    """The loss of a block over some of its samples."""

    def __init__(self, block: nn.Module, inputs: Tensor, targets: Tensor, call: Call) -> None:
        self.block, self.inputs, self.targets, self.call = block, inputs, targets, call
        energy = targets.square().mean(dim=-1, keepdim=True)
        self.importance = 1.0 / energy.clamp_(min=torch.finfo(torch.float32).tiny)

    def loss(self, samples: Tensor) -> Tensor:
        with fast_products():
            output: Any = self.block(self.inputs[samples], *self.call.args, **self.call.kwargs)
        output = output[0] if isinstance(output, tuple) else output
        error = (output.float() - self.targets[samples]).square_()
        mean: Tensor = (error * self.importance[samples]).mean()
        return mean

    @torch.no_grad()
    def total(self, batch: int) -> float:
        """The mean over all samples, NaN where an output is not finite."""
        parts = torch.arange(len(self.inputs)).split(batch)
        return sum(float(self.loss(part)) * len(part) for part in parts) / len(self.inputs)


class _Learned:
    """One linear while its rounding is learned.

    latent      float32 [out, groups, width], in units of the scale: codes are its nearest integers
    multiplier  float32 [out, groups, 1], multiplies the first scales
    """

    def __init__(self, linear: nn.Linear, packed: QuantizedWeight, original: Tensor) -> None:
        self.linear, self.kept = linear, packed
        self.start = packed.scales[..., None]
        self.multiplier = torch.ones_like(self.start)
        self.zeros: Tensor | float = float(packed.scheme.zero)
        if packed.zeros is not None:
            self.zeros = packed.zeros.to(torch.float32)[..., None]
        codes = packed.codes.view(*packed.scales.shape, -1).to(torch.float32)
        self.latent = (original.view_as(codes) / self.start).add_(self.zeros)
        self.latent.sub_(codes).clamp_(-_HALF, _HALF).mul_(_SHRINK).add_(codes)

    @torch.no_grad()
    def descend(self, rate: float) -> None:
        """Move the latent by ``rate`` against the gradient the linear now holds; give the multiplier its own."""
        self.multiplier.grad = None
        if self.linear.weight.grad is None:  # an expert that none of these tokens reached
            return
        gradient = self.linear.weight.grad.view_as(self.latent)
        self.multiplier.grad = (gradient * self._centred()).sum(dim=-1, keepdim=True).mul_(self.start)
        self.latent.addcmul_(gradient.sign_(), self.start.sign(), value=-rate)
        self.latent.clamp_(-_HALF, self.kept.scheme.max_code + _HALF)
        self.linear.weight.grad = None

    def install(self) -> None:
        self.linear.weight.data = (self._centred() * self._scales()).view_as(self.linear.weight)

    def keep(self) -> None:
        """Note the present codes and scales as the result."""
        codes = self.latent.round().to(torch.uint8).view_as(self.kept.codes)
        self.kept = replace(self.kept, stored=codes, scales=self._scales()[..., 0].contiguous())

    def _centred(self) -> Tensor:
        return self.latent.round().sub_(self.zeros)

    def _scales(self) -> Tensor:
        return scale_search.storable(self.start * self.multiplier)


@contextmanager
def trainable(module: nn.Module, linears: Iterable[nn.Linear]) -> Iterator[None]:
    """Enable gradients only for the weights of ``linears``, parts of ``module``, whatever the caller's mode."""
    before = {parameter: parameter.requires_grad for parameter in module.parameters()}
    try:
        with torch.enable_grad():
            module.requires_grad_(False)
            for linear in linears:
                linear.weight.requires_grad_(True)
            yield
    finally:
        for parameter, flag in before.items():
            parameter.requires_grad_(flag)
            parameter.grad = None
