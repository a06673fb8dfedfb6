"""``Skeleton``: a Hugging Face causal LM without weights, filled from a ``ModelSource`` one part at a time.

Knows transformers' module trees; does not know text, statistics or quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.source import ModelSource


@dataclass(frozen=True)
class Call:
    """What a block is called with besides the hidden states, for one sequence: it broadcasts over a batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Skeleton:
    """The module tree of ``source``: parameters on the meta device, buffers computed, attention by SDPA.

    blocks    module names of the decoder blocks, in order
    shapes    linear module name -> (out, in), for every linear inside a block
    Raises ``CheckpointError`` for an architecture transformers does not know, or whose tensors the source lacks.
    """

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.model = _build(source.config, source.name)
        prefix, modules = _find_blocks(self.model, source.name)
        self.blocks = [f"{prefix}.{index}" for index in range(len(modules))]
        self._modules = list(modules)
        self.shapes: dict[str, tuple[int, int]] = {}
        for name, block in zip(self.blocks, self._modules, strict=True):
            for child, module in block.named_modules():
                if isinstance(module, nn.Linear):
                    self.shapes[f"{name}.{child}"] = (module.out_features, module.in_features)
            for tensor, parameter in block.state_dict().items():
                self._check(f"{name}.{tensor}", parameter)
        inside = tuple(f"{name}." for name in self.blocks)
        ties = getattr(self.model.config, "tie_word_embeddings", False)
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ()) if ties else set()  # not stored
        for tensor, parameter in self.model.state_dict().items():
            if not tensor.startswith(inside) and tensor not in tied:
                self._check(tensor, parameter)
        if not self.shapes:
            raise UsageError(f"{source.name}: its decoder blocks hold no linear layers that can be quantized")

    @property
    def hidden_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[1])

    def linears(self, index: int) -> dict[str, nn.Linear]:
        """Module name -> linear, of one block, in the order they were defined."""
        name, block = self.blocks[index], self._modules[index]
        return {f"{name}.{child}": m for child, m in block.named_modules() if isinstance(m, nn.Linear)}

    def block_bytes(self) -> int:
        """float32 bytes of the largest block."""
        return max(4 * sum(p.numel() for p in block.parameters()) for block in self._modules)

    def embedding_bytes(self) -> int:
        """float32 bytes of what is loaded to compute the first block's input."""
        return 4 * sum(parameter.numel() for _, parameter in self._stem())

    def load(self, index: int) -> nn.Module:
        """Block ``index`` with its weights in float32."""
        block, name = self._modules[index], self.blocks[index]
        block.load_state_dict({child: self._read(f"{name}.{child}") for child in block.state_dict()}, assign=True)
        return block

    def unload(self, index: int) -> None:
        """Drop the weights of block ``index``."""
        self._modules[index].to("meta")

    @torch.no_grad()
    def stem(self, windows: Tensor, short: int) -> tuple[Tensor, list[Call], list[Call]]:
        """The first block's input for ``windows`` int64 [samples, length], and every block's calls.

        Returns hidden states float32 [samples, length, hidden]; the calls for one sequence of ``length``; and
        the calls for one of only ``short`` tokens.
        """
        for name, _ in self._stem():
            owner, _, leaf = name.rpartition(".")
            value = nn.Parameter(self._read(name), requires_grad=False)
            self.model.get_submodule(owner).register_parameter(leaf, value)
        hidden, calls = self._trace(windows[:1])
        batch = hidden.new_empty(len(windows), *hidden.shape[1:])
        for row in range(len(windows)):
            batch[row] = self._trace(windows[row : row + 1])[0][0]
        _, short_calls = self._trace(windows[:1, :short])
        for name, parameter in self._stem():
            owner, _, leaf = name.rpartition(".")
            empty = nn.Parameter(parameter.to("meta"), requires_grad=False)
            self.model.get_submodule(owner).register_parameter(leaf, empty)
        return batch, calls, short_calls

    def _stem(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters outside the blocks that the model's body uses (embeddings, norms): not the output layer."""
        inside = tuple(f"{name}." for name in self.blocks)
        body = f"{self.model.base_model_prefix}."
        return [(n, p) for n, p in self.model.named_parameters() if n.startswith(body) and not n.startswith(inside)]

    def _trace(self, window: Tensor) -> tuple[Tensor, list[Call]]:
        """Run the body with blocks that only note how they are called and hand their input on."""
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
            if len(calls) == len(self._modules) and all(each.shape == inputs[0].shape for each in inputs):
                return inputs[0], calls
        kind = type(self.model).__name__
        raise UsageError(f"{self.source.name}: the decoder blocks of {kind} cannot be run one by one")

    def _check(self, name: str, expected: Tensor) -> None:
        if not self.source.has(name):
            raise CheckpointError(f"{self.source.name} lacks the tensor {name} that {type(self.model).__name__} needs")
        if self.source.shape(name) != tuple(expected.shape):
            raise CheckpointError(
                f"{self.source.name}: {name} is {list(self.source.shape(name))}, its config says {list(expected.shape)}"
            )

    def _read(self, name: str) -> Tensor:
        tensor = self.source.tensor(name).to(torch.float32)
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{self.source.name}: {name} holds NaN or infinity")
        return tensor


def _recorder(inputs: list[Tensor], calls: list[Call], wrap: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs.append(hidden_states)
        calls.append(Call(args, kwargs))
        return wrap(hidden_states)

    return forward


class _EmptyOnMeta(TorchFunctionMode):
    """Parameters are allocated with ``torch.empty`` and buffers are computed: only the former need no memory."""

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
            model = AutoModelForCausalLM.from_config(
                parsed, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
            )
    except Exception as error:  # transformers raises whatever a malformed config leads to
        # The first sentence: what follows may be a list of every architecture there is.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0][:200]
        raise CheckpointError(f"{name}: transformers cannot build this architecture ({reason})") from None
    return model.eval()


def _find_blocks(model: nn.Module, name: str) -> tuple[str, nn.ModuleList]:
    """The decoder blocks: of all lists of one class of module, the one that holds most parameters."""
    candidates = [
        (sum(p.numel() for p in module.parameters()), path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and len({type(child) for child in module}) == 1
    ]
    if not candidates:
        raise UsageError(f"{name}: no decoder blocks found in {type(model).__name__}")
    _, path, blocks = max(candidates, key=lambda candidate: candidate[0])
    return path, blocks
