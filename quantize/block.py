"""``BlockQuantizer``: applies a job's method to the linears of one block while the calibration text passes through."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from qserve.calibration.folds import Fold, apply, find_folds
from qserve.calibration.groups import role
from qserve.calibration.kv import KVRecorder
from qserve.calibration.stats import LayerStats
from qserve.calibration.visit import Gather, Inputs, Replacement, Visit
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.grid import E2M1, INTEGERS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import MICROSCALED, QuantSpec, WeightScheme
from qserve.kernels.executor import CPU
from qserve.quantize import rtn, signround
from qserve.quantize.job import QuantizeJob
from qserve.quantize.kv import recorded
from qserve.quantize.layer import LayerReport, LayerResult, with_activations
from qserve.quantize.mixed.units import of_experts
from qserve.quantize.scales import storable

_UNREACHED = "rounded to nearest: calibration never reached it"
# The scale of an input that calibration never saw: e4m3 numbers as they are, to 448, with all their bits from 1/64 on.
_UNSEEN_SCALE = 1.0


@dataclass
class BlockResult:
    """The result of one block: packed linears, dense tensors that changed or are new, and a line for each linear."""

    packed: dict[str, QuantizedWeight] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)
    reports: list[LayerReport] = field(default_factory=list)


class BlockQuantizer:
    """``dtype`` is that of dense tensors in the checkpoint. A changed tensor is rounded to it at once, so that later
    blocks see what will be served. Weights of the linears ``as_stored`` do not change. ``outputs``: of the gradients by
    the outputs of linears, where the method wants them. Blocks are on ``device``; results are in the memory of the CPU.
    """

    def __init__(
        self,
        spec: QuantSpec,
        job: QuantizeJob,
        dtype: torch.dtype,
        as_stored: Collection[str] = (),
        outputs: Mapping[str, LayerStats] | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.spec, self.job, self.dtype, self.as_stored, self.device = spec, job, dtype, as_stored, device
        self.outputs = outputs or {}
        self._method = job.algorithm
        self._uses_text = job.text is not None and self._method.text != "unused"
        self._gather = Gather(
            hessian=self._method.hessian, sample_rows=self._method.sample_rows, drift=self._method.compensates
        )

    def run(self, visit: Visit) -> BlockResult:
        """Quantize the block of ``visit``, which is left with the dequantized weights."""
        with torch.device(self.device):  # of every tensor that is made meanwhile
            made = self._run(visit)
        made.packed = {name: weight.to(CPU) for name, weight in made.packed.items()}
        made.dense = {name: tensor.to(CPU) for name, tensor in made.dense.items()}
        return made

    def _run(self, visit: Visit) -> BlockResult:
        self._visit, self._result = visit, BlockResult()
        self._original: dict[str, Tensor] = {}
        self._folds: dict[frozenset[str], Fold] = {}
        learn = self.job.learns_rounding and visit.inputs is not None
        if visit.inputs is not None and self._method.search_scale is not None:
            assert visit.short_call is not None
            found = find_folds(visit.block, visit.linears, visit.short_inputs(), visit.short_call)
            self._folds = {frozenset(fold.consumers): fold for fold in found}
        visit.replace(self._on_inputs, self._gather)
        if learn:
            self._learn(visit)
        for name, weight in self._result.packed.items():
            bias = visit.linears[name].bias
            if bias is not None:
                self._result.packed[name] = replace(weight, bias=bias.data.clone())
        if self.spec.kv_cache is not None and visit.inputs is not None:
            self._record_kv(visit)
        return self._result

    def _on_inputs(self, inputs: Inputs) -> Replacement:
        weights = dict(zip(inputs.names, inputs.weights, strict=True))
        stats = inputs.stats
        divisor = self._moved_scale(weights, stats)
        if divisor is not None and stats is not None:
            stats = stats.divided(divisor)
            weights = {name: weight * divisor for name, weight in weights.items()}
        by_scheme: dict[WeightScheme, list[str]] = {}
        for name in inputs.names:
            if (scheme := self.spec.scheme_of(name)) is not None and name not in self.as_stored:
                by_scheme.setdefault(scheme, []).append(name)
        for scheme, members in by_scheme.items():
            for name, part in self._round_together(weights, members, stats, scheme):
                if self.job.learns_rounding:
                    self._original[name] = weights[name]
                self._result.packed[name] = part.weight
                self._result.reports.append(part.report(name))
                if self._visit.inputs is not None:  # the rest of the block will see it
                    weights[name] = part.weight.dequantize()
                if (bias := self._visit.linears[name].bias) is not None:
                    bias.data = bias.data.to(torch.float16).to(torch.float32)
        if divisor is not None:
            for name in weights.keys() - self._result.packed.keys():
                self._result.dense[f"{name}.weight"] = weights[name] = self._narrow(weights[name])
        return Replacement(list(weights.values()), divisor)

    def _round_together(
        self, weights: Mapping[str, Tensor], members: list[str], stats: LayerStats | None, scheme: WeightScheme
    ) -> Iterable[tuple[str, LayerResult]]:
        """The linears share one Hessian, and rows do not affect each other, so they are rounded as one weight. Only
        where outputs share a scale or bits are they rounded alone: those may not reach into the next linear."""
        if scheme.joins_outputs:
            yield from ((name, self._round([name], weights[name], stats, scheme)) for name in members)
            return
        together = [weights[name] for name in members]
        joined = torch.cat(together) if len(together) > 1 else together[0]
        result = self._round(members, joined, stats, scheme)
        row = 0
        for name in members:
            yield name, result.rows(row, row + len(weights[name]))
            row += len(weights[name])

    def _round(
        self, names: list[str], weight: Tensor, stats: LayerStats | None, scheme: WeightScheme
    ) -> LayerResult:
        fallback = _UNREACHED if stats is None and self._uses_text else self._too_few(names, stats)
        activations, input_scale = self.spec.activations, None
        if activations is not None and not activations.dynamic:
            if stats is None:
                input_scale, origin = self._unseen_scale(names[0])
                fallback = f"{fallback}; {origin}"
            elif not stats.finite():
                raise UsageError(
                    f"{names[0]}: its calibration input is not finite, so it has no static scale: calibrate on other "
                    f"text, or use --scheme {'nvfp4a16' if activations.grid is E2M1 else 'fp8-tensor'}"
                )
        if fallback:
            result = replace(rtn.quantize(weight, stats, scheme), fallback=fallback)
        else:
            known = all(name in self.outputs for name in names)
            outputs = [self.outputs[name] for name in names] if known else []
            result = self._method.quantize(
                weight, stats, scheme, act_order=self.job.act_order, outputs=outputs
            )
        return with_activations(result, activations, stats, input_scale)

    def _too_few(self, names: Sequence[str], stats: LayerStats | None) -> str:
        """Why the Hessian of an expert's input is not used, or "".

        With fewer tokens than inputs it is singular but for damping. Weights fitted to those few tokens are worse on
        others than rounding to nearest, for which the inputs' magnitudes are enough.
        """
        if stats is None or not self._gather.hessian or not of_experts(tuple(names)):
            return ""
        tokens, inputs = stats.tokens, len(stats.absmax)
        if tokens >= inputs:
            return ""
        count = f"{tokens} token{'' if tokens == 1 else 's'}"
        return f"rounded to nearest: calibration reached it with {count}, fewer than its {inputs} inputs"

    def _unseen_scale(self, name: str) -> tuple[float, str]:
        """The static input scale of a linear that calibration never reached, and where it comes from. The linears that
        it reached are already done, see ``Visit.replace``."""
        reached = [each.module for each in self._result.reports if not each.fallback.startswith(_UNREACHED)]
        alike = [self._result.packed[module].input_scale for module in reached if role(module) == role(name)]
        if scales := [scale for scale in alike if scale is not None]:
            return max(scales), "its input scale is the largest of the other experts'"
        return _UNSEEN_SCALE, f"its input scale is {_UNSEEN_SCALE:g}"

    def _moved_scale(self, weights: Mapping[str, Tensor], stats: LayerStats | None) -> Tensor | None:
        """Choose a scale to divide the inputs of these linears by, and fold it into the layer before."""
        fold = self._folds.get(frozenset(weights))
        if fold is None or stats is None or not stats.finite() or self._too_few(list(weights), stats):
            return None
        if any(name in self.as_stored for name in (*weights, f"{self._visit.name}.{fold.producer}")):
            return None
        if all(self.spec.scheme_of(name) is None for name in weights):
            return None  # mixed precision keeps them all in floating point
        schemes = [self.spec.scheme_of(name) or self.spec.weights for name in weights]
        assert self._method.search_scale is not None
        columns = list(weights.values())
        scale = self._method.search_scale(columns, stats, schemes, self.spec.activations, fold.channels)
        if scale is None:
            return None
        producer = f"{self._visit.name}.{fold.producer}"
        if producer in self._result.packed:
            rounded = self._result.packed[producer].scheme
            if rounded.rows != 1 or rounded in MICROSCALED:
                return None  # a scale that outputs share cannot be divided for one of them, nor a scale of few bits
            row_scale = torch.ones(self._visit.linears[producer].out_features)
            row_scale[fold.channels] = scale
            self._divide_rows(producer, row_scale)
        else:
            for name in apply(self._visit.block, fold, scale):
                parameter = self._visit.block.get_parameter(name)
                parameter.data = self._narrow(parameter.data)
                self._result.dense[f"{self._visit.name}.{name}"] = parameter.data.clone()
        return scale

    def _divide_rows(self, name: str, scale: Tensor) -> None:
        """Divide the rows of a linear that is already quantized: its scales are divided and its codes stay."""
        packed, linear = self._result.packed[name], self._visit.linears[name]
        scales = packed.scales / scale[:, None]
        packed = replace(packed, scales=storable(scales) if packed.scheme.grid is INTEGERS else scales)
        self._result.packed[name] = packed
        linear.weight.data = packed.dequantize()
        if name in self._original:
            self._original[name] = self._original[name] / scale[:, None]
        if linear.bias is not None:
            linear.bias.data = (linear.bias.data / scale).to(torch.float16).to(torch.float32)

    def _learn(self, visit: Visit) -> None:
        """Learn the rounding: the targets are the float model's outputs of this block, the inputs are its own."""
        assert visit.inputs is not None and visit.floats is not None and visit.call is not None
        packed = {name: weight for name, weight in self._result.packed.items() if name in self._original}
        targets = torch.cat([part for _, part in visit.float_forward()])
        inputs = visit.inputs.read(0, len(targets))
        self._result.packed |= signround.tune(
            visit.block, visit.linears, packed, self._original, inputs, targets, visit.call, seed=self.job.seed
        )
        visit.changed()

    def _record_kv(self, visit: Visit) -> None:
        assert self.spec.kv_cache is not None
        visit.changed()  # record with the present weights
        with KVRecorder(visit.block) as recorder:
            visit.finish()
        self._result.dense |= recorded(recorder, visit.name, self.spec.kv_cache)

    def _narrow(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype).to(torch.float32)


def restore(name: str, block: nn.Module, linears: Mapping[str, nn.Linear], result: BlockResult) -> None:
    """Put ``result`` into the block ``name``, which then runs as it will be served."""
    for module, weight in result.packed.items():
        linear = linears[module]
        here = weight.to(linear.weight.device)
        linear.weight.data = here.dequantize()
        if here.bias is not None:
            linear.bias.data = here.bias
    device = next(block.parameters()).device
    own = {each.removeprefix(f"{name}."): tensor.to(device, torch.float32) for each, tensor in result.dense.items()}
    known = block.state_dict().keys()
    block.load_state_dict({k: v for k, v in own.items() if k in known}, strict=False, assign=True)
