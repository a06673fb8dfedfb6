"""``PrefixNews``: tells routers which beginnings of prompts the KV cache holds, in digests that they can compute.

A router does not tokenize: it digests the bytes of a prompt (``fleet.prompts``). The engine tells of blocks of tokens.
Here both are known of each prompt, so a digest of the router's stands for some blocks of the engine's, and is held
while all of them are. Where in its tokens a text block ends is an estimate, rounded up: by its share of the text.
Prompts of token ids have the same blocks on both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from qserve.runtime.client.engine_client import EngineClient
from qserve.runtime.client.messages import BlocksChanged
from qserve.runtime.digests import chain_digests
from qserve.runtime.fleet.prompts import block_size, prompt_texts
from qserve.runtime.server.errors import APIError

MAX_ROUTERS = 16
MAX_PENDING = 1 << 16  # digests of prompts that were not computed yet, or never will be
GATHER = 0.02  # seconds from a change to its report, so that a step is one report
SILENCE = 0.5  # seconds without a change, after which an empty report says that there was none


class Listener:
    """A router. ``changed``: what it has not been told yet; True for what is held. None: all of it."""

    def __init__(self) -> None:
        self.changed: dict[bytes, bool] | None = None
        self.news = asyncio.Event()


class PrefixNews:
    """All methods belong to one event loop. The engine is asked only while a router listens, and what came before is
    not told of: its prompts are not known."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._block_size = engine.info.block_size
        self._listeners: set[Listener] = set()
        self._blocks: set[str] = set()  # what the engine holds
        self._stands_for: dict[bytes, tuple[str, ...]] = {}
        self._part_of: dict[str, set[bytes]] = {}  # the same the other way round
        self._held: dict[bytes, None] = {}
        self._pending: dict[bytes, None] = {}  # the others, the oldest first

    @property
    def is_watched(self) -> bool:
        return bool(self._listeners)

    def num_held(self, blocks: Sequence[str]) -> int:
        """How many leading blocks of a prompt the engine is known to hold; they are its own digests, in hex."""
        return next((number for number, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def note(self, body: dict[str, Any], tenant: str, tokens: Sequence[int], salt: str) -> None:
        """A prompt was submitted. ``tenant``: by the router's name; ``salt``: of its blocks in the engine."""
        if not (texts := prompt_texts(body)):
            return
        text, size, last = texts[0], block_size(texts[0]), 0
        blocks = [digest.hex() for digest in chain_digests(tokens, self._block_size, salt=salt)]
        for number, digest in enumerate(chain_digests(text, size, salt=tenant), 1):
            end = -(-number * size * len(tokens) // (len(text) * self._block_size))
            if end > len(blocks):
                break
            if digest not in self._held:
                self._relate(digest, tuple(blocks[min(last, end - 1) : end]))
            last = end

    def enter(self) -> Listener:
        """A router more. Raises ``APIError`` 503 where there are too many."""
        if len(self._listeners) == MAX_ROUTERS:
            raise APIError(503, f"{MAX_ROUTERS} routers listen, the limit", headers={"Retry-After": "30"})
        self._listeners.add(listener := Listener())
        if len(self._listeners) == 1:
            self._engine.watch_blocks(self._changed)
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if not self._listeners:
            self._engine.watch_blocks(None)
            for known in (self._blocks, self._stands_for, self._part_of, self._held, self._pending):
                known.clear()

    async def reports(self, listener: Listener) -> AsyncIterator[dict[str, Any]]:
        """Without an end. The first one has all that is held, and says so."""
        while True:
            whole = listener.changed is None
            changed = dict.fromkeys(self._held, True) if listener.changed is None else listener.changed
            listener.changed = {}
            listener.news.clear()
            yield {
                "whole": whole,
                "held": [digest.hex() for digest, held in changed.items() if held],
                "gone": [digest.hex() for digest, held in changed.items() if not held],
            }
            try:
                await asyncio.wait_for(listener.news.wait(), SILENCE)
                await asyncio.sleep(GATHER)
            except TimeoutError:
                pass

    def _changed(self, event: BlocksChanged) -> None:
        gone = event.gone if not event.whole else self._blocks.difference(event.held)
        for block in [*gone]:
            self._blocks.discard(block)
            for digest in [*self._part_of.get(block, ())]:
                if digest in self._held:
                    self._forget(digest)
                    self._tell(digest, False)
        self._blocks.update(event.held)
        self._complete({digest for block in event.held for digest in self._part_of.get(block, ())})

    def _relate(self, digest: bytes, blocks: tuple[str, ...]) -> None:
        self._forget(digest)
        self._stands_for[digest] = blocks
        for block in blocks:
            self._part_of.setdefault(block, set()).add(digest)
        self._pending[digest] = None
        self._complete((digest,))
        if len(self._pending) > MAX_PENDING:
            self._forget(next(iter(self._pending)))

    def _complete(self, digests: Iterable[bytes]) -> None:
        """Some of their blocks have come."""
        for digest in digests:
            if digest in self._pending and self._blocks.issuperset(self._stands_for[digest]):
                del self._pending[digest]
                self._held[digest] = None
                self._tell(digest, True)

    def _forget(self, digest: bytes) -> None:
        for block in self._stands_for.pop(digest, ()):
            self._part_of[block].discard(digest)
            if not self._part_of[block]:
                del self._part_of[block]
        self._held.pop(digest, None)
        self._pending.pop(digest, None)

    def _tell(self, digest: bytes, held: bool) -> None:
        for listener in self._listeners:
            if listener.changed is not None:
                listener.changed[digest] = held
                listener.news.set()
