"""The end of a model, run by itself: from the last block's output to log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qserve.calibration.skeleton import Skeleton


@contextmanager
def head(skeleton: Skeleton) -> Iterator[tuple[dict[str, nn.Linear], Callable[[Tensor], Tensor]]]:
    """The part after the last block, with its weights: the output layer by its name, and a function from the last
    block's output float32 [1, tokens, width] to log-probabilities float32 [1, tokens, vocabulary].

    The whole model runs, with blocks that pass the given states on, so final norms, projections and caps are its own.
    """
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
        if name.startswith(inside) or module is embedding:  # the states are given: no token is looked up
            continue
        source = stored if tied and module is output else name
        value = skeleton.source.tensor(source).to(torch.float32)
        module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
        loaded.append((module, leaf))
    layer = next(name for name, module in model.named_modules() if module is output)
    try:
        yield {layer: output}, _through(skeleton, int(embedding.weight.shape[1]))
    finally:
        for module, leaf in loaded:
            empty = nn.Parameter(getattr(module, leaf).to("meta"), requires_grad=False)
            module.register_parameter(leaf, empty)


def _through(skeleton: Skeleton, width: int) -> Callable[[Tensor], Tensor]:
    blocks = [skeleton.model.get_submodule(name) for name in skeleton.blocks]

    def run(hidden: Tensor, wrap: Callable[[Tensor], Any]) -> Tensor:
        blocks[0].forward = lambda *args, **kwargs: wrap(hidden)
        for block in blocks[1:]:
            block.forward = lambda states, *args, **kwargs: wrap(states)
        try:
            embedded = torch.zeros(*hidden.shape[:-1], width)
            logits: Tensor = skeleton.model(inputs_embeds=embedded, use_cache=False).logits
        finally:
            for block in blocks:
                del block.forward
        if logits.shape[:-1] != hidden.shape[:-1]:
            raise IndexError("the states lost a dimension")
        return logits.float().log_softmax(dim=-1)

    def log_probabilities(hidden: Tensor) -> Tensor:
        try:
            return run(hidden, lambda states: states)
        except (IndexError, RuntimeError, AttributeError, TypeError):  # it takes the first of a tuple
            return run(hidden, lambda states: (states,))

    return log_probabilities
