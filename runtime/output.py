"""``RequestOutput``: what one step added to one choice of a request, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from qserve.runtime.sampler import TokenLogprobs


@dataclass(slots=True)  # a frozen one takes five times as long to make, and a step makes one for each request
class RequestOutput:
    """One step's addition to one choice: ``text`` and ``token_ids`` hold the new part only.

    ``finish_reason``: stop, length, abort, timeout or error; None while it goes on. ``stop_reason``: the stop string or
    token that ended it. ``queue_seconds``: from arrival to the first step that held it.
    ``prompt_logprobs``: for the prompt's tokens from the second on. It comes with the first output of a request that
    asked for them, which is one of choice 0, and holds for all choices. ``embedding``: the vector, or the logits of
    classes, where ``pooling`` was asked for. ``error_param``: the field of the request that caused the error, where one
    did.
    A beam search outputs each of its n choices once, whole, when it is over.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_seconds: float
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: list[float] | None = None
    error_param: str | None = None
