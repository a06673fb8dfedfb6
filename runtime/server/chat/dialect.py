"""``Dialect``: how the model served here marks tool calls and reasoning, and ``OutputParser``, which reads its answers.

A ``Dialect`` is made once per model, from its chat template. It also says which markers are special tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from qserve.runtime.detokenizer import special_ids
from qserve.runtime.server.chat.block_formats import BlockFormat
from qserve.runtime.server.chat.block_parser import BlockParser
from qserve.runtime.server.chat.harmony import MARKERS, SIGN, HarmonyParser
from qserve.runtime.server.chat.parts import Part, Text
from qserve.runtime.server.chat.reasoning import ReasoningParser, ReasoningTags, find_tags
from qserve.runtime.server.chat.tool_formats import HARMONY, ToolFormat, find_format
from qserve.runtime.server.chat.tool_parser import ToolParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Dialect:
    """One model's row of the tool formats and its reasoning tags; each is None where the model has none.

    ``harmony``: its messages have channels, in which both are found; then the others are None. ``shows_reasoning``:
    of those, what is in the channel of reasoning is part of the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tool_format: str, reasoning: str) -> None:
        """``tool_format``, ``reasoning``: a row's name, auto or none."""
        given = tokenizer.chat_template or ""
        template = "\n".join(given.values()) if isinstance(given, dict) else str(given)
        self._added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
        self._special = special_ids(tokenizer)
        self.harmony = tool_format == HARMONY or reasoning == "openai_gptoss" or (
            SIGN in template and tool_format in ("auto", "none")
        )
        self.shows_reasoning = reasoning != "none"
        self.takes_tools = tool_format != "none" if self.harmony else False
        self.tools: ToolFormat | BlockFormat | None = None
        self.reasoning: ReasoningTags | None = None
        if not self.harmony:
            self.tools = find_format(tool_format, template)
            self.takes_tools = self.tools is not None
            self.reasoning = find_tags(template, reasoning)

    def token_of(self, text: str) -> int | None:
        """The id of an added token of the vocabulary, None for any other text."""
        return self._added.get(text)

    def visible_tokens(self, *, tools: bool, reasoning: bool) -> tuple[int, ...]:
        """The special tokens that an output must show, because its parser looks for them."""
        if self.harmony:
            return tuple(token for marker in MARKERS if (token := self.token_of(marker)) in self._special)
        markers = [*(self.tools.markers if tools and self.tools else ())]
        if reasoning and self.reasoning:
            markers += self.reasoning.markers
        return tuple(token for marker in markers if (token := self.token_of(marker)) in self._special)


class OutputParser:
    """Splits the text of a choice into parts: reasoning first, then content and calls. Either parser may be missing."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | BlockParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def thinking(self) -> bool:
        return self._reasoning is not None and self._reasoning.thinking

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def feed(self, text: str) -> list[Part]:
        """Take more text; return what is certain now, perhaps nothing."""
        return list(self._through(self._reasoning.feed(text) if self._reasoning else [Text(text)]))

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the output."""
        parts = list(self._through(self._reasoning.finish())) if self._reasoning else []
        return parts + (self._tools.finish() if self._tools else [])

    def _through(self, parts: Collection[Part]) -> Iterator[Part]:
        for part in parts:
            if self._tools is not None and isinstance(part, Text):
                yield from self._tools.feed(part.text)
            elif not isinstance(part, Text) or part.text:
                yield part


AnswerParser = OutputParser | HarmonyParser
