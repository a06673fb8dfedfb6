"""Waiting for something that a server does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable

from qserve.runtime.server.serve import ServerHandle


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def idle(server: ServerHandle) -> bool:
    """Whether nothing runs, waits or holds a block."""
    stats = server.service.engine.stats
    return stats.num_running == stats.num_waiting == stats.kv_blocks_used == 0
