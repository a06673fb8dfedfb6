"""``Recording``: what a model does in a step, found by running it once without weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from qserve.runtime.fallback.attention import AttentionCall, attending
from qserve.runtime.fallback.experts import mixing
from qserve.runtime.fallback.skeleton import Positions
from qserve.runtime.fallback.unsupported import Unsupported

_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "baddbmm", "einsum", "addmm"}
_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
_SAME = {"__get__", "size", "dim", "numel", "float", "to", "type", "requires_grad_"}
"""Functions that give back the parameter itself, or a fact about it."""


@dataclass
class Recording:
    """Parameters are known by their ``id``; each is an ``nn.Parameter`` of the model.

    Attributes:
        calls: those of the attention function, in order.
        linears: weights [out, in] of products; ``transposed`` are stored [in, out].
        tables: whose rows are looked up.
        experts: modules of experts, which ours compute.
        dense: parameters that are used in any other way.
        others: products of no parameter, by torch's name.
        base: the submodel whose hidden states the head takes; they have ``hidden_size`` numbers.
        vocab_size: logits of a token.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    linears: dict[int, nn.Parameter] = field(default_factory=dict)
    transposed: set[int] = field(default_factory=set)
    tables: dict[int, nn.Parameter] = field(default_factory=dict)
    experts: list[nn.Module] = field(default_factory=list)
    dense: dict[int, nn.Parameter] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    base: PreTrainedModel | None = None
    hidden_size: int = 0
    vocab_size: int = 0


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module, found: Recording) -> None:
        super().__init__()
        self._parameters = {id(parameter): parameter for parameter in model.parameters()}
        self._found = found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, found, name = kwargs or {}, self._found, getattr(func, "__name__", "")
        if func is F.linear and id(args[1]) in self._parameters:
            found.linears[id(args[1])] = args[1]
            self._note(args[2:], kwargs)
            return args[0].new_zeros(*args[0].shape[:-1], len(args[1]))
        if func is torch.addmm and id(args[2]) in self._parameters:
            found.linears[id(args[2])] = args[2]
            found.transposed.add(id(args[2]))
            self._note(args[:1], kwargs)
            return args[1].new_zeros(len(args[1]), args[2].shape[1])
        if func is F.embedding and id(args[1]) in self._parameters:
            found.tables[id(args[1])] = args[1]
            return args[0].new_zeros(*args[0].shape, args[1].shape[1], dtype=torch.float32)
        if name in _CONVOLUTIONS:
            raise Unsupported("recurrence: a convolution over tokens, whose state is not kept")
        result = func(*args, **kwargs)
        if name in _PRODUCTS and not self._invariant(func, args):
            found.others.add(name)
        if not (name in _SAME and (not isinstance(result, Tensor) or any(result is arg for arg in args))):
            self._note(args, kwargs)
        return result

    def _invariant(self, func: Callable[..., Any], args: Any) -> bool:
        """The product of a position and a frequency adds nothing up, and that of a parameter is taken row by row."""
        by_row = func is torch.bmm and isinstance(args[1], nn.Parameter)
        return by_row or (isinstance(args[0], Tensor) and args[0].shape[-1] == 1)

    def _note(self, args: Any, kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            for part in value if isinstance(value, list | tuple) else (value,):
                if id(part) in self._parameters:
                    self._found.dense[id(part)] = part


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def record(model: PreTrainedModel, positions: Positions) -> Recording:
    """Run ``model`` on three tokens. Raises ``Unsupported`` where it does what we do not compute."""
    found = Recording()

    def attention(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found.calls.append(call)
        return query.new_zeros(1, query.shape[2], call.heads, call.value_dim)

    def experts(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if not any(module is known for known in found.experts):
            found.experts.append(module)
        return torch.zeros_like(hidden)

    def entered(module: nn.Module, args: Any) -> None:
        if found.base is None:
            assert isinstance(module, PreTrainedModel)
            found.base = module

    def left(module: nn.Module, args: Any, output: Any) -> None:
        if module is found.base:
            found.hidden_size = int((output[0] if isinstance(output, tuple) else output.last_hidden_state).shape[-1])

    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not model]
    hooks = [hook for part in parts
             for hook in (part.register_forward_pre_hook(entered), part.register_forward_hook(left))]  # fmt: skip
    tokens = torch.tensor([3, 4, 5])
    try:
        with torch.no_grad(), attending(attention), mixing(experts), _Recorder(model, found):
            found.vocab_size = int(positions.call(model, tokens, torch.arange(3)).logits.shape[-1])
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"a step that fails in transformers: {type(error).__name__}: {first_line(error)}") from None
    finally:
        for hook in hooks:
            hook.remove()
    if not found.calls:
        raise Unsupported("no attention that calls transformers' AttentionInterface")
    if found.base is None:
        raise Unsupported("no submodel below its head")
    return found


def expert_parameters(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    """The stacked weights of a module of experts: into them, and out."""
    return getattr(module, "gate_up_proj" if module.has_gate else "up_proj"), module.down_proj  # type: ignore[return-value]
