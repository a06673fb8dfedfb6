"""``PromptCompletions``, ``PromptEmbedding`` and ``PromptClassification``: what ``LLM`` returns, shaped like vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """``logprob`` in nats; ``rank`` 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class Completion:
    """One answer. ``finish_reason`` is stop, length, timeout or error.

    ``logprobs``: for each token, where they were asked for, the log-probabilities of it and of the likeliest ones, by
    token id. ``cumulative_logprob``: the sum of those of the answer's tokens.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Seconds on the clock of ``time.monotonic``: differences are what counts. None where it did not come to that.
    All prompts of a call arrive together; what waits for room is late by that."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class PromptCompletions:
    """A prompt with its n answers, in order.

    ``prompt`` is its text, None where it was given as token ids; ``prompt_logprobs`` are like those of an answer, with
    None for the first token, which nothing predicts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(answer.finished() for answer in self.outputs)


@dataclass(frozen=True)
class Embedding:
    """float32 [hidden size], of Euclidean length 1."""

    embedding: list[float]


@dataclass(frozen=True)
class PromptEmbedding:
    """A prompt with its vector."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Embedding
    finished: bool = True


@dataclass(frozen=True)
class Classification:
    """``probs``: one for each class, in the order of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class PromptClassification:
    """A prompt with the probabilities of its classes."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Classification
    finished: bool = True
