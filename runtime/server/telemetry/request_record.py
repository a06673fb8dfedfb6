"""``RequestRecord``: what is known of one HTTP request, from its headers to its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qserve.runtime.client.generation import Generation
    from qserve.runtime.client.timeline import Timeline
    from qserve.runtime.sampling import SamplingParams

PROMPT_TOKENS, CACHED_TOKENS = "X-Prompt-Tokens", "X-Cached-Tokens"  # headers of an answer


@dataclass
class RequestRecord:
    """One request, from its headers to its end; ``scope["qserve.record"]`` holds it. Times: ``time.monotonic``."""

    request_id: str
    method: str
    traceparent: dict[str, str]
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    status: int | None = None
    route: str = "unmatched"
    tenant: str = ""
    is_probe: bool = False
    generations: list[Generation] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list, repr=False)  # the first one's tokens
    adapter: str | None = None

    @property
    def timelines(self) -> list[Timeline]:
        return [timeline for generation in self.generations for timeline in generation.timelines]

    @property
    def params(self) -> SamplingParams | None:
        return self.generations[0].params if self.generations else None

    @property
    def prompt_tokens(self) -> int:
        return sum(timeline.prompt_tokens for timeline in self.timelines)

    @property
    def cached_tokens(self) -> int:
        return sum(timeline.cached_tokens for timeline in self.timelines)

    @property
    def cache_headers(self) -> dict[str, str]:
        """What the prefix cache had of the prompts, once a step tells that they were looked up."""
        if self.queue_seconds is None:
            return {}
        return {PROMPT_TOKENS: str(self.prompt_tokens), CACHED_TOKENS: str(self.cached_tokens)}

    @property
    def output_tokens(self) -> int:
        return sum(sum(timeline.output_tokens.values()) for timeline in self.timelines)

    @property
    def queue_seconds(self) -> float | None:
        """The longest wait of any of its prompts."""
        return max((t.queue_seconds for t in self.timelines if t.queue_seconds is not None), default=None)

    @property
    def ttft_seconds(self) -> float | None:
        """From the request's headers to the first token of any of its choices."""
        first = min((t.first_token for t in self.timelines if t.first_token is not None), default=None)
        return None if first is None else first - self.started

    @property
    def finish_reasons(self) -> list[str]:
        """Each finish reason that occurred, once. An unfinished choice counts as ``abort``."""
        return sorted({reason for timeline in self.timelines for reason in timeline.reasons()})
