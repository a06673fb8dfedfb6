"""The content blocks of ``/v1/messages``, and the messages for the chat template that they become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from qserve.runtime.server.errors import APIError
from qserve.runtime.server.openai.messages import MAX_ID, check_name
from qserve.runtime.server.openai.protocol import parse
from qserve.runtime.server.openai.strict import NotDone, Strict


class CacheControl(Strict):
    """A hint: equal beginnings of prompts find each other here without a mark."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    not_done: ClassVar[NotDone] = {"citations": ([],)}

    type: Literal["text"]
    text: str


class ThinkingBlock(Strict):
    """``signature`` comes back with the blocks of earlier answers and changes nothing."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(_Block):
    not_done: ClassVar[NotDone] = {"caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=MAX_ID)
    name: str
    input: dict[str, Any]

    _name = field_validator("name")(check_name)

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


class ToolResultBlock(_Block):
    """``content`` becomes a string. What a tool said when it failed begins with "Error: " in the prompt."""

    not_done: ClassVar[NotDone] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=MAX_ID)
    content: Any = None
    is_error: bool | None = None

    @field_validator("content")
    @classmethod
    def _text(cls, value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
            raise PydanticCustomError("content", "must be a string or a list of text blocks")
        for part in value:
            if (kind := part.get("type")) != "text":
                raise PydanticCustomError("content", f"holds a block of type '{kind!s:.40}'; only text is supported")
        return "\n".join(TextBlock.model_validate(part).text for part in value)

    def for_template(self) -> dict[str, Any]:
        text = f"Error: {self.content or ''}" if self.is_error else self.content or ""
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": text}


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
BLOCKS: Mapping[str, Mapping[str, type[Block]]] = {
    "system": {"text": TextBlock},
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}
"""The types of blocks that a message may hold, by its role."""

_BLOCK = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": sorted({kind for kinds in BLOCKS.values() for kind in kinds})}},
}
_TEXT_OR_BLOCKS = [{"type": "string"}, {"type": "array", "items": _BLOCK}]
Content = Annotated[Any, WithJsonSchema({"anyOf": _TEXT_OR_BLOCKS})]
OptionalContent = Annotated[Any, WithJsonSchema({"anyOf": [*_TEXT_OR_BLOCKS, {"type": "null"}]})]


class InputMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: Content


def read_blocks(content: Any, role: str, where: str) -> list[Block]:
    """The blocks of a message, or of ``system``, at least one. Raises ``APIError`` 400 naming the field at fault."""
    if isinstance(content, str) or content == []:
        return [TextBlock(type="text", text=content or "")]
    if not isinstance(content, list):
        raise APIError(400, f"{where}: must be a string or a list of blocks", param=where, code="invalid_value")
    kinds = BLOCKS[role]
    blocks = []
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            what = f"{place}: a block of type {kind!r:.40} is not served here; the role {role} has {', '.join(kinds)}"
            raise APIError(400, what, param=place, code="invalid_value")
        blocks.append(parse(kinds[kind], block, within=place))
    return blocks


def template_messages(turns: list[tuple[str, list[Block]]]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: successive turns of a role are one, and each result of a tool is a message
    of its own."""
    messages: list[dict[str, Any]] = []
    for role, block in [(role, block) for role, blocks in turns for block in blocks]:
        if isinstance(block, ToolResultBlock):
            messages.append(block.for_template())
            continue
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": ""})
        message = messages[-1]
        if isinstance(block, ToolUseBlock):
            message.setdefault("tool_calls", []).append(block.for_template())
            continue
        name = "content" if isinstance(block, TextBlock) else "reasoning_content"
        text = block.text if isinstance(block, TextBlock) else block.thinking
        message[name] = f"{message[name]}\n{text}" if message.get(name) else text
    return messages
