"""``Vocabulary`` and ``GrammarCompiler``: from a ``Constraint`` to a matcher of llguidance, within limits.

Light to import: the worker that tries constraints out (``grammar_worker``) loads this file and little else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from qserve.runtime.constraint import Constraint
from qserve.runtime.sampling import RequestError

MAX_SCHEMA = 64 << 10  # characters
MAX_GRAMMAR = 128 << 10
MAX_PATTERN = 4096  # the work for one mask grows with the length of a regular expression
MAX_CHOICES = 1000
MAX_DEPTH = 64
_MAX_ERROR = 300

# A lexer state takes 1 to 2 kB, so one request grows by 40 MB at most.
_LIMITS = LLParserLimits(max_lexer_states=20_000, step_max_items=20_000, verbose_errors=False)
# A model that may write white space for ever sometimes does; this is enough for indented JSON ten levels deep.
# Without escapes of code points a key has one spelling, so no other spelling of a property escapes its schema.
_JSON_OPTIONS: Any = {
    "whitespace_pattern": r"[ \t\n\r]{1,40}",
    "whitespace_flexible": True,
    "lenient": False,
    "json_allowed_escapes": '"\\bfnrt',
}
# As json.dumps writes them; those with an escape of their own are fine.
_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:0[0-7bef]|1[0-9a-f]|7f)")
_GBNF = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)


@dataclass(frozen=True)
class Vocabulary:
    """The facts about a model for llguidance: the tokenizer as JSON, the width of the logits, how a text ends."""

    tokenizer: str
    size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> Vocabulary:
        """The vocabulary of a fast transformers tokenizer and a model with logits for ``vocab_size`` tokens."""
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        size = max(vocab_size, len(tokenizer))
        return cls(backend.to_str(), size, tuple(sorted(token for token in eos_token_ids if token < size)))

    def for_matchers(self) -> LLTokenizer:
        """Takes between a tenth of a second and a second. Logits beyond the tokenizer's tokens are never allowed."""
        return LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=list(self.eos_token_ids) or None)


class GrammarCompiler:
    """Compiles constraints for one vocabulary. Several threads may use it."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = vocabulary

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Made with the first constraint: a server without any never pays for it."""
        return self._make_vocabulary()

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        return self.vocabulary.for_matchers()

    def matcher(self, constraint: Constraint, grammar: str | None = None) -> LLMatcher:
        """A matcher at the beginning of the output, for one request.

        Copies of a matcher share what the lexer learns and the limits on it, so each request gets its own matcher,
        though that takes a millisecond or more. Raises ``RequestError`` with the constraint's ``param`` where it does
        not compile. Compiling may take long: constraints from strangers should go to the worker first.

        ``grammar``: the constraint's ``grammar_text``, where it is known.
        """
        grammar = grammar or grammar_text(constraint)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=_LIMITS)
        trial = matcher.deep_copy()
        trial.compute_bitmask()  # only this finds out that no text can begin
        if trial.is_error():
            raise _refused(constraint, one_line(trial.get_error()))
        return matcher


def grammar_text(constraint: Constraint) -> str:
    """The constraint in llguidance's own format. Raises ``RequestError`` with its ``param`` beyond the limits."""
    kind, text = constraint.kind, constraint.text
    if kind == "regex":
        _check_size(constraint, MAX_PATTERN)
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        _check_size(constraint, MAX_SCHEMA)
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, _choices(constraint))))
    if kind == "lark":
        _check_size(constraint, MAX_GRAMMAR)
        return LLMatcher.grammar_from_lark(_lark(constraint))
    _check_size(constraint, MAX_SCHEMA)
    schema = _json(constraint)
    _check_schema(constraint, schema)
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}  # options go with objects only
    schema.pop("x-guidance", None)  # options of llguidance that could turn the promise off
    text = json.dumps(schema)
    if _CONTROL.search(text):
        raise _refused(constraint, "the schema holds a control character, which the output could not")
    return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)


def one_line(error: str) -> str:
    """llguidance's message as part of an error object: without its state, its backtrace, its line breaks."""
    for end in ("<state>", "<non-verbose/>", "<backtrace>", "following special tokens are available"):
        error = error.partition(end)[0]
    return " ".join(error.split())[:_MAX_ERROR].rstrip(" ;") or "it cannot be compiled"


def _lark(constraint: Constraint) -> str:
    """Grammars come in the Lark dialect of llguidance or in llama.cpp's GBNF, whose first rule is ``root``."""
    if not _GBNF.search(constraint.text):
        return constraint.text
    try:
        return gbnf_to_lark(constraint.text)
    except RecursionError:
        raise _refused(constraint, "the grammar is nested too deeply") from None
    except Exception as error:  # it raises plain Exception
        raise _refused(constraint, one_line(str(error))) from None


def _choices(constraint: Constraint) -> list[str]:
    choices = _json(constraint)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise _refused(constraint, "choices must be a list of strings, at least one")
    if len(choices) > MAX_CHOICES:
        raise _refused(constraint, f"it has {len(choices)} choices, at most {MAX_CHOICES} are allowed")
    return choices


def _json(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise _refused(constraint, f"it is not valid JSON ({error})") from None


def _check_size(constraint: Constraint, limit: int) -> None:
    if len(constraint.text) > limit:
        raise _refused(constraint, f"it has {len(constraint.text):,} characters, at most {limit:,} are allowed")


def _check_schema(constraint: Constraint, schema: Any) -> None:
    if not isinstance(schema, dict | bool):
        raise _refused(constraint, "a schema must be an object")
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        for node in level:
            if isinstance(node, dict):
                _check_keywords(constraint, node)
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise _refused(constraint, f"the schema is nested more than {MAX_DEPTH} levels deep")


def _check_keywords(constraint: Constraint, node: dict[str, Any]) -> None:
    values, properties = node.get("enum"), node.get("patternProperties")
    least, required = node.get("minProperties"), node.get("required")
    if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
        # Nothing keeps a text from writing a key twice, which counts once.
        raise _refused(constraint, "minProperties can be at most 1, or the number of required properties")
    if isinstance(values, list) and len(values) > MAX_CHOICES:
        raise _refused(constraint, f"an enum has {len(values):,} values, at most {MAX_CHOICES:,} are allowed")
    for pattern in (node.get("pattern"), *(properties if isinstance(properties, dict) else ())):
        if isinstance(pattern, str) and len(pattern) > MAX_PATTERN:
            raise _refused(
                constraint, f"a pattern has {len(pattern):,} characters, at most {MAX_PATTERN:,} are allowed"
            )


def _refused(constraint: Constraint, why: str) -> RequestError:
    return RequestError(f"the constraint is refused: {why}", constraint.param)
