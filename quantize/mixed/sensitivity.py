"""What rounding each linear costs in the model's own output: KL divergence, measured one linear at a time.

This file sends variants of the model through its blocks; ``probe`` and ``rounders`` round a linear, ``allocate``
chooses within a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qserve.calibration.activations import Activations
from qserve.calibration.blocks import copy_sharing_weights
from qserve.calibration.float_walk import FloatWalk
from qserve.calibration.head import head
from qserve.calibration.skeleton import Call, Skeleton
from qserve.checkpoint.parts import Keep, Part
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.quantize import fitted
from qserve.quantize.mixed.probe import Probe, scheme_of
from qserve.quantize.mixed.rounders import Compensated, Nearest, Rounder, compensate
from qserve.quantize.mixed.units import Unit, of_experts
from qserve.runtime import heap

EXCERPT = (4, 128)
"""Windows, and tokens of each, that are enough to rank linears."""


@dataclass(frozen=True)
class Candidate:
    """One scheme for a unit: its stored bits, scales included, and its predicted part of the mean KL divergence (nats).
    ``scheme`` None keeps 16-bit floats."""

    scheme: WeightScheme | None
    bits: int
    kl: float


@dataclass(frozen=True)
class Sensitivity:
    """``candidates`` of one unit of ``weights`` weights, the smallest first."""

    modules: Unit
    weights: int
    candidates: tuple[Candidate, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Sensitivity:
        candidates = (Candidate(**{**each, "scheme": scheme_of(each["scheme"])}) for each in content["candidates"])
        return cls(tuple(content["modules"]), content["weights"], tuple(candidates))


Sensitivities = tuple[Sensitivity, ...]


def excerpt(windows: Tensor) -> Tensor:
    """The first ``EXCERPT`` of ``windows`` int64 [samples, length]."""
    samples, length = EXCERPT
    return windows[:samples, :length]


@dataclass(frozen=True)
class Compensation:
    """GPTQ will round in the end, with or without ``act_order``. Its Hessians come from ``windows`` int64 [samples,
    length], of which ``excerpt`` is a part. With ``follows`` it will follow the float model: then the linears behind
    one in its block make up for part of its loss, for very unequal parts."""

    windows: Tensor
    act_order: bool = True
    follows: bool = True


@torch.no_grad()
def measure(
    skeleton: Skeleton,
    windows: Tensor,
    candidates: Mapping[Unit, Sequence[WeightScheme | None]],
    *,
    around: float = 4.25,
    symmetric_zeros: bool = True,
    activations: ActivationScheme | None = None,
    compensation: Compensation | None = None,
    offload: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    kept: Part | None = None,
    keep: Keep | None = None,
) -> Sensitivities:
    """Measure one candidate of each unit, the one nearest to ``around`` bits per weight, and predict the others.

    For each unit, the hidden states of a model with only that unit rounded go through the blocks. At the end its
    next-token distributions are compared with the float model's, over ``windows`` int64 [samples, length] (see
    ``excerpt``). Rounding acts on KL to second order, so the other candidates cost in proportion to the squared error
    of the unit's output. Units are linears of blocks, or the output layer alone. A unit that ``windows`` never reach is
    left out. Linears of blocks are rounded as ``compensation`` says, or to nearest without it; the output layer is
    rounded to nearest. The inputs of a rounded unit are rounded by ``activations`` (dynamic). Where ``compensation``
    follows the float model, so do the unrounded linears behind the unit in its block: they make up for much of what
    rounding q, k and v loses, and for nothing of what the down projection loses. The measured costs are then evened
    (see ``_evened``). ``offload`` is a directory for the hidden states; ``symmetric_zeros`` as in ``Format``. One block
    is in memory at a time, and a copy of its weights where they follow.

    After each step that ``progress`` is told of, ``keep`` gets the hidden states that the next steps need. Making them
    again would be a large part of the work, since every block adds some. ``kept`` is the last state that the same
    measurement gave to ``keep``; it goes on from there.
    """
    with torch.device(skeleton.device):  # of every tensor that is made meanwhile
        walk = _Walk(
            skeleton, windows, candidates, around, symmetric_zeros, activations, compensation, offload, progress, keep
        )
        if kept is not None:
            walk.resume(kept)
        walk.pass_blocks()
        probes, means = walk.score()
    if compensation and compensation.follows:
        means = _evened(probes, means, fitted.ALL_AT_ONCE.value if activations is None else 1.0)
    return tuple(_predicted(probe, kl) for probe, kl in zip(probes, means, strict=True))


@dataclass
class _Walk:
    """One measurement in progress. ``probes`` of the blocks' units have passed ``passed`` blocks, and then ``scored``
    samples; ``sums`` are their divergences over those samples. The fields before are the arguments of ``measure``."""

    skeleton: Skeleton
    windows: Tensor
    candidates: Mapping[Unit, Sequence[WeightScheme | None]]
    around: float
    symmetric_zeros: bool
    activations: ActivationScheme | None
    compensation: Compensation | None
    offload: Path | None
    progress: Callable[[int, int], None] | None
    keep: Keep | None
    probes: list[Probe] = field(default_factory=list)
    passed: int = 0
    scored: int = 0
    sums: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._samples, length = self.windows.shape
        variants = 1 + len(self.candidates)
        shape = variants * self._samples, length, self.skeleton.hidden_size
        self._states = Activations(*shape, self.offload, self.skeleton.device)
        self._calls, _ = self.skeleton.stem(self.windows, length, self._states)
        text = self.compensation
        self._floats = FloatWalk(self.skeleton, text.windows, self.offload) if text else None

    def resume(self, kept: Part) -> None:
        """Go on from ``kept``, the state that an earlier run gave to ``keep``."""
        self.passed, self.scored, self.sums = kept.extra["passed"], kept.extra["scored"], kept.extra["sums"]
        self.probes += (Probe.from_json(each) for each in kept.extra["probes"])
        for number in range(1 + len(self.probes)):
            self._write(number, kept.read(f"variant.{number}"))
        if self._floats:
            self._floats.resume(kept)

    def pass_blocks(self) -> None:
        """Send every variant through the remaining blocks. Each block adds a variant for each of its units."""
        while self.passed < len(self.skeleton.blocks):
            self._pass_block(self.passed)
            heap.release()
            self.passed += 1
            self._note()

    def score(self) -> tuple[list[Probe], list[float]]:
        """Every probe, the output layer's last, and its mean divergence from the float model (nats)."""
        tried = list(self.probes)
        with head(self.skeleton) as (linears, log_probabilities):
            rounders: dict[str, Rounder] = {}
            if (unit := tuple(linears)) in self.candidates:
                inputs = _inputs(linears, lambda: [log_probabilities(each) for each in self._variant(0).split(1)])
                rounders |= {name: Nearest(rows) for name, rows in inputs.items()}
                if probe := self._probe(unit, linears, rounders):
                    tried.append(probe)
                    self._write(len(tried), self._variant(0))
            divergence = torch.tensor(self.sums or [0.0] * len(tried), dtype=torch.float64)
            while self.scored < self._samples:
                base = log_probabilities(self._states.read(self.scored, self.scored + 1))
                for number, probe in enumerate(tried):
                    where = (1 + number) * self._samples + self.scored
                    with ExitStack() as rounded:
                        if probe.modules == unit:
                            rounded.enter_context(probe.rounded(linears, rounders))
                            rounded.enter_context(probe.rounded_inputs(linears, self.activations))
                        changed = log_probabilities(self._states.read(where, where + 1))
                    divergence[number] += (base.exp() * (base - changed)).sum(dtype=torch.float64)
                self.scored, self.sums = self.scored + 1, divergence.tolist()
                self._note()
        heap.release()
        return tried, (divergence / self.windows.numel()).clamp_(min=0).tolist()

    def _pass_block(self, index: int) -> None:
        run = _runner(self.skeleton.load(index), self._calls[index])
        linears = self.skeleton.linears(index)
        inputs = _inputs(linears, lambda: run(self._variant(0)))
        rounders: dict[str, Rounder] = {name: Nearest(rows) for name, rows in inputs.items()}
        if self._floats and self.compensation:
            for names, stats in self._floats.enter(index):
                rounders |= dict.fromkeys(names, Compensated(stats, act_order=self.compensation.act_order))
        before = len(self.probes)
        for unit in self.candidates:
            if probe := self._probe(unit, linears, rounders):
                self.probes.append(probe)
                self._write(len(self.probes), self._output_with(probe, index, rounders))
        for number in range(1 + before):
            self._write(number, run(self._variant(number)))
        self.skeleton.unload(index)

    def _output_with(self, probe: Probe, index: int, rounders: Mapping[str, Rounder]) -> Tensor:
        """The output of block ``index`` for the float model's states, with the unit of ``probe`` rounded."""
        block = copy_sharing_weights(self.skeleton.block(index))
        parts = block.named_modules(prefix=self.skeleton.blocks[index])
        linears = {name: part for name, part in parts if isinstance(part, nn.Linear)}
        with probe.rounded(linears, rounders):
            if self._floats and self.compensation and self.compensation.follows:
                compensate(self._floats.visit(index, block, probe.reached))
            with probe.rounded_inputs(linears, self.activations):  # this noise is not made up for
                return _runner(block, self._calls[index])(self._variant(0))

    def _probe(
        self, unit: Unit, linears: Mapping[str, nn.Linear], rounders: Mapping[str, Rounder]
    ) -> Probe | None:
        return Probe.of(unit, linears, rounders, self.candidates[unit], self.around, self.symmetric_zeros)

    def _variant(self, number: int) -> Tensor:
        """The hidden states of one variant; number 0 is the float model."""
        return self._states.read(number * self._samples, (number + 1) * self._samples)

    def _write(self, number: int, states: Tensor) -> None:
        self._states.write(number * self._samples, states)

    def _every_state(self) -> Iterator[tuple[str, Tensor]]:
        for number in range(1 + len(self.probes)):
            yield f"variant.{number}", self._variant(number).cpu()
        if self._floats:
            yield from self._floats.states()

    def _note(self) -> None:
        done, steps = self.passed + self.scored, len(self.skeleton.blocks) + self._samples
        if self.keep and done < steps:
            listed = [probe.to_json() for probe in self.probes]
            so_far = {"passed": self.passed, "scored": self.scored, "sums": self.sums, "probes": listed}
            self.keep(self._every_state(), so_far)
        if self.progress:
            self.progress(done, steps)


def _predicted(probe: Probe, kl: float) -> Sensitivity:
    """The costs of the other schemes, where the scheme that was tried costs ``kl``."""
    error = probe.errors[probe.measured]
    rate = kl / error if error else 0.0
    found = zip(probe.schemes, probe.bits, probe.errors, strict=True)
    chosen = (Candidate(scheme, bits, rate * error) for scheme, bits, error in found)
    return Sensitivity(probe.modules, probe.weights, tuple(sorted(chosen, key=lambda each: (each.bits, each.kl))))


def _evened(probes: Sequence[Probe], measured: Sequence[float], times: float) -> list[float]:
    """The divergences ``measured``, drawn per weight towards that of all units together, and multiplied by ``times``.
    Experts keep theirs: they cost little because they seldom run, and nothing is made up for them."""
    pairs = [(probe.weights, kl) for probe, kl in zip(probes, measured, strict=True) if not of_experts(probe.modules)]
    mean = sum(kl for _, kl in pairs) / max(1, sum(weights for weights, _ in pairs))

    def evened(probe: Probe, kl: float) -> float:
        if not kl or of_experts(probe.modules):
            return kl
        ratio: float = (kl / probe.weights / mean) ** (fitted.EVENING.value - 1)
        return times * kl * ratio

    return [evened(probe, kl) for probe, kl in zip(probes, measured, strict=True)]


def _runner(block: nn.Module, call: Call) -> Callable[[Tensor], Tensor]:
    def run(hidden: Tensor) -> Tensor:
        result = block(hidden, *call.args, **call.kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    return run


def _inputs(linears: Mapping[str, nn.Linear], run: Callable[[], object]) -> dict[str, Tensor]:
    """float32 [..., in]: the inputs of each of ``linears`` while ``run`` runs; without those that do not run."""
    seen: dict[str, list[Tensor]] = {}

    def before(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, args: seen.setdefault(name, []).append(args[0])

    hooks = [linear.register_forward_pre_hook(before(name)) for name, linear in linears.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in seen.items()}
