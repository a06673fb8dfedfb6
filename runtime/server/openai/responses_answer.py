"""``ResponseAnswer``: the response object of ``/v1/responses``, whole or as a stream of named events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, ClassVar

from qserve.runtime.client.failures import EngineFailure
from qserve.runtime.server.chat.dialect import AnswerParser, OutputParser
from qserve.runtime.server.chat.parts import CallArguments, CallStart, Part, Text, Thought
from qserve.runtime.server.openai.answers import Json, Outputs, Usage

# By type of item: the field that holds its text, the names of its events, and the beginning of its id.
_KINDS = {
    "message": ("output_text", "response.output_text", "msg"),
    "reasoning": ("reasoning_text", "response.reasoning_text", "rs"),
    "function_call": ("arguments", "response.function_call_arguments", "fc"),
}


class ResponseAnswer:
    """One response. ``whole`` gathers it, ``chunks`` gives it out as it comes."""

    named_events: ClassVar[bool] = True

    def __init__(self, model: str, shown: Mapping[str, Any], usage: Usage, parser: AnswerParser | None) -> None:
        """``shown``: the fields of the request that the response repeats. ``parser`` finds reasoning and calls."""
        self.id = f"resp_{secrets.token_hex(24)}"
        self._model = model
        self._shown = dict(shown)
        self._usage = usage
        self._parser: AnswerParser = parser or OutputParser(None, None)
        self._created = int(time.time())
        self._reasoning_tokens = 0
        self._items: list[Json] = []
        self._open: Json | None = None  # the last item, while it grows

    async def whole(self, outputs: Outputs) -> Json:
        last: Json = {}
        async for event in self.chunks(outputs):
            last = event
        response: Json = last["response"]
        if response["error"] is not None:
            raise EngineFailure(response["error"]["message"])
        return response

    async def chunks(
        self, outputs: Outputs, *, include_usage: bool = True, continuous_usage: bool = False
    ) -> AsyncIterator[Json]:
        """Numbered events. The last one has the whole response with its usage, which no other event has.

        A failure before the first output is raised; a later one is the last event.
        """
        number = 0
        try:
            async for event in self._events(outputs):
                yield {"type": event.pop("type"), "sequence_number": number} | event
                number += 1
        except EngineFailure as error:
            if not number:
                raise
            failure = {"code": "server_error", "message": str(error)}
            failed = self._response("failed", error=failure)
            yield {"type": "response.failed", "sequence_number": number, "response": failed}

    async def _events(self, outputs: Outputs) -> AsyncIterator[Json]:
        begun = False
        async for index, output in outputs:
            if not begun:
                begun = True
                for name in ("created", "in_progress"):
                    yield {"type": f"response.{name}", "response": self._response("in_progress")}
            self._usage.add(index, output)
            parts = self._parser.feed(output.text)
            if self._parser.thinking:
                self._reasoning_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                parts += self._parser.finish()
            for part in parts:
                for event in self._grow(part):
                    yield event
            if output.finish_reason is not None:
                status = "incomplete" if output.finish_reason == "length" else "completed"
                for event in [*([] if self._items else self._begin("message")), *self._end(status)]:
                    yield event
                yield {"type": f"response.{status}", "response": self._response(status)}

    def _grow(self, part: Part) -> Iterator[Json]:
        match part:
            case CallStart():
                yield from self._end("completed")
                yield from self._begin("function_call", call_id=part.id, name=part.name, arguments="")
                return
            case CallArguments():
                kind = "function_call"
            case Text():
                kind = "message"
            case Thought():
                kind = "reasoning"
        if self._open is None or self._open["type"] != kind:
            yield from self._end("completed")
            yield from self._begin(kind)
        assert self._open is not None
        if kind == "function_call":
            self._open["arguments"] += part.text
        else:
            self._open["content"][0]["text"] += part.text
        more: Json = {"logprobs": []} if kind == "message" else {}
        yield {"type": f"{_KINDS[kind][1]}.delta", **self._place(), "delta": part.text, **more}

    def _begin(self, kind: str, **fields: Any) -> Iterator[Json]:
        content, _, prefix = _KINDS[kind]
        item: Json = {"id": f"{prefix}_{secrets.token_hex(24)}", "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._open = item
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": _copy(item)}
        if kind != "function_call":
            part: Json = {"type": content, "text": ""}
            item["content"].append(part | ({"annotations": [], "logprobs": []} if kind == "message" else {}))
            yield {"type": "response.content_part.added", **self._place(), "part": dict(item["content"][0])}

    def _end(self, status: str) -> Iterator[Json]:
        item = self._open
        if item is None:
            return
        name = f"{_KINDS[item['type']][1]}.done"
        if item["type"] == "function_call":
            yield {"type": name, **self._place(), "name": item["name"], "arguments": item["arguments"]}
        else:
            part = dict(item["content"][0])
            more: Json = {"logprobs": []} if item["type"] == "message" else {}
            yield {"type": name, **self._place(), "text": part["text"], **more}
            yield {"type": "response.content_part.done", **self._place(), "part": part}
        item["status"] = status
        self._open = None
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": _copy(item)}

    def _place(self) -> Json:
        """The fields of an event that say where the open item is."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._items) - 1}
        return place if self._open["type"] == "function_call" else place | {"content_index": 0}

    def _response(self, status: str, error: Json | None = None) -> Json:
        ended = status != "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": [_copy(item) for item in self._items] if ended else [],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": self._usage_json() if ended else None,
            **self._shown,
        }

    def _usage_json(self) -> Json:
        usage = self._usage.to_json()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _copy(item: Json) -> Json:
    """A copy of an item as it is now: it may grow while an event waits to be sent."""
    return item | ({"content": [dict(part) for part in item["content"]]} if "content" in item else {})
