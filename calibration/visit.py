"""``Visit``: one decoder block during calibration. A caller gets its linears with statistics of their inputs, and
returns the weights that replace theirs.

The calibration batch goes through the block in one of two ways, with the same result. Where memory allows it goes ONCE,
by workers: each part pauses in front of a linear until the statistics of all parts are gathered and the caller has
replaced the weight, then goes on with the new weight. Otherwise the samples go through in parts, once for each stage of
linears that do not feed each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qserve.calibration.activations import Activations
from qserve.calibration.groups import Hooks, StopForward, stages
from qserve.calibration.pausable import PausableForward, pause
from qserve.calibration.products import fast_products
from qserve.calibration.residual import Streams, adding_linears
from qserve.calibration.skeleton import Call
from qserve.calibration.stats import LayerStats
from qserve.kernels import products

DRY_TOKENS = 4
"""Tokens to try things out with."""
# Samples that go through a block at once, times the bytes of a number. With more, passes come from memory, and buffers
# have a size that the allocator does not keep; with fewer, threads wake too often.
_TOGETHER = 32


@dataclass(frozen=True)
class Gather:
    """The statistics that a caller wants: ``hessian`` and ``sample_rows`` of ``LayerStats``, and ``drift``, which
    counts where the walk follows the float model."""

    hessian: bool = True
    sample_rows: int = 0
    drift: bool = False

    def stats(self, in_features: int) -> LayerStats:
        return LayerStats(in_features, hessian=self.hessian, sample_rows=self.sample_rows)


@dataclass(frozen=True)
class Inputs:
    """Linears that are given the very same tensor: their weights float32 [out, in], and the statistics of that tensor.

    ``stats`` is None for linears that the calibration batch never reached.
    """

    names: tuple[str, ...]
    weights: tuple[Tensor, ...]
    stats: LayerStats | None


@dataclass(frozen=True)
class Replacement:
    """The weights to go on with. Where the caller moved a scale into the layer before, their input is divided by
    ``divisor`` (float32 [in]) from now on."""

    weights: Sequence[Tensor]
    divisor: Tensor | None = None


OnInputs = Callable[[Inputs], Replacement]


@dataclass
class Visit:
    """One block of the walk. ``groups`` are the linears that share an input, in the order they run.

    ``floats`` are this block's inputs in the float model, for the first samples, and ``float_block`` is the block with
    its own weights; both are None where the walk does not follow the float model.
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
    float_block: nn.Module | None = None
    load: Callable[[str], None] | None = None
    _outputs: list[tuple[int, Tensor]] | None = None
    _float_outputs: list[tuple[int, Tensor]] | None = None
    _finished: bool = False
    _adding: dict[str, str] = field(default_factory=dict)

    def short_inputs(self) -> Tensor:
        """float32 [1, few tokens, width]: enough to try things out with ``short_call``."""
        assert self.inputs is not None
        return self.inputs.read(0, 1)[:, :DRY_TOKENS]

    def forward(self) -> Iterator[tuple[int, Tensor]]:
        """(first sample, output of the block as it is now) for each part of the batch."""
        assert self.inputs is not None
        return self._run(self.block, self.inputs, self._together())

    def float_forward(self) -> Iterator[tuple[int, Tensor]]:
        """The same for the float model: (first sample, output of this block there), for the samples of ``floats``."""
        assert self.floats is not None and self.float_block is not None
        if self._float_outputs is not None:
            return iter(self._float_outputs)
        return self._run(self.float_block, self.floats, min(self.samples_at_once, _at_once()))

    def _run(self, block: nn.Module, inputs: Activations, at_once: int) -> Iterator[tuple[int, Tensor]]:
        assert self.call is not None
        for start, stop in _parts(inputs, at_once):
            part = inputs.read(start, stop)
            with torch.no_grad(), fast_products():
                output = _output(block(part, *self.call.args, **self.call.kwargs)).float()
            yield start, output

    def replace(self, on_inputs: OnInputs, gather: Gather) -> None:
        """Hand every linear with its statistics to ``on_inputs`` and go on with what it returns."""
        reached: set[str] = set()
        if self.floats is None:
            gather = dataclasses.replace(gather, drift=False)
        if gather.drift and self._all_followed():
            assert self.short_call is not None
            first = {group[0]: self.linears[group[0]] for group in self.groups if len(group) == 1}
            self._adding = adding_linears(self.block, first, self.short_inputs(), self.short_call)
        if self.inputs is not None:
            if self.samples_at_once >= self.inputs.shape[0]:
                self._in_one_pass(on_inputs, gather, reached)
            else:
                self._in_stages(on_inputs, gather, reached)
        for name in self.linears:
            if name not in reached:  # never reached, so no shared input is known: each is handed over alone
                self._hand_over([name], on_inputs, None)

    def finish(self) -> None:
        """Make the outputs the inputs of the next block. The walk does it if the caller did not."""
        if self.inputs is None or self._finished:
            return
        self._finished = True
        if self.floats is not None and self.float_block is not None:
            for start, output in self.float_forward():
                self.floats.write(start, output)
            self._float_outputs = None
        for start, output in self.forward() if self._outputs is None else self._outputs:
            self.inputs.write(start, output)
        self._outputs = None

    def changed(self) -> None:
        """Call it if weights change after ``replace``: the outputs are then computed again."""
        self._outputs = None

    def _together(self) -> int:
        """How many samples go through the block at once: all of them where a router sends tokens to experts, since one
        worker could not know whether another will still come to a linear."""
        assert self.inputs is not None
        samples = self.inputs.shape[0]
        if self.samples_at_once < samples:
            return self.samples_at_once
        return min(_at_once(), samples) if len(stages(self.groups)) == len(self.groups) else samples

    @torch.no_grad()
    def _in_one_pass(self, on_inputs: OnInputs, gather: Gather, reached: set[str]) -> None:
        assert self.inputs is not None
        place = {name: index for index, group in enumerate(self.groups) for name in group}
        divisors: dict[str, Tensor] = {}
        streams = Streams(self.block, self._adding)

        def before(name: str, inputs: Tensor) -> Tensor | None:
            if name not in reached:
                pause(name, inputs, streams.before(name))
            # The layer before has already run, without the scale that was just moved into it.
            return inputs / divisors[name] if name in divisors else None

        workers = self._workers()
        floats = self._float_states(gather)
        with ExitStack() as stack:
            stack.enter_context(streams)
            stack.enter_context(Hooks(self.linears, before))
            for worker in workers:
                stack.callback(worker.cancel)
            for worker in workers:
                worker.resume()
            while waiting := [worker for worker in workers if worker.at is not None]:
                group = self.groups[min(place[worker.at[0]] for worker in waiting if worker.at)]
                here = [worker for worker in waiting if worker.at and worker.at[0] in group]
                stats = self._paused_stats(here, floats.pop(group[0], {}), group, gather)
                divisor = self._hand_over(group, on_inputs, stats)
                reached.update(group)
                if divisor is not None:
                    divisors.update(dict.fromkeys(group, divisor))
                for worker in here:
                    worker.resume()
        self._outputs = [(worker.start, worker.output) for worker in workers if worker.output is not None]

    def _workers(self) -> list[PausableForward]:
        assert self.inputs is not None and self.call is not None
        inputs, call = self.inputs, self.call

        def forward(start: int, stop: int) -> Tensor:
            with torch.no_grad(), fast_products():
                return _output(self.block(inputs.read(start, stop), *call.args, **call.kwargs)).float()

        parts = _parts(inputs, self._together())
        return [PausableForward(start, stop, partial(forward, start, stop)) for start, stop in parts]

    def _float_states(self, gather: Gather) -> dict[str, dict[int, Tensor]]:
        """The float model's inputs of the first linear of each group, by the first sample of each part; or its outputs,
        where they are smaller and tell as much; or, where it adds to the residual stream, that behind it (float32). Not
        for experts, whose rows could not be matched."""
        seen: dict[str, dict[int, Tensor]] = {}
        if not gather.drift or self.floats is None or self.float_block is None or self.call is None:
            return seen
        start, streams = 0, Streams(self.float_block, self._adding)

        def note(name: str, by_outputs: bool, linear: nn.Linear, inputs: Tensor, output: Tensor) -> None:
            stream = streams.before(name)
            if stream is not None:
                kept = stream + _own(linear, output)
            else:
                kept = inputs if not by_outputs else _own(linear, output)
                # A copy: a block may add to the output in place (parallel blocks do).
                kept = kept.to(products.multiplied(kept.device), copy=True)
            seen.setdefault(name, {}).setdefault(start, kept.reshape(-1, kept.shape[-1]))

        with ExitStack() as stack:
            for group in (stage[0] for stage in stages(self.groups) if len(stage) == 1):
                linear = self.float_block.get_submodule(group[0].removeprefix(f"{self.name}."))
                keep = partial(note, group[0], self._by_outputs(group))
                hook = linear.register_forward_hook(lambda of, args, output, keep=keep: keep(of, args[0], output))
                stack.callback(hook.remove)
            stack.enter_context(streams)
            stack.enter_context(fast_products())
            self._float_outputs = []
            for start, stop in _parts(self.floats, _at_once()):
                output = self.float_block(self.floats.read(start, stop), *self.call.args, **self.call.kwargs)
                self._float_outputs.append((start, _output(output).float()))
        return seen

    def _by_outputs(self, group: list[str]) -> bool:
        """Whether the float model's outputs of the linear tell as much as its inputs, and are smaller."""
        linear = self.linears[group[0]]
        return len(group) == 1 and linear.out_features < linear.in_features and self._all_followed()

    def _all_followed(self) -> bool:
        assert self.inputs is not None and self.floats is not None
        return self.floats.shape == self.inputs.shape

    def _paused_stats(
        self, workers: list[PausableForward], floats: dict[int, Tensor], group: list[str], gather: Gather
    ) -> LayerStats:
        """Statistics of the inputs of ``group``, where ``workers`` are stopped, and of the float model there."""
        assert self.inputs is not None and workers[0].at is not None
        samples, length, _ = self.inputs.shape
        by_outputs = bool(floats) and (group[0] in self._adding or self._by_outputs(group))
        note = LayerStats.update_target if by_outputs else LayerStats.update_drift
        stats = gather.stats(workers[0].at[1].shape[-1])
        for worker in workers:
            assert worker.at is not None
            rows, stream = _rows(worker.at[1]), worker.at[2]
            stats.update(rows, (worker.stop - worker.start) / samples)
            if len(rows) != (worker.stop - worker.start) * length:
                continue  # a router chose which tokens come here
            for start in [start for start in floats if worker.start <= start < worker.stop]:
                state, first = floats.pop(start), (start - worker.start) * length
                part = slice(first, first + len(state))
                if stream is not None:
                    state = state.sub_(_rows(stream)[part])
                if len(state) % length == 0:
                    note(stats, rows[part], state)
        return stats

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
        count, streams = 0, Streams(self.block, self._adding)

        def before(name: str, inputs: Tensor) -> None:
            if name not in stats:
                stats[name] = gather.stats(inputs.shape[-1])
            stats[name].update(inputs, count / samples)
            self._note_drift(stats[name], inputs, floats.get(name), streams.before(name), count)
            missing.discard(name)
            if not missing:
                raise StopForward

        with streams, Hooks({name: self.linears[name] for name in names}, before):
            for start in range(0, samples, self.samples_at_once):
                missing.update(names)
                part = self.inputs.read(start, min(start + self.samples_at_once, samples))
                count = len(part)
                if gather.drift:
                    floats = self._float_inputs(start, start + count, names)
                with suppress(StopForward), fast_products():
                    self.block(part, *self.call.args, **self.call.kwargs)
        return stats

    def _float_inputs(self, start: int, stop: int, names: list[str]) -> dict[str, Tensor]:
        """The float model's inputs of the linears ``names``, for those of the samples for which it is followed; or the
        residual stream behind those that add to it."""
        assert self.floats is not None and self.float_block is not None and self.call is not None
        stop = min(stop, self.floats.shape[0])
        found: dict[str, Tensor] = {}
        streams = Streams(self.float_block, self._adding)

        def before(name: str, inputs: Tensor) -> None:
            if (stream := streams.before(name)) is None:
                found.setdefault(name, inputs.clone())
            else:
                weight = linears[name].get_parameter("weight")
                found.setdefault(name, stream + F.linear(inputs.float(), weight))
            if len(found) == len(names):
                raise StopForward

        linears = {name: self.float_block.get_submodule(name.removeprefix(f"{self.name}.")) for name in names}
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        with streams, Hooks(linears, before), fast_products():
            for first in range(start, stop, _at_once()):
                found.clear()
                part = self.floats.read(first, min(first + _at_once(), stop))
                with suppress(StopForward):
                    self.float_block(part, *self.call.args, **self.call.kwargs)
                for name, inputs in found.items():
                    parts[name].append(inputs)
        return {name: torch.cat(parts.pop(name)) for name in names if parts[name]}

    def _note_drift(
        self, stats: LayerStats, inputs: Tensor, floats: Tensor | None, stream: Tensor | None, samples: int
    ) -> None:
        """``inputs`` and ``stream`` are those of ``samples`` samples, ``floats`` those of as many or fewer. Where a
        router chose the tokens, rows cannot be matched and nothing is noted."""
        assert self.inputs is not None
        length = self.inputs.shape[1]
        rows = _rows(inputs)
        if floats is not None and stream is not None:
            stats.update_target(rows, _rows(floats - stream))
            return
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


def _rows(states: Tensor) -> Tensor:
    return states.reshape(-1, states.shape[-1])


def _own(linear: nn.Linear, output: Tensor) -> Tensor:
    """``output`` without the bias."""
    return output if linear.bias is None else output - linear.bias


def _at_once() -> int:
    """Samples in a part, unless memory asks for fewer."""
    return _TOGETHER // products.multiplied().itemsize


def _parts(inputs: Activations, together: int) -> list[tuple[int, int]]:
    """(first sample, the one after the last) of each part of ``together`` samples."""
    samples = inputs.shape[0]
    return [(start, min(start + together, samples)) for start in range(0, samples, together)]


def _output(result: Any) -> Tensor:
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output
