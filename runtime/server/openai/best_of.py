"""``BestOfAnswer``: generates more answers than were asked for and keeps those that the model found likeliest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from qserve.runtime.server.openai.answers import CompletionAnswer, Json, Outputs

if TYPE_CHECKING:
    from qserve.runtime.output import RequestOutput


class BestOfAnswer(CompletionAnswer):
    """Keeps the choices of the highest mean log-probability, the best first; usage counts all tokens. No streams."""

    async def whole(self, outputs: Outputs) -> Json:
        return await super().whole(self._best(outputs))

    async def _best(self, outputs: Outputs) -> AsyncIterator[tuple[int, RequestOutput]]:
        prompts: dict[int, dict[int, list[RequestOutput]]] = {}  # by the place of their first choice
        async for index, output in outputs:
            prompts.setdefault(index - output.index, {}).setdefault(output.index, []).append(output)
        kept = self.choices // len(prompts)
        for place, first in enumerate(sorted(prompts)):
            choices = [prompts[first][index] for index in sorted(prompts[first])]
            ranked = sorted(choices, key=_mean_logprob, reverse=True)
            for rank, choice in enumerate(ranked[:kept]):
                await asyncio.sleep(0)  # a choice may have many outputs
                for output in choice:
                    yield place * kept + rank, output
            for choice in ranked[kept:]:
                self.usage.add(-1 - len(self.usage.completion), choice[-1])


def _mean_logprob(choice: list[RequestOutput]) -> float:
    values = [token.chosen.logprob for output in choice for token in output.logprobs or []]
    return sum(values) / len(values)
