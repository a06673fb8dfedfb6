"""``stream_options.continuous_usage_stats``: each chunk of a stream tells the usage so far, as load generators ask."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from qserve.runtime.server.serve import ServerHandle


@pytest.mark.parametrize("chat", [True, False])
def test_every_chunk_tells_the_usage_so_far(
    client: openai.OpenAI, server: ServerHandle, model: str, chat: bool
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    (letter,) = server.service.encoder.encode("q")  # parts of a character would wait for the rest of it
    body: dict[str, Any] = {"model": model, "max_tokens": 6, "logit_bias": {str(letter): 100}, "stream": True}
    if chat:
        messages = [{"role": "user", "content": "the fox"}]
        chunks = list(client.chat.completions.create(messages=messages, stream_options=options, **body))
    else:
        chunks = list(client.completions.create(prompt="the fox", stream_options=options, **body))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 6
    assert all(chunk.usage.prompt_tokens == chunks[0].usage.prompt_tokens > 0 for chunk in chunks)
    assert chunks[-1].choices == []


def test_without_include_usage_it_asks_for_nothing(client: openai.OpenAI, model: str) -> None:
    chunks = client.completions.create(
        model=model, prompt="the fox", stream=True, stream_options={"continuous_usage_stats": True}
    )
    assert all(chunk.usage is None for chunk in chunks)
