"""``Probe``: one unit rounded in an otherwise float model, to see what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels.reference import round_input
from qserve.quantize.mixed.rounders import Rounder, errors
from qserve.quantize.mixed.units import Unit


@dataclass(frozen=True)
class Probe:
    """A unit of ``weights`` weights. For each of its ``schemes`` (None: 16-bit floats) it has the stored ``bits``,
    scales included, and the squared ``errors`` of the output. ``reached`` are the modules that some token came to;
    ``measured`` is the index of the scheme that is tried."""

    modules: Unit
    reached: tuple[str, ...]
    schemes: tuple[WeightScheme | None, ...]
    bits: tuple[int, ...]
    errors: tuple[float, ...]
    weights: int
    measured: int

    @classmethod
    def of(
        cls,
        unit: Unit,
        linears: Mapping[str, nn.Linear],
        rounders: Mapping[str, Rounder],
        schemes: Sequence[WeightScheme | None],
        around: float,
        symmetric_zeros: bool,
    ) -> Probe | None:
        """A probe of the scheme nearest to ``around`` bits per weight. None where ``unit`` is not among ``linears``, or
        no token reached it: then it has no rounder."""
        reached = tuple(module for module in unit if module in rounders)
        if not reached:
            return None
        shapes = [tuple(linears[module].weight.shape) for module in unit]
        weights = sum(out * inp for out, inp in shapes)

        def stored(scheme: WeightScheme | None, out: int, inp: int) -> int:
            return scheme.storage_bits(out, inp, symmetric_zeros=symmetric_zeros) if scheme else 16 * out * inp

        bits = tuple(sum(stored(scheme, *shape) for shape in shapes) for scheme in schemes)
        alike: dict[Rounder, list[Tensor]] = {}
        for module in reached:
            alike.setdefault(rounders[module], []).append(linears[module].weight.data)
        each = [errors(rounder, parts, schemes) for rounder, parts in alike.items()]
        total = tuple(map(sum, zip(*each, strict=True)))
        # A scheme without error tells nothing about the others.
        telling = [index for index, error in enumerate(total) if error > 0] or [0]
        measured = min(telling, key=lambda index: abs(bits[index] / weights - around))
        return cls(unit, reached, tuple(schemes), bits, total, weights, measured)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Probe:
        lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
        return cls(**{**content, **lists, "schemes": tuple(map(scheme_of, content["schemes"]))})

    @contextmanager
    def rounded(self, linears: Mapping[str, nn.Linear], rounders: Mapping[str, Rounder]) -> Iterator[None]:
        """Within the ``with`` the unit has the scheme to be measured."""
        scheme = self.schemes[self.measured]
        changed = {name: linears[name] for name in self.reached if scheme is not None}
        kept = {name: linear.weight.data for name, linear in changed.items()}
        for name, linear in changed.items():
            assert scheme is not None
            linear.weight.data = rounders[name].round(kept[name], scheme)
        yield
        for name, linear in changed.items():
            linear.weight.data = kept[name]

    @contextmanager
    def rounded_inputs(
        self, linears: Mapping[str, nn.Linear], activations: ActivationScheme | None
    ) -> Iterator[None]:
        """Within the ``with`` the unit's inputs are rounded, where the scheme to be measured does that."""
        with ExitStack() as hooks:
            if activations is not None and self.schemes[self.measured] is not None:
                for name in self.reached:
                    handle = linears[name].register_forward_pre_hook(
                        lambda _, args: (round_input(args[0], activations),)
                    )
                    hooks.callback(handle.remove)
            yield


def scheme_of(content: dict[str, Any] | None) -> WeightScheme | None:
    """A scheme from its fields; None for 16-bit floats."""
    return None if content is None else WeightScheme(**content)
