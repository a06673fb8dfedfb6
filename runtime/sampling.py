"""``SamplingParams``: how the tokens of one request are chosen and when it stops. Every field is checked.

A field is declared here once, with its bounds. The fields of requests over HTTP and their OpenAPI schemas follow from
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from qserve.runtime.constraint import Constraint

MAX_CHOICES = 128
MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_TIMEOUT = 3600.0
INT31 = 2**31 - 1
POOLINGS = ("mean", "last", "classify")
GREEDY_BELOW = 1e-5
Defaults = Mapping[str, Any]
"""Values of fields, for requests that do not say."""
OF_DRAWS = ("temperature", "top_k", "top_p", "min_p")
"""Fields that a beam search, which draws nothing, has no use for; a model may have defaults for them."""


class RequestError(ValueError):
    """A request that is refused. ``param`` names the field at fault, None if it is no single field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Bounds:
    """The allowed values of a number: from ``low`` (excluded if ``above``) to ``high``."""

    low: float
    high: float
    above: bool = False

    def hold(self, value: float) -> bool:
        # Compared before any conversion: NaN fails both comparisons, and a huge int would overflow float().
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        low, high = (f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (self.low, self.high))
        return f"above {low} and at most {high}" if self.above else f"between {low} and {high}"

    def schema(self) -> dict[str, float]:
        """The bounds as JSON schema keywords."""
        return {"exclusiveMinimum" if self.above else "minimum": self.low, "maximum": self.high}


def _bounded(default: Any, low: float, high: float, *, above: bool = False, request: bool = True) -> Any:
    """A number with its bounds. ``request``: requests have a field of this name with the same meaning."""
    return field(default=default, metadata={"bounds": Bounds(low, high, above), "request": request})


_INTERNAL = {"request": False}
"""Marks a field that no request has, or that means something else there."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. Constructing it raises ``RequestError`` naming the first bad field.

    Attributes:
        n: choices to generate, 1..128.
        max_tokens: output tokens at most; None means until the context (or the KV pool) ends.
        min_tokens: output tokens before an end-of-sequence or stop token is allowed.
        temperature: 0..100; below 1e-5 the most likely token is taken.
        top_k: keep the k most likely tokens; 0 (or -1) is off.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
        min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1].
        top_n_sigma: keep tokens whose logit is at most this many standard deviations of all logits below the highest,
            in [0, 100]; 0 is off. It comes after biases and penalties and before everything else, so it keeps the same
            tokens at any temperature (Tang et al., 2024).
        repetition_penalty: divides positive and multiplies negative logits of seen tokens, in [0.01, 10].
        presence_penalty: subtracted from the logit of every token already generated, in [-2, 2].
        frequency_penalty: the same, once per occurrence, in [-2, 2].
        logit_bias: token id -> what is added to its logit before any penalty, each in [-100, 100], at most 1,024;
            ids may be written as strings, as JSON has them. Kept as sorted pairs.
        seed: int64; the same seed and prompt give the same tokens. None draws one.
        stop: strings that end the output, at most 4; given as a sequence or one string, kept as a tuple.
        stop_token_ids: tokens that end the output, at most 128; kept as a tuple.
        allowed_token_ids: the only tokens that may come, at most 4,096; an end-of-sequence token is among them or never
            comes. None allows all. Kept as a tuple.
        bad_words: words that may not come, at most 128 of at most 256 characters: the tokens with which the tokenizer
            spells them, at the beginning of a text or after a space, never come in this order. Kept as a tuple.
        ignore_eos: the model's end-of-sequence tokens do not end the output.
        include_stop_str_in_output: the text keeps the stop string or stop token that ended it.
        skip_special_tokens: the text leaves out special tokens.
        truncate_prompt_tokens: only so many tokens at the end of the prompt are kept; -1 keeps as many as the context
            has room for beside ``max_tokens``. None keeps all.
        logprobs: how many alternatives to report for each output token, 0..20; None reports nothing.
        prompt_logprobs: how many alternatives to report for each prompt token, 0..20; None reports nothing. Such a
            request computes each of its prompt positions and never reads the prefix cache.
        pooling: mean or last: deliver the model's last hidden states at the prompt's positions as one vector, and no
            output; classify: the logits that the model's classification head gives the last of them. Such a request,
            too, computes each of its prompt positions.
        timeout: seconds from its arrival after which the request is ended, waiting or running, above 0 and at most
            3600; None never.
        use_beam_search: return the ``n`` best outputs of a beam search of width ``n`` instead of samples.
        length_penalty: an output of a beam search scores the sum of its log-probabilities, divided by the number of
            its tokens to this power, in [-10, 10]; above 0 prefers longer ones.
        early_stopping: a beam search ends with the first ``n`` outputs that end; else it goes on while a better one
            may still come.
        constraint: what the output must look like; None leaves it free.
        visible_tokens: special tokens that appear in the text all the same, where a parser must see them. Not for
            clients, so not checked.
    """

    n: int = _bounded(1, 1, MAX_CHOICES)
    max_tokens: int | None = _bounded(16, 1, INT31)
    min_tokens: int = _bounded(0, 0, INT31)
    temperature: float = _bounded(1.0, 0, 100)
    top_k: int = _bounded(0, -1, INT31)
    top_p: float = _bounded(1.0, 0, 1, above=True)
    min_p: float = _bounded(0.0, 0, 1)
    top_n_sigma: float = _bounded(0.0, 0, 100)
    repetition_penalty: float = _bounded(1.0, 0.01, 10)
    presence_penalty: float = _bounded(0.0, -2, 2)
    frequency_penalty: float = _bounded(0.0, -2, 2)
    logit_bias: Mapping[str, float] | Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = _bounded(None, -(2**63), 2**63 - 1)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = _bounded(None, -1, INT31)
    logprobs: int | None = _bounded(None, 0, MAX_LOGPROBS, request=False)
    prompt_logprobs: int | None = _bounded(None, 0, MAX_LOGPROBS)
    pooling: str | None = field(default=None, metadata=_INTERNAL)
    timeout: float | None = _bounded(None, 0, MAX_TIMEOUT, above=True)
    use_beam_search: bool = False
    length_penalty: float = _bounded(1.0, -10, 10)
    early_stopping: bool = False
    constraint: Constraint | None = field(default=None, metadata=_INTERNAL)
    visible_tokens: tuple[int, ...] = field(default=(), metadata=_INTERNAL)

    def __post_init__(self) -> None:
        for each in NUMBERS.values():
            self._check_number(each)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})", "min_tokens"
            )
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        self._normalize_lists()
        self._normalize_bias()
        if self.truncate_prompt_tokens == 0:
            raise RequestError("truncate_prompt_tokens must be -1 or at least 1, not 0", "truncate_prompt_tokens")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {_shown(getattr(self, name))}", name)
        if self.pooling not in (None, *POOLINGS):
            raise RequestError(f"pooling must be one of {', '.join(POOLINGS)}, not {_shown(self.pooling)}", "pooling")
        if self.pooling is not None and self.max_tokens != 1:
            raise RequestError("pooling is for requests with max_tokens 1", "pooling")
        if self.use_beam_search:
            self._check_beam_search()
        else:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != getattr(SamplingParams, name):
                    raise RequestError(f"{name} is for requests with use_beam_search", name)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as it is kept."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature < GREEDY_BELOW

    def within(self, num_prompt: int, max_model_len: int) -> SamplingParams:
        """These parameters, with a default ``max_tokens`` lowered to the room that a context has beside a prompt."""
        if self.max_tokens is None:
            return self
        return replace(self, max_tokens=max(1, min(self.max_tokens, max_model_len - num_prompt)))

    def kept(self, prompt: list[int], max_model_len: int) -> list[int]:
        """What is kept of a prompt."""
        count = self.num_prompt_kept(max_model_len)
        return prompt if count is None else prompt[-count:]

    def num_prompt_kept(self, max_model_len: int) -> int | None:
        """How many tokens at the end of a prompt are kept in a context of ``max_model_len``; None for all."""
        asked = self.truncate_prompt_tokens
        if asked is not None and asked > max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens {asked} is more than the context of {max_model_len}", "truncate_prompt_tokens"
            )
        return max(1, max_model_len - (self.max_tokens or 1)) if asked == -1 else asked

    def _check_number(self, number: Number) -> None:
        name, value = number.name, getattr(self, number.name)
        if value is None and number.optional:
            return
        if isinstance(value, bool) or not isinstance(value, number.kind | int):
            what = "an integer" if number.kind is int else "a number"
            raise RequestError(f"{name} must be {what}, not {_shown(value)}", name)
        if not number.bounds.hold(value):
            raise RequestError(f"{name} must be {number.bounds}, not {_shown(value)}", name)
        object.__setattr__(self, name, number.kind(value))

    def _check_beam_search(self) -> None:
        """A beam search draws nothing, and its outputs are known only when they are complete."""
        if self.temperature not in (0.0, 1.0):
            raise RequestError("temperature does nothing in a beam search; leave it out", "temperature")
        for name in ("top_k", "top_p", "min_p", "top_n_sigma", "seed", "stop", "allowed_token_ids", "bad_words",
                     "prompt_logprobs", "pooling"):  # fmt: skip
            if getattr(self, name) != getattr(SamplingParams, name):
                raise RequestError(f"{name} cannot be used with use_beam_search", name)
        if self.constraint is not None:
            field = self.constraint.param
            raise RequestError(f"{field} cannot be used with use_beam_search", field)

    def _normalize_bias(self) -> None:
        given = self.logit_bias
        pairs = tuple(given.items()) if isinstance(given, Mapping) else given
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise RequestError(f"logit_bias must map token ids to numbers, not be {_shown(given)}", "logit_bias")
        if len(pairs) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias may hold at most {MAX_LOGIT_BIAS} tokens, not {len(pairs)}", "logit_bias")
        kept: dict[int, float] = {}
        for token, bias in pairs:
            number = int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 11 else token
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= INT31:
                raise RequestError(f"logit_bias holds {_shown(token)}, which is no token id", "logit_bias")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias of token {number} must be a number between -100 and 100, not {_shown(bias)}",
                    "logit_bias",
                )
            kept[number] = float(bias)
        object.__setattr__(self, "logit_bias", tuple(sorted(kept.items())))

    def _normalize_lists(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        kept = {
            "stop": _texts_of("stop", stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH),
            "stop_token_ids": _tokens_of("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            "bad_words": _texts_of("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH),
        }
        if any(not word.strip() for word in kept["bad_words"]):
            raise RequestError("bad_words holds only white space; logit_bias can forbid its tokens", "bad_words")
        if self.allowed_token_ids is not None:
            kept["allowed_token_ids"] = _tokens_of("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not kept["allowed_token_ids"]:
                raise RequestError("allowed_token_ids is empty, so that nothing may come", "allowed_token_ids")
        for name, values in kept.items():
            object.__setattr__(self, name, values)


@dataclass(frozen=True)
class Number:
    """A field of ``SamplingParams`` that is a number."""

    name: str
    kind: type[int] | type[float]
    optional: bool
    bounds: Bounds


REQUEST_FIELDS = tuple(each.name for each in fields(SamplingParams) if each.metadata.get("request", True))
"""The fields that requests have under the same name."""
NUMBERS = {
    each.name: Number(
        each.name,
        int if str(each.type).startswith("int") else float,
        "None" in str(each.type),
        each.metadata["bounds"],
    )
    for each in fields(SamplingParams)
    if "bounds" in each.metadata
}
SWITCHES = tuple(each.name for each in fields(SamplingParams) if each.type == "bool")


def _texts_of(name: str, value: object, limit: int, longest: int) -> tuple[Any, ...]:
    texts = _tuple_of(name, value, "strings", limit)
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"{name} must hold strings, not {_shown(text)}", name)
        if not 1 <= len(text) <= longest:
            raise RequestError(f"a string of {name} must have 1 to {longest} characters, not {len(text)}", name)
    return texts


def _tokens_of(name: str, value: object, limit: int) -> tuple[Any, ...]:
    tokens = _tuple_of(name, value, "token ids", limit)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= INT31:
            raise RequestError(f"{name} must hold integers of 0 to {INT31}, not {_shown(token)}", name)
    return tokens


def _tuple_of(name: str, value: object, what: str, limit: int) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of {what}, not {_shown(value)}", name)
    if len(value) > limit:
        raise RequestError(f"{name} may hold at most {limit} {what}, not {len(value)}", name)
    return tuple(value)


def _shown(value: object) -> str:
    """A refused value for an error line, kept short: a client may have sent a million digits."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    if value is None or isinstance(value, int | float | str):
        return f"{value!r:.80}"
    return f"a value of type {type(value).__name__}"
