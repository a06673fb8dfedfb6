"""``Skeleton``: a Hugging Face causal LM without weights, filled from a ``ModelSource`` one part at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qserve.calibration.activations import Activations
from qserve.calibration.conv1d import linears_of_conv1d
from qserve.calibration.experts import routers, split_experts
from qserve.calibration.stored_names import rename_modules, stored_names
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.source import ModelSource
from qserve.kernels.executor import CPU


@dataclass(frozen=True)
class Call:
    """The arguments of a block besides the hidden states, for one sequence; they broadcast over a batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def named(self) -> dict[str, Any]:
        """Every argument by its name or, where it has none, its place after the hidden states."""
        return {f"argument {place}": value for place, value in enumerate(self.args, 2)} | self.kwargs


class Skeleton:
    """The module tree of ``source``: parameters on the meta device, buffers computed, experts as linears.

    Modules are named as the source names them, which may differ from transformers' own code.
    blocks    module names of the decoder blocks, in order
    shapes    linear module name -> (out, in), for every linear inside a block but the routers
    transposed  names of the linears whose weight is stored [in, out]
    routers   names of the modules inside blocks that choose among experts and stay in floating point
    device  where weights are loaded and blocks run
    Packed weights of the source are dequantized. GPT-2's ``Conv1D``, whose weight is stored [in, out], is a linear like
    any other here. Raises ``CheckpointError`` for an architecture transformers does not
    know, or whose tensors the source lacks.
    """

    def __init__(self, source: ModelSource, device: torch.device = CPU) -> None:
        self.source, self.device = source, device
        self._packed = frozenset(source.linears())
        self.model = _build(source.config, source.name)
        stored = stored_names(self.model, [*source.names(), *(f"{module}.weight" for module in source.linears())])
        split_experts(self.model, stored)
        self.transposed = linears_of_conv1d(self.model)
        rename_modules(self.model, stored)
        prefix, modules = _find_blocks(self.model, source.name)
        self.blocks = [f"{prefix}.{index}" for index in range(len(modules))]
        self._modules = list(modules)
        _refuse_shared(self._modules, source.name)
        self.shapes: dict[str, tuple[int, int]] = {}
        self.routers: list[str] = []
        for name, block in zip(self.blocks, self._modules, strict=True):
            self.routers += [f"{name}.{child}" for child in routers(block)]
        for index in range(len(self.blocks)):
            for name, linear in self.linears(index).items():
                self.shapes[name] = (linear.out_features, linear.in_features)
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:  # tied tensors are stored under their first name
                self._check(name, tensor)
            seen.add(id(tensor))
        if not self.shapes:
            raise UsageError(f"{source.name}: its decoder blocks hold no linear layers that can be quantized")
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    def linears(self, index: int) -> dict[str, nn.Linear]:
        """Module name -> linear, of one block without its routers, in the order they were defined."""
        block = self.blocks[index]
        every = {f"{block}.{child}": module for child, module in self._modules[index].named_modules()}
        return {name: m for name, m in every.items() if isinstance(m, nn.Linear) and name not in self.routers}

    def block_bytes(self) -> int:
        """float32 bytes of the largest block."""
        return max(4 * sum(p.numel() for p in block.parameters()) for block in self._modules)

    def embedding_bytes(self) -> int:
        """float32 bytes of the parameters that compute the first block's input."""
        return 4 * sum(parameter.numel() for _, parameter in self._stem())

    def block(self, index: int) -> nn.Module:
        """Block ``index`` as it is; it has no weights unless it is loaded."""
        return self._modules[index]

    def load_linear(self, name: str) -> None:
        """Load one linear of a block that is not loaded, in float32."""
        linear = self.model.get_submodule(name)
        linear.load_state_dict({part: self.read(f"{name}.{part}") for part in linear.state_dict()}, assign=True)

    def load(self, index: int) -> nn.Module:
        """Block ``index`` with its weights in float32."""
        block, name = self._modules[index], self.blocks[index]
        block.load_state_dict({child: self.read(f"{name}.{child}") for child in block.state_dict()}, assign=True)
        return block

    def unload(self, index: int) -> None:
        """Drop the weights of block ``index``."""
        self._modules[index].to("meta")

    def load_all(self) -> Any:
        """The whole model with its weights in float32."""
        state = self.model.state_dict(keep_vars=True)
        values: dict[int, Tensor] = {}
        for name, tensor in state.items():
            if id(tensor) not in values:
                values[id(tensor)] = self.read(name)
        self.model.load_state_dict({name: values[id(tensor)] for name, tensor in state.items()}, assign=True)
        return self.model

    @torch.no_grad()
    def stem(self, windows: Tensor, short: int, inputs: Activations) -> tuple[list[Call], list[Call]]:
        """Write the first block's input for ``windows`` int64 [samples, length] into ``inputs``.

        Returns every block's call for one sequence of ``length``, and for one of only ``short`` tokens. Raises
        ``UsageError`` where a block is given more of the tokens than hidden states.
        """
        for name, _ in self._stem():
            owner, _, leaf = name.rpartition(".")
            value = nn.Parameter(self.read(name), requires_grad=False)
            self.model.get_submodule(owner).register_parameter(leaf, value)
        windows = windows.to(self.device)
        _, calls = self._trace(windows[:1])
        for row in range(len(windows)):
            hidden, own = self._trace(windows[row : row + 1])
            self._refuse_tokens(calls, own)
            inputs.write(row, hidden)
        _, short_calls = self._trace(windows[:1, :short])
        for name, parameter in self._stem():
            owner, _, leaf = name.rpartition(".")
            empty = nn.Parameter(parameter.to("meta"), requires_grad=False)
            self.model.get_submodule(owner).register_parameter(leaf, empty)
        return calls, short_calls

    def _stem(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters outside the blocks that the model's body uses (embeddings, norms): not the output layer."""
        inside = tuple(f"{name}." for name in self.blocks)
        body = {id(parameter) for parameter in self.model.base_model.parameters()}
        named = self.model.named_parameters()
        return [(name, p) for name, p in named if id(p) in body and not name.startswith(inside)]

    def _trace(self, window: Tensor) -> tuple[Tensor, list[Call]]:
        """Run the body with blocks that only note their arguments and return their input."""
        # Some models take a block's output as a tensor, some as the first of a tuple.
        for wrap in (lambda hidden: hidden, lambda hidden: (hidden,)):
            inputs: list[Tensor] = []
            calls: list[Call] = []
            for block in self._modules:
                block.forward = _recorder(inputs, calls, wrap)
            try:
                self.model.base_model(input_ids=window, use_cache=False)
            except (IndexError, RuntimeError, AttributeError, TypeError):
                continue
            finally:
                for block in self._modules:
                    del block.forward
            like_windows = [*window.shape, inputs[0].shape[-1]] if inputs else []
            if len(calls) == len(self._modules) and all(list(each.shape) == like_windows for each in inputs):
                return inputs[0], calls
        kind = type(self.model).__name__
        raise UsageError(f"{self.source.name}: the decoder blocks of {kind} cannot be run one by one")

    def _refuse_tokens(self, first: list[Call], other: list[Call]) -> None:
        """Every sample goes through a block with the arguments of the first."""
        for name, one, another in zip(self.blocks, first, other, strict=True):
            for key, value in one.named().items():
                if not _alike(value, another.named().get(key)):
                    raise UsageError(
                        f"{self.source.name}: {name} is given {key}, which depends on the tokens; calibration does not "
                        "follow that: use --method rtn --calibration none"
                    )

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor ``name`` of the model as the source stores it, or back: a ``Conv1D`` is turned around."""
        return tensor.t().contiguous() if self._is_transposed(name) else tensor

    def _is_transposed(self, name: str) -> bool:
        module, _, part = name.rpartition(".")
        return part == "weight" and module in self.transposed

    def _check(self, name: str, expected: Tensor) -> None:
        module, _, part = name.rpartition(".")
        packed = module in self._packed
        if not packed and not self.source.has(name):
            raise CheckpointError(f"{self.source.name} lacks the tensor {name} that {type(self.model).__name__} needs")
        if packed and part != "weight":
            return
        shape = self.source.shape(module if packed else name)
        if self._is_transposed(name) and not packed:
            shape = shape[::-1]
        if shape != tuple(expected.shape):
            raise CheckpointError(
                f"{self.source.name}: {name} is {list(shape)}, its config says {list(expected.shape)}"
            )

    def read(self, name: str) -> Tensor:
        """A tensor of the source in float32, as modules hold it here. Raises ``CheckpointError`` if it is damaged."""
        with CPU:  # of what a file is read into
            tensor = self._stored(name)
        tensor = tensor.to(self.device, torch.float32)
        if not is_finite(tensor):
            raise CheckpointError(
                f"{self.source.name}: {name} holds NaN or infinity: the model is damaged; fetch or convert it again"
            )
        return tensor

    def _stored(self, name: str) -> Tensor:
        module, _, part = name.rpartition(".")
        if module in self._packed:
            packed = self.source.linear(module)
            found = packed.dequantize() if part == "weight" else packed.bias
            if found is None:
                raise CheckpointError(f"{self.source.name} lacks the tensor {name}")
            return found
        return self.as_stored(name, self.source.tensor(name))


def is_finite(tensor: Tensor) -> bool:
    """By the extremes of slices rather than a mask as large as the tensor: a NaN makes both extremes NaN."""
    parts = tensor.reshape(-1).split(1 << 22)
    return all(bool(extreme.isfinite()) for part in parts if len(part) for extreme in torch.aminmax(part.float()))


def _alike(one: Any, other: Any) -> bool:
    """Whether two arguments hold the same tensors."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, tuple | list):
        return isinstance(other, tuple | list) and len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and all(_alike(value, other.get(key)) for key, value in one.items())
    return True


def _refuse_shared(blocks: list[nn.Module], name: str) -> None:
    seen: dict[int, int] = {}
    for index, block in enumerate(blocks):
        for child, parameter in block.named_parameters():
            if seen.setdefault(id(parameter), index) != index:
                raise UsageError(f"{name}: blocks {seen[id(parameter)]} and {index} share {child}: not supported")


def _recorder(inputs: list[Tensor], calls: list[Call], wrap: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs.append(hidden_states)
        calls.append(Call(args, kwargs))
        return wrap(hidden_states)

    return forward


class _EmptyOnMeta(TorchFunctionMode):
    """Puts parameters, allocated with ``torch.empty``, on the meta device. Buffers are computed and take memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _build(config: dict[str, Any], name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        parsed = AutoConfig.for_model(config.get("model_type", ""), **fields)
        with _EmptyOnMeta():
            # Attention is SDPA where the architecture allows it.
            model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever a malformed config leads to
        # The first sentence: what follows may be a list of every architecture there is.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0][:200]
        raise CheckpointError(f"{name}: transformers cannot build this architecture ({reason})") from None
    return model.eval()


def _find_blocks(model: nn.Module, name: str) -> tuple[str, nn.ModuleList]:
    """The decoder blocks: the list of modules that holds the most parameters; they may be of several classes."""
    candidates = [
        (sum(p.numel() for p in module.parameters()), path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    if not candidates:
        raise UsageError(f"{name}: no decoder blocks found in {type(model).__name__}")
    _, path, blocks = max(candidates, key=lambda candidate: candidate[0])
    return path, blocks
