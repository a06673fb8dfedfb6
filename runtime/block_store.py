"""``BlockStore``: the slots of ``BlockTiers`` in memory, and the thread that moves blocks to disk and back.

Steps copy blocks between the cache and the slots (``DecoderRunner``). The thread touches only slots that it was given,
so no step waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from itertools import count
from queue import Empty, PriorityQueue, SimpleQueue

import torch
from torch import Tensor

from qserve.runtime.block_files import BlockFiles
from qserve.runtime.block_tiers import Key, Outcome, Transfer

logger = logging.getLogger(__name__)


class BlockStore:
    """``slots`` [slots, …], contiguous, on the CPU. ``files``: None without a disk."""

    def __init__(self, slots: Tensor, files: BlockFiles | None = None) -> None:
        self.files = files
        self._slots = slots
        self._orders: PriorityQueue[tuple[int, int, Transfer | None]] = PriorityQueue()
        self._arrivals = count()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="qserve-kv-disk", daemon=True)
        if files is not None:
            self._thread.start()

    def begin(self, orders: Iterable[Transfer]) -> None:
        """Hand transfers to the thread. The slots must hold what is to be written by now. Reads go before writes,
        because requests wait for them."""
        for order in orders:
            self._orders.put((int(order.to_disk), next(self._arrivals), order))

    def outcomes(self, timeout: float = 0.0) -> list[Outcome]:
        """The transfers that have ended since the last call. Waits up to ``timeout`` seconds for the first of them."""
        found: list[Outcome] = []
        try:
            found.append(self._outcomes.get(timeout=timeout) if timeout else self._outcomes.get_nowait())
            while True:
                found.append(self._outcomes.get_nowait())
        except Empty:
            return found

    def close(self, blocks: Iterable[tuple[Key, Tensor]] = ()) -> None:
        """End the thread after its last transfer. Then write ``blocks``, the least valuable first."""
        if self.files is None:
            return
        self._orders.put((2, 0, None))
        self._thread.join()
        for key, block in blocks:
            self.files.write(key, _bytes(block.cpu().contiguous()))
        self.files.close()

    def _work(self) -> None:
        assert self.files is not None
        while (order := self._orders.get()[2]) is not None:
            done, dropped = False, tuple[Key, ...]()
            try:
                if order.to_disk:
                    done, dropped = self.files.write(order.key, _bytes(self._slots[order.slot]))
                else:
                    done = self.files.read(order.key, _bytes(self._slots[order.slot]))
            except Exception:  # a block less; the server goes on
                logger.exception("a KV block could not be moved")
            self._outcomes.put(Outcome(order, done, dropped))


def _bytes(block: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(block.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
