"""Large answers: nobody waits while one is made, and what is too large is refused before it begins."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from qserve.runtime.engine import Engine
from qserve.runtime.output import RequestOutput
from qserve.runtime.sampler import TokenLogprob, TokenLogprobs
from qserve.runtime.server.http.json_writer import JsonWriter, compact_json
from qserve.runtime.server.openai.answers import Answer, ChatAnswer, CompletionAnswer, Echo, Usage
from qserve.runtime.server.openai.best_of import BestOfAnswer
from qserve.runtime.server.openai.logprobs import TokenTexts

CHOICES, TOKENS = 8, 500


def told(token: int) -> TokenLogprobs:
    top = [TokenLogprob(token + i, -0.5 - i, i + 1) for i in range(20)]
    return TokenLogprobs(top[0], tuple(top))


async def outputs() -> AsyncIterator[tuple[int, RequestOutput]]:
    prompt = [told(token % 200) for token in range(TOKENS)]
    for count in range(1, TOKENS + 1):
        await asyncio.sleep(0)  # a step
        for index in range(CHOICES):
            end = "length" if count == TOKENS else None
            row = [told(7 + count % 200)]
            scored = prompt if count == 1 else None
            yield (
                index,
                RequestOutput("r", index, "a", [7], row, end, None, TOKENS, 0, count, 0.0, prompt_logprobs=scored),
            )


async def longest_wait(work: asyncio.Task[Any]) -> float:
    longest = 0.0
    while not work.done():
        began = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - began)
    return longest


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer, BestOfAnswer])
@pytest.mark.parametrize("streamed", [False, True])
def test_nobody_waits_for_a_large_answer(engine: Engine, kind: type[Answer], streamed: bool) -> None:
    """168,000 log-probabilities. In one piece they take most of a second."""
    echo = {} if kind is ChatAnswer else {"echo": [Echo("a" * TOKENS, 7)] * CHOICES}
    answer = kind(
        model="m",
        choices=CHOICES,
        usage=Usage(TOKENS),
        texts=TokenTexts(engine.tokenizer),
        logprobs=True,
        prompt_logprobs=kind is ChatAnswer,
        **echo,  # type: ignore[arg-type]
    )

    async def whole() -> list[str]:
        return [await JsonWriter().text(await answer.whole(outputs()))]

    async def chunks() -> list[str]:
        return [compact_json(chunk) async for chunk in answer.chunks(outputs(), include_usage=False)]

    async def run() -> tuple[list[str], float]:
        work = asyncio.create_task(chunks() if streamed else whole())
        return await longest_wait(work), await work

    gc.freeze()  # as the server does with what is loaded: other tests left much
    longest, texts = asyncio.run(run())
    assert longest < 0.25
    choices = [choice for text in texts for choice in json.loads(text)["choices"] if choice["index"] == CHOICES - 1]
    columns: dict[str, list[Any]] = {}
    for choice in choices:
        for name, column in (choice["logprobs"] or {}).items():
            columns.setdefault(name, []).extend(column or [])
    lengths = {len(column) for name, column in columns.items() if name != "refusal"}
    if kind is ChatAnswer:
        assert lengths == {TOKENS * (1 + streamed)}
        assert streamed or len(json.loads(texts[0])["prompt_logprobs"]) == TOKENS + 1
    else:
        assert lengths == {2 * TOKENS + 1}
        offset, texts_of = columns["text_offset"], answer.texts
        assert offset[0] == 0 and offset[1] == texts_of.characters(7) and offset == sorted(offset)
