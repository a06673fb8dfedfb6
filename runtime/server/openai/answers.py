"""``CompletionAnswer`` and ``ChatAnswer``: the JSON of a generation, whole or as a stream of chunks."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

from qserve.runtime.server.openai.chat_parts import chat_delta, chat_message
from qserve.runtime.server.openai.logprobs import TokenTexts, chat_logprobs, completion_logprobs, prompt_logprobs

if TYPE_CHECKING:
    from qserve.runtime.output import RequestOutput
    from qserve.runtime.sampler import TokenLogprobs
    from qserve.runtime.server.chat.dialect import AnswerParser

Json = dict[str, Any]
Outputs = AsyncIterator[tuple[int, "RequestOutput"]]
_ROWS = 32  # tokens with log-probabilities in a chunk


@dataclass
class Usage:
    """Token counts; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    cached: dict[str, int] = field(default_factory=dict)  # by engine request
    completion: dict[int, int] = field(default_factory=dict)  # by choice

    def add(self, choice: int, output: RequestOutput) -> None:
        self.completion[choice] = output.output_tokens
        if output.index == 0:
            self.cached[output.request_id] = min(output.cached_tokens, output.prompt_tokens)

    def to_json(self) -> Json:
        completion = sum(self.completion.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


@dataclass
class _Whole:
    """A choice put together."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of an echoed prompt too
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(kw_only=True)
class Answer(ABC):
    """One response. ``whole`` gathers it, ``chunks`` gives it out as it comes. Long lists in it are iterators.

    ``logprobs``: whether it tells those of the answer. ``prompt_logprobs``: whether it tells those of the prompt, in a
    field of their own.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    named_events: ClassVar[bool] = False

    model: str
    choices: int
    usage: Usage
    texts: TokenTexts
    logprobs: bool
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._head = {"created": int(time.time()), "model": self.model}

    async def whole(self, outputs: Outputs) -> Json:
        choices = [_Whole() for _ in range(self.choices)]
        async for index, output in outputs:
            self.usage.add(index, output)
            choice = choices[index]
            choice.text += output.text
            if self.prompt_logprobs:  # they get a field of their own
                choice.prompt_logprobs = output.prompt_logprobs or choice.prompt_logprobs
                output = replace(output, prompt_logprobs=None)
            choice.logprobs += _logprobs(output)
            if output.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        answers = [
            {
                "index": index,
                **self._content(index, choice.text),
                "logprobs": self._logprobs_json(index, choice.logprobs) if self.logprobs else None,
                "finish_reason": self._finish_reason(index, choice.finish_reason),
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ]
        answer = {
            "id": self.id,
            "object": self.kind,
            **self._head,
            "choices": answers,
            "usage": self.usage.to_json(),
        }
        if self.prompt_logprobs:
            scored = [prompt_logprobs(self.texts, choice.prompt_logprobs) for choice in choices]
            self._add_prompt_logprobs(answer, scored)
        return answer

    async def chunks(
        self, outputs: Outputs, *, include_usage: bool, continuous_usage: bool = False
    ) -> AsyncIterator[Json]:
        """A choice opens with its ``_first`` deltas and ends with an empty chunk that has the finish reason."""
        usage: Json = {"usage": None} if include_usage else {}
        opened: set[int] = set()
        async for index, output in outputs:
            self.usage.add(index, output)
            if continuous_usage:
                usage = {"usage": self.usage.to_json()}
            if index not in opened:
                opened.add(index)
                for first in self._first(index):
                    yield self._chunk(index, first) | usage
            told = _logprobs(output) if output.logprobs else []
            rows = [told[start : start + _ROWS] for start in range(0, len(told), _ROWS)]
            deltas = self._deltas(index, output.text, last=output.finish_reason is not None)
            for delta, new in zip_longest(deltas, rows):
                logprobs = self._logprobs_json(index, new) if new else None
                yield self._chunk(index, self._delta("") if delta is None else delta, logprobs) | usage
                if new:
                    self._passed(index, new)
                if len(rows) > 1:  # those of an echoed prompt
                    await asyncio.sleep(0)
            if output.finish_reason is not None:
                reason = self._finish_reason(index, output.finish_reason)
                ending = {"finish_reason": reason, "stop_reason": output.stop_reason}
                yield self._chunk(index, self._delta(""), None, ending) | usage
        if include_usage:
            yield self._envelope([]) | {"usage": self.usage.to_json()}

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, ending: Json | None = None) -> Json:
        ending = ending or {"finish_reason": None}
        return self._envelope([{"index": index, **delta, "logprobs": logprobs, **ending}])

    def _envelope(self, choices: list[Json]) -> Json:
        return {"id": self.id, "object": self.chunk_kind, **self._head, "choices": choices}

    def _deltas(self, index: int, text: str, *, last: bool) -> list[Json]:
        """The deltas that more text adds to a choice; ``last``: there will be no more text."""
        return [self._delta(text)] if text else []

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        return reason

    @abstractmethod
    def _passed(self, index: int, new: Sequence[TokenLogprobs]) -> None:
        """A chunk has told these."""

    @abstractmethod
    def _add_prompt_logprobs(self, answer: Json, scored: list[Iterator[Json | None]]) -> None:
        """Put ``scored``, a list for each choice, where vLLM has it."""

    @abstractmethod
    def _content(self, index: int, text: str) -> Json: ...

    @abstractmethod
    def _first(self, index: int) -> list[Json]:
        """Deltas that open a choice."""

    @abstractmethod
    def _delta(self, text: str) -> Json: ...

    @abstractmethod
    def _logprobs_json(self, index: int, new: Sequence[TokenLogprobs]) -> Json: ...


@dataclass(kw_only=True)
class ChatAnswer(Answer):
    """``parser`` makes a parser that finds reasoning and tool calls in the text of a choice."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    parser: Callable[[], AnswerParser] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parsers = [self.parser() for _ in range(self.choices)] if self.parser else None

    def _add_prompt_logprobs(self, answer: Json, scored: list[Iterator[Json | None]]) -> None:
        answer["prompt_logprobs"] = scored[0]

    def _content(self, index: int, text: str) -> Json:
        if self._parsers is None:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"message": chat_message(self._parsers[index].feed(text) + self._parsers[index].finish())}

    def _deltas(self, index: int, text: str, *, last: bool) -> list[Json]:
        if self._parsers is None:
            return super()._deltas(index, text, last=last)
        parser = self._parsers[index]
        parts = parser.feed(text) + (parser.finish() if last else [])
        return [{"delta": chat_delta(part)} for part in parts]

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        called = self._parsers is not None and self._parsers[index].num_calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _first(self, index: int) -> list[Json]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _logprobs_json(self, index: int, new: Sequence[TokenLogprobs]) -> Json:
        return chat_logprobs(self.texts, new)

    def _passed(self, index: int, new: Sequence[TokenLogprobs]) -> None:
        """Nothing in a chunk depends on those before it."""


@dataclass(frozen=True)
class Echo:
    """A prompt that is repeated before its answer. ``first_token``: set where its log-probabilities are wanted."""

    text: str
    first_token: int | None = None


@dataclass(kw_only=True)
class CompletionAnswer(Answer):
    """``echo``: for each choice, the prompt to repeat before the answer."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    echo: Sequence[Echo] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offsets: dict[int, int] = {}  # by choice, characters of the answer so far

    def _add_prompt_logprobs(self, answer: Json, scored: list[Iterator[Json | None]]) -> None:
        for choice, own in zip(answer["choices"], scored, strict=True):
            choice["prompt_logprobs"] = own

    def _content(self, index: int, text: str) -> Json:
        return {"text": self.echo[index].text + text if self.echo else text}

    def _first(self, index: int) -> list[Json]:
        return [{"text": self.echo[index].text}] if self.echo else []

    def _delta(self, text: str) -> Json:
        return {"text": text}

    def _logprobs_json(self, index: int, new: Sequence[TokenLogprobs]) -> Json:
        offset, first = self._offset(index)
        return completion_logprobs(self.texts, new, offset, first)

    def _passed(self, index: int, new: Sequence[TokenLogprobs]) -> None:
        offset, first = self._offset(index)
        ids = [*([] if first is None else [first]), *(token.chosen.token_id for token in new)]
        self._offsets[index] = offset + sum(map(self.texts.characters, ids))

    def _offset(self, index: int) -> tuple[int, int | None]:
        """Where the next log-probabilities of a choice begin, and the first token of an echoed prompt before them."""
        if index in self._offsets:
            return self._offsets[index], None
        echo = self.echo[index] if self.echo else Echo("")
        return (len(echo.text), None) if echo.first_token is None else (0, echo.first_token)


def _logprobs(output: RequestOutput) -> list[TokenLogprobs]:
    return (output.prompt_logprobs or []) + (output.logprobs or [])
