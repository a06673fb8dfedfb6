"""Walks a model one decoder block at a time with the calibration text, and lets a caller replace weights on the way.

Knows the order in which layers run and which share an input; does not know how weights are rounded.

A block is visited in one of two ways with the same result. Where memory allows, the whole calibration batch goes
through it in ONE forward: a hook in front of each linear sees all of its input at once, gathers the statistics,
lets the caller replace the weight, and the forward goes on with the new one. Otherwise the samples go through in
parts, once for each stage of linears that do not feed each other. Either way later linears and blocks see
quantized activations (true-sequential).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qserve.calibration.activations import Activations
from qserve.calibration.groups import Enough, Hooks, shared_inputs, stages
from qserve.calibration.skeleton import Call, Skeleton
from qserve.calibration.stats import LayerStats, fast_bfloat16
from qserve.runtime import heap

_DRY_TOKENS = 4
# So many samples of the float model, which nothing interrupts, go through a block at once: they stay in cache.
_FLOAT_SAMPLES = 8


@dataclass(frozen=True)
class Gather:
    """What statistics a caller wants: ``LayerStats``' ``hessian`` and ``sample_rows``, and ``drift`` where the walk
    follows the float model."""

    hessian: bool = True
    sample_rows: int = 0
    drift: bool = False

    def stats(self, in_features: int) -> LayerStats:
        return LayerStats(in_features, hessian=self.hessian, sample_rows=self.sample_rows)


@dataclass(frozen=True)
class Inputs:
    """Linears that are given the very same tensor: their weights float32 [out, in], and what that tensor was like.

    ``stats`` is None for linears that the calibration batch never reached.
    """

    names: tuple[str, ...]
    weights: tuple[Tensor, ...]
    stats: LayerStats | None


@dataclass(frozen=True)
class Replacement:
    """The weights to go on with, and what their input is divided by from now on (float32 [in]) where the caller
    moved a scale into the layer before."""

    weights: Sequence[Tensor]
    divisor: Tensor | None = None


OnInputs = Callable[[Inputs], Replacement]


@dataclass
class Visit:
    """One block while the walk is at it. ``groups`` are the linears that share an input, in the order they run.

    ``floats`` are the inputs that this block has in the float model, for the first few samples, and ``twin`` is the
    block with its own weights; both None where the walk does not follow the float model.
    Without calibration text there are no groups, nothing runs, and each linear is loaded (by ``load``) only while it is
    handed over.
    """

    index: int
    total: int
    name: str
    block: nn.Module
    linears: dict[str, nn.Linear]
    groups: list[list[str]] = field(default_factory=list)
    inputs: Activations | None = None
    call: Call | None = None
    short_call: Call | None = None
    samples_at_once: int = 0
    floats: Activations | None = None
    twin: nn.Module | None = None
    load: Callable[[str], None] | None = None
    _outputs: Tensor | None = None
    _float_outputs: Tensor | None = None
    _finished: bool = False

    def short_inputs(self) -> Tensor:
        """float32 [1, few tokens, width]: enough to try things out with ``short_call``."""
        assert self.inputs is not None
        return self.inputs.read(0, 1)[:, :_DRY_TOKENS]

    def forward(self) -> Iterator[tuple[int, Tensor]]:
        """(first sample, output of the block as it is now) for each part of the batch."""
        assert self.inputs is not None
        return self._run(self.block, self.inputs, self.samples_at_once)

    def float_forward(self) -> Iterator[tuple[int, Tensor]]:
        """The same of the float model: (first sample, output of this block there), for the samples of ``floats``."""
        assert self.floats is not None and self.twin is not None
        if self._float_outputs is not None:
            return iter([(0, self._float_outputs)])
        return self._run(self.twin, self.floats, min(self.samples_at_once, _FLOAT_SAMPLES))

    def _run(self, block: nn.Module, inputs: Activations, at_once: int) -> Iterator[tuple[int, Tensor]]:
        assert self.call is not None
        for start in range(0, inputs.shape[0], at_once):
            part = inputs.read(start, min(start + at_once, inputs.shape[0]))
            with torch.no_grad(), fast_products():
                output = _output(block(part, *self.call.args, **self.call.kwargs)).float()
            yield start, output

    def replace(self, on_inputs: OnInputs, gather: Gather) -> None:
        """Hand every linear with its statistics to ``on_inputs`` and go on with what it returns."""
        reached: set[str] = set()
        if self.floats is None:
            gather = dataclasses.replace(gather, drift=False)
        if self.inputs is not None:
            if self.samples_at_once >= self.inputs.shape[0]:
                self._outputs = self._in_one_forward(on_inputs, gather, reached)
            else:
                self._in_stages(on_inputs, gather, reached)
        for name in self.linears:
            if name not in reached:  # they have no input in common either: each is handed over alone
                self._hand_over([name], on_inputs, None)

    def finish(self) -> None:
        """The outputs become the inputs of the next block. Done by the walk where the caller did not."""
        if self.inputs is None or self._finished:
            return
        self._finished = True
        if self.floats is not None and self.twin is not None:
            for start, output in self.float_forward():
                self.floats.write(start, output)
            self._float_outputs = None
        if self._outputs is not None:
            self.inputs.write(0, self._outputs)
            self._outputs = None
            return
        for start, output in self.forward():
            self.inputs.write(start, output)

    def changed(self) -> None:
        """To be called after weights were changed once ``replace`` was done: the outputs are computed again."""
        self._outputs = None

    @torch.no_grad()
    def _in_one_forward(self, on_inputs: OnInputs, gather: Gather, reached: set[str]) -> Tensor:
        waiting = {name: group for group in self.groups for name in group}
        divisors: dict[str, Tensor] = {}
        assert self.inputs is not None and self.call is not None
        samples = self.inputs.shape[0]
        floats: dict[str, Tensor] = {}
        if gather.drift:
            floats, self._float_outputs = self._float_inputs(0, samples, [group[0] for group in self.groups])

        def before(name: str, inputs: Tensor) -> Tensor | None:
            if name not in reached:
                stats = gather.stats(inputs.shape[-1])
                stats.update(inputs)
                group = waiting[name]
                self._note_drift(stats, inputs, floats.pop(group[0], None), samples)
                divisor = self._hand_over(group, on_inputs, stats)
                reached.update(group)
                if divisor is not None:
                    divisors.update(dict.fromkeys(group, divisor))
            # The layer before ran already, without the scale that was just moved into it.
            return inputs / divisors[name] if name in divisors else None

        with Hooks(self.linears, before), fast_products():
            whole = self.inputs.read(0, samples)
            return _output(self.block(whole, *self.call.args, **self.call.kwargs)).float()

    def _in_stages(self, on_inputs: OnInputs, gather: Gather, reached: set[str]) -> None:
        for stage in stages(self.groups):
            first = {group[0]: group for group in stage}
            stats = self._stage_stats(list(first), gather)
            for name in [name for name in first if name in stats]:
                self._hand_over(first[name], on_inputs, stats.pop(name))
                reached.update(first[name])

    @torch.no_grad()
    def _stage_stats(self, names: list[str], gather: Gather) -> dict[str, LayerStats]:
        """The statistics of the linears ``names``, from partial forwards over all samples."""
        assert self.inputs is not None and self.call is not None
        samples = self.inputs.shape[0]
        stats: dict[str, LayerStats] = {}
        missing: set[str] = set()
        floats: dict[str, Tensor] = {}
        count = 0

        def before(name: str, inputs: Tensor) -> None:
            if name not in stats:
                stats[name] = gather.stats(inputs.shape[-1])
            stats[name].update(inputs, count / samples)
            self._note_drift(stats[name], inputs, floats.get(name), count)
            missing.discard(name)
            if not missing:
                raise Enough

        with Hooks({name: self.linears[name] for name in names}, before):
            for start in range(0, samples, self.samples_at_once):
                missing.update(names)
                part = self.inputs.read(start, min(start + self.samples_at_once, samples))
                count = len(part)
                if gather.drift:
                    floats, _ = self._float_inputs(start, start + count, names, stop_early=True)
                with suppress(Enough), fast_products():
                    self.block(part, *self.call.args, **self.call.kwargs)
        return stats

    def _float_inputs(
        self, start: int, stop: int, names: list[str], *, stop_early: bool = False
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The float model's inputs of the linears ``names``, for those of the samples that it is followed for, and
        what its block puts out, unless it is enough to have seen the inputs."""
        assert self.floats is not None and self.twin is not None and self.call is not None
        stop = min(stop, self.floats.shape[0])
        found: dict[str, Tensor] = {}

        def before(name: str, inputs: Tensor) -> None:
            found.setdefault(name, inputs)
            if stop_early and len(found) == len(names):
                raise Enough

        linears = {name: self.twin.get_submodule(name.removeprefix(f"{self.name}.")) for name in names}
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        outputs: list[Tensor] = []
        with Hooks(linears, before), fast_products():
            for first in range(start, stop, _FLOAT_SAMPLES):
                found.clear()
                part = self.floats.read(first, min(first + _FLOAT_SAMPLES, stop))
                with suppress(Enough):
                    outputs.append(_output(self.twin(part, *self.call.args, **self.call.kwargs)).float())
                for name, inputs in found.items():
                    parts[name].append(inputs)
        joined = {name: torch.cat(parts.pop(name)) for name in names if parts[name]}
        return joined, torch.cat(outputs) if outputs else None

    def _note_drift(self, stats: LayerStats, inputs: Tensor, floats: Tensor | None, samples: int) -> None:
        """``inputs`` are those of ``samples`` samples, ``floats`` those of as many or fewer. Where a router chose
        which tokens come here, rows cannot be matched."""
        assert self.inputs is not None
        length = self.inputs.shape[1]
        rows = inputs.reshape(-1, inputs.shape[-1])
        if floats is None or len(rows) != samples * length or floats.numel() % (length * rows.shape[1]):
            return
        stats.update_drift(rows[: floats.numel() // rows.shape[1]], floats)

    def _hand_over(self, names: list[str], on_inputs: OnInputs, stats: LayerStats | None) -> Tensor | None:
        if self.load is not None:
            self.load(names[0])
        weights = tuple(self.linears[name].weight.data for name in names)
        replacement = on_inputs(Inputs(tuple(names), weights, stats))
        for name, weight in zip(names, replacement.weights, strict=True):
            self.linears[name].weight = nn.Parameter(weight if self.load is None else weight.to("meta"), False)
        return replacement.divisor


def walk(
    skeleton: Skeleton,
    windows: Tensor | None,
    *,
    samples_at_once: int | None = None,
    float_samples: int = 0,
    offload: Path | None = None,
) -> Iterator[Visit]:
    """Visit every block in order; one is in memory at a time.

    ``windows`` int64 [samples, length]; None visits without running anything (statistics are then None).
    ``samples_at_once`` go through a block together; None takes all. For the first ``float_samples`` the float model
    is followed beside the quantized one. ``offload`` is a directory for the hidden states, which otherwise stay in
    memory.
    """
    inputs: Activations | None = None
    floats: Activations | None = None
    calls: list[Call] = []
    short: list[Call] = []
    count = 0
    if windows is not None:
        count = min(samples_at_once or len(windows), len(windows))
        samples, length = windows.shape
        inputs = Activations(samples, length, skeleton.hidden_size, offload)
        calls, short = skeleton.stem(windows, _DRY_TOKENS, inputs)
        if float_samples:
            floats = Activations(min(float_samples, len(windows)), windows.shape[1], skeleton.hidden_size, offload)
            for row in range(floats.shape[0]):
                floats.write(row, inputs.read(row, row + 1))
    total = len(skeleton.blocks)
    for index in range(total):
        block = skeleton.block(index) if inputs is None else skeleton.load(index)
        visit = Visit(index, total, skeleton.blocks[index], block, skeleton.linears(index))
        if inputs is None:
            visit.load = skeleton.load_linear
        else:
            visit.inputs, visit.samples_at_once = inputs, count
            visit.call, visit.short_call = calls[index], short[index]
            visit.floats, visit.twin = floats, _twin(block) if floats is not None else None
            visit.groups = shared_inputs(block, visit.linears, visit.short_inputs(), short[index])
        yield visit
        visit.finish()
        skeleton.unload(index)
        heap.release()


def fast_products() -> torch.autocast:
    """The products of a calibration forward in bfloat16, where this processor has them: twice as fast, and their
    rounding is far below what quantization does. Hidden states and Hessians stay in float32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=fast_bfloat16())


def _twin(block: nn.Module) -> nn.Module:
    """A copy whose parameters share the memory of ``block``'s until those are replaced."""
    shared: dict[int, Any] = {id(p): nn.Parameter(p.data, False) for p in block.parameters()}
    return copy.deepcopy(block, shared | {id(b): b for b in block.buffers()})


def _output(result: Any) -> Tensor:
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output
