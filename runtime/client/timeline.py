"""``Timeline``: the times of one prompt on its way through the engine, and how many tokens it took.

Metrics, the log and traces read it. Only the engine's thread writes it; others may read it at any time and see one
moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qserve.runtime.output import RequestOutput


@dataclass
class Timeline:
    """One prompt with all of its choices. Times are seconds of ``time.monotonic``; None: not yet.

    Attributes:
        queue_seconds: from ``arrival`` to the first step that held it.
        last_token: newest token of each choice.
        finish_reasons: how each choice ended.
    """

    arrival: float
    prompt_tokens: int
    max_tokens: int | None
    choices: int = 1
    cached_tokens: int = 0
    queue_seconds: float | None = None
    first_token: float | None = None
    last_token: dict[int, float] = field(default_factory=dict)
    output_tokens: dict[int, int] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)

    def add(self, output: RequestOutput, now: float) -> None:
        """Take in what one step added to a choice."""
        self.output_tokens[output.index] = output.output_tokens
        if self.queue_seconds is None:
            self.queue_seconds = output.queue_seconds
            self.cached_tokens = min(output.cached_tokens, output.prompt_tokens)
        if output.token_ids:
            self.last_token[output.index] = now
            if self.first_token is None:
                self.first_token = now
        if output.finish_reason is not None:
            self.finish_reasons[output.index] = output.finish_reason

    def failed(self) -> None:
        """Note that the engine could not go on with the choices that have not ended."""
        self.finish_reasons = dict.fromkeys(range(self.choices), "error") | self.finish_reasons

    def reasons(self) -> list[str]:
        """How each choice ended; a choice left in the middle reads ``abort``."""
        return [self.finish_reasons.get(index, "abort") for index in range(self.choices)]

    @property
    def prefill_start(self) -> float | None:
        """When the first step that held it began."""
        return None if self.queue_seconds is None else self.arrival + self.queue_seconds
