"""``merged``: a dense model with a LoRA adapter added to its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.lora import LoraAdapter, read_adapter
from qserve.checkpoint.source import ModelSource, dense_linears


class _Merged:
    """All of ``source``, but for the weights that ``adapter`` changes. Those are float32, so that a small change is not
    rounded away."""

    card: QualityCard | None = None

    def __init__(self, source: ModelSource, adapter: LoraAdapter) -> None:
        self._source, self._adapter = source, adapter
        self._weights = {f"{module}.weight": weight for module, weight in adapter.modules.items()}
        self.name = f"{source.name} with {adapter.path.name}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def tensor(self, name: str, rows: range | None = None) -> Tensor:
        """As ``ModelSource.tensor``."""
        stored = self._source.tensor(name, rows)
        if (weight := self._weights.get(name)) is None:
            return stored
        delta = weight.delta()
        delta = delta.T if self._adapter.transposed else delta
        return stored.to(torch.float32) + (delta if rows is None else delta[rows.start : rows.stop])

    def nbytes(self, name: str) -> int:
        """As ``ModelSource.nbytes``."""
        if (weight := self._weights.get(name)) is None:
            return self._source.nbytes(name)
        return 4 * len(weight.b) * weight.a.shape[1]

    def sha256(self) -> str:
        """As ``ModelSource.sha256``."""
        return hashlib.sha256(f"{self._source.sha256()} {self._adapter.sha256}".encode()).hexdigest()


def merged(source: ModelSource, path: Path) -> ModelSource:
    """``source`` with the adapter in the directory ``path`` added to its weights.

    Raises ``CheckpointError`` where there is no adapter or it does not fit, or the model is quantized.
    """
    if source.spec is not None:
        raise CheckpointError(f"{source.name} is quantized: an adapter is merged into the model that it was made from")
    shapes = {module: source.shape(f"{module}.weight") for module in dense_linears(source)}
    highest = max((min(shape) for shape in shapes.values()), default=0)
    adapter = read_adapter(path, cast(dict[str, tuple[int, int]], shapes), max_rank=highest, as_stored=True)
    return cast(ModelSource, _Merged(source, adapter))
