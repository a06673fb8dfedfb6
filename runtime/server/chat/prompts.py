"""``PromptEncoder``: texts and chat messages to token ids, for requests that come from strangers."""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qserve.runtime.detokenizer import decode
from qserve.runtime.sampling import RequestError
from qserve.runtime.server.chat import harmony
from qserve.runtime.server.chat.template_options import DEFAULT_OPTIONS, TemplateOptions, template_variables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL = 32  # tokens; more than any tag and the white space around it
_MAX_TRUNCATED = 8  # contexts that a prompt which is to be truncated may fill
_BATCH = 256  # texts that are encoded in one call; what it returns is converted under the interpreter lock


class PromptEncoder:
    """Encodes in any number of threads at once: the tokenizer is a copy whose settings never change.

    A text that must have more tokens than ``max_model_len`` is refused before it is encoded. It may have eight times as
    many where only ``kept`` tokens at the end of the prompt are wanted.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_model_len: int, vocab_size: int) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._longest = max(map(len, self._tokenizer.get_vocab()))
        special = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile(_any_of(special) or r"(?!)")
        spelled = self._tokenizer([*special, ""], add_special_tokens=False, split_special_tokens=True)["input_ids"]
        self._spelled = dict(zip(special, spelled))  # special tokens as plain text
        self._tokenizer("")  # it sets back what the call before has changed

    def encode(
        self, prompt: str | list[int], *, add_special_tokens: bool = True, kept: int | None = None
    ) -> list[int]:
        """Encode a prompt as it is: special tokens in it count as such, and the model's own are put around it."""
        if isinstance(prompt, list):
            self._check_length(len(prompt), 1, kept)
            if max(prompt) >= self._vocab_size:
                raise RequestError(f"a token id is outside 0..{self._vocab_size - 1}", "prompt")
            return _end(prompt, kept)
        self._check_length(len(prompt), self._longest, kept)
        return _end(self._encode([prompt], add_special_tokens=add_special_tokens)[0], kept)

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Encode pairs of texts as the tokenizer joins two: special tokens as in ``encode``."""
        for pair in pairs:
            self._check_length(sum(map(len, pair)), self._longest)
        return self._encode(pairs, add_special_tokens=True)

    def within(self, before: str, texts: Sequence[str], after: str) -> list[list[int]]:
        """Encode each text between two parts of a template. Special tokens count as such in those; in a text they are
        plain."""
        first, last = self._encode([before, after], add_special_tokens=False)
        return [[*first, *self._plain(text), *last] for text in texts]

    def _plain(self, text: str) -> list[int]:
        self._check_length(len(text), self._longest)
        special = self._special.findall(text)
        self._check_length(sum(len(self._spelled[token]) for token in special), 1)
        pieces = iter(self._encode(self._special.split(text), add_special_tokens=False))
        ids = list(next(pieces))
        for token, piece in zip(special, pieces, strict=True):
            ids += self._spelled[token] + piece
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return decode(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The name of each token in the vocabulary; an id beyond it, which some models have, gets an empty name."""
        return [piece or "" for piece in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    def tail(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt's end, special tokens included."""
        return decode(self._tokenizer, token_ids[-_TAIL:], skip_special_tokens=False)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
        kept: int | None = None,
    ) -> list[int]:
        """Encode the messages by the chat template, up to the beginning of the answer.

        Special tokens count as such in the template; in a message, a tool or a variable they are plain text.
        Raises ``RequestError`` where there is no template, it refuses the messages, it does not tell the model of the
        tools, it has no such variable, or its last message cannot be continued.
        """
        self._check_length(sum(map(len, _texts([messages, tools, options.variables]))), self._longest, kept)
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        self._check_variables(options.variables)
        if harmony.SIGN in str(self._tokenizer.chat_template):
            messages = [harmony.for_template(message) for message in messages]
        # Text that looks like a special token is hidden behind a word nobody can guess, and tokenized apart.
        mark = f"x{secrets.token_hex(12)}"
        hidden: list[list[int]] = []
        num_hidden = 0

        def hide(match: re.Match[str]) -> str:
            nonlocal num_hidden
            hidden.append(self._spelled[match[0]])
            num_hidden += len(hidden[-1])
            self._check_length(num_hidden, 1, kept)
            return f"{mark}n{len(hidden) - 1}x"

        def safe(node: Any) -> Any:
            return _map_texts(node, lambda text: self._special.sub(hide, text))

        shown, known, variables = safe(messages), safe(tools), safe(options.variables)
        last = shown[-1].get("content") or ""
        if options.continue_final_message:
            shown[-1]["content"] = f"{last}{mark}e "
        more = {"add_generation_prompt": options.add_generation_prompt, **variables}
        text = self._render(shown, known, more)
        if tools and not self._shows(text, shown, more):
            raise RequestError("the chat template of this model does not know tools", "tools")
        if options.continue_final_message:
            text = _continued(text, last, f"{mark}e ")
        pieces = re.split(rf"{mark}n(\d+)x", text)
        distinct = list(dict.fromkeys(pieces[::2]))
        encoded = dict(zip(distinct, self._encode(distinct, add_special_tokens=False), strict=True))
        ids = list(encoded[pieces[0]])
        for place, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            ids += hidden[int(place)]
            ids += encoded[piece]
        return _end(ids, kept)

    def _encode(self, texts: Sequence[str] | Sequence[tuple[str, str]], *, add_special_tokens: bool) -> list[list[int]]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return list(self._tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"])
        return [  # transformers would change the settings, and take twice the time
            encoding.ids
            for start in range(0, len(texts), _BATCH)
            for encoding in backend.encode_batch_fast(
                texts[start : start + _BATCH], add_special_tokens=add_special_tokens
            )
        ]

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables of the chat template that a request may set."""
        return template_variables(self._tokenizer)

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name not in self.variables:
                raise RequestError(
                    f"the chat template of this model has no variable {name!r:.80} for requests; it has "
                    + (", ".join(sorted(self.variables)) or "none"),
                    f"chat_template_kwargs.{name:.80}",
                )

    def _shows(self, text: str, messages: list[Any], more: Mapping[str, Any]) -> bool:
        """Whether ``text`` tells the model of the tools with which it was rendered."""
        try:
            return text != self._render(messages, [], more)
        except RequestError:  # a template that needs tools knows them
            return True

    def _render(self, messages: list[Any], tools: list[Any], more: Mapping[str, Any]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **more))
        except Exception as error:  # a template is a program, and may fail in any way on what it was not written for
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from None

    def _check_length(self, length: int, per_token: int, kept: int | None = None) -> None:
        at_least, context = -(-length // per_token), self.max_model_len
        if kept is not None and at_least > (most := _MAX_TRUNCATED * context):
            raise RequestError(
                f"the prompt has at least {at_least:,} tokens, and at most {most:,} can be truncated here", "prompt"
            )
        if kept is None and at_least > context:
            raise RequestError(f"the prompt has at least {at_least:,} tokens, the context {context:,}", "prompt")


def _end(ids: list[int], kept: int | None) -> list[int]:
    return ids if kept is None else ids[-kept:]


def _any_of(words: Iterable[str]) -> str:
    """A regular expression for the longest of ``words``, as a tree of their beginnings: a thousand alternatives would
    be tried at every place that may begin one, and no other thread runs meanwhile. Empty if there is nothing to match.
    """
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[:1], []).append(word[1:])
    may_end = rests.pop("", None) is not None
    branches = [re.escape(first) + _any_of(rest) for first, rest in rests.items()]
    if not may_end and len(branches) == 1:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if may_end else ''}" if branches else ""


def _continued(text: str, last: str, mark: str) -> str:
    """``text`` up to ``mark``, which stands at the end of the ``last`` message. Where the template cuts white space off
    messages, that of the end is cut off here too."""
    end = text.rfind(mark.rstrip())
    start = text[: max(end, 0)]
    if not last.strip() or last.strip() not in start:
        raise RequestError(
            "the last message cannot be continued: "
            + ("the chat template does not show it as it is" if last.strip() else "it holds no text"),
            "continue_final_message",
        )
    return start if text.startswith(mark, end) else start.rstrip()


def _map_texts(node: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON data with every string changed, keys of objects too."""
    if isinstance(node, str):
        return change(node)
    if isinstance(node, Mapping):
        return {change(key): _map_texts(value, change) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_map_texts(item, change) for item in node]
    return node


def _texts(node: Any) -> Iterator[str]:
    """Every string of JSON data, keys of objects too."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        yield from node
        for value in node.values():
            yield from _texts(value)
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _texts(item)
