"""``output_gradients``: how much the model's predictions change with the outputs of each linear."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qserve.calibration.head import head_input
from qserve.calibration.products import exact_products
from qserve.calibration.stats import LayerStats
from qserve.kernels import products

PIECE = 128  # tokens whose logits are there at once


def output_gradients(
    model: nn.Module,
    linears: Mapping[str, nn.Linear],
    windows: Tensor,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, LayerStats]:
    """For each of ``linears`` the statistics of the gradients by its outputs of -log p(next token), over all tokens of
    ``windows`` int64 [samples, length]. The next tokens are drawn from the model's own predictions. So the Hessian of
    the statistics is twice the Fisher information, which is the Hessian of the divergence that a change of the outputs
    causes. A linear that no token reaches has none.

    ``model`` is a transformers causal LM in float32 that holds ``linears``; changes to the logits after its output
    layer are left out. One window at a time is in memory. ``progress`` is told (windows done, windows).
    """
    generator = torch.Generator(windows.device).manual_seed(seed)
    found: dict[str, LayerStats] = {}

    def note(name: str, gradient: Tensor) -> None:
        with gradient.device, exact_products():  # gradients of a GPU come in a thread that has no default device
            stats = found.setdefault(name, LayerStats(gradient.shape[-1]))
            stats.update(gradient.float())

    def after(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(partial(note, name))

    def embedded(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # All gradients pass through it, and no weight needs one. A copy: some models scale it in place.
        return output.detach().requires_grad_().clone()

    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    handles = [linear.register_forward_hook(partial(after, name)) for name, linear in linears.items()]
    handles.append(model.get_input_embeddings().register_forward_hook(embedded))  # type: ignore[operator]
    try:
        model.requires_grad_(False)
        for number, window in enumerate(windows.split(1), 1):
            with torch.enable_grad():
                states = head_input(model, window)
                gradient = _gradient(model.get_output_embeddings(), states.detach(), generator)  # type: ignore[operator]
                states.backward(gradient)  # type: ignore[no-untyped-call]
            if progress is not None:
                progress(number, len(windows))
    finally:
        for handle in handles:
            handle.remove()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    return found


@torch.no_grad()
def _gradient(head: nn.Linear, states: Tensor, generator: torch.Generator) -> Tensor:
    """Of the sum of -log p(drawn token), by ``states`` [samples, length, hidden]."""
    weight = head.weight.to(products.multiplied(states.device))
    bias = None if head.bias is None else head.bias.to(weight.dtype)
    parts = []
    for part in states.flatten(0, 1).split(PIECE):
        by_logits = F.linear(part.to(weight.dtype), weight, bias).float().softmax(-1)
        drawn = draw(by_logits, generator)  # from what are still their chances, which the gradient has less 1 for it
        by_logits.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=torch.float32))
        parts.append(by_logits.to(weight.dtype) @ weight)
    return torch.cat(parts).view_as(states).to(states.dtype)


def draw(chances: Tensor, generator: torch.Generator) -> Tensor:
    """A token of each row's distribution, int64 [tokens, 1]; by one random number, where ``multinomial`` takes one for
    every token of the vocabulary. Any token where the chances are not finite."""
    sums = chances.cumsum(-1, dtype=torch.float64)
    random = torch.rand(len(sums), 1, dtype=torch.float64, generator=generator, device=sums.device)
    return torch.searchsorted(sums, (1 - random) * sums[:, -1:]).clamp_(max=chances.shape[1] - 1)
