"""``ReasoningTags``: how models mark their reasoning, and ``ReasoningParser``, which splits it off the answer.

Reasoning comes once, before everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qserve.runtime.server.chat.parts import Part, Text, Thought
from qserve.runtime.stop_checker import overlap


@dataclass(frozen=True)
class ReasoningTags:
    """``answer``: tags around the answer that follows, which are dropped."""

    begin: str
    end: str
    answer: tuple[str, str] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that an output must show even where they are special tokens of the tokenizer."""
        # Gemma 4's tag is a token and the name of a channel.
        return (self.begin, self.begin.removesuffix("thought"), self.end, *(self.answer or ()))

    def are_open(self, text: str) -> bool:
        """Whether ``text`` ends inside reasoning that it began."""
        return text.rfind(self.begin) > text.rfind(self.end)


REASONING_TAGS = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("<thinking>", "</thinking>"),
    ReasoningTags("<reasoning>", "</reasoning>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|channel>thought", "<channel|>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    ReasoningTags("<think>", "</think>", ("<response>", "</response>")),
)
_SEED, _GEMMA, _COHERE, _GRANITE = REASONING_TAGS[-4:]
_NAMED = {
    "think": REASONING_TAGS[0],
    "thinking": REASONING_TAGS[1],
    "reasoning": REASONING_TAGS[2],
    "mistral": REASONING_TAGS[3],
    "seed_oss": _SEED,
    "gemma4": _GEMMA,
    "granite": _GRANITE,
    **dict.fromkeys(("cohere", "cohere_command3"), _COHERE),
    **dict.fromkeys(  # vLLM's names
        (
            "deepseek_r1", "deepseek_v3", "deepseek_v31", "qwen3", "glm45", "ernie45", "nemotron_v3", "kimi_k2",
            "minimax_m2",
        ),
        REASONING_TAGS[0],
    ),
}
REASONING_NAMES = (*_NAMED, "openai_gptoss")  # the last is read by ``HarmonyParser``


def find_tags(template: str, name: str = "auto") -> ReasoningTags | None:
    """The tags of that name; for ``auto`` those that a chat template contains, None where it contains none."""
    if name != "auto":
        return _NAMED.get(name)
    if "<response>" in template and "<think>" in template:
        return _GRANITE
    return next((tags for tags in REASONING_TAGS if tags.begin in template or tags.end in template), None)


class ReasoningParser:
    """Takes text by ``feed`` and gives out thoughts and text; ``finish`` gives out what was held back.

    White space is dropped at both ends of the reasoning and before the answer that follows it. Reasoning that is cut
    off stays reasoning.
    """

    def __init__(self, tags: ReasoningTags, opened: bool = False) -> None:
        """``opened``: the prompt ends inside reasoning, so that the output begins there."""
        self._tags = tags
        self._opened = opened
        self._state: Callable[[], list[Part]] | None = self._opening
        self._buffer = ""
        self._given = False  # something of an answer between tags

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._state in (self._inside, self._thought) or (self._opened and self._state == self._opening)

    def feed(self, text: str) -> list[Part]:
        """Take more text; return what is certain now, perhaps nothing."""
        if self._state is None:
            return [Text(text)] if text else []
        self._buffer += text
        parts: list[Part] = []
        before = None
        while self._state is not None and self._state != before:
            before = self._state
            parts += self._state()
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the output."""
        thinking, rest, self._buffer = self.thinking, self._buffer, ""
        if self._state == self._answer:
            return [Text(rest.lstrip())] if rest.strip() else []
        if thinking:
            rest = rest.rstrip() if self._state == self._thought else rest.strip()
            return [Thought(rest)] if rest else []
        return [Text(rest)] if rest else []

    # A state looks at the buffer and returns what is certain. If it sets another state, that one goes on at once.

    def _opening(self) -> list[Part]:
        text, begin = self._buffer.lstrip(), self._tags.begin
        if text.startswith(begin):
            self._buffer = text[len(begin) :]
            self._state = self._inside
        elif begin.startswith(text):
            return []
        elif self._opened:
            self._state = self._inside
        elif self._tags.answer is None:
            return self._rest(self._buffer)
        elif text.startswith(self._tags.answer[0]):
            self._state = self._answer
        elif not self._tags.answer[0].startswith(text):  # the prompt may end with the first of its tags
            self._given, self._state = True, self._tagged_answer
        return []

    def _inside(self) -> list[Part]:
        if text := self._buffer.lstrip():
            self._buffer = text
            self._state = self._thought
        return []

    def _thought(self) -> list[Part]:
        end = self._tags.end
        at = self._buffer.find(end)
        stop = at if at >= 0 else len(self._buffer) - overlap(self._buffer, end)
        text = self._buffer[:stop].rstrip()
        if at < 0:
            self._buffer = self._buffer[len(text) :]
        else:
            self._buffer = self._buffer[at + len(end) :]
            self._state = self._answer
        return [Thought(text)] if text else []

    def _answer(self) -> list[Part]:
        text = self._buffer.lstrip()
        if self._tags.answer is not None and text:
            begin = self._tags.answer[0]
            if text.startswith(begin):
                self._buffer, self._state = text[len(begin) :].lstrip(), self._tagged_answer
                return []
            if begin.startswith(text):
                return []
        return self._rest(text) if text else []

    def _tagged_answer(self) -> list[Part]:
        """The answer between tags of its own, which ends with the last of them."""
        assert self._tags.answer is not None
        if not self._given:
            self._buffer = self._buffer.lstrip()
        end = self._tags.answer[1]
        at = self._buffer.find(end)
        stop = at if at >= 0 else len(self._buffer) - overlap(self._buffer, end)
        text = self._buffer[:stop].rstrip()
        self._given |= bool(text)
        self._buffer = self._buffer[len(text) :]
        if at >= 0:
            self._buffer = self._buffer[stop - len(text) + len(end) :]
            return ([Text(text)] if text else []) + self._rest(self._buffer)
        return [Text(text)] if text else []

    def _rest(self, text: str) -> list[Part]:
        self._buffer, self._state = "", None
        return [Text(text)] if text else []
