"""``usage_page``: what ``/v1/usage`` of a server and of a router shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def usage_page(used: Mapping[str, int], since: float) -> dict[str, Any]:
    """``used``: tokens of prompts and outputs by the names of keys, since a time in seconds since the epoch."""
    data = [{"caller": name, "object": "usage", "tokens": tokens} for name, tokens in sorted(used.items())]
    return {"object": "list", "since": since, "data": data}
