"""``Experts``: the experts of a mixture-of-experts layer as linears, one for each expert and projection.

transformers keeps the weights of all experts in two tensors. Checkpoints name them one by one, and calibration must see
which tokens each expert gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qserve.checkpoint.errors import UsageError

_JOINED, _LAST = "gate_up_proj", "down_proj"
# Attributes of transformers' experts that do not compute down(act(gate(x)) * up(x)).
_UNUSUAL = {"has_gate": False, "has_post_expert_norm": True}
# Those of experts whose gate and up projection are not one after the other, or that have biases.
_ALTERNATING = {"is_transposed": True, "is_concatenated": False, "has_bias": True}


class Expert(nn.Module):
    """One expert. ``names`` are those of its gate and up projection, or of one that joins them, and of its down
    projection. ``combine`` maps the outputs of the first, side by side [tokens, 2 * inner], to the input of the last
    [tokens, inner]."""

    def __init__(
        self, names: Sequence[str], hidden: int, inner: int, bias: bool, combine: Callable[[Tensor], Tensor],
        device: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        *self._ups, self._down = names
        self._combine = combine
        for name in self._ups:
            self.add_module(name, nn.Linear(hidden, 2 * inner // len(self._ups), bias=bias, device=device))
        self.add_module(self._down, nn.Linear(inner, hidden, bias=bias, device=device))

    def forward(self, inputs: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate_up = torch.cat([self.get_submodule(name)(inputs) for name in self._ups], dim=-1)
        output: Tensor = self.get_submodule(self._down)(self._combine(gate_up))
        return output


class Experts(nn.Module):
    """``Expert`` modules named "0", "1", ..., in place of a module that holds all weights in two tensors.

    ``least_share``: an expert that fewer than this share of the tokens chose runs on all of them, so that calibration
    sees what it does. Its output counts for the tokens that chose it, as ever.
    """

    least_share = 0.0

    def __init__(self, fused: Any, names: Sequence[str]) -> None:
        super().__init__()
        joined = fused.get_parameter(_JOINED)
        self.count, *sizes = joined.shape
        both, hidden = reversed(sizes) if fused.is_transposed else sizes
        for index in range(self.count):
            expert = Expert(names, hidden, both // 2, fused.has_bias, fused._apply_gate, joined.device)
            self.add_module(str(index), expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, hidden]; the experts of each token int64 [tokens, k] with their weights.

        An expert without tokens does not run. An index beyond the last expert stands for none.
        """
        output = torch.zeros_like(hidden_states)
        everyone = torch.arange(len(hidden_states), device=hidden_states.device)
        for index in range(self.count):
            choice, token = torch.where(top_k_index.t() == index)
            few = len(token) < self.least_share * len(everyone)
            if not few and not len(token):
                continue
            # A copy for each expert: linears are known to share an input by its memory.
            part = self.get_submodule(str(index))(hidden_states[everyone if few else token])
            part = part[token] if few else part
            output.index_add_(0, token, (part * top_k_weights[token, choice, None]).to(output.dtype))
        return output


def reach_every_expert(block: nn.Module, tokens: int) -> None:
    """From now on each expert of ``block`` runs on all of the ``tokens`` that calibrate where those that chose it are
    fewer than its inputs: fitted to so few it would be worse than rounded to nearest."""
    for module in block.modules():
        if isinstance(module, Experts):
            most = max(parameter.shape[-1] for parameter in module.parameters())
            module.least_share = most / tokens


def split_experts(model: nn.Module, stored: dict[str, list[str]]) -> None:
    """Replace every module of ``model`` that holds the weights of its experts together.

    Their names come from ``stored``, the result of ``stored_names``. Raises ``UsageError`` for experts that the
    checkpoint stores together too, or that do not compute gated projections.
    """
    for path, module in list(model.named_modules()):
        joined = getattr(module, _JOINED, None)
        if not isinstance(joined, nn.Parameter) or joined.dim() != 3:
            continue
        kind = type(module).__name__
        if stored.get(f"{path}.0.{_JOINED}.weight"):  # gate and up are one linear, in an order of their own
            names = [_JOINED, _LAST]
            unusual = _flags(module, _UNUSUAL)
        else:
            names = _names(path, len(joined), stored, kind)
            unusual = _flags(module, _ALTERNATING | _UNUSUAL)
        if unusual or not hasattr(module, "_apply_gate"):
            raise UsageError(f"{path}: experts of the kind {kind} cannot be taken apart ({', '.join(unusual)})")
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, Experts(module, names))


def _names(path: str, count: int, stored: dict[str, list[str]], kind: str) -> list[str]:
    """Of the gate, up and down projection of an expert."""
    parts = [name.split(".") for leaf in (_JOINED, _LAST) for name in stored.get(f"{path}.{leaf}", [])]
    # The last three components: the number of the expert, the projection, "weight".
    if len(parts) != 3 * count or any(len(part) < 3 or not part[-3].isdecimal() for part in parts):
        raise UsageError(f"{path} ({kind}): its experts are not stored one by one, which quantizing them needs")
    return [part[-2] for part in parts[::count]]


def _flags(module: nn.Module, unusual: dict[str, bool]) -> list[str]:
    return [flag for flag, value in unusual.items() if getattr(module, flag, not value) is value]


def routers(block: nn.Module) -> list[str]:
    """The modules that choose experts and stay in floating point. They stand beside experts, and their weight has one
    row for each expert, or a single row (the gate of an expert that all tokens share)."""
    found = []
    for path, module in block.named_modules():
        children = dict(module.named_children())
        counts = [child.count for child in children.values() if isinstance(child, Experts)]
        counts += [len(child) for child in children.values() if isinstance(child, nn.ModuleList)]
        for name, child in children.items():
            weight = getattr(child, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 2 and counts and len(weight) in (1, *counts):
                found.append(f"{path}.{name}" if path else name)
    return found
