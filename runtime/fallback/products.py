"""``Products``: the products, looked-up rows and experts of transformers' modules, computed by our kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qserve.kernels.executor import Executor, Program, Step
from qserve.kernels.ops import Embed, Linear, Op
from qserve.runtime.fallback.parameters import Parameters
from qserve.runtime.fallback.recording import Recording, expert_parameters
from qserve.runtime.models.weights import Weight

_BY_ROW = {"gelu", "sigmoid", "silu", "softplus", "mish", "elu", "logsigmoid", "hardswish", "hardsigmoid"}
"""Functions of single numbers whose last bits vary in torch with the place in the tensor: vectors are computed in
another way than what is left behind the last of them."""


@cache
def _rows(count: int) -> Step:
    """A step of ``count`` rows for programs that read nothing else of it."""
    return step_of(torch.zeros(count, dtype=torch.int32))


def step_of(ids: Tensor) -> Step:
    none = torch.zeros(1, dtype=torch.int32)
    return Step(ids, ids, ids, none, none[None], ids)


class Products(TorchFunctionMode):
    """A mode in which torch's products of parameters, and the rows that it looks up, are ours. A row's result does not
    depend on the other rows. ``fallbacks``: the operations, for ``registry.fallbacks``.
    """

    def __init__(self, executor: Executor, parameters: Parameters, max_rows: int) -> None:
        super().__init__()
        self._executor, self._parameters, self._max_rows = executor, parameters, max_rows
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._linears: dict[int, tuple[Program, Tensor, Tensor]] = {}
        self._tables: dict[int, tuple[Program, Tensor]] = {}
        self._experts: dict[int, tuple[list[tuple[Program, Tensor, Tensor]], list[tuple[Program, Tensor, Tensor]]]] = {}
        self.ops: list[Op] = []

    def load(self, found: Recording, loaded: Callable[[], None]) -> None:
        """Read the weights of ``found``, and call ``loaded`` after each."""
        for key, parameter in found.linears.items():
            self._linears[key] = self._product(self._parameters.weight(parameter, transposed=key in found.transposed))
            loaded()
        for key, parameter in found.tables.items():
            table = self._parameters.weight(parameter)
            out = self._buffer(self._outputs, parameter.shape[1])
            self._tables[key] = self._program(Embed(table, out)), out
            loaded()
        for module in found.experts:
            up, down = expert_parameters(module)
            transposed = bool(module.is_transposed)
            self._experts[id(module)] = (
                [self._product(weight) for weight in self._parameters.experts(up, transposed=transposed)],
                [self._product(weight) for weight in self._parameters.experts(down, transposed=transposed)],
            )
            loaded()

    def _product(self, weight: Weight) -> tuple[Program, Tensor, Tensor]:
        out_features, in_features = weight.shape if isinstance(weight, Tensor) else weight.stored.shape
        x, out = self._buffer(self._inputs, in_features), self._buffer(self._outputs, out_features)
        return self._program(Linear(x, weight, out)), x, out

    def _program(self, op: Op) -> Program:
        program = self._executor.program(self._max_rows)
        program.add([op])
        self.ops.append(op)
        return program

    def _buffer(self, buffers: dict[int, Tensor], width: int) -> Tensor:
        if width not in buffers:
            buffers[width] = torch.empty(self._max_rows, width)
        return buffers[width]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            if product := self._linears.get(id(args[1])):
                return self._multiply(product, args[0], bias)
            return _by_row(func, args[1].shape[0], *args, **kwargs)
        if func is torch.addmm and (product := self._linears.get(id(args[2]))):
            return self._multiply(product, args[1], args[0])
        if func is F.embedding and (table := self._tables.get(id(args[1]))):
            return self._look_up(table, args[0])
        if func is torch.bmm and isinstance(args[1], nn.Parameter):
            return torch.cat([func(row, args[1]) for row in args[0].split(1, 1)], 1)
        if getattr(func, "__name__", "") in _BY_ROW:
            return _by_row(func, args[0].shape[-1], *args, **kwargs)
        return func(*args, **kwargs)

    def _multiply(self, product: tuple[Program, Tensor, Tensor], x: Tensor, bias: Tensor | None) -> Tensor:
        program, into, out = product
        rows = x.reshape(-1, x.shape[-1])
        found = torch.empty(len(rows), out.shape[1])
        for begin in range(0, len(rows), self._max_rows):
            part = rows[begin : begin + self._max_rows]
            into[: len(part)] = part
            program.run(_rows(len(part)))
            found[begin : begin + len(part)] = out[: len(part)]
        if bias is not None:
            found += bias
        return found.view(*x.shape[:-1], found.shape[1])

    def _look_up(self, table: tuple[Program, Tensor], ids: Tensor) -> Tensor:
        program, out = table
        rows = ids.reshape(-1).int()
        found = torch.empty(len(rows), out.shape[1])
        for begin in range(0, len(rows), self._max_rows):
            part = rows[begin : begin + self._max_rows].contiguous()
            program.run(step_of(part))
            found[begin : begin + len(part)] = out[: len(part)]
        return found.view(*ids.shape, found.shape[1])

    def mix(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Experts, for ``experts.mixing``. A token's experts are added in the order in which the router names them."""
        up, down = self._experts[id(module)]
        names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
        index = index.reshape(len(hidden), -1)
        found = hidden.new_empty(*index.shape, hidden.shape[-1])
        for expert in index.unique().tolist():
            rows, places = torch.where(index == expert)
            if expert >= len(up):  # a token that an expert of another rank takes
                found[rows, places] = 0
                continue
            biases = [getattr(module, f"{name}_bias")[expert] if module.has_bias else None for name in names]
            inner = self._multiply(up[expert], hidden[rows], biases[0])
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)  # type: ignore[operator]
            done = self._multiply(down[expert], inner, biases[1])
            found[rows, places] = module.post_expert_norm(done) if module.has_post_expert_norm else done  # type: ignore[operator]
        found *= weights.reshape(*index.shape, 1)
        total = found[:, 0]
        for place in range(1, index.shape[1]):
            total = total + found[:, place]
        return total


def _by_row(func: Callable[..., Tensor], width: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``func`` of each row by itself, so that no row's last bits depend on another; a result has ``width`` columns."""
    rows = x.reshape(-1, x.shape[-1])
    found = rows.new_empty(len(rows), width)
    for row, out in zip(rows, found):
        out.copy_(func(row, *args, **kwargs))
    return found.view(*x.shape[:-1], width)
