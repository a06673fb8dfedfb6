"""``Hints``: fields that official SDKs and agents send and that change no answer. They are checked, and that is all."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qserve.runtime.server.openai.strict import Strict

Label = Annotated[str, Field(max_length=512)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class PromptCacheOptions(Strict):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Label | None = None


class Hints(Strict):
    """``prompt_cache_*``: equal prompts find each other here without a key. ``service_tier``: there is one."""

    metadata: dict[Annotated[str, Field(max_length=64)], Label] | None = Field(default=None, max_length=16)
    prompt_cache_key: Label | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
