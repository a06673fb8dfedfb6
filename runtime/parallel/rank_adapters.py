"""``RankAdapters``: the adapters of a model that several ranks compute. Every rank reads the files and lays out its own
part while steps run. Between two steps all of them fill a slot, or empty it."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qserve.checkpoint.lora import LoraAdapter
from qserve.runtime.models.lora_layers import LaidOut, LoraLayers
from qserve.runtime.parallel.rank_orders import RankOrder, ReadAdapter


@dataclass(frozen=True, eq=False)
class _Numbered(LaidOut):
    """The matrices of this rank; as many bytes for each of the ``sharing`` ranks that share its memory."""

    number: int
    sharing: int

    @property
    def nbytes(self) -> int:
        return self.sharing * super().nbytes


class RankAdapters:
    """Those of the rank that plans; in the place of its ``LoraLayers``. ``ask`` sends an order to the other ranks and
    waits for all; ``change`` has them call ``LoraLayers.change``, and ``changes_own`` says that this one does, too.
    ``sharing``: how many ranks share the memory of this one."""

    def __init__(
        self,
        layers: LoraLayers,
        ask: Callable[[RankOrder], None],
        change: Callable[[int, int], int],
        *,
        changes_own: bool,
        sharing: int,
    ) -> None:
        self._layers, self._ask, self._change, self._changes_own = layers, ask, change, changes_own
        self._sharing = sharing
        self.count, self.max_rank = layers.count, layers.max_rank
        self.shapes: Mapping[str, tuple[int, int]] = layers.shapes
        self._laying_out = threading.Lock()
        self._numbers = itertools.count()
        # Of those without a slot: where nobody holds one any more, the other ranks need not either.
        self._unplaced: dict[int, weakref.finalize[[int], _Numbered]] = {}
        self._gone: deque[int] = deque()

    def lay_out(self, adapter: LoraAdapter) -> LaidOut:
        """On every rank. Raises ``CheckpointError`` where another one cannot."""
        with self._laying_out:
            gone = [self._gone.popleft() for _ in range(len(self._gone))]
            for number in gone:
                self._layers.waiting.pop(number, None)
                self._unplaced.pop(number, None)
            number = next(self._numbers)
            try:
                order = ReadAdapter(number, str(adapter.path.absolute()), adapter.sha256, tuple(gone))
                self._ask(order)
            except BaseException:
                self._gone.append(number)  # some may have it
                raise
            own = self._layers.waiting[number] = self._layers.lay_out(adapter)
            numbered = _Numbered(own.sha256, own.matrices, number, self._sharing)
            self._unplaced[number] = weakref.finalize(numbered, self._gone.append, number)
        return numbered

    def put(self, slot: int, adapter: LaidOut) -> None:
        """Fill a slot, between two steps."""
        assert isinstance(adapter, _Numbered)
        self._unplaced.pop(adapter.number).detach()
        self._all(slot, adapter.number)

    def clear(self, slot: int) -> None:
        """Empty a slot that no token of a later step has."""
        self._all(slot, -1)

    def _all(self, slot: int, number: int) -> None:
        if (unseen := self._change(slot, number)) >= 0:
            self._gone.append(unseen)
        if not self._changes_own:
            self._layers.change(slot, number)
