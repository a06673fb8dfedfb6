"""``ToolFormat``: how a family of models writes tool calls. One table; a row is chosen by the chat template's text.

``ToolParser`` finds calls in a text by it, ``tool_grammar`` forces them.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qserve.runtime.server.chat.block_formats import BLOCK_FORMATS, BlockFormat

_ALPHABET = string.ascii_letters + string.digits
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"


@dataclass(frozen=True)
class ToolFormat:
    """One row of the table.

    Attributes:
        name: what ``ServerConfig.tool_format`` calls it.
        layout: tagged, each call an object between ``begin`` and ``end``; bare, objects separated by ``;`` that are
            the answer; list, a JSON list of objects after ``begin``; named, ``begin``, the name, ``[ARGS]``, arguments.
        begin: the marker before calls; of a bare answer it may be left out.
        end: the marker after a call, empty where there is none.
        arguments: the key of a call's arguments. The parser understands both keys that are in use.
        signs: a template that contains one of these texts, and none of ``other``, is of this format.
        other: signs of formats that share a marker with this one.
        id_length: characters of a call's id, where templates insist on a number.
    """

    name: str
    layout: Literal["tagged", "bare", "list", "named"]
    begin: str
    end: str
    arguments: str
    signs: tuple[str, ...]
    other: tuple[str, ...] = ()
    id_length: int | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that an output must show even where they are special tokens of the tokenizer."""
        more = (CALL_ID, ARGS) if self.begin == "[TOOL_CALLS]" else ()
        return tuple(marker for marker in (self.begin, self.end, *more) if marker)

    def call_id(self) -> str:
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ALPHABET) for _ in range(self.id_length))


TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat("mistral-named", "named", "[TOOL_CALLS]", "", "arguments", (ARGS,), id_length=9),
    ToolFormat("mistral", "list", "[TOOL_CALLS]", "", "arguments", ("[TOOL_CALLS]",), id_length=9),
    # Qwen3-Coder, GLM and MiniMax put XML between the same tags.
    ToolFormat(
        "hermes", "tagged", "<tool_call>", "</tool_call>", "arguments", ("<tool_call>",),
        ("<function=", "<arg_key>", "<invoke"),
    ),
    ToolFormat("granite", "list", "<|tool_call|>", "", "arguments", ("<|tool_call|>",)),
    ToolFormat(
        "llama", "bare", "<|python_tag|>", "", "parameters", ("<|python_tag|>", '{"name": function name, "parameters":')
    ),
)
NAMES = tuple(row.name for row in TOOL_FORMATS)
HARMONY = "harmony"  # GPT-OSS: no row, since its markers are those of every message
FORMAT_NAMES = (*NAMES, *(row.name for row in BLOCK_FORMATS), HARMONY)
VLLM_PARSERS = {  # vLLM's names of formats that have another name here
    "llama3_json": "llama",
    "llama4_json": "llama",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "glm45": "glm",
    "glm47": "glm",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "granite4": "hermes",
    "cohere_command3": "cohere",
    "openai": HARMONY,
}


def find_format(name: str, template: str) -> ToolFormat | BlockFormat | None:
    """The row of that name; for ``auto`` the one whose signs the chat template shows, if there is one."""
    rows: tuple[ToolFormat | BlockFormat, ...] = (*BLOCK_FORMATS, *TOOL_FORMATS)
    for row in rows:
        if row.name == name or (name == "auto" and _holds(template, row.signs) and not _holds(template, row.other)):
            return row
    return None


def _holds(template: str, texts: Sequence[str]) -> bool:
    return any(text in template for text in texts)
