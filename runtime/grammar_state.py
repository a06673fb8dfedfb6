"""``GrammarState``: where one output stands in its grammar; ``MaskPool``: masks made during a forward pass."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from qserve.runtime.grammar import one_line

_SPECIAL = b"\xff"  # begins the name of a special token in llguidance's bytes


class GrammarState:
    """Follows one output. After an error, for example at a limit of the matcher, nothing is allowed any more.

    ``param``: the field of the request that the grammar came from.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, param: str) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self.param = param
        self._stuck = False

    def allowed(self, vocab_size: int, draft: Sequence[int] = ()) -> list[Tensor]:
        """bool [vocab_size], one more than ``draft`` has tokens: those that may come next, and after each token of the
        draft. An end-of-sequence token is among them where the text may end.

        All False after an error. Releases the interpreter lock for nearly all of its time.
        """
        first = self._mask(self._matcher, vocab_size)
        self._stuck = not first.any()
        if not draft:
            return [first]
        ahead, masks = self._matcher.deep_copy(), [first]
        for token in draft:
            ahead.consume_token(token)
            masks.append(self._mask(ahead, vocab_size))
        return masks

    def draft(self, guess: Sequence[int]) -> list[int]:
        """The tokens that must come next, where there are some, else as much of ``guess`` as may come. A model may
        still spell in other tokens what must come."""
        return self._matcher.compute_ff_tokens() or list(guess[: self._matcher.validate_tokens(list(guess))])

    def _mask(self, matcher: LLMatcher, vocab_size: int) -> Tensor:
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(packed, bitorder="little")[:vocab_size].view(np.bool_)
        if matcher.is_error():
            mask[:] = False
        if np.count_nonzero(mask) == 1:
            self._spell_out(matcher, mask)
        return torch.from_numpy(mask)

    def _spell_out(self, matcher: LLMatcher, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Correct the token of a text that must come now and looks like a special token.

        llguidance has the tokenizer cut such a text, and then allows the special token, which it would not accept.
        """
        only = int(mask.argmax())
        if self._tokenizer.is_special_token(only):
            text = matcher.compute_ff_bytes()
            if text and not text.startswith(_SPECIAL):
                mask[only] = False
                mask[self._tokenizer.greedy_tokenize(text.decode("utf-8", "replace"))[0]] = True

    def consume(self, token_id: int) -> None:
        """Take the chosen token, once."""
        self._matcher.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        """The text is in the language and cannot go on, or an end-of-sequence token has ended it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why the output cannot go on though it is not complete."""
        if self._matcher.is_error():
            return one_line(self._matcher.get_error())
        return "the model has no token for it" if self._stuck else None


class MaskPool:
    """Computes masks in a few threads while the model computes logits. The threads start with the first mask."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "qserve-masks")

    def start(self, states: Mapping[str, tuple[GrammarState, Sequence[int]]]) -> dict[str, Future[list[Tensor]]]:
        """The masks of each state, and of those after each token of its draft."""
        return {
            key: self._pool.submit(state.allowed, self._vocab_size, draft) for key, (state, draft) in states.items()
        }
