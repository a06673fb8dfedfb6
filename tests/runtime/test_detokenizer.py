"""Incremental text against ``tokenizer.decode`` of everything, for both kinds of tokenizers with bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from qserve.checkpoint.demo import demo_path
from qserve.checkpoint.gguf import GGUFFile
from qserve.runtime.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    PieceDetokenizer,
    WindowDetokenizer,
    decode,
    new_detokenizer,
)
from qserve.runtime.stop_checker import StopChecker

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and then it does it again.",
    "Grüße aus Köln! Straße, Äpfel, naïve façade, smørrebrød.",
    "こんにちは世界。你好,世界! 👩‍👩‍👧 😀😃 👍🏽 🇩🇪",
    "def main(args):\n\treturn {k: v for k, v in args}\n",
]
KINDS = ["byte_level", "byte_fallback"] + (["demo"] if demo_path().exists() else [])
# What is taken for a tokenizer, and what would serve it, too.
EVERY = [(kind, new_detokenizer) for kind in KINDS]
EVERY += [(kind, WindowDetokenizer) for kind in KINDS]
every = pytest.mark.parametrize(("kind", "made"), EVERY)


@lru_cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    if kind == "demo":
        return GGUFFile(demo_path()).tokenizer()
    if kind == "byte_level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
        backend.train_from_iterator(SENTENCES, trainer)
    else:
        vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
        for byte in range(256):
            vocab[f"<0x{byte:02X}>"] = len(vocab)
        for piece in ("▁", *"abcdefghijklmnopqrstuvwxyz.,!ü", "th", "the", "▁th", "▁the", "he"):
            vocab.setdefault(piece, len(vocab))
        merges = [("t", "h"), ("th", "e"), ("▁", "th"), ("▁th", "e"), ("h", "e")]
        backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


Made = Callable[..., Detokenizer]


def pieces(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Feed ``ids`` in chunks of ``sizes`` (then one by one), then flush."""
    deltas, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        if at < len(ids):
            deltas.append(detokenizer.append(ids[at : at + size]))
            at += size
    return [*deltas, detokenizer.flush()]


TEXT = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="the 😀👩‍👧é€ü\ufffd\n", max_size=60),
    st.lists(st.sampled_from(SENTENCES), max_size=3).map("".join),
)


@every
@settings(max_examples=150, deadline=None)
@given(text=TEXT, sizes=st.lists(st.integers(1, 4), max_size=10))
@example(text="😀" * 40, sizes=[])
@example(text="é😀" * 40, sizes=[3, 2])
@example(text="\ufffd" * 30 + "x", sizes=[])
def test_pieces_join_to_the_decoded_text(kind: str, made: Made, text: str, sizes: list[int]) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = pieces(made(tokenizer, []), ids, sizes)
    whole = decode(tokenizer, ids)
    assert "".join(deltas) == whole


@every
@settings(max_examples=100, deadline=None)
@given(prompt=TEXT, text=TEXT)
@example(prompt="the", text="the")
@example(prompt="x" + "😀" * 9, text="😀é")
def test_output_continues_the_prompt(kind: str, made: Made, prompt: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    before = tokenizer.encode(prompt, add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = pieces(made(tokenizer, before), ids, [])
    assert decode(tokenizer, before) + "".join(deltas) == decode(tokenizer, before + ids)


@pytest.mark.parametrize(("kind", "made"), [each for each in EVERY if each[0] != "byte_fallback"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_bytes_at_all(kind: str, made: Made, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, min(len(tokenizer), 420) - 1), max_size=80))
    assert "".join(pieces(made(tokenizer, []), ids, [])) == decode(tokenizer, ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 290), max_size=80), prompt=st.lists(st.integers(0, 290), max_size=12))
def test_byte_fallback_gives_wild_tokens_the_text_that_a_window_does(ids: list[int], prompt: list[int]) -> None:
    tokenizer = tokenizer_of("byte_fallback")
    texts = ["".join(pieces(made(tokenizer, prompt), ids, [])) for made in (PieceDetokenizer, WindowDetokenizer)]
    assert texts[0] == texts[1] and len(texts[0]) <= 6 * len(ids) + 8


def test_a_character_waits_for_its_last_byte() -> None:
    tokenizer = tokenizer_of("byte_fallback")
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    detokenizer = new_detokenizer(tokenizer)
    assert [detokenizer.append([i]) for i in ids[-5:]] == ["a", "", "", "", "😀"]


@every
def test_unfinished_character_comes_out_at_the_end_only(kind: str, made: Made) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("hello 🦑", add_special_tokens=False)[:-1]
    detokenizer = made(tokenizer, [])
    assert "\ufffd" not in "".join(detokenizer.append([i]) for i in ids)
    assert detokenizer.flush().startswith("\ufffd")
    assert detokenizer.flush() == ""


@every
def test_special_tokens_are_left_out_or_shown(kind: str, made: Made) -> None:
    tokenizer = tokenizer_of(kind)
    eos = tokenizer.eos_token_id
    ids = [eos, *tokenizer.encode("the end", add_special_tokens=False), eos, len(tokenizer) + 7]
    assert "".join(pieces(made(tokenizer, []), ids, [])) == "the end"
    shown = "".join(pieces(made(tokenizer, [], skip_special_tokens=False), ids, []))
    assert shown.count(tokenizer.eos_token) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_tokenizer_has_its_detokenizer(kind: str) -> None:
    expected = PieceDetokenizer if kind == "byte_fallback" else ByteDetokenizer
    assert type(new_detokenizer(tokenizer_of(kind))) is expected


def test_decoders_that_nobody_knows_have_a_window() -> None:
    for decoder in (None, decoders.Metaspace(), decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()])):
        backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        if decoder is not None:
            backend.decoder = decoder
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        detokenizer = new_detokenizer(tokenizer)
        assert type(detokenizer) is WindowDetokenizer
        assert "".join(pieces(detokenizer, [0, 1, 1], [])) == decode(tokenizer, [0, 1, 1])


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_window_stays_short(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    byte = tokenizer.convert_tokens_to_ids("<0x82>" if kind == "byte_fallback" else "Ĥ")
    for ids in ([byte] * 500, tokenizer.encode("😀 " * 200), tokenizer.encode("😀" * 200), [2] * 500):
        for made in (WindowDetokenizer, PieceDetokenizer) if kind == "byte_fallback" else (WindowDetokenizer,):
            detokenizer = made(tokenizer)
            detokenizer.append(ids)
            assert len(detokenizer._window) < 40


CUTS = st.lists(st.integers(0, 30), max_size=8)
STOP_TEXT = st.text(alphabet="ab😀‍", max_size=30)
STOPS = st.lists(st.text(alphabet="ab😀‍", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(text=STOP_TEXT, stops=STOPS, cuts=CUTS, include=st.booleans())
def test_stop_is_found_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    checker = StopChecker(stops, include)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    got = "".join(checker.append(text[a:b]) for a, b in pairwise(edges)) + checker.flush()
    # The naive reference: add one character at a time until the text so far ends with a stop.
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            assert checker.matched == longest
            assert got == (text[:end] if include else text[: end - len(longest)])
            return
    assert checker.matched is None
    assert got == text


def test_nothing_that_may_become_a_stop_is_passed_on() -> None:
    checker = StopChecker(["</end>", "STOP"])
    assert checker.append("hello </e") == "hello "
    assert checker.append("nd") == ""
    assert checker.append("ing ST") == "</ending "
    assert checker.append("OP, more") == ""
    assert checker.matched == "STOP"
    assert checker.append("more") == checker.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_stop_split_across_tokens_and_inside_an_emoji_sequence(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("the fox 👩\u200d👧 runs", add_special_tokens=False)
    detokenizer, checker = new_detokenizer(tokenizer), StopChecker(["\u200d👧"])
    text = "".join(checker.append(detokenizer.append([i])) for i in ids)
    assert (text, checker.matched) == ("the fox 👩", "\u200d👧")
