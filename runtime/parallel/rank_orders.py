"""What the engine's rank asks of the others between the steps, or while steps run. Each order is a line of JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.lora import read_adapter
from qserve.runtime.models.decoder import Decoder, copy_blocks


@dataclass(frozen=True)
class ReadAdapter:
    """Read an adapter, and keep it as ``number`` until it gets a slot. ``gone``: the numbers of those that never get
    one."""

    number: int
    path: str
    sha256: str
    gone: tuple[int, ...] = ()
    kind: Literal["adapter"] = "adapter"

    def obey(self, decoder: Decoder) -> None:
        """Raises ``CheckpointError`` where the files are no longer those that the first rank has read."""
        layers = decoder.lora
        assert layers is not None
        for number in self.gone:
            layers.waiting.pop(number, None)
        adapter = read_adapter(Path(self.path), layers.shapes, max_rank=layers.max_rank)
        if adapter.sha256 != self.sha256:
            raise CheckpointError(f"{self.path} was changed while it was read; load it again")
        layers.waiting[self.number] = layers.lay_out(adapter)


@dataclass(frozen=True)
class CopyBlock:
    """Copy a block of the KV cache into a slot. No step may be running."""

    source: int
    destination: int
    kind: Literal["block"] = "block"

    def obey(self, decoder: Decoder) -> None:
        copy_blocks(decoder, [(self.source, self.destination)])


RankOrder = ReadAdapter | CopyBlock
ORDER: TypeAdapter[RankOrder] = TypeAdapter(RankOrder)
"""Reads and writes an order."""
