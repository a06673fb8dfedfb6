"""``bounded``: how many log-probabilities a request may be told. They are most of what a server holds of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qserve.runtime.sampling import RequestError, SamplingParams

MAX_TOLD = 1 << 19
"""Log-probabilities of one request: some 100 MB while they are gathered or wait to be read."""


def bounded(params: SamplingParams, prompts: Sequence[Sequence[int]], max_model_len: int) -> SamplingParams:
    """``params``, with an earlier end where they say none. Raises ``RequestError`` where they ask for more than
    ``MAX_TOLD``. The rows of a prompt are counted once: its choices share them."""
    own, most = 0, MAX_TOLD
    if params.prompt_logprobs is not None:
        tokens = sum(map(len, prompts))
        own = tokens * (1 + params.prompt_logprobs)
        if own > most:
            raise RequestError(
                f"{own:,} log-probabilities of {tokens:,} prompt tokens are more than the {most:,} that a request is "
                "told here; ask for fewer alternatives, or send fewer tokens at once",
                "prompt_logprobs",
            )
    if params.logprobs is None:
        return params
    each = len(prompts) * params.n * (1 + params.logprobs)
    room = (most - own) // each
    asked = max_model_len - min(map(len, prompts)) if params.max_tokens is None else params.max_tokens
    if asked <= room:
        return params
    if params.max_tokens is None and room:
        return replace(params, max_tokens=room)
    raise RequestError(
        f"{own + each * asked:,} log-probabilities are more than the {most:,} that a request is told here: "
        f"{len(prompts) * params.n} answers of {asked} tokens with {params.logprobs} alternatives each"
        f"{f', and {own:,} of the prompt' if own else ''}; ask for "
        f"{f'max_tokens of at most {room}' if room else 'fewer answers or alternatives'}",
        "max_tokens",
    )
