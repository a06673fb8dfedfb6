"""``RankAdapters``: the adapters of a model that several ranks compute. Every rank reads the files and lays out its own
part while steps run. Between two steps all of them fill a slot, or empty it."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.lora import LoraAdapter, read_adapter
from qserve.runtime.models.lora_layers import LaidOut, LoraLayers


@dataclass(frozen=True)
class AdapterOrder:
    """What the other ranks are asked to read, and to keep as ``number`` until it gets a slot. ``gone``: the numbers of
    those that never get one."""

    number: int
    path: str
    sha256: str
    gone: tuple[int, ...] = ()

    def obey(self, layers: LoraLayers) -> None:
        """Raises ``CheckpointError`` where the files are no longer those that the first rank has read."""
        for number in self.gone:
            layers.waiting.pop(number, None)
        adapter = read_adapter(Path(self.path), layers.shapes, max_rank=layers.max_rank)
        if adapter.sha256 != self.sha256:
            raise CheckpointError(f"{self.path} was changed while it was read; load it again")
        layers.waiting[self.number] = layers.lay_out(adapter)


ORDER = TypeAdapter(AdapterOrder)
"""Reads and writes an order as a line of JSON."""


@dataclass(frozen=True, eq=False)
class _Numbered(LaidOut):
    number: int


class RankAdapters:
    """Those of the rank that plans; in the place of its ``LoraLayers``. ``ask`` sends an order to the other ranks and
    waits for all; ``change`` has them call ``LoraLayers.change``, and ``changes_own`` says that this one does, too."""

    def __init__(
        self,
        layers: LoraLayers,
        ask: Callable[[bytes], None],
        change: Callable[[int, int], None],
        *,
        changes_own: bool,
    ) -> None:
        self._layers, self._ask, self._change, self._changes_own = layers, ask, change, changes_own
        self.count, self.max_rank = layers.count, layers.max_rank
        self.shapes: Mapping[str, tuple[int, int]] = layers.shapes
        self._laying_out = threading.Lock()
        self._numbers = itertools.count()
        # Of those without a slot: where nobody holds one any more, the other ranks need not either.
        self._unplaced: dict[int, weakref.finalize[[int], _Numbered]] = {}
        self._gone: list[int] = []

    def lay_out(self, adapter: LoraAdapter) -> LaidOut:
        """On every rank. Raises ``CheckpointError`` where another one cannot."""
        with self._laying_out:
            gone, self._gone = self._gone, []
            for number in gone:
                self._layers.waiting.pop(number, None)
                self._unplaced.pop(number, None)
            number = next(self._numbers)
            try:
                order = AdapterOrder(number, str(adapter.path.absolute()), adapter.sha256, tuple(gone))
                self._ask(ORDER.dump_json(order))
            except BaseException:
                self._gone.append(number)  # some may have it
                raise
            own = self._layers.waiting[number] = self._layers.lay_out(adapter)
            numbered = _Numbered(own.sha256, own.matrices, number)
            self._unplaced[number] = weakref.finalize(numbered, self._forget, number)
        return numbered

    def _forget(self, number: int) -> None:
        self._gone.append(number)

    def put(self, slot: int, adapter: LaidOut) -> None:
        """Fill a slot, between two steps."""
        assert isinstance(adapter, _Numbered)
        self._unplaced.pop(adapter.number).detach()
        self._all(slot, adapter.number)

    def clear(self, slot: int) -> None:
        """Empty a slot that no token of a later step has."""
        self._all(slot, -1)

    def _all(self, slot: int, number: int) -> None:
        self._change(slot, number)
        if not self._changes_own:
            self._layers.change(slot, number)
