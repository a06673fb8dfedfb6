"""How a checkpoint names the tensors of a transformers model, and that model's module tree renamed to match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


def stored_names(model: Any, names: Iterable[str]) -> dict[str, list[str]]:
    """Tensor of ``model`` -> the stored ``names`` that it is loaded from, in the order they are joined.

    Mixtral's ``mlp.experts.gate_up_proj`` is loaded from ``block_sparse_moe.experts.0.w1.weight`` and its seven
    siblings, then the eight ``w3``. Tensors that are stored under their own name are included.
    """
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    order = {pattern: index for entry in converters for index, pattern in enumerate(entry.source_patterns)}
    found: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in names:
        tensor, pattern = rename_source_key(name, renamings, converters)
        numbers = tuple(int(part) for part in name.split(".") if part.isdecimal())
        found.setdefault(tensor, []).append(((order.get(pattern or "", 0), *numbers), name))
    return {tensor: [name for _, name in sorted(parts)] for tensor, parts in found.items()}


def rename_modules(model: nn.Module, names: Mapping[str, Sequence[str]]) -> None:
    """Give the modules of ``model`` the names under which their tensors are stored; ``names`` is from ``stored_names``.

    Their code still finds them under the old names. Modules that are stored at another depth keep their names.
    """
    renamed: dict[tuple[str, ...], str] = {}
    for tensor, (first, *others) in names.items():
        path, stored = tensor.split("."), first.split(".")
        if len(path) == len(stored) or others:
            for depth, (own, other) in enumerate(zip(path[:-1], stored, strict=False)):
                if own != other:
                    renamed[tuple(path[: depth + 1])] = other
    for (*path, own), other in sorted(renamed.items(), key=lambda item: len(item[0]), reverse=True):
        parent = model.get_submodule(".".join(path))
        module = parent.get_submodule(own)
        children = [(other if name == own else name, child) for name, child in parent._modules.items()]
        parent._modules.clear()
        parent._modules.update(children)
        object.__setattr__(parent, own, module)  # an attribute now, no longer a submodule
