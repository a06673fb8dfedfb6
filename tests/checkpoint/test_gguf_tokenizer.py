"""Tokenizers out of GGUF metadata, against SentencePiece and against transformers, made of the same vocabulary."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.gguf_tokenizer import tokenizer_of

WORDS = (
    "The quick brown fox jumps over the lazy dog. It doesn't care, nor do we! Numbers: 1, 22, 333 and 2024.\n"
    "def f(x):\n    return x ** 2  # a comment\n\n\tTabs and  double   spaces, naïve café façade, 漢字 and кириллица.\n"
)
TEXTS = [
    "", " ", "  ", "     ", "a", " a", "a ", "the quick brown fox", "  leading and  trailing  ", "\n", "\n\n\n",
    "\t\ttabs", "line\nbreak\r\nand\n\n\nmore", "12345 3.14159 1e-9 007", "naïve café 漢字 кириллица", "🙂🙃 🇩🇪",
    "\U0001f469\u200d\U0001f467", "e\u0301 \u200b\u00a0 \ufeff", "def f(x):\n    return x ** 2", "<b>bold</b>",
    "<unk> <s>", "\x00\x01\x7f", "ＦＵＬＬ ｗｉｄｔｈ", "don't I'll WE'VE", "x\u2581y", "\ud7ff\uffff", "a" * 40,
    "supercalifragilisticexpialidocious", "http://a.b/c?d=e&f=g#h",
]  # fmt: skip


SPACES = ["\u2581\u2581", "\u2581\u2581\u2581"]


def trained(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS.splitlines() * 3), model_writer=model, model_type="bpe", vocab_size=420,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=0.98, minloglevel=2, **options,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata_of(processor: sentencepiece.SentencePieceProcessor, **changes: Any) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes of a tokenizer: user-defined tokens with real spaces."""
    tokens, types = [], []
    for i in range(processor.vocab_size()):
        piece = processor.id_to_piece(i)
        kind = 2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        if kind == 1 and processor.get_score(i) == 0 and len(piece) > 1 and i < 20:
            kind, piece = 4, piece.replace("\u2581", " ")
        tokens.append(piece)
        types.append(kind)
    scores = np.array([processor.get_score(i) for i in range(len(tokens))], np.float32)
    said = {
        "model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": np.array(types),
        "bos_token_id": processor.bos_id(), "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(), **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in said.items() if value is not None}


@pytest.mark.parametrize("prefix", [True, False])
def test_the_tokens_are_those_of_sentencepiece(prefix: bool) -> None:
    processor = trained(add_dummy_prefix=prefix, user_defined_symbols=["<mark>", *([] if prefix else SPACES)])
    tokenizer = tokenizer_of(metadata_of(processor, add_space_prefix=prefix), 420)
    for text in [*TEXTS, *WORDS.splitlines(), WORDS, "a<mark>b <mark>"]:
        if "<s>" in text or "<unk>" in text:
            continue  # SentencePiece takes control tokens in a text for letters, a tokenizer of a model for themselves
        if prefix and "<mark>" in text:
            continue  # llama.cpp writes a space after each such token, SentencePiece none
        want = processor.encode(text)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == want, text
        assert tokenizer(text)["input_ids"] == [processor.bos_id(), *want]
        assert tokenizer.decode(want) == processor.decode(want).replace(" \u2047 ", "<unk>"), text


def test_special_tokens_and_flags() -> None:
    processor = trained(user_defined_symbols=["<tool>"])
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    said = metadata_of(processor, add_bos_token=False, add_eos_token=True)
    tokenizer = tokenizer_of({**said, "tokenizer.chat_template": template}, 420)
    ids = tokenizer("x</s>y <tool>")["input_ids"]
    assert ids.count(processor.eos_id()) == 2 and ids[-1] == processor.eos_id() and processor.bos_id() not in ids
    assert processor.piece_to_id("<tool>") in ids
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[user] hi"
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith("<tool>")


def byte_level() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|start|>"])
    tokenizer.train_from_iterator(WORDS.splitlines() * 3, trainer)
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    said = {
        "model": "gpt2", "tokens": tokens, "token_type": np.array([3, 3] + [1] * (len(tokens) - 2)),
        "merges": [" ".join(merge) for merge in state["merges"]], "bos_token_id": 1, "eos_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()}


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "smaug-bpe"])
def test_byte_level_tokens_are_those_of_transformers(pre: str) -> None:
    said = {**byte_level(), "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    ours = tokenizer_of(said, 400)
    keys = {
        "tokenizer_type": "gpt2", "pre_tokenizer_type": pre, "tokens": said["tokenizer.ggml.tokens"],
        "token_type": said["tokenizer.ggml.token_type"].tolist(), "merges": said["tokenizer.ggml.merges"],
    }  # fmt: skip
    judge = PreTrainedTokenizerFast(tokenizer_object=convert_gguf_tokenizer("llama", keys)[0])
    judge.backend_tokenizer.decoder = decoders.ByteLevel()
    for text in [*TEXTS, WORDS, "<|start|>a<|end|>"]:
        want = judge(text, add_special_tokens=False)["input_ids"]
        assert ours(text)["input_ids"] == want, text
        assert ours.decode(want) == text


PUBLISHED = {
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+"),
}  # fmt: skip
"""The expressions in the tokenizer.json of these models; DeepSeek-Coder's is followed by ``Digits``."""


@pytest.mark.parametrize("pre", ["qwen35", "deepseek-v3", "hunyuan-dense", "deepseek-coder"])
def test_text_is_cut_as_the_published_tokenizer_does(pre: str) -> None:
    ours = tokenizer_of({**byte_level(), "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}, 400)
    cuts = PUBLISHED["deepseek-v3" if pre == "hunyuan-dense" else pre]
    steps = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    steps += [pre_tokenizers.Digits(individual_digits=True)] if pre == "deepseek-coder" else []
    published = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    found = ours.backend_tokenizer.pre_tokenizer
    scripts = "It's 12345 ne\u0301e हिन्दी #if x==3:\r\n\t漢字かなカナ 한국어12 $ ^a  \n\n _b (c) "
    for text in [*TEXTS, WORDS, scripts]:
        assert found.pre_tokenize_str(text) == published.pre_tokenize_str(text), text
    assert [piece for piece, _ in found.pre_tokenize_str("12345")] == (
        ["123", "45"] if pre in ("deepseek-v3", "hunyuan-dense") else list("12345")
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "t5"}, "tokenizer 't5'"),
        ({"model": "gpt2", "pre": "unheard-of"}, "pre-tokenizer 'unheard-of'"),
        ({"model": None}, "tokenizer None"),
        ({"tokens": None}, "holds no tokenizer"),
        ({"tokens": np.zeros(3)}, "holds no tokenizer"),
        ({"scores": None}, "no scores"),
        ({"scores": np.zeros(3)}, "scores must be 420 numbers"),
        ({"token_type": ["a"] * 420}, "token_type must be 420 numbers"),
        ({"bos_token_id": 420}, "bos_token_id is 420, of 420 tokens"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"bos_token_id": "one"}, "bos_token_id is 'one'"),
        ({"add_bos_token": 3}, "add_bos_token must be true or false"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        tokenizer_of(metadata_of(trained(), **changes), 420)
    assert "\n" not in str(caught.value)


def test_more_tokens_than_the_model_has() -> None:
    with pytest.raises(CheckpointError, match="420 tokens, the model 400"):
        tokenizer_of(metadata_of(trained()), 400)


def test_merges_that_are_none_and_merges_in_a_circle() -> None:
    said = {**byte_level(), "tokenizer.ggml.pre": "gpt-2"}
    for wrong in ("ab", "th", "the unheardof", "unheardof the", ""):
        with pytest.raises(CheckpointError, match="is not of tokens, into a token"):
            tokenizer_of({**said, "tokenizer.ggml.merges": [*said["tokenizer.ggml.merges"], wrong]}, 400)
    with pytest.raises(CheckpointError, match="no merges"):
        tokenizer_of({**said, "tokenizer.ggml.merges": 3}, 400)
    # A merge makes a longer token, so none can come back to its own parts. A list that repeats itself ends, too.
    again = [*said["tokenizer.ggml.merges"], *said["tokenizer.ggml.merges"][::-1]]
    tokenizer = tokenizer_of({**said, "tokenizer.ggml.merges": again}, 400)
    assert tokenizer.decode(tokenizer("the lazy dog")["input_ids"]) == "the lazy dog"


def test_long_tokens_take_no_longer() -> None:
    """A token of a million letters that could be cut in a million ways."""
    said = metadata_of(trained())
    said["tokenizer.ggml.tokens"][-1] = "a" * 1_000_000
    began = time.perf_counter()
    tokenizer_of(said, 420)
    assert time.perf_counter() - began < 2


def test_tokens_spelled_alike_keep_their_numbers() -> None:
    said = metadata_of(trained())
    said["tokenizer.ggml.tokens"][400:] = ["\ufffd"] * 20
    tokenizer = tokenizer_of(said, 420)
    assert len(tokenizer) == 420 and tokenizer.convert_ids_to_tokens([400, 401]) == ["\ufffd", "\ufffd[401]"]
