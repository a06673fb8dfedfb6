"""``Call`` and ``Reply``: a request without its transport, and its answer as one source of chunks.

Server-sent events and WebSockets are two ways to write the same chunks down.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from qserve.runtime.client.generation import Generation
from qserve.runtime.server.anthropic.message_answer import MessageAnswer
from qserve.runtime.server.kv_order import KvOrder
from qserve.runtime.server.limits.keys import ApiKey
from qserve.runtime.server.openai.answers import Answer
from qserve.runtime.server.openai.protocol import Delivery
from qserve.runtime.server.openai.responses_answer import ResponseAnswer
from qserve.runtime.server.telemetry.request_record import RequestRecord


@dataclass(frozen=True)
class Call:
    """One call. ``key`` is the caller's, None where no key is needed. ``kv``: what a router asks of the KV cache."""

    key: ApiKey | None
    record: RequestRecord
    kv: KvOrder | None = None

    @property
    def tenant(self) -> str:
        return self.key.name if self.key else ""

    @property
    def asked_for(self) -> str:
        """The tenant by its name at a router: that one names nobody where it has no keys."""
        return "" if self.key is None or self.key.router else self.key.name


@dataclass(frozen=True)
class Reply:
    """The generation begun for a call, and its answer. Its user must abort the generation in the end."""

    generation: Generation
    answer: Answer | ResponseAnswer | MessageAnswer
    delivery: Delivery

    @property
    def streamed(self) -> bool:
        return self.delivery["stream"]

    async def whole(self) -> dict[str, Any]:
        return await self.answer.whole(aiter(self.generation))

    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        return self.answer.chunks(
            aiter(self.generation),
            include_usage=self.delivery["include_usage"],
            continuous_usage=self.delivery["continuous_usage"],
        )
