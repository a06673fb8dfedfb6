"""Moonshot's tokenizer, rebuilt, against byte pair encoding done slowly by tiktoken's definition."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.kimi_tokenizer import CUTS
from qserve.checkpoint.tokenizer import load_tokenizer

TEXT = "The cats' hats aren't 12345 hats.\n\n  你好世界abc ÄÖ été naïve  \t x=1;\r\n\U0001f600 don'T HELLOworld "
TOOL = "<|tool_calls_section_begin|>"


def learned() -> list[bytes]:
    """A vocabulary: all bytes, then what the most frequent pairs of the text make."""
    pieces = [[bytes([byte]) for byte in found.encode()] for found in regex.findall(CUTS, TEXT, flags=regex.V1)]
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < 330:
        pairs: dict[bytes, int] = {}
        for piece in pieces:
            for left, right in pairwise(piece):
                pairs[left + right] = pairs.get(left + right, 0) + 1
        new = max((pair for pair in pairs if pair not in tokens), key=lambda pair: pairs[pair], default=None)
        if new is None:
            break
        tokens.append(new)
        pieces = [merged(piece, tokens) for piece in pieces]
    return tokens


def merged(piece: list[bytes], tokens: list[bytes]) -> list[bytes]:
    """``piece`` with the pair of the least rank joined, again and again."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    while True:
        made = [(ranks[left + right], at) for at, (left, right) in enumerate(pairwise(piece))
                if left + right in ranks]  # fmt: skip
        if not made:
            return piece
        at = min(made)[1]
        piece = [*piece[:at], piece[at] + piece[at + 1], *piece[at + 2 :]]


def encoded(text: str, tokens: list[bytes]) -> list[int]:
    cut = regex.findall(CUTS, text, flags=regex.V1)
    assert "".join(cut) == text
    return [tokens.index(each) for piece in cut for each in merged([bytes([b]) for b in piece.encode()], tokens)]


def write(path: Path, tokens: list[bytes], **more: Any) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (path / "tiktoken.model").write_text("".join(lines))
    first = len(tokens)
    marks = {
        first: ("[BOS]", True), first + 1: ("[EOS]", True), first + 2: ("<|im_end|>", True), first + 11: (TOOL, False),
    }  # fmt: skip
    config = {
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]", "chat_template": "{{ 1 }}",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(i): {"content": text, "special": special} for i, (text, special) in marks.items()},
    } | more  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    tokens = learned()
    tokenizer = load_tokenizer(write(tmp_path, tokens), vocab_size=len(tokens) + 256)
    other = "世界 hats, HATS; 999999 aren'tcats\n \n你x好 "
    for text in (TEXT, other):
        assert tokenizer(text)["input_ids"] == encoded(text, tokens)
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert max(tokenizer(TEXT)["input_ids"]) > 300
    first = len(tokens)
    assert tokenizer(f"a<|im_end|>{TOOL}")["input_ids"] == [97, first + 2, first + 11]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (first, first + 1, first + 256)
    assert tokenizer.convert_ids_to_tokens(first + 255) == f"<|reserved_token_{first + 255}|>"
    assert tokenizer.chat_template == "{{ 1 }}"
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    assert "<|im_end|>" in special and TOOL not in special


def test_a_checkpoint_gets_it_in_a_form_that_others_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    from safetensors.torch import save_file

    save_file({}, tmp_path / "model.safetensors")
    (tmp_path / "out").mkdir()
    source = HFDirectory(write(tmp_path, learned()))
    source.save_tokenizer(tmp_path / "out")
    again = load_tokenizer(tmp_path / "out")
    assert again(TEXT)["input_ids"] == source.tokenizer()(TEXT)["input_ids"]
    assert not (tmp_path / "out" / "tiktoken.model").exists()


@pytest.mark.parametrize("line", ["!! 3", "YQ==", "YQ== x", "YQ== 9999"])
def test_a_broken_vocabulary_is_one_line(line: str, tmp_path: Path) -> None:
    write(tmp_path, learned())
    with (tmp_path / "tiktoken.model").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model: (line \d+ is no token|ranks must count up)"):
        load_tokenizer(tmp_path)


def test_special_tokens_that_are_alike_are_refused(tmp_path: Path) -> None:
    tokens = learned()
    marks = {str(len(tokens) + i): {"content": "[X]", "special": True} for i in range(2)}
    write(tmp_path, tokens, added_tokens_decoder=marks)
    with pytest.raises(CheckpointError, match="is there twice"):
        load_tokenizer(tmp_path)
