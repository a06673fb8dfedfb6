"""``KvOrder``: what a router asks of a replica about KV blocks, beside a request; and the tickets that open a replica.

A ticket is made with the hash of a router's key, which that router and the replica know. So the router lets one replica
read the blocks of another one, for a few minutes, and neither gets the other's key.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from hashlib import sha256

from qserve.checkpoint.errors import UsageError

KV_HEADER = "x-qserve-kv"
"""JSON of a ``KvOrder``. A replica believes it of the key of a router only."""
KV_PATH = "/v1/kv/blocks"
TICKET_SECONDS = 300


@dataclass(frozen=True)
class KvOrder:
    """``source``: the address of a replica that holds more of the prompt, empty for none, and its ``ticket``.
    ``prefill``: compute the prompt for another replica, and answer with its size alone."""

    source: str = ""
    ticket: str = field(default="", repr=False)
    prefill: bool = False

    def header(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, value: bytes) -> KvOrder:
        """Raises ``UsageError``."""
        order: KvOrder | None
        try:
            order = cls(**json.loads(value))
        except (ValueError, TypeError, RecursionError):
            order = None
        kinds = (str, str, bool)
        if order is None or not all(map(isinstance, (order.source, order.ticket, order.prefill), kinds)):
            raise UsageError(f"{KV_HEADER} must be JSON with source, ticket and prefill")
        return order


def ticket(key: str, now: float) -> str:
    """To read blocks of the replica that knows ``key`` as a router's; ``now``: seconds since the epoch."""
    until = int(now) + TICKET_SECONDS
    return f"kv-{until}-{_sign(sha256(key.encode()).digest(), until)}"


def admits(ticket: str, digests: Iterable[bytes], now: float) -> bool:
    """Whether a ticket was made, not too long ago, with one of the keys that have these hashes."""
    _, _, rest = ticket.partition("kv-")
    until, _, signature = rest.partition("-")
    if not (until.isdecimal() and len(until) < 16 and now < int(until) <= now + 2 * TICKET_SECONDS):
        return False
    found = [hmac.compare_digest(_sign(digest, int(until)).encode(), signature.encode()) for digest in digests]
    return any(found)  # every key was compared


def _sign(digest: bytes, until: int) -> str:
    return hmac.new(digest, f"read KV blocks until {until}".encode(), sha256).hexdigest()
