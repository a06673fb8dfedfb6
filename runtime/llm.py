"""``LLM``: the Python interface for batches of prompts, shaped like that of vLLM."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.source import ModelSource
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.llm_outputs import (
    Classification,
    Completion,
    Embedding,
    Logprob,
    PromptClassification,
    PromptCompletions,
    PromptEmbedding,
    RequestMetrics,
)
from qserve.runtime.output import RequestOutput
from qserve.runtime.pooling import stated_pooling
from qserve.runtime.sampler import TokenLogprobs
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.chat.prompts import PromptEncoder
from qserve.runtime.server.openai.logprobs import TokenTexts
from qserve.runtime.vllm_arguments import engine_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Conversation = Sequence[Mapping[str, Any]]
Prompt = str | list[int] | Mapping[str, Any]
"""A text, token ids, or one of them in a dict, as ``prompt`` or ``prompt_token_ids``."""


@dataclass(frozen=True)
class LoRARequest:
    """The LoRA adapter of a call, in the shape of vLLM's. It is loaded at its first use; later calls find it by its
    name, and a name stands for one path. ``lora_int_id`` changes nothing."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class LLM:
    """A model and the engine that serves it, in this process.

    ``options``: fields of ``EngineConfig`` or arguments of vLLM's ``LLM``. Raises ``UsageError`` for what is unknown or
    not served; ``revision`` is of a hub id.

    >>> LLM("demo").generate(["The capital of France is"], SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | ModelSource,
        config: EngineConfig | None = None,
        *,
        tokenizer: str | None = None,
        revision: str | None = None,
        **options: Any,
    ) -> None:
        if tokenizer not in (None, model):
            raise UsageError(f"tokenizer {tokenizer!r:.200} is not served: leave it out, the model's files have one")
        if revision is not None:
            model = f"{model}@{revision}"
        self.engine = Engine(model, engine_config(options, config))
        self._texts = TokenTexts(self.engine.tokenizer)
        weakref.finalize(self, self.engine.close)  # at the end of the process at the latest

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of a call that gives none: what the model's ``generation_config.json`` says, as ``generation_config``
        asks for."""
        return SamplingParams(**self.engine.generation_config.defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PromptCompletions]:
        """Answer all prompts, batched. One ``sampling_params`` and one ``lora_request`` for all, or one for each; the
        order is kept.

        ``use_tqdm`` shows a bar. Raises ``RequestError`` where a prompt can never run, and what loading an adapter
        raises.
        """
        batch = [self._read(prompt) for prompt in _listed(prompts)]
        adapters = self._adapters(lora_request, len(batch))
        return self._answer(batch, self._for_each(sampling_params, len(batch)), use_tqdm, adapters)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PromptCompletions]:
        """Answer a conversation, or several. Each is a list of messages, checked and rendered as over HTTP.

        The text of an answer is what the model wrote: reasoning and calls of ``tools`` are not split off.
        ``chat_template`` takes the place of the model's own. Unless the last message is continued, the prompt ends with
        the beginning of an answer. Raises ``RequestError`` naming the field that is refused.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        asked = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": None if tools is None else list(tools),
            "chat_template_kwargs": None if chat_template_kwargs is None else dict(chat_template_kwargs),
        }
        encoder = self._encoder if chat_template is None else _encoder(self.engine, chat_template)
        batch, conversations = [], list(messages if several else [messages])
        each = self._for_each(sampling_params, len(conversations))
        for conversation, params in zip(conversations, each):
            kept = params.num_prompt_kept(self.engine.max_model_len)
            ids = _rendered(encoder, asked | {"messages": list(conversation)}, kept)
            batch.append((encoder.decode(ids, skip_special_tokens=False), ids))
        return self._answer(batch, each, use_tqdm, self._adapters(lora_request, len(batch)))

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: str | None = None, use_tqdm: bool = False
    ) -> list[PromptEmbedding]:
        """The hidden states of each prompt as one vector: their mean, or the last. The order is kept. None pools as the
        model says, else by mean.

        Raises ``RequestError`` where a prompt can never run, or its hidden states are not finite.
        """
        pooling = pooling or stated_pooling(self.engine.source) or "mean"
        if pooling not in ("mean", "last"):
            raise RequestError(f"pooling must be mean or last, not {pooling!r:.80}", "pooling")
        found = self._pool(prompts, pooling, use_tqdm)
        return [PromptEmbedding(str(i), tokens, Embedding(vector)) for i, (tokens, vector) in enumerate(found)]

    def classify(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = False) -> list[PromptClassification]:
        """The probability of each class for each prompt. The order is kept.

        Raises ``RequestError`` where the model has no classification head or a prompt can never run.
        """
        if self.engine.classifier is None:
            raise RequestError("this model has no classification head, so it classifies nothing", "model")
        probabilities = self.engine.classifier.classes.probabilities
        found = self._pool(prompts, "classify", use_tqdm)
        return [
            PromptClassification(str(i), tokens, Classification(probabilities(logits)))
            for i, (tokens, logits) in enumerate(found)
        ]

    def _pool(
        self, prompts: Prompt | Sequence[Prompt], pooling: str, use_tqdm: bool
    ) -> list[tuple[list[int], list[float]]]:
        """(token ids, pooled vector) of each prompt."""
        batch = [tokens for _, tokens in map(self._read, _listed(prompts))]
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)
        vectors: dict[int, list[float]] = {}
        for output in self._run(batch, [params] * len(batch), use_tqdm):
            if output.embedding is None:
                raise RequestError(f"prompt {output.request_id}: {output.error}", "prompt")
            vectors[int(output.request_id)] = output.embedding
        return [(tokens, vectors[i]) for i, tokens in enumerate(batch)]

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return _encoder(self.engine)

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt."""
        if isinstance(prompt, Mapping):
            others = prompt.keys() - {"prompt", "prompt_token_ids"}
            if others or not prompt:
                named = ", ".join(sorted(map(str, others))) or "nothing"
                raise RequestError(f"a prompt holds prompt or prompt_token_ids, not {named}", "prompt")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            prompt = str(prompt["prompt"])
        return (prompt, self.engine.encode(prompt)) if isinstance(prompt, str) else (None, list(prompt))

    def _for_each(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        given = self.get_default_sampling_params() if given is None else given
        each = [given] * count if isinstance(given, SamplingParams) else list(given)
        if len(each) != count:
            raise RequestError(f"{count} prompts but {len(each)} sampling parameters", "sampling_params")
        return each

    def _adapters(
        self, given: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[str | None]:
        """The name of each prompt's adapter; those that are not loaded yet are."""
        each = [given] * count if given is None or isinstance(given, LoRARequest) else list(given)
        if len(each) != count:
            raise RequestError(f"{count} prompts but {len(each)} adapters", "lora_request")
        pool = self.engine.adapters
        loaded = {adapter.name: adapter.path for adapter in pool.loaded}
        for asked in {request for request in each if request is not None}:
            if asked.lora_name not in loaded:
                pool.add(asked.lora_name, asked.lora_path, pool.read(asked.lora_path))
            elif loaded[asked.lora_name] != asked.lora_path:
                raise RequestError(f"the adapter {asked.lora_name!r:.200} is loaded from another path", "lora_request")
        return [None if request is None else request.lora_name for request in each]

    def _answer(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        each: list[SamplingParams],
        use_tqdm: bool,
        adapters: list[str | None],
    ) -> list[PromptCompletions]:
        context = self.engine.max_model_len
        batch = [(text, params.kept(tokens, context)) for (text, tokens), params in zip(prompts, each)]
        now = time.monotonic()
        results = [
            PromptCompletions(str(i), text, tokens, [Completion(k) for k in range(params.n)], RequestMetrics(now))
            for i, ((text, tokens), params) in enumerate(zip(batch, each))
        ]
        for params, result in zip(each, results):
            if params.prompt_logprobs is not None:
                result.prompt_logprobs = [None]
            if params.logprobs is not None:
                for answer in result.outputs:
                    answer.cumulative_logprob, answer.logprobs = 0.0, []
        for output in self._run([tokens for _, tokens in batch], each, use_tqdm, adapters):
            self._add(output, results[int(output.request_id)])
        return results

    def _run(
        self,
        batch: list[list[int]],
        params: list[SamplingParams],
        use_tqdm: bool,
        adapters: list[str | None] | None = None,
    ) -> Iterator[RequestOutput]:
        from tqdm.auto import tqdm

        answers = sum(each.n for each in params)
        with tqdm(total=answers, desc="Processed prompts", disable=not use_tqdm) as bar:
            for output in self.engine.generate(list(batch), params, adapters):
                yield output
                bar.update(output.finish_reason is not None)

    def _add(self, output: RequestOutput, result: PromptCompletions) -> None:
        """Add what a step made to the prompt's answers."""
        now, metrics = time.monotonic(), result.metrics
        result.num_cached_tokens = max(result.num_cached_tokens, output.cached_tokens)
        if result.prompt_logprobs is not None:
            result.prompt_logprobs += map(self._by_token, output.prompt_logprobs or ())
        answer = result.outputs[output.index]
        answer.text += output.text
        answer.token_ids += output.token_ids
        if answer.logprobs is not None and answer.cumulative_logprob is not None:
            answer.logprobs += map(self._by_token, output.logprobs or ())
            answer.cumulative_logprob += sum(token.chosen.logprob for token in output.logprobs or ())
        answer.finish_reason, answer.stop_reason, answer.error = output.finish_reason, output.stop_reason, output.error
        if output.token_ids and metrics.first_token_time is None:
            metrics.first_token_time = now
        if result.finished:
            metrics.finished_time = now

    def _by_token(self, token: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first, then the likeliest."""
        found = (token.chosen, *token.top)
        return {each.token_id: Logprob(each.logprob, each.rank, self._texts.name(each.token_id)) for each in found}


def _encoder(engine: Engine, chat_template: str | None = None) -> PromptEncoder:
    tokenizer = engine.tokenizer
    if chat_template is not None:
        tokenizer = copy(tokenizer)
        tokenizer.chat_template = chat_template
    return PromptEncoder(tokenizer, engine.max_model_len, engine.vocab_size)


def _rendered(encoder: PromptEncoder, asked: dict[str, Any], kept: int | None) -> list[int]:
    """The prompt of a chat request, or ``kept`` tokens at its end, with the checks that it has over HTTP."""
    from qserve.runtime.server.errors import APIError  # with pydantic, for which others need not wait
    from qserve.runtime.server.openai.protocol import ChatRequest, parse

    try:
        body = parse(ChatRequest, asked)
        messages = [message.for_template() for message in body.messages]
        tools = [tool.for_template() for tool in body.tool_use().shown]
        return encoder.chat(messages, tools, body.template_options(), kept)
    except APIError as error:
        raise RequestError(str(error), error.param) from None


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a list of one."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
