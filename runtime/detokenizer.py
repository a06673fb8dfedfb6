"""A ``Detokenizer`` turns new tokens into final text.

Tokens may hold parts of a character, and a token's leading space depends on what stands before it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
MAX_PARTIAL = 3  # tokens of a byte each after which a character may still be incomplete
CONTEXT = 5  # tokens kept before the next one; more than the tokens of one character
MAX_WINDOW = 24


class Detokenizer(ABC):
    """The text of one growing output, given out piece by piece.

    The pieces joined are what ``tokenizer.decode`` returns for all the tokens, with the leading space that the prompt
    before them calls for. A character is given out when its last byte is there; bytes that never become one are given
    out as U+FFFD.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        visible: Sequence[int] = (),
    ) -> None:
        """For the output behind a prompt. ``visible``: special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skipped = special_ids(tokenizer).difference(visible) if skip_special_tokens else frozenset()
        self._skips = skip_special_tokens and not visible  # all of them
        self._size = len(tokenizer)
        self._begin(self._kept(prompt_token_ids[-4 * CONTEXT :]))

    @abstractmethod
    def _begin(self, prompt: list[int]) -> None:
        """Behind the end of a prompt."""

    @abstractmethod
    def append(self, token_ids: Iterable[int]) -> str:
        """Take new tokens; return the text that is now final. It often belongs to earlier tokens, and may be empty."""

    @abstractmethod
    def flush(self) -> str:
        """What was held back, at the end of the output."""

    def _kept(self, token_ids: Iterable[int]) -> list[int]:
        """The tokens that have text."""
        return [token for token in token_ids if token < self._size and token not in self._skipped]


def new_detokenizer(
    tokenizer: PreTrainedTokenizerBase,
    prompt_token_ids: Sequence[int] = (),
    skip_special_tokens: bool = True,
    visible: Sequence[int] = (),
) -> Detokenizer:
    """The ``Detokenizer`` for this kind of tokenizer."""
    return _kind(tokenizer)(tokenizer, prompt_token_ids, skip_special_tokens, visible)


class ByteDetokenizer(Detokenizer):
    """Where each token stands for bytes, whatever is before it: those are UTF-8, and nothing is decoded twice."""

    def _begin(self, prompt: list[int]) -> None:
        self._known = _token_text(self._tokenizer)
        self._held = b""  # the beginning of a character
        self._read(prompt)

    def append(self, token_ids: Iterable[int]) -> str:
        return self._read(self._kept(token_ids))

    def _read(self, tokens: list[int]) -> str:
        text = ""
        for token in tokens:
            known = self._known[token]
            if self._held or isinstance(known, bytes):
                data = self._held + (known if isinstance(known, bytes) else known.encode())
                known, used = utf_8_decode(data, "replace", False)
                self._held = data[used:]
            text += known
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


class WindowDetokenizer(Detokenizer):
    """For any tokenizer. Only a short window of tokens is decoded at each step. Its first tokens are context. The
    window is shortened to a tail that decodes alone to the same text as at the end of the window.
    """

    def _begin(self, prompt: list[int]) -> None:
        self._bytes = _byte_tokens(self._tokenizer)
        self._window = next(self._tails(prompt))
        self._sent = len(self._decode(self._window))  # characters of the window's text that were given out
        self._pending = 0  # tokens since the text last ended with a whole character

    def append(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self._step, self._kept(token_ids)))

    def _step(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        partial = self._partial(text)
        self._pending = self._pending + 1 if partial else 0
        delta = self._take(text, len(text) - partial)
        if len(self._window) > MAX_WINDOW and (self._pending == 0 or self._pending > CONTEXT + MAX_PARTIAL):
            self._shorten(text)
        return delta

    def _partial(self, text: str) -> int:
        """Characters at the end of ``text``, all U+FFFD, that the next tokens may change."""
        partial = len(text) - len(text.rstrip(REPLACEMENT))
        if partial and self._window[-1] in self._bytes:
            # Byte fallback: an unfinished character turns every byte in the run before it into U+FFFD too.
            run = [self._bytes[token] for token in takewhile(self._bytes.__contains__, reversed(self._window))]
            return partial if _is_unfinished(bytes(reversed(run))) else 0
        # Byte-level tokens: after more tokens than a character has bytes, it was a true U+FFFD or garbage, and only
        # the last one can still be the beginning of a character.
        return partial if self._pending < MAX_PARTIAL else min(partial, MAX_PARTIAL)

    def flush(self) -> str:
        text = self._decode(self._window)
        return self._take(text, len(text))

    def _take(self, text: str, end: int) -> str:
        # It is shorter than what was given out only if bytes complete a character that the prompt began.
        start = min(self._sent, len(text))
        self._sent = max(start, end)
        return text[start:end]

    def _shorten(self, text: str) -> None:
        for window in self._tails(self._window):
            tail = self._decode(window)
            # Every byte-level token may cross a character boundary; then the tail starts with the rest of a character.
            whole = tail if text.endswith(tail) else tail.lstrip(REPLACEMENT)
            if whole and text.endswith(whole) and len(text) - self._sent <= len(whole):
                self._window = window
                self._sent -= len(text) - len(tail)
                return

    def _tails(self, window: list[int]) -> Iterator[list[int]]:
        """Ends of ``window`` to go on from; those that start inside a byte-fallback character come last."""
        for size in range(CONTEXT, CONTEXT + MAX_PARTIAL + 1):
            tail = window[-size:]
            if tail and self._bytes.get(tail[0], 0) >> 6 != 0b10:
                yield tail
        yield window[-CONTEXT:]  # bytes that are no character anyway

    def _decode(self, token_ids: list[int]) -> str:
        return decode(self._tokenizer, token_ids, skip_special_tokens=self._skips)


class PieceDetokenizer(WindowDetokenizer):
    """Where a token that is no byte stands for its piece, but for a space at the very beginning: SentencePiece's.
    A window is decoded only there, and for bytes and what follows them."""

    def _begin(self, prompt: list[int]) -> None:
        super()._begin(prompt)
        self._pieces = _pieces(self._tokenizer)
        self._plain = self._is_plain()  # what comes next is a piece, unless it is a byte
        self._stale = False  # all of the window's text was given out, and nobody knows how long it is

    def _step(self, token: int) -> str:
        piece = self._pieces[token]
        if self._plain and piece is not None:
            self._window = [*self._window[1 - CONTEXT :], token]
            self._stale = True
            return piece
        if self._stale:
            self._sent, self._stale = len(self._decode(self._window)), False
        text = super()._step(token)
        self._plain = self._pending == 0 and self._is_plain()
        return text

    def flush(self) -> str:
        return "" if self._stale else super().flush()

    def _is_plain(self) -> bool:
        pieces = [self._pieces[token] for token in self._window]
        return any(pieces) and pieces[-1] is not None


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The text of ``token_ids`` as it is: no spaces are tidied away, whatever the tokenizer's default."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # transformers would call it too, after looking at every token
        return str(backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


@lru_cache(maxsize=8)
def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that have no text of their own."""
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


def _byte_characters() -> dict[str, int]:
    """How GPT-2's byte-level tokens write bytes: a printable one as itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_characters()


@lru_cache(maxsize=8)
def _kind(tokenizer: PreTrainedTokenizerBase) -> type[ByteDetokenizer] | type[WindowDetokenizer]:
    """Goes by what the tokenizer's decoder does."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return WindowDetokenizer
    steps = json.loads(decoder.__getstate__())
    if steps["type"] == "ByteLevel":
        return ByteDetokenizer
    return PieceDetokenizer if steps.get("decoders") in (_PIECES, [*_PIECES, _STRIPPED]) else WindowDetokenizer


_SPACE = "\u2581"
_PIECES = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
]  # fmt: skip
_STRIPPED = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Pieces(dict[int, str | None]):
    """Of SentencePiece's vocabulary: a token's text, or None for a single byte."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = tokenizer.backend_tokenizer  # type: ignore[attr-defined]

    def __missing__(self, token: int) -> str | None:
        written = self._backend.id_to_token(token) or ""
        self[token] = found = None if BYTE_TOKEN.fullmatch(written) else str(written).replace(_SPACE, " ")
        return found


_pieces = lru_cache(maxsize=8)(_Pieces)


class _TokenText(dict[int, str | bytes]):
    """Of a byte-level vocabulary: a token's text, or its bytes where those are no whole characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = tokenizer.backend_tokenizer  # type: ignore[attr-defined]

    def __missing__(self, token: int) -> str | bytes:
        written = self._backend.id_to_token(token) or ""
        try:
            data = bytes(BYTE_OF[character] for character in written)
        except KeyError:  # an added token, which stands for itself
            data = written.encode()
        try:
            found: str | bytes = data.decode()
        except UnicodeDecodeError:
            found = data
        self[token] = found
        return found


_token_text = lru_cache(maxsize=8)(_TokenText)


@lru_cache(maxsize=8)
def _byte_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """Token -> byte where the vocabulary has tokens for single bytes (SentencePiece's byte fallback)."""
    vocab = tokenizer.get_vocab()
    return {vocab[name]: byte for byte in range(256) if (name := f"<0x{byte:02X}>") in vocab}


def _is_unfinished(data: bytes) -> bool:
    """Whether ``data`` is UTF-8 that ends inside a character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False
