"""The end of a model, run by itself: from the last block's output to log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from qserve.calibration.activations import Activations
from qserve.calibration.groups import StopForward
from qserve.calibration.products import fast_products
from qserve.calibration.skeleton import Skeleton


@contextmanager
def head(skeleton: Skeleton) -> Iterator[tuple[dict[str, nn.Linear], Callable[[Tensor], Tensor]]]:
    """The part after the last block, with its weights: the output layer by its name, and a function from the last
    block's output float32 [1, tokens, width] to log-probabilities float32 [1, tokens, vocabulary].

    The whole model runs, with blocks that pass the given states on, so final norms, projections and caps are its own.
    """
    output = skeleton.model.get_output_embeddings()
    layer = next(name for name, module in skeleton.model.named_modules() if module is output)
    with _loaded(skeleton):
        yield {layer: output}, _log_probabilities(skeleton)


def head_importance(skeleton: Skeleton, inputs: Activations) -> Tensor:
    """The mean square of each input of the output layer, float32 [hidden]. ``inputs`` are the last block's outputs. The
    layer itself, which may be as large as many blocks, is not loaded."""
    output = skeleton.model.get_output_embeddings()
    total, tokens = torch.zeros((), dtype=torch.float64, device=skeleton.device), 0
    states = torch.zeros(())

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal total, tokens
        if args[0].shape[:-1] != states.shape[:-1]:
            raise IndexError("the states lost a dimension")
        total = total + args[0].double().square().sum(dim=(0, 1))
        tokens += args[0].shape[1]
        raise StopForward

    handle = output.register_forward_pre_hook(before)
    try:
        with _loaded(skeleton, but=output), torch.no_grad():
            for row in range(inputs.shape[0]):
                states = inputs.read(row, row + 1)
                with suppress(StopForward):
                    _either_way(skeleton, states)
    finally:
        handle.remove()
    return (total / tokens).float().cpu()


def head_input(model: nn.Module, window: Tensor) -> Tensor:
    """The input of a causal LM's output layer, [samples, length, hidden], for ``window`` int64 [samples, length]; the
    layer itself does not run."""
    seen: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise StopForward

    handle = model.get_output_embeddings().register_forward_pre_hook(before)  # type: ignore[operator]
    try:
        with fast_products(), suppress(StopForward):
            model(input_ids=window, use_cache=False)
    finally:
        handle.remove()
    return seen[0]


@contextmanager
def _loaded(skeleton: Skeleton, but: nn.Module | None = None) -> Iterator[None]:
    """The part after the last block has its weights, ``but`` for one module."""
    model = skeleton.model
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stored = names[id(embedding.weight)]
    loaded: list[tuple[nn.Module, str]] = []
    inside = tuple(f"{block}." for block in skeleton.blocks)
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if name.startswith(inside) or module is embedding or module is but:  # states are given: no lookup
            continue
        source = stored if tied and module is output else name
        value = skeleton.read(source)
        module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
        loaded.append((module, leaf))
    try:
        yield
    finally:
        for module, leaf in loaded:
            empty = nn.Parameter(getattr(module, leaf).to("meta"), requires_grad=False)
            module.register_parameter(leaf, empty)


def _log_probabilities(skeleton: Skeleton) -> Callable[[Tensor], Tensor]:
    return lambda hidden: _either_way(skeleton, hidden).float().log_softmax(dim=-1)


def _either_way(skeleton: Skeleton, hidden: Tensor) -> Tensor:
    """The model's logits for the last block's output ``hidden``."""
    blocks = [skeleton.model.get_submodule(name) for name in skeleton.blocks]
    width = int(skeleton.model.get_input_embeddings().weight.shape[1])

    def run(wrap: Callable[[Tensor], Any]) -> Tensor:
        blocks[0].forward = lambda *args, **kwargs: wrap(hidden)
        for block in blocks[1:]:
            block.forward = lambda states, *args, **kwargs: wrap(states)
        try:
            embedded = torch.zeros(*hidden.shape[:-1], width, device=hidden.device)
            logits: Tensor = skeleton.model(inputs_embeds=embedded, use_cache=False).logits
        finally:
            for block in blocks:
                del block.forward
        if logits.shape[:-1] != hidden.shape[:-1]:
            raise IndexError("the states lost a dimension")
        return logits

    try:
        return run(lambda states: states)
    except (IndexError, RuntimeError, AttributeError, TypeError):  # it takes the first of a tuple
        return run(lambda states: (states,))
