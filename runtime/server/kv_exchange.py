"""``KvExchange``: KV blocks of other replicas over HTTP, where they are here sooner than computed.

Blocks travel as blobs with a checksum, as they lie on disk. What is damaged, late or not there is computed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

from qserve.checkpoint.errors import UsageError
from qserve.runtime.block_files import BlobError, pack, unpack
from qserve.runtime.client.engine_client import EngineClient
from qserve.runtime.client.messages import KvBlock
from qserve.runtime.fleet.upstream import Lost, Unreachable, Upstream
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.kv_order import KV_PATH, KvOrder

logger = logging.getLogger(__name__)

LEAST = 4  # blocks of a prompt that are worth a call
MESSAGE_BYTES = 4 << 20  # of one answer: no step of either engine waits for more to be copied
PATIENCE = 5.0  # seconds for all of it, where nothing was measured yet; else no longer than to compute it
FORGET = 60.0  # seconds after which a slow source is tried again
MAX_SOURCES = 64


class KvExchange:
    """``fetch`` gets blocks for a prompt that is about to be submitted; ``send`` answers another replica. All methods
    belong to one event loop."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._facts = engine.info.kv_transfer
        self._sources: dict[str, Upstream] = {}
        self._rates: dict[str, tuple[float, float]] = {}  # seconds for a block, and when that was measured

    async def send(self, content: dict[str, Any]) -> bytes:
        """The blobs of the first ``digests`` that are here, up to the first that is not. Raises ``APIError``."""
        facts, digests = self._facts, content.get("digests")
        if facts is None or content.get("identity") != facts.identity:
            raise APIError(404, "no KV blocks of this model and these kernels are exchanged here", code="no_kv_blocks")
        if not isinstance(digests, list) or not 0 < len(digests) <= self._per_message or not all(map(_is_hex, digests)):
            raise APIError(400, f"digests must be 1 to {self._per_message} hashes in hex", param="digests")
        blocks = await self._engine.read_blocks(digests)
        return await asyncio.to_thread(
            lambda: b"".join(pack((each.group, bytes.fromhex(each.digest)), each.content) for each in blocks)
        )

    async def fetch(self, order: KvOrder, digests: Sequence[str]) -> int:
        """Get what is missing of a prompt, whose blocks have these ``digests`` and of which the first is not here.
        Returns how many blocks came."""
        facts, source = self._facts, order.source
        if facts is None or len(digests) < LEAST:
            return 0
        digests = digests[: facts.most // facts.groups]
        seconds = self._seconds_to_compute(len(digests) * facts.groups)
        if seconds is not None and self._seconds_to_fetch(source, len(digests) * facts.groups) >= seconds:
            return 0
        count, began, why = 0, time.monotonic(), ""
        try:
            async with asyncio.timeout(PATIENCE if seconds is None else seconds):
                for start in range(0, len(digests), self._per_message):
                    wanted = digests[start : start + self._per_message]
                    blocks = await self._ask(order, wanted)
                    count += await self._engine.store_blocks(blocks) if blocks else 0
                    if len(blocks) < len(wanted) * facts.groups:
                        break
        except TimeoutError:
            why = "it takes longer than to compute them"
        except (Unreachable, Lost, BlobError, UsageError) as error:
            why = str(error)
        now = time.monotonic()
        if why:
            logger.warning("KV blocks of %s are computed here: %s", source, why)
        if count or why:
            self._measured(source, (now - began) / max(1, count), now)
        return count

    @property
    def _per_message(self) -> int:
        assert self._facts is not None
        return max(1, MESSAGE_BYTES // (self._facts.block_bytes * self._facts.groups))

    def _seconds_to_compute(self, blocks: int) -> float | None:
        use = self._engine.stats.offload
        return None if use is None or use.block_seconds is None else blocks * (use.block_seconds - use.load_seconds)

    def _seconds_to_fetch(self, source: str, blocks: int) -> float:
        """0 where it is not known, so that it is tried."""
        seconds, when = self._rates.get(source, (0.0, 0.0))
        return blocks * seconds if time.monotonic() - when < FORGET else 0.0

    def _measured(self, source: str, seconds: float, now: float) -> None:
        known, when = self._rates.get(source, (seconds, now))
        self._rates[source] = (0.7 * known + 0.3 * seconds if now - when < FORGET else seconds), now

    async def _ask(self, order: KvOrder, digests: Sequence[str]) -> list[KvBlock]:
        """Raises ``Unreachable``, ``Lost``, ``BlobError`` or ``UsageError``."""
        assert self._facts is not None
        body = _json({"identity": self._facts.identity, "digests": list(digests)})
        upstream = self._upstream(order.source)
        headers = f"Authorization: Bearer {order.ticket}\r\nContent-Type: application/json\r\n"
        answer = await upstream.send("POST", KV_PATH, headers, body)
        try:
            content = await answer.whole(2 * MESSAGE_BYTES + 2 * self._facts.block_bytes * self._facts.groups)
        finally:
            upstream.release(answer)
        if answer.status != 200:
            raise Lost(f"it answers {answer.status}")
        found = await asyncio.to_thread(unpack, content, self._facts.block_bytes)
        asked = set(digests)
        if any(digest.hex() not in asked for (_, digest), _ in found):
            raise BlobError("it sends what was not asked for")
        return [KvBlock(group, digest.hex(), content) for (group, digest), content in found]

    def _upstream(self, source: str) -> Upstream:
        if source not in self._sources:
            if len(self._sources) == MAX_SOURCES:
                self._sources.pop(next(iter(self._sources))).close()
            self._sources[source] = Upstream(source)
        return self._sources[source]


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


def _is_hex(digest: object) -> bool:
    return isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None


_DIGEST = re.compile(r"[0-9a-f]{64}")
