"""``EngineView``: the state of the engine as JSON. One snapshot serves all watchers; without one none is taken.

It holds no prompt, text or tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from qserve.runtime.client.engine_client import EngineClient
from qserve.runtime.server.errors import APIError

if TYPE_CHECKING:
    from qserve.runtime.snapshot import EngineSnapshot, RequestState

Json = dict[str, Any]

INTERVAL = 0.25  # seconds between pictures, for one watcher or many
MAX_WATCHERS = 16
MAX_CELLS = 4096
FREE, CACHED, SHARED, FIRST_REQUEST = range(4)  # values of a cell in the grid of blocks


class EngineView:
    """Snapshots of the engine for watchers. All methods belong to one event loop."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._watchers = 0
        self._taken = float("-inf")
        self._picture: asyncio.Task[Json] | None = None

    async def picture(self) -> Json:
        """The engine now, or at most ``INTERVAL`` seconds ago. Raises ``EngineFailure``."""
        now = time.monotonic()
        if self._picture is None or (self._picture.done() and now - self._taken >= INTERVAL * 0.9):
            self._taken = now
            self._picture = asyncio.create_task(self._take())
        return await asyncio.shield(self._picture)  # a watcher that leaves must not cancel it for the others

    def enter(self) -> None:
        """Count a watcher. Raises ``APIError`` 503 where there are too many."""
        if self._watchers == MAX_WATCHERS:
            raise APIError(
                503,
                f"{MAX_WATCHERS} clients watch the engine, the limit; try again later",
                code="too_many_watchers",
                headers={"Retry-After": "30"},
            )
        self._watchers += 1

    def leave(self) -> None:
        self._watchers -= 1

    async def pictures(self) -> AsyncIterator[Json]:
        """A picture every ``INTERVAL`` seconds; ``steps`` and ``first_tokens`` hold only what the last one had not."""
        seen = float("-inf")
        while True:
            picture = await self.picture()
            new = {
                name: [entry for entry in picture[name] if entry["time"] > seen] for name in ("steps", "first_tokens")
            }
            seen = picture["time"]
            yield picture | new
            await asyncio.sleep(INTERVAL)

    async def _take(self) -> Json:
        snapshot = await self._engine.snapshot()
        return await asyncio.to_thread(to_json, snapshot)


def to_json(snapshot: EngineSnapshot) -> Json:
    """``kv.cells`` is the grid of blocks as runs ``[what, cells]``. ``what``: 0 free, 1 cached and held by no request,
    2 held by several requests, 3 + i held by ``requests[i]`` alone.

    Where there are more than ``MAX_CELLS`` blocks, a cell stands for ``blocks_per_cell`` of them and shows the highest
    of their values.
    """
    held: dict[int, int] = {}
    for number, request in enumerate(snapshot.running, FIRST_REQUEST):
        for block in request.blocks:
            held[block] = SHARED if block in held else number
    per_cell = -(-snapshot.num_blocks // MAX_CELLS)
    cells = [FREE] * -(-snapshot.num_blocks // per_cell)
    for block in snapshot.cached_blocks:
        cells[block // per_cell] = CACHED
    for block, what in held.items():
        cells[block // per_cell] = max(cells[block // per_cell], what)
    return {
        "object": "engine.snapshot",
        "time": snapshot.time,
        "num_running": len(snapshot.running),
        "num_waiting": snapshot.num_waiting,
        "num_preemptions": snapshot.num_preemptions,
        "num_draft_tokens": snapshot.num_draft_tokens,
        "num_accepted_tokens": snapshot.num_accepted_tokens,
        "prompt_tokens": snapshot.prompt_tokens,
        "output_tokens": snapshot.output_tokens,
        "prefix_queries": snapshot.prefix_queries,
        "prefix_hits": snapshot.prefix_hits,
        "kv": {
            "block_size": snapshot.block_size,
            "total": snapshot.num_blocks,
            "free": snapshot.num_blocks - len(held) - len(snapshot.cached_blocks),
            "cached": len(snapshot.cached_blocks),
            "shared": sum(what == SHARED for what in held.values()),
            "used": len(held),
            "blocks_per_cell": per_cell,
            "cells": [[what, sum(1 for _ in run)] for what, run in groupby(cells)],
        },
        "requests": [_request(request) for request in (*snapshot.running, *snapshot.waiting)],
        "steps": [
            {
                "step": step.step,
                "time": step.time,
                "prefill_tokens": step.prefill_tokens,
                "decode_tokens": step.decode_tokens,
            }
            for step in snapshot.steps
        ],
        "first_tokens": [{"time": first.time, "seconds": first.seconds} for first in snapshot.first_tokens],
    }


def _request(request: RequestState) -> Json:
    return {
        "id": request.request_id,
        "state": request.state,
        "prompt_tokens": request.prompt_tokens,
        "computed_tokens": request.computed_tokens,
        "cached_tokens": request.cached_tokens,
        "output_tokens": request.output_tokens,
        "blocks": len(request.blocks),
        "age": round(request.age, 3),
    }
