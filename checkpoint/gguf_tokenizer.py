"""``tokenizer_of``: the tokenizer that the metadata of a GGUF file describe, built of the ``tokenizers`` library.

Two kinds are known: byte-level BPE (``gpt2``), whose merges are listed, and SentencePiece's BPE (``llama``), whose
merges follow from the scores of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qserve.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
_SPACE = "\u2581"
_MAX_TOKENS = 1 << 22

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _ENDINGS + _WORDS % "{1,3}", _ENDINGS + _WORDS % ""
_GPT4O, _TEKKEN = _CASES % (f"{_ENDINGS}?", f"{_ENDINGS}?", "{1,3}"), _CASES % ("", "", "")
_SEED = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_DIGIT = r"\p{N}"
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
_DEEPSEEK_CODER = (
    r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", _DIGIT
)  # fmt: skip
CUTS: dict[tuple[str, ...], tuple[str, ...]] = {
    (_GPT2,): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"),
    (_DIGIT, _GPT2): ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"),
    (_LLAMA3,): (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "lfm2",
    ),
    (_QWEN2,): ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "kormo"),
    (_QWEN35,): ("qwen35",),
    _DEEPSEEK_V3: ("deepseek-v3", "hunyuan-dense"),
    _DEEPSEEK_CODER: ("deepseek-coder",),
    (_TEKKEN,): ("tekken",),
    (_GPT4O,): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    (_SEED,): ("seed-coder",),
}  # fmt: skip
"""How text is cut before byte-level BPE: expressions one after another, by the names in ``tokenizer.ggml.pre``. An
unknown name is refused: a model fed with wrong tokens talks nonsense without any error."""
_PRE = {name: cuts for cuts, names in CUTS.items() for name in names}


@dataclass(frozen=True)
class _Vocabulary:
    """The arrays of a tokenizer, by token."""

    tokens: Sequence[str]
    types: Sequence[int]
    metadata: Mapping[str, Any]

    def key(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.key(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"tokenizer.ggml.{name} must be true or false, not {value!r}")
        return value

    def special(self, name: str) -> str | None:
        """The token whose number a key gives."""
        number = self.key(f"{name}_token_id")
        if number is None:
            return None
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.tokens):
            raise CheckpointError(f"tokenizer.ggml.{name}_token_id is {number!r}, of {len(self.tokens):,} tokens")
        return self.tokens[number]


def tokenizer_of(metadata: Mapping[str, Any], vocab_size: int) -> PreTrainedTokenizerBase:
    """Raises ``CheckpointError`` for a kind of tokenizer that is not known, and for arrays that do not fit together or
    have more tokens than the model (``vocab_size``)."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = _vocabulary(metadata, vocab_size)
    model, pre = vocabulary.key("model"), vocabulary.key("pre", "default")
    if model == "llama":
        tokenizer = _sentencepiece(vocabulary)
    elif model == "gpt2" and pre in _PRE:
        tokenizer = _byte_level(vocabulary, _PRE[pre])
    else:
        raise CheckpointError(f"the tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; open the model's "
                              "Hugging Face directory instead")
    _add_tokens(tokenizer, vocabulary, model == "gpt2")
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    before = [bos] if bos is not None and vocabulary.flag("add_bos_token", _adds_bos(model, pre)) else []
    after = [eos] if eos is not None and vocabulary.flag("add_eos_token", False) else []
    _frame(tokenizer, before, after)
    named = {f"{name}_token": vocabulary.special(key)
             for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False,
        chat_template=template if isinstance(template, str) else None,
        **{name: token for name, token in named.items() if token is not None},
    )


def _vocabulary(metadata: Mapping[str, Any], vocab_size: int) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError("it holds no tokenizer; open the model's Hugging Face directory instead")
    if len(tokens) > vocab_size:
        raise CheckpointError(
            f"the tokenizer has {len(tokens):,} tokens, the model {vocab_size:,}; it belongs to another model"
        )
    types = _numbers(metadata, "token_type", len(tokens)) or [1] * len(tokens)
    return _Vocabulary(_distinct(tokens), [int(kind) for kind in types], metadata)


def _numbers(metadata: Mapping[str, Any], name: str, count: int) -> list[Any] | None:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        return None
    if not hasattr(values, "tolist") or len(values) != count:
        raise CheckpointError(f"tokenizer.ggml.{name} must be {count:,} numbers, one for each token")
    return list(values.tolist())


def _distinct(tokens: list[str]) -> list[str]:
    """No two tokens may be spelled alike. Bytes that are no text read alike."""
    seen: set[str] = set()
    spelled = []
    for number, token in enumerate(tokens):
        spelled.append(f"{token}[{number}]" if token in seen else token)
        seen.add(spelled[-1])
    return spelled


def _adds_bos(model: str, pre: str) -> bool:
    return model == "llama" or pre in ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece's BPE: of all pairs of neighbours that are a token together, the one with the best score is joined
    first. Bytes stand for what no token spells."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, kinds = vocabulary.tokens, vocabulary.types
    scores = _numbers(vocabulary.metadata, "scores", len(tokens))
    if scores is None:
        raise CheckpointError("the tokenizer has no scores (tokenizer.ggml.scores)")
    prefix = vocabulary.flag("add_space_prefix", True)
    unknown = next((token for token, kind in zip(tokens, kinds) if kind == UNKNOWN), vocabulary.special("unknown"))
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)}, _merges(tokens, kinds, scores), unk_token=unknown,
            fuse_unk=True, byte_fallback=BYTE in kinds,
        )
    )
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a normal token of two, best scores first."""
    numbers = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind not in (CONTROL, BYTE)}
    made: list[tuple[float, int, int, str, str]] = []
    for token, whole in numbers.items():
        if kinds[whole] == USER_DEFINED:
            continue
        for cut in range(1, min(len(token), _LONGEST)):
            left, right = token[:cut], token[cut:]
            if left in numbers and right in numbers:
                made.append((-scores[whole], numbers[left], numbers[right], left, right))
    made.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in made]


_LONGEST = 256
"""Characters of a token that can be made of others; longer ones would take time that grows with the square."""


def _byte_level(vocabulary: _Vocabulary, cuts: Sequence[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    numbers = {token: i for i, token in enumerate(vocabulary.tokens)}
    listed = vocabulary.key("merges")
    if not isinstance(listed, list):
        raise CheckpointError("the tokenizer has no merges (tokenizer.ggml.merges)")
    merges: list[tuple[str, str]] = []
    for merge in listed:
        left, space, right = merge.partition(" ")
        if not space or left not in numbers or right not in numbers or left + right not in numbers:
            raise CheckpointError(f"the merge {merge[:60]!r} is not of tokens, into a token")
        merges.append((left, right))
    whole = vocabulary.key("pre") in ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken", "glm4")
    tokenizer = Tokenizer(models.BPE(numbers, merges, ignore_merges=whole))
    split = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, byte_level: bool) -> None:
    """Tokens that are matched as they are: those of the model's own marks are special."""
    from tokenizers import AddedToken

    added = zip(vocabulary.tokens, vocabulary.types)
    marks = [(token, kind == CONTROL) for token, kind in added if kind in (CONTROL, USER_DEFINED) and token]
    for special in (True, False):
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(token, normalized=False, special=special) for token, is_mark in marks if is_mark == special])


def _frame(tokenizer: Tokenizer, before: list[str], after: list[str]) -> None:
    """What stands before and after the text of a request."""
    from tokenizers import processors

    if not before and not after:
        return
    template = [*before, "$A", *after]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=[*template, *before, "$B:1", *after],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys([*before, *after])],
    )
