"""The tokenizer of Moonshot's models (Kimi K2, Moonlight): a vocabulary of tiktoken, and code of their own that says
how text is cut. It is rebuilt from the files; that code is not run.

``tiktoken.model`` has a token in each line: its bytes in base64, and its rank, which is its id. Byte pairs are merged
in the order of the ranks of what they make. The 256 ids behind are special tokens: ``added_tokens_decoder`` of
``tokenizer_config.json`` names some, the others are ``<|reserved_token_ID|>``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARY = "tiktoken.model"
_CLASS = "TikTokenTokenizer"
_SPECIAL = 256
_LONGEST = 128
"""Bytes of a token. Longer ones would take time that grows with the square."""
_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CUTS = (
    rf"[\p{{Han}}]+|{_LETTERS}{_UPPER}*{_LOWER}+{_ENDINGS}|{_LETTERS}{_UPPER}+{_LOWER}*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is cut before byte pairs are merged: Chinese characters stand alone."""


def is_kimi(directory: Path) -> bool:
    """Whether the tokenizer in ``directory`` is such a one, and not in a form that transformers reads."""
    if not (directory / VOCABULARY).exists() or (directory / "tokenizer.json").exists():
        return False
    config = directory / "tokenizer_config.json"
    return config.exists() and read_json_object(config).get("tokenizer_class") == _CLASS


def kimi_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Raises ``CheckpointError`` where the files are not what their names say."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ranks = _ranks(directory / VOCABULARY)
    config = read_json_object(directory / "tokenizer_config.json")
    vocabulary = {_characters(token): rank for token, rank in ranks.items()}
    merges = [(_characters(left), _characters(right)) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(CUTS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    for number, (text, special) in enumerate(_marks(config, len(ranks)), len(ranks)):
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(text, normalized=False, special=special)])
        if tokenizer.token_to_id(text) != number:
            raise CheckpointError(f"{directory}: the special token {text!r:.60} is there twice")
    named = {key: config[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token") if key in config}
    named = {key: token["content"] if isinstance(token, dict) else token for key, token in named.items() if token}
    template = directory / "chat_template.jinja"
    chat = template.read_text(encoding="utf-8") if template.exists() else config.get("chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=chat, clean_up_tokenization_spaces=False, **named
    )


def _ranks(path: Path) -> dict[bytes, int]:
    """The rank of each token, in their order."""
    found: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            found[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(f"{path}: line {number} is no token in base64 with its rank") from None
    single = {bytes([byte]) for byte in range(256)}
    if not single <= found.keys() or list(found.values()) != list(range(len(found))):
        raise CheckpointError(f"{path}: ranks must count up from 0, and every byte must have one")
    return found


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token, by the rank of what it makes."""
    return [
        (token[:cut], token[cut:])
        for token in ranks
        if len(token) <= _LONGEST
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]


def _marks(config: Mapping[str, Any], first: int) -> list[tuple[str, bool]]:
    """The text of each token from ``first`` on, and whether it is special."""
    given = config.get("added_tokens_decoder") or {}
    found = []
    for number in range(first, first + _SPECIAL):
        entry = given.get(str(number)) if isinstance(given, Mapping) else None
        text = entry.get("content") if isinstance(entry, Mapping) else None
        if isinstance(entry, Mapping) and isinstance(text, str) and text:
            found.append((text, entry.get("special") is True))
        else:
            found.append((f"<|reserved_token_{number}|>", True))
    return found


def _characters(token: bytes) -> str:
    """The bytes as the characters that stand for them in byte-level BPE."""
    return "".join(_ALPHABET[byte] for byte in token)


def _alphabet() -> list[str]:
    """The character of each byte: itself where it is printable, else the next one from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


_ALPHABET = _alphabet()
