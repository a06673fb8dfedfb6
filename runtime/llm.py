"""``LLM``: the Python interface for batches of prompts, shaped like that of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qserve.checkpoint.source import ModelSource
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampler import TokenLogprobs
from qserve.runtime.sampling import RequestError, SamplingParams

Prompt = str | list[int]


@dataclass
class Completion:
    """One answer. ``finish_reason`` is stop, length, timeout or error."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass
class PromptCompletions:
    """A prompt with its n answers, in order. ``prompt_logprobs`` is set if both it and ``logprobs`` were asked for."""

    prompt: Prompt
    outputs: list[Completion]
    prompt_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None


class LLM:
    """A model and the engine that serves it, in this process.

    >>> LLM("demo").generate(["The capital of France is"], SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(self, model: str | ModelSource, config: EngineConfig | None = None) -> None:
        self.engine = Engine(model, config)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[PromptCompletions]:
        """Answer all prompts, batched. One ``params`` for all, or one for each; the order is kept.

        Raises ``RequestError`` where a prompt can never run.
        """
        batch: list[Prompt]
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            batch = [prompts]  # type: ignore[list-item]
        else:
            batch = list(prompts)  # type: ignore[arg-type]
        params = SamplingParams() if params is None else params
        each = [params] * len(batch) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(batch):
            raise RequestError(f"{len(batch)} prompts but {len(each)} sampling parameters", "params")
        results = [PromptCompletions(p, [Completion(i) for i in range(s.n)]) for p, s in zip(batch, each)]
        for output in self.engine.generate(batch, each):
            result = results[int(output.request_id)]
            result.prompt_tokens = output.prompt_tokens
            result.prompt_logprobs = output.prompt_logprobs or result.prompt_logprobs
            answer = result.outputs[output.index]
            answer.text += output.text
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs or []
            answer.finish_reason, answer.stop_reason = output.finish_reason, output.stop_reason
            answer.error = output.error
        return results
