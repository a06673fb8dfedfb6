"""``vocabulary_of``: a tokenizer as the metadata of a GGUF file.

It is the inverse of ``gguf_tokenizer``. What that reads of the result must cut difficult texts as the tokenizer does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.gguf_tokenizer import (
    BYTE,
    CONTROL,
    CUTS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    tokenizer_of,
)
from qserve.checkpoint.tokenizer import leading_tokens, plain_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXTS = (
    "The quick brown fox doesn't care: it's 1, 22, 333 or 4444 o'clock.", "  leading,  double   and trailing  ",
    "def f(x):\n    return x ** 2  # comment\n\n\n\ttab\r\nend\n", "naïve café, Größe, ÉCOLE",
    "漢字かなカナ 한국어 кириллица עברית العربية ไทย हिन्दी", "🙂🙃 🇩🇪 \U0001f469\u200d\U0001f467",
    "http://a.b/c?d=e&f=g#h 3.14e-10 %&$§ ...",
    "CamelCase snake_case kebab-case WE'VE I'LL 'tis 12345678901234567890",
    "\u00a0\u200b\ufeff\x00\x7f x", "a" * 40, " ", "\n\n", "",
)  # fmt: skip
"""Texts on which ways to cut differ."""


def vocabulary_of(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, ids: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """The keys below ``tokenizer``. ``vocab_size``: rows of the embedding; ``ids``: the model's configuration, which
    gives the numbers of marks that the tokenizer leaves out. Raises ``UsageError`` for a tokenizer that GGUF files do
    not describe."""
    state = _state(tokenizer, name)
    tokens, kinds = _tokens(tokenizer, state, vocab_size)
    said: dict[str, Any] = {"tokens": tokens, "token_type": np.array(kinds, np.int32)}
    marks = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "unknown": tokenizer.unk_token_id,
             "padding": tokenizer.pad_token_id}  # fmt: skip
    ends = ids.get("eos_token_id")
    if isinstance(ends, list) and ends:
        marks["eos"] = ends[0] if marks["eos"] not in ends else marks["eos"]
        others = [end for end in ends if end != marks["eos"]]
        marks["eot"] = others[-1] if others else None
    said |= {f"{mark}_token_id": int(number) for mark, number in marks.items()
             if number is not None and number < vocab_size}  # fmt: skip
    said["add_bos_token"] = bool(leading_tokens(tokenizer))
    said["add_eos_token"] = list(tokenizer("a")["input_ids"])[-1:] == [marks["eos"]]
    merges = [pair.split(" ", 1) if isinstance(pair, str) else list(pair) for pair in state["model"]["merges"]]
    keys = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    if tokenizer.chat_template and isinstance(tokenizer.chat_template, str):
        keys["tokenizer.chat_template"] = tokenizer.chat_template
    if _has(state, "ByteLevel"):
        keys |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
        candidates: list[dict[str, Any]] = [{"tokenizer.ggml.pre": names[0]} for names in CUTS.values()]
    else:
        keys |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
                 "tokenizer.ggml.scores": _scores(tokens, merges)}  # fmt: skip
        candidates = [{"tokenizer.ggml.add_space_prefix": prefix} for prefix in (False, True)]
    for candidate in candidates:
        if _same(tokenizer, {**keys, **candidate}, vocab_size):
            return {**keys, **candidate}
    raise UsageError(f"{name}: GGUF files do not describe how its tokenizer cuts text")


def _state(tokenizer: PreTrainedTokenizerBase, name: str) -> dict[str, Any]:
    """The tokenizer as the ``tokenizers`` library stores it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    if state["model"].get("type", "BPE") != "BPE" or not state["model"].get("merges"):
        raise UsageError(f"{name}: its tokenizer is not made of merges (BPE), which GGUF files are written for")
    return dict(state)


def _has(state: Any, kind: str) -> bool:
    """Whether a part of the pipeline around the model is of ``kind``."""
    parts = [state.get(part) for part in ("pre_tokenizer", "decoder")]
    return f'"{kind}"' in json.dumps(parts)


def _tokens(
    tokenizer: PreTrainedTokenizerBase, state: dict[str, Any], vocab_size: int
) -> tuple[list[str], list[int]]:
    """Text and type of each token, with fillers for rows of the embedding that no token has."""
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    unknown = state["model"].get("unk_token")
    fallback = bool(state["model"].get("byte_fallback"))
    for text, number in state["model"]["vocab"].items():
        if number < vocab_size:
            is_byte = fallback and len(text) == 6 and text.startswith("<0x")
            tokens[number], kinds[number] = text, BYTE if is_byte else UNKNOWN if text == unknown else NORMAL
    for number, added in tokenizer.added_tokens_decoder.items():
        if number < vocab_size and kinds[number] != UNKNOWN:  # some have no row in the embedding, and are of no use
            tokens[number], kinds[number] = added.content, CONTROL if added.special else USER_DEFINED
    return tokens, kinds


def _scores(tokens: list[str], merges: list[list[str]]) -> np.ndarray[Any, Any]:
    """float32 [tokens]: the sooner a token is made, the better. Those that no merge makes are worst."""
    rank: dict[str, int] = {}
    for number, pair in enumerate(merges):
        rank.setdefault("".join(pair), number)
    worst = len(merges)
    return np.array([-float(rank.get(token, worst)) for token in tokens], np.float32)


def _same(tokenizer: PreTrainedTokenizerBase, keys: dict[str, Any], vocab_size: int) -> bool:
    """Whether what is read of ``keys`` cuts texts alike, with this vocabulary and before it."""
    try:
        read = tokenizer_of(keys, vocab_size)
    except CheckpointError:
        return False
    cuts, wanted = (each.backend_tokenizer.pre_tokenizer for each in (read, tokenizer))
    if cuts is not None and wanted is not None and any(
        cuts.pre_tokenize_str(text) != wanted.pre_tokenize_str(text) for text in _TEXTS
    ):
        return False
    known = set(keys["tokenizer.ggml.tokens"])
    marked = [f"{token}user{token}" for token in (tokenizer.bos_token, tokenizer.eos_token) if token in known]
    alike = all(plain_tokens(read, text) == plain_tokens(tokenizer, text) for text in (*_TEXTS, *marked))
    return alike and list(read("a b")["input_ids"]) == list(tokenizer("a b")["input_ids"])


