"""Which scales can be moved out of the inputs of linears into the module before them, found by experiment.

Two experiments on a few tokens decide, without naming architectures. First, a module's output is replaced by random
numbers, then multiplied by powers of two, a different one for each channel. A linear's input that is multiplied by the
same power carries that channel. Second, the module's output is divided by a random scale and the linears' input is
multiplied by it. The block computes the same as before only where nothing else reads that output. Powers of two pass
through sums and products without rounding, so mistakes are unlikely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qserve.calibration.experts import Expert
from qserve.calibration.groups import shared_inputs
from qserve.calibration.skeleton import Call

# Random outputs per experiment. Half of them are positive everywhere, so that they pass a ReLU.
_SAMPLES = 4
# Channels are told apart by a power of two for each digit of their number.
_BASE = 32
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Fold:
    """A scale of the consumers' input that the producer's output can be divided by.

    producer   module of the block, named relative to it: a norm or a linear
    consumers  the linears that share that input, named as they were given
    channels   int64 [in]: for each input of the consumers, the producer's output (a row of a linear) that it carries
    offset     what the producer adds to its weight before it multiplies by it (1 in Gemma's norms)
    """

    producer: str
    consumers: tuple[str, ...]
    channels: Tensor
    offset: float = 0.0


@torch.no_grad()
def find_folds(block: nn.Module, linears: Mapping[str, nn.Linear], hidden: Tensor, call: Call) -> list[Fold]:
    """Every fold of ``block``, at most one for each group of linears that share an input.

    ``hidden`` float32 [1, few tokens, width] with its ``call``. Experts are tried one by one, with any tokens.
    """
    names = {id(linear): name for name, linear in linears.items()}
    generator = torch.Generator().manual_seed(0)
    found: list[Fold] = []
    outside = dict(linears)
    for path, expert in block.named_modules():
        own = {names[id(m)]: m for m in expert.modules() if isinstance(m, nn.Linear) and id(m) in names}
        if isinstance(expert, Expert) and own:
            outside = {name: linear for name, linear in outside.items() if name not in own}
            inputs = torch.randn(1, 1, hidden.shape[-1], generator=generator, device="cpu").to(hidden.device)
            folds = _Block(expert, own, inputs, Call((), {})).folds()
            found += [replace(fold, producer=f"{path}.{fold.producer}") for fold in folds]
    return found + _Block(block, outside, hidden, call).folds()


def apply(block: nn.Module, fold: Fold, scale: Tensor) -> list[str]:
    """Divide the output of ``fold``'s producer by ``scale`` float32 [in], in place.

    Inputs that carry the same channel must have the same scale. The caller multiplies the consumers' columns by it.
    Returns the names of the changed parameters, relative to the block.
    """
    module = block.get_submodule(fold.producer)
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, nn.Parameter)
    divisor = torch.ones(len(weight))
    divisor[fold.channels] = scale
    column = divisor[:, None] if weight.dim() == 2 else divisor
    weight.data = (weight.data + fold.offset) / column - fold.offset
    changed = [f"{fold.producer}.weight"]
    if isinstance(bias, nn.Parameter):
        bias.data = bias.data / divisor
        changed.append(f"{fold.producer}.bias")
    return changed


class _Block:
    """The experiments on one block."""

    def __init__(self, block: nn.Module, linears: Mapping[str, nn.Linear], hidden: Tensor, call: Call) -> None:
        self.block, self.linears, self.call = block, dict(linears), call
        self.hidden = hidden.expand(_SAMPLES, *hidden.shape[1:])
        self.generator = torch.Generator().manual_seed(0)
        ran = shared_inputs(block, self.linears, hidden, call)
        self.groups = {group[0]: tuple(group) for group in ran}

    def folds(self) -> list[Fold]:
        found: dict[str, Fold] = {}
        experts = [module for module in self.block.modules() if isinstance(module, Expert)]
        apart = {inner for expert in experts if expert is not self.block for inner in expert.modules()}
        for producer, module in self.block.named_modules():
            offset = None if module in apart else _offset(module)
            if not producer or offset is None:
                continue
            for first, channels in self._carried(module).items():
                fold = Fold(producer, self.groups[first], channels, offset)
                if first not in found and self._nothing_else_reads(module, fold):
                    found[first] = fold
        return list(found.values())

    def _carried(self, module: nn.Module) -> dict[str, Tensor]:
        """First linear of a group -> the channel of ``module`` that each of its inputs carries."""
        weight = module.weight
        assert isinstance(weight, Tensor)
        rows = len(weight)
        parts = {(0, rows)}
        if weight.dim() == 2:  # of a fused linear, perhaps only a part of the rows is carried
            widths = {self.linears[first].in_features for first in self.groups}
            parts |= {(row, row + width) for width in widths if rows % width == 0 for row in range(0, rows, width)}
        result: dict[str, Tensor] = {}
        for start, stop in sorted(parts, key=lambda part: part[0] - part[1]):
            for first, channels in self._identify(module, rows, start, stop).items():
                result.setdefault(first, channels)
        return result

    def _identify(self, module: nn.Module, rows: int, start: int, stop: int) -> dict[str, Tensor]:
        """As ``_carried``, with only the channels ``start`` to ``stop`` multiplied."""
        outputs = torch.randn(*self.hidden.shape[:2], rows, generator=self.generator, device="cpu")
        outputs = outputs.to(self.hidden.device)
        outputs[: _SAMPLES // 2] = outputs[: _SAMPLES // 2].abs() + 0.1
        plain = self._inputs(module, outputs)
        channels = {first: torch.full(values.shape[1:], start) for first, values in plain.items()}
        place = 1
        while channels and place < stop - start:
            power = torch.zeros(rows)
            digits = torch.arange(stop - start) // place % _BASE - _BASE // 2
            power[start:stop] = torch.where(digits >= 0, digits + 1, digits).float()  # 0: not multiplied
            changed = self._inputs(module, outputs * torch.exp2(power))
            for first in list(channels):
                found = _powers(plain[first], changed[first])
                if found is None or bool((found == 0).any()):
                    del channels[first]
                else:
                    channels[first] += (torch.where(found > 0, found - 1, found) + _BASE // 2) * place
            place *= _BASE
        return channels

    def _inputs(self, module: nn.Module, outputs: Tensor) -> dict[str, Tensor]:
        """The input [samples, in] of every group at the first token, when ``module`` outputs ``outputs``.

        The first token attends to itself alone, so its attention returns its value for any queries and keys.
        """
        seen: dict[str, Tensor] = {}
        samples, tokens = self.hidden.shape[:2]

        def note(name: str) -> Callable[..., None]:
            def before(linear: nn.Module, args: tuple[Tensor, ...]) -> None:
                if args[0].numel() == samples * tokens * args[0].shape[-1]:
                    seen[name] = args[0].reshape(samples, tokens, -1)[:, 0].clone()

            return before

        def substitute(module: nn.Module, args: object, output: Tensor) -> Tensor:
            return outputs.reshape(output.shape) if output.numel() == outputs.numel() else output

        with ExitStack() as hooks:
            hooks.callback(module.register_forward_hook(substitute).remove)
            for first in self.groups:
                hooks.callback(self.linears[first].register_forward_pre_hook(note(first)).remove)
            self.block(self.hidden, *self.call.args, **self.call.kwargs)
        return seen

    def _nothing_else_reads(self, module: nn.Module, fold: Fold) -> bool:
        weight = module.weight
        assert isinstance(weight, Tensor)
        divisor = torch.ones(len(weight))
        carried = fold.channels.unique()
        halves = torch.randint(0, 2, carried.shape, generator=self.generator, device="cpu")
        divisor[carried] = torch.exp2(halves.to(carried.device) * 2.0 - 1.0)
        factor = divisor[fold.channels]
        expected = self._output()
        with ExitStack() as hooks:
            hooks.callback(module.register_forward_hook(lambda module, args, output: output / divisor).remove)
            for name in fold.consumers:
                linear = self.linears[name]
                hooks.callback(linear.register_forward_pre_hook(lambda linear, args: (args[0] * factor,)).remove)
            found = self._output()
        return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())

    def _output(self) -> Tensor:
        result = self.block(self.hidden[:1], *self.call.args, **self.call.kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output


def _offset(module: nn.Module) -> float | None:
    """What ``module`` adds to its weight before it multiplies by it; None where its output is no multiple of that."""
    if isinstance(module, nn.Linear):
        return 0.0
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(weight.device)

    inputs = random(2, 2, len(weight))
    own = {name: random(*p.shape) for name, p in module.named_parameters(recurse=False)}
    try:
        plain = functional_call(module, own, (inputs,))
        for offset in (0.0, 1.0):
            twice = {name: 2 * p + offset if name == "weight" else 2 * p for name, p in own.items()}
            doubled = functional_call(module, twice, (inputs,))
            if doubled.shape == inputs.shape and torch.allclose(doubled, 2 * plain, rtol=_TOLERANCE):
                return offset
    except (RuntimeError, TypeError, AttributeError):  # not a norm: it takes other arguments
        pass
    return None


def _powers(plain: Tensor, changed: Tensor) -> Tensor | None:
    """int64 [in]: the power of two that every row of ``plain`` [n, in] was multiplied by; None where none was."""
    alive = plain != 0
    ratio = torch.where(alive, changed / plain, 1.0)
    power = torch.where(alive & (ratio > 0), ratio, 1.0).log2().round()
    exact = (ratio / torch.exp2(power) - 1).abs() < _TOLERANCE
    # A row where a channel is zero says nothing about that channel.
    common = torch.where(alive, power, -torch.inf).amax(0)
    same = torch.where(alive, power == common, changed == 0) & exact
    return common.long() if bool(same.all() and alive.any(0).all()) else None
