"""What each linear's rounding costs in the model's own output: KL divergence, measured one linear at a time.

Knows how to send variants of a model through its blocks; does not know budgets (``allocate``), nor how a linear is
rounded for it (``probe``, ``rounder``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qserve.calibration.activations import Activations
from qserve.calibration.blocks import twin
from qserve.calibration.float_walk import FloatWalk
from qserve.calibration.head import head
from qserve.calibration.skeleton import Call, Skeleton
from qserve.checkpoint.parts import Keep, Part
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.quantize.mixed.probe import Probe, scheme_of
from qserve.quantize.mixed.rounders import Compensated, Nearest, Rounder, compensate
from qserve.quantize.mixed.units import Unit, of_experts
from qserve.runtime import heap

EXCERPT = (4, 128)
"""Windows, and tokens of each, that are enough to rank linears by."""
# Where the float model is followed, later blocks make up for more of what costs more, which one block does not show:
# of the differences in cost per weight this power is left. And rounded all at once, linears make up for less than they
# do for one: what weights cost together is this many times the sum. Both as seen on a 135M model
# (docs/notes/quantization.md).
_EVENING, _ALL_AT_ONCE = 0.75, 1.7


@dataclass(frozen=True)
class Candidate:
    """One scheme for a unit: what it stores (bits, scales included) and what it is predicted to add to the
    mean KL divergence (nats). ``scheme`` None keeps 16-bit floats."""

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
    """``EXCERPT`` of ``windows`` int64 [samples, length]."""
    samples, length = EXCERPT
    return windows[:samples, :length]


@dataclass(frozen=True)
class Compensation:
    """GPTQ will round in the end, with or without ``act_order``: its Hessians come from ``windows`` int64 [samples,
    length], of which ``excerpt`` is a part. With ``follows`` it will follow the float model, so that the linears
    behind one in its block make up for part of what it loses: very unequal parts."""

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

    The hidden states of one more model for each unit go through the blocks, with only that unit rounded; at the end
    their next-token distributions are compared with the float model's over ``windows`` int64 [samples, length]
    (see ``excerpt``). Rounding acts on KL to second order, so the other candidates cost in proportion to the squared
    error of the unit's output. Units are linears of blocks, or the output layer alone. One that ``windows`` never
    reach is left out. Linears of blocks are rounded as ``compensation`` says, to nearest without it, the output layer
    to nearest; the inputs of what is rounded as ``activations`` (dynamic) say. Where ``compensation`` follows the float
    model, so do the unrounded linears behind the unit in its block: much of what rounding q, k and v loses is made up
    for there, and nothing of what the down projection loses; what is measured is then evened (see ``_evened``).
    ``offload`` is a directory for the hidden states; ``symmetric_zeros`` as in ``Format``. One block is in memory at a
    time, and a copy of its weights where they follow.

    After each step that ``progress`` is told of, ``keep`` gets what the next ones need: the hidden states. To make them
    again would be a good part of the work, as there are more with every block. ``kept`` is what the same measurement
    gave it last, and goes on from there.
    """
    samples, length = windows.shape
    states = Activations((1 + len(candidates)) * samples, length, skeleton.hidden_size, offload)
    calls, _ = skeleton.stem(windows, length, states)
    floats = FloatWalk(skeleton, compensation.windows, offload) if compensation else None
    steps = len(skeleton.blocks) + samples
    probes: list[Probe] = []  # of the blocks
    passed = scored = 0  # blocks, samples
    sums: list[float] = []  # of divergences over those samples

    def variant(number: int) -> Tensor:
        return states.read(number * samples, (number + 1) * samples)

    def every_state() -> Iterator[tuple[str, Tensor]]:
        for number in range(1 + len(probes)):
            yield f"variant.{number}", variant(number)
        if floats:
            yield from floats.states()

    def note() -> None:
        done = passed + scored
        if keep and done < steps:
            listed = [probe.to_json() for probe in probes]
            keep(every_state(), {"passed": passed, "scored": scored, "sums": sums, "probes": listed})
        if progress:
            progress(done, steps)

    if kept is not None:
        passed, scored, sums = kept.extra["passed"], kept.extra["scored"], kept.extra["sums"]
        probes += (Probe.from_json(each) for each in kept.extra["probes"])
        for number in range(1 + len(probes)):
            states.write(number * samples, kept.read(f"variant.{number}"))
        if floats:
            floats.resume(kept)

    def pass_block(index: int) -> None:
        run = _runner(skeleton.load(index), calls[index])
        linears = skeleton.linears(index)
        inputs = _inputs(linears, lambda: run(variant(0)))
        rounders: dict[str, Rounder] = {name: Nearest(rows) for name, rows in inputs.items()}
        if floats and compensation:
            for names, stats in floats.enter(index):
                rounders |= dict.fromkeys(names, Compensated(stats, act_order=compensation.act_order))
        before = len(probes)
        for unit in candidates:
            if probe := Probe.of(unit, linears, rounders, candidates[unit], around, symmetric_zeros):
                probes.append(probe)
                block = twin(skeleton.block(index))
                parts = block.named_modules(prefix=skeleton.blocks[index])
                own = {name: part for name, part in parts if isinstance(part, nn.Linear)}
                with probe.rounded(own, rounders):
                    if floats and compensation and compensation.follows:
                        compensate(floats.visit(index, block, probe.reached))
                    with probe.rounded_inputs(own, activations):  # noise, for which nothing is made up
                        states.write(len(probes) * samples, _runner(block, calls[index])(variant(0)))
        for number in range(1 + before):
            states.write(number * samples, run(variant(number)))
        skeleton.unload(index)

    while passed < len(skeleton.blocks):
        pass_block(passed)
        heap.release()
        passed += 1
        note()

    tried = list(probes)
    with head(skeleton) as (linears, log_probabilities):
        if (unit := tuple(linears)) in candidates:
            inputs = _inputs(linears, lambda: [log_probabilities(each) for each in variant(0).split(1)])
            rounders = {name: Nearest(rows) for name, rows in inputs.items()}
            if probe := Probe.of(unit, linears, rounders, candidates[unit], around, symmetric_zeros):
                tried.append(probe)
                states.write(len(tried) * samples, variant(0))
        divergence = torch.tensor(sums or [0.0] * len(tried), dtype=torch.float64)
        while scored < samples:
            base = log_probabilities(states.read(scored, scored + 1))
            for number, probe in enumerate(tried):
                where = (1 + number) * samples + scored
                with ExitStack() as rounded:
                    if probe.modules == unit:
                        rounded.enter_context(probe.rounded(linears, rounders))
                        rounded.enter_context(probe.rounded_inputs(linears, activations))
                    changed = log_probabilities(states.read(where, where + 1))
                divergence[number] += (base.exp() * (base - changed)).sum(dtype=torch.float64)
            scored, sums = scored + 1, divergence.tolist()
            note()
    heap.release()
    means = (divergence / windows.numel()).clamp_(min=0).tolist()
    if compensation and compensation.follows:
        means = _evened(tried, means, _ALL_AT_ONCE if activations is None else 1.0)
    return tuple(_predicted(probe, kl) for probe, kl in zip(tried, means, strict=True))


def _predicted(probe: Probe, kl: float) -> Sensitivity:
    """What the other schemes cost where the one that was tried costs ``kl``."""
    error = probe.errors[probe.measured]
    rate = kl / error if error else 0.0
    found = zip(probe.schemes, probe.bits, probe.errors, strict=True)
    chosen = (Candidate(scheme, bits, rate * error) for scheme, bits, error in found)
    return Sensitivity(probe.modules, probe.weights, tuple(sorted(chosen, key=lambda each: (each.bits, each.kl))))


def _evened(probes: Sequence[Probe], measured: Sequence[float], times: float) -> list[float]:
    """``times`` the divergences ``measured``, each nearer, per weight, to that of all units together. Not of experts:
    that they cost little is because they seldom run, and nothing is made up for them."""
    pairs = [(probe.weights, kl) for probe, kl in zip(probes, measured, strict=True) if not of_experts(probe.modules)]
    mean = sum(kl for _, kl in pairs) / max(1, sum(weights for weights, _ in pairs))

    def evened(probe: Probe, kl: float) -> float:
        if not kl or of_experts(probe.modules):
            return kl
        ratio: float = (kl / probe.weights / mean) ** (_EVENING - 1)
        return times * kl * ratio

    return [evened(probe, kl) for probe, kl in zip(probes, measured, strict=True)]


def _runner(block: nn.Module, call: Call) -> Callable[[Tensor], Tensor]:
    def run(hidden: Tensor) -> Tensor:
        result = block(hidden, *call.args, **call.kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    return run


def _inputs(linears: Mapping[str, nn.Linear], run: Callable[[], object]) -> dict[str, Tensor]:
    """float32 [..., in]: what each of ``linears`` is given while ``run`` runs; nothing for one that does not."""
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
