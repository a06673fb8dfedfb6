"""``bad_word_tokens``: the token sequences that spell the words which may not come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def bad_word_tokens(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """For each word its tokens at the beginning of a text, and after a space where they differ.

    As in vLLM, but the latter also where they are more or fewer tokens.
    """
    if not words:
        return ()
    texts = [f"{space}{word.lstrip()}" for word in words for space in ("", " ")]
    spelled = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return tuple(dict.fromkeys(tuple(ids) for ids in spelled if ids))
