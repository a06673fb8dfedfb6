"""``Generation``: a coroutine's handle on requests that it has in an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from qserve.runtime.client.failures import DeadlineExceeded, EngineFailure
from qserve.runtime.client.timeline import Timeline
from qserve.runtime.output import RequestOutput
from qserve.runtime.sampler import TokenLogprobs
from qserve.runtime.sampling import RequestError, SamplingParams


class Observer:
    """Is told, on the event loop, what becomes of a generation: each choice ends with an output, dropped or refused.

    This one keeps the timelines; subclasses may do more.
    """

    def output(self, timeline: Timeline, output: RequestOutput, now: float) -> None:
        """A step added to a prompt's choice; ``now`` as ``time.monotonic()``."""
        timeline.add(output, now)

    def dropped(self, choices: int, reason: str) -> None:
        """``choices`` choices of a prompt ended without an output, for ``reason``: ``abort`` or ``error``."""

    def refused(self, choices: int) -> None:
        """The engine did not take the generation, which has ``choices`` choices."""


@dataclass(eq=False)
class Generation:
    """Prompts that were submitted together. Iterating yields ``(choice, output)`` until all ended.

    Choice ``prompt * n + index`` is answer number ``index`` to that prompt. The first output of each choice has the
    ``prompt_logprobs`` of its prompt, where they were asked for. Raises ``EngineFailure``, or
    ``RequestError`` where the request itself is the cause.

    ``unread``: tokens and log-probabilities that wait in ``events``.
    """

    request_ids: list[str]
    params: SamplingParams
    timelines: list[Timeline]  # one for each prompt
    observer: Observer
    unfinished: int = 0
    unread: int = 0
    events: asyncio.Queue[list[RequestOutput] | EngineFailure] = field(default_factory=asyncio.Queue)

    @property
    def prompt_tokens(self) -> int:
        return sum(timeline.prompt_tokens for timeline in self.timelines)

    def put(self, outputs: list[RequestOutput]) -> None:
        self.unread += sum(map(_size, outputs))
        self.events.put_nowait(outputs)

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        places = {request_id: i for i, request_id in enumerate(self.request_ids)}
        scored: dict[str, list[TokenLogprobs]] = {}
        while self.unfinished:
            event = await self.events.get()
            if isinstance(event, EngineFailure):
                self.unfinished = 0
                raise event
            self.unread -= sum(map(_size, event))
            for output in event:
                if output.error_param is not None:
                    raise RequestError(output.error or "", output.error_param)
                if output.finish_reason == "timeout":
                    raise DeadlineExceeded(output.error)
                if output.finish_reason in ("abort", "error"):
                    raise EngineFailure(output.error or "the request was aborted")
                self.unfinished -= output.finish_reason is not None
                if output.prompt_logprobs is not None:
                    scored[output.request_id] = output.prompt_logprobs
                elif output.request_id in scored and output.output_tokens == len(output.token_ids):
                    output = replace(output, prompt_logprobs=scored[output.request_id])
                yield places[output.request_id] * self.params.n + output.index, output


def _size(output: RequestOutput) -> int:
    """Tokens and log-probabilities in it."""
    told = (*(output.logprobs or ()), *(output.prompt_logprobs or ()))
    return len(output.token_ids) + sum(1 + len(each.top) for each in told)
