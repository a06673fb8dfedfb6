"""``TokenTexts`` and the shapes in which log-probabilities are told. Their lists are iterators, read once: what is told
of a long answer is made when it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from qserve.runtime.detokenizer import BYTE_OF, BYTE_TOKEN, REPLACEMENT, decode, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qserve.runtime.sampler import TokenLogprob, TokenLogprobs

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


class TokenTexts:
    """The bytes and the name of single tokens; a name is unique even where the bytes are half a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        # Decoded behind another token, so that a SentencePiece token keeps its leading space.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._prefix = len(decode(tokenizer, self._anchor))
        self.bytes = lru_cache(maxsize=1 << 16)(self._bytes)

    def characters(self, token_id: int) -> int:
        """Characters that begin in this token."""
        if token_id in self._special:  # the text leaves special tokens out
            return 0
        return sum(byte >> 6 != 0b10 for byte in self.bytes(token_id))

    def name(self, token_id: int) -> str:
        data = self.bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token_id: int) -> bytes:
        text = decode(self._tokenizer, [*self._anchor, token_id], skip_special_tokens=False)[self._prefix :]
        if REPLACEMENT not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if byte := BYTE_TOKEN.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        if all(character in BYTE_OF for character in piece):
            return bytes(BYTE_OF[character] for character in piece)
        return text.encode()


def completion_logprobs(
    texts: TokenTexts, new: Sequence[TokenLogprobs], offset: int, first: int | None = None
) -> dict[str, Any]:
    """``logprobs`` of a completion's choice; ``offset`` is the number of characters before the new tokens.

    ``first``: the first token of an echoed prompt. Nothing predicts it, so it has nulls.
    """
    opening, unknown = ([], []) if first is None else ([first], [None])

    def ids() -> Iterator[int]:
        return chain(opening, (token.chosen.token_id for token in new))

    return {
        "tokens": map(texts.name, ids()),
        "token_logprobs": chain(unknown, (_finite(token.chosen.logprob) for token in new)),
        "top_logprobs": chain(unknown, (_by_name(texts, token) for token in new)),
        "text_offset": _offsets(texts, ids(), offset),
    }


def _offsets(texts: TokenTexts, token_ids: Iterator[int], offset: int) -> Iterator[int]:
    for token_id in token_ids:
        yield offset
        offset += texts.characters(token_id)


def _by_name(texts: TokenTexts, token: TokenLogprobs) -> dict[str, float]:
    """The chosen token first, then the likeliest. Of two tokens with one name, the first counts."""
    found: dict[str, float] = {}
    for each in (token.chosen, *token.top):
        found.setdefault(texts.name(each.token_id), _finite(each.logprob))
    return found


def chat_logprobs(texts: TokenTexts, new: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """``logprobs`` of a chat choice."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {
            "token": texts.name(token.token_id),
            "logprob": _finite(token.logprob),
            "bytes": list(texts.bytes(token.token_id)),
        }

    content = (entry(token.chosen) | {"top_logprobs": [entry(t) for t in token.top]} for token in new)
    return {"content": content, "refusal": None}


def prompt_logprobs(texts: TokenTexts, following: Sequence[TokenLogprobs]) -> Iterator[dict[str, Any] | None]:
    """``prompt_logprobs`` as vLLM has it: by token id, one entry for each prompt token; nothing predicts the first."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {
            "logprob": _finite(token.logprob),
            "rank": token.rank,
            "decoded_token": texts.name(token.token_id),
        }

    return chain([None], ({str(t.token_id): entry(t) for t in (token.chosen, *token.top)} for token in following))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
