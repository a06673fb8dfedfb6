"""``MessageAnswer``: the message of ``/v1/messages``, whole or as a stream of named events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

from qserve.runtime.output import RequestOutput
from qserve.runtime.server.chat.dialect import AnswerParser, OutputParser
from qserve.runtime.server.chat.parts import CallArguments, CallStart, Part, Text, Thought
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.http.body import parse_object
from qserve.runtime.server.openai.answers import Json, Outputs, Usage

INVALID = "INVALID_JSON"  # the key under which arguments are kept that are no JSON object


class MessageAnswer:
    """One message. ``whole`` gathers it, ``chunks`` gives it out as it comes."""

    named_events: ClassVar[bool] = True

    def __init__(self, model: str, usage: Usage, parser: AnswerParser | None) -> None:
        """``parser`` finds reasoning and calls."""
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._usage = usage
        self._parser: AnswerParser = parser or OutputParser(None, None)
        self._thinking_tokens = 0
        self._content: list[Json] = []
        self._open = False  # whether the last block grows
        self._arguments = ""  # of the last block, where it is a call
        self._ending: Json = {"stop_reason": None, "stop_sequence": None}

    async def whole(self, outputs: Outputs) -> Json:
        async for _ in self.chunks(outputs):
            pass
        return self._message()

    async def chunks(
        self, outputs: Outputs, *, include_usage: bool = True, continuous_usage: bool = False
    ) -> AsyncIterator[Json]:
        """A failure is raised."""
        begun = False
        async for index, output in outputs:
            self._usage.add(index, output)
            if not begun:
                begun = True
                yield {"type": "message_start", "message": self._message() | {"content": []}}
                yield {"type": "ping"}
            parts = self._parser.feed(output.text)
            if self._parser.thinking:
                self._thinking_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                parts += self._parser.finish()
            for part in parts:
                for event in self._grow(part):
                    yield event
            if output.finish_reason is not None:
                for event in self._stop():
                    yield event
                self._ending = self._why(output)
                yield {"type": "message_delta", "delta": self._ending, "usage": self._usage_json()}
                yield {"type": "message_stop"}

    def _grow(self, part: Part) -> Iterator[Json]:
        match part:
            case CallStart():
                yield from self._start({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
            case CallArguments(_, text):
                self._arguments += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case Text(text):
                yield from self._more("text", text)
            case Thought(text):
                yield from self._more("thinking", text)

    def _more(self, kind: str, text: str) -> Iterator[Json]:
        """More of a block whose text is in the field that is called like its type."""
        if not self._open or self._content[-1]["type"] != kind:
            yield from self._start({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._content[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _start(self, block: Json) -> Iterator[Json]:
        yield from self._stop()
        self._content.append(block)
        self._open, self._arguments = True, ""
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _stop(self) -> Iterator[Json]:
        if not self._open:
            return
        self._open = False
        if self._content[-1]["type"] == "tool_use":
            self._content[-1]["input"] = _input(self._arguments)
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _why(self, output: RequestOutput) -> Json:
        """Why the answer ended."""
        reason = "max_tokens" if output.finish_reason == "length" else "end_turn"
        matched = output.stop_reason if isinstance(output.stop_reason, str) else None
        if matched is not None:
            reason = "stop_sequence"
        elif reason == "end_turn" and self._parser.num_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": matched}

    def _message(self) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._content,
            **self._ending,
            "usage": self._usage_json(),
        }

    def _usage_json(self) -> Json:
        """``input_tokens`` are those that no cache had."""
        usage = self._usage.to_json()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._thinking_tokens},
        }


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call, which a model wrote: what is no JSON object is kept as text."""
    try:
        return parse_object((arguments or "{}").encode())
    except APIError:
        return {INVALID: arguments}
