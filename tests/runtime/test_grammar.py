"""Constrained output: every text is of the language, and other requests do not notice."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLParserLimits

from qserve.checkpoint.demo import demo_path
from qserve.runtime.config import EngineConfig
from qserve.runtime.constraint import Constraint
from qserve.runtime.engine import Engine
from qserve.runtime.grammar import GrammarCompiler
from qserve.runtime.llm import LLM
from qserve.runtime.llm_outputs import Completion
from qserve.runtime.sampling import RequestError, SamplingParams


def schema_of(rng: random.Random, depth: int) -> Any:
    """Some schema, at most ``depth`` levels of arrays and objects."""
    return rng.choice(LEAVES if depth == 0 else LEAVES + NODES * 2)(rng, depth)


def an_integer(rng: random.Random, depth: int) -> Any:
    low = rng.randint(-500, 500)
    bounds = [{}, {"minimum": low}, {"maximum": low}, {"minimum": low, "maximum": low + rng.randint(0, 5000)}]
    return {"type": "integer", **rng.choice([*bounds, {"exclusiveMinimum": low, "exclusiveMaximum": low + 9}])}


def a_number(rng: random.Random, depth: int) -> Any:
    low = round(rng.uniform(-10, 10), 2)
    return {"type": "number", **rng.choice([{}, {"minimum": low, "maximum": low + 2.5}, {"exclusiveMinimum": low}])}


def a_string(rng: random.Random, depth: int) -> Any:
    patterns = ["^[A-Z]{2}-[0-9]{3}$", "^(a|bc)+d$", "[0-9]x", r"^\d{4}(-\d{2}){2}$", "^é+ü?$"]
    formats = ["date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname"]
    length = {"minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 12)}
    rules = [length, {"pattern": rng.choice(patterns)}, {"format": rng.choice(formats)}]
    return {"type": "string", **rng.choice(rules)}


def an_enum(rng: random.Random, depth: int) -> Any:
    values = ["red", 'a "quoted" name', "tab\there", 12, -1.5, None, True, [1, 2], {"a": 1}, "😀", ""]
    return {"enum": rng.sample(values, rng.randint(1, 6))}


def a_constant(rng: random.Random, depth: int) -> Any:
    return {"const": rng.choice(["exactly", 42, None, False, {"k": ["v", 1]}])}


def a_bare_type(rng: random.Random, depth: int) -> Any:
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["integer", "null"]},
            {"type": ["string", "null"], "maxLength": 5},
        ]
    )


def an_array(rng: random.Random, depth: int) -> Any:
    size = {"minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 4)}
    if rng.random() < 0.3:
        return {"type": "array", "prefixItems": [schema_of(rng, depth - 1) for _ in range(2)], "items": False}
    return {"type": "array", "items": schema_of(rng, depth - 1), **size}


def an_object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(["id", "name", "a b", "ü", 'x"y', "tags", "$ref", "type"], rng.randint(1, 4))
    return {
        "type": "object",
        "title": "Something",
        "properties": {name: schema_of(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": rng.choice([False, False, False, {"type": "integer"}]),
    }


def a_union(rng: random.Random, depth: int) -> Any:
    return {"anyOf": [schema_of(rng, depth - 1), schema_of(rng, depth - 1), {"type": "null"}]}


def a_reference(rng: random.Random, depth: int) -> Any:
    return {"$ref": "#/$defs/shared"}


LEAVES = [an_integer, a_number, a_string, an_enum, a_constant, a_bare_type]
NODES = [an_array, an_object, a_union, a_reference]
TREE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["v"],
    "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    {"type": "object"},
    {"type": "array"},
    {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
    {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"type": "integer", "multipleOf": 7, "minimum": 0},
]
for seed in range(100):
    rng = random.Random(seed)
    top = rng.choice([an_object, an_object, an_array, schema_of])(rng, 3)
    SCHEMAS.append(top | {"$defs": {"shared": schema_of(rng, 0), "tree": TREE}})


def held(kind: Any, text: str, **params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 160, "seed": 1} | params, constraint=Constraint(kind, text))


def generate(engine: Engine, params: list[SamplingParams], prompt: str = "hello") -> list[Completion]:
    """Batched, on an engine that is as good as new after it."""
    answers: dict[tuple[str, int], Completion] = {}
    for output in engine.generate([prompt] * len(params), params):
        answer = answers.setdefault((output.request_id, output.index), Completion(output.index))
        answer.text += output.text
        answer.token_ids += output.token_ids
        answer.logprobs = [*(answer.logprobs or []), *(output.logprobs or [])]
        answer.finish_reason, answer.error = output.finish_reason, output.error
    engine.check()
    assert engine.stats().kv_blocks_used == 0
    return [answers[key] for key in sorted(answers, key=lambda key: (int(key[0]), key[1]))]


def one(engine: Engine, params: SamplingParams) -> Completion:
    return generate(engine, [params])[0]


@pytest.fixture(
    scope="module",
    params=[
        "tiny",
        pytest.param("demo", marks=[pytest.mark.slow, pytest.mark.skipif(not demo_path().exists(), reason="no demo")]),
    ],
)
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Engine:
    model = str(tiny_model) if request.param == "tiny" else "demo"
    return Engine(model, EngineConfig(max_model_len=512, max_num_seqs=32, kv_cache_memory=64 << 20, threads=2))


def check_json(answer: Completion, schema: Any) -> None:
    assert answer.finish_reason in ("stop", "length"), answer.error
    if answer.finish_reason == "stop":
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        validator.validate(json.loads(answer.text))


def test_a_hundred_schemas(engine: Engine) -> None:
    for schema in SCHEMAS:
        Draft202012Validator.check_schema(schema)
    schemas = SCHEMAS if engine.vocab_size < 1000 else SCHEMAS[::5]  # a real model takes its time
    params = [held("json_schema", json.dumps(schema), seed=i) for i, schema in enumerate(schemas)]
    answers = generate(engine, params)
    for schema, answer in zip(schemas, answers, strict=True):
        check_json(answer, schema)
    assert sum(answer.finish_reason == "stop" for answer in answers) > len(schemas) // 2
    for index in range(0, len(schemas), 30):  # the same alone
        assert one(engine, params[index]).token_ids == answers[index].token_ids


EXPRESSIONS = [
    "(a+)+b",
    r"[A-Z][a-z]{2,5}( [A-Z][a-z]{2,5})?",
    r"\d{3}-\d{4}",
    "[а-я]{3}é?",
    'a/b"c\\\\|x{2}',
    "(yes|no)\n?",
    "",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_regular_expression(engine: Engine, expression: str) -> None:
    for seed in range(3):
        answer = one(engine, held("regex", expression, seed=seed))
        assert answer.finish_reason == "stop" or expression == "(a+)+b"
        if answer.finish_reason == "stop":
            assert re.fullmatch(expression, answer.text)


CHOICES = ["red", "re", "", 'a "b"', "a\\b", "two\nlines", "é😀", "<|im_end|>", ".*", "a{2}|b", "#/&~", "tab\t"]


def test_choices_are_taken_literally(engine: Engine) -> None:
    seen = {one(engine, held("choice", json.dumps(CHOICES), temperature=30.0, seed=seed)).text for seed in range(12)}
    assert seen <= set(CHOICES) and len(seen) > 1
    for choice in CHOICES:
        answer = one(engine, held("choice", json.dumps([choice])))
        assert (answer.text, answer.finish_reason) == (choice, "stop")


GRAMMARS = [
    ('start: greeting " " NAME\ngreeting: "hi" | "hello"\nNAME: /[a-z]{1,6}/', r"(hi|hello) [a-z]{1,6}"),
    ('start: "a" start "b" | "c"', r"a*cb*"),
    (
        'start: "call " call\ncall: %json {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], '
        '"additionalProperties": false}',
        r'call \{\s*"n"\s*:\s*[12]\s*\}',
    ),
    ('root ::= item ("," item)*\nitem ::= [0-9] | "x"', r"[0-9x](,[0-9x])*"),
]


@pytest.mark.parametrize(("grammar", "language"), GRAMMARS)
def test_a_grammar(engine: Engine, grammar: str, language: str) -> None:
    for seed in range(3):
        answer = one(engine, held("lark", grammar, seed=seed))
        assert answer.finish_reason == "length" or re.fullmatch(language, answer.text)


def test_special_tokens_of_a_grammar_are_tokens(engine: Engine) -> None:
    start, end = engine.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    answer = one(engine, held("lark", 'start: "a" <|im_start|> "b"'))
    assert answer.token_ids == [*engine.encode("a"), start, *engine.encode("b")]
    assert answer.finish_reason == "stop"
    assert one(engine, held("lark", 'start: "a" <|im_end|> "b"')).token_ids == [*engine.encode("a"), end]
    spelled = one(engine, held("json_schema", '{"const": "a<|im_end|>b"}'))
    assert json.loads(spelled.text) == "a<|im_end|>b" and end not in spelled.token_ids
    assert start not in one(engine, held("regex", "(?s:.{40})", temperature=50.0)).token_ids


def test_an_output_ends_when_its_grammar_does(engine: Engine) -> None:
    eos = engine.tokenizer.eos_token_id
    answer = one(engine, held("regex", "[ab]{8}", ignore_eos=True))
    assert re.fullmatch("[ab]{8}", answer.text) and answer.finish_reason == "stop" and eos not in answer.token_ids
    assert one(engine, held("regex", "[ab]{8}", min_tokens=100)).text == answer.text
    # What may end at any time is as long as it can be where the end is not wanted yet.
    assert len(one(engine, held("regex", "[ab]{0,8}", min_tokens=100)).text) == 8
    assert len(one(engine, held("regex", "[ab]{0,8}", ignore_eos=True)).text) == 8
    endless = one(engine, held("regex", "[ab]*", ignore_eos=True, max_tokens=20))
    assert endless.finish_reason == "length" and len(endless.token_ids) == 20
    exact = one(engine, held("regex", "[ab]{8}", max_tokens=len(answer.token_ids)))
    assert exact.finish_reason == "stop" and exact.text == answer.text
    assert one(engine, held("regex", "[ab]{8}", max_tokens=1, temperature=0.0)).finish_reason == "length"


def test_constraints_go_with_every_other_parameter(engine: Engine) -> None:
    text = '{"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 6}'
    schema = json.loads(text)
    variants: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 5.0, "presence_penalty": 2.0},
        {"frequency_penalty": -2.0, "top_k": 3},
        {"top_p": 0.01},
        {"min_p": 0.9},
        {"top_k": 1, "min_tokens": 5},
        {"temperature": 100.0, "stop_token_ids": [5, 6]},
    ]
    for answer in generate(engine, [held("json_schema", text, **variant) for variant in variants]):
        check_json(answer, schema)
    answers = generate(engine, [held("json_schema", text, n=4, logprobs=2)])
    assert len({answer.text for answer in answers}) > 1
    for answer in answers:
        check_json(answer, schema)
        assert [entry.chosen.token_id for entry in answer.logprobs] == answer.token_ids
    stopped = one(engine, held("regex", "[ab]{6}X[ab]{6}", stop=["X"]))
    assert re.fullmatch("[ab]{6}", stopped.text) and stopped.finish_reason == "stop"


def test_neighbours_are_left_alone(engine: Engine) -> None:
    free = [SamplingParams(max_tokens=30, seed=i, ignore_eos=True, temperature=float(i % 2)) for i in range(6)]
    before = [answer.token_ids for answer in generate(engine, free)]
    mixed = [
        params for i, each in enumerate(free) for params in (each, held("json_schema", "{}", seed=i, max_tokens=40))
    ]
    assert [answer.token_ids for answer in generate(engine, mixed)[::2]] == before


def test_preemption_forgets_nothing(tiny_model: Path) -> None:
    params = [held("regex", f"[ab]{{30}}{i}[cd]{{30}}", seed=i, max_tokens=70) for i in range(6)]
    roomy = Engine(str(tiny_model), EngineConfig(kv_cache_memory=8 << 20, threads=2))
    tight = Engine(str(tiny_model), EngineConfig(kv_cache_memory=12 * 16 * 256, max_model_len=128, threads=2))
    expected = [answer.text for answer in generate(roomy, params)]
    assert [answer.text for answer in generate(tight, params)] == expected
    assert tight.stats().num_preemptions
    assert all(re.fullmatch(f"[ab]{{30}}{i}[cd]{{30}}", text) for i, text in enumerate(expected))


def test_more_logits_than_tokens(tiny_model: Path) -> None:
    engine = Engine(str(tiny_model), EngineConfig(kv_cache_memory=4 << 20, threads=2))
    vocabulary = engine.grammars.vocabulary
    wide = type(vocabulary)(vocabulary.tokenizer, vocabulary.size + 77, vocabulary.eos_token_ids)
    matcher = GrammarCompiler(lambda: wide).matcher(Constraint("regex", "(?s:.*)"))
    packed = matcher.compute_bitmask()
    allowed = [token for token in range(len(packed) * 8) if packed[token // 8] >> token % 8 & 1]
    assert len(allowed) > 200 and max(allowed) < len(engine.tokenizer)


REFUSED: list[tuple[Any, str]] = [
    ("regex", "(a"),
    ("regex", "a" * 5000),
    ("regex", r"(a)\1"),
    ("regex", "a&~a" * 2000),
    ("choice", "[]"),
    ("choice", "[1]"),
    ("choice", '"a"'),
    ("choice", json.dumps([str(i) for i in range(1001)])),
    ("lark", 'start: "a" y'),
    ("lark", "start: <no_such_token>"),
    ("lark", ""),
    ("lark", "start: A\nA: /a+/ & /b+/"),
    ("lark", 'start: %json {"type": "what"}'),
    ("lark", "root ::= unknown"),
    ("lark", "root ::= " + "(" * 5000 + '"a"'),
    ("lark", "start: " + "(" * 5000 + '"a"'),
    ("json_schema", "{"),
    ("json_schema", "[1]"),
    ("json_schema", "false"),
    ("json_schema", '{"type": "what"}'),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'),
    ("json_schema", '{"$ref": "#/nowhere"}'),
    ("json_schema", '{"$ref": "http://example.com/schema"}'),
    ("json_schema", '{"not": {"type": "string"}}'),
    ("json_schema", '{"type": "object", "minProperties": 2}'),
    ("json_schema", '{"const": "\\u0000a"}'),
    ("json_schema", '{"const": "\\\\\\u001f"}'),
    ("json_schema", '{"enum": ["a", "\\u007f"]}'),
    ("json_schema", '{"type": "string", "pattern": "' + "a" * 5000 + '"}'),
    ("json_schema", '{"type": "string", "pattern": "(?=a)b"}'),
    ("json_schema", '{"description": "' + "a" * 70_000 + '"}'),
    ("json_schema", json.dumps({"enum": list(range(1001))})),
    ("json_schema", '{"items": ' * 70 + "{}" + "}" * 70),
]


@pytest.mark.parametrize(("kind", "text"), REFUSED)
def test_what_does_not_compile_is_refused(engine: Engine, kind: Any, text: str) -> None:
    with pytest.raises(RequestError) as refused:
        engine.submit("x", "hi", SamplingParams(constraint=Constraint(kind, text, "guided_json")))
    assert refused.value.param == "guided_json"
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert not engine.has_work()


def test_a_key_has_one_spelling(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for text, taken in (
        ('{"a":1}', True),
        ('{"b":"x\\n"}', True),
        ('{"\\u0061":"x"}', False),
        ('{"a":1,"a":"x"}', False),
    ):
        matcher = engine.grammars.matcher(Constraint("json_schema", json.dumps(schema)))
        tokens = engine.encode(text)
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) == taken, text
    special = one(engine, held("json_schema", json.dumps({"const": "\\u0001\n\t\b\f\u2028/\u00e9"})))
    assert json.loads(special.text) == "\\u0001\n\t\b\f\u2028/\u00e9"


def test_options_of_the_library_are_not_open_to_a_schema(engine: Engine) -> None:
    schema = {"x-guidance": {"whitespace_pattern": "z", "item_separator": ";"}, "enum": [[1, 2]]}
    assert json.loads(one(engine, held("json_schema", json.dumps(schema))).text) == [1, 2]


def test_an_output_that_cannot_go_on_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    hard = held("regex", "x(.*a.{3000}.*){300}", max_tokens=400, temperature=5.0)
    with monkeypatch.context() as patch:
        patch.setattr("qserve.runtime.grammar._LIMITS", LLParserLimits(max_lexer_states=60, verbose_errors=False))
        failed, neighbour = generate(engine, [hard, held("regex", "[ab]{8}")])
    assert failed.finish_reason == "error" and "too many states" in (failed.error or "")
    assert neighbour.finish_reason == "stop"


def test_offline(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), EngineConfig(kv_cache_memory=4 << 20, threads=2))
    constraint = Constraint("choice", '["left", "right"]')
    results = llm.generate(["a", "b"], SamplingParams(seed=3, n=2, constraint=constraint))
    assert {answer.text for result in results for answer in result.outputs} <= {"left", "right"}


def test_what_one_request_uses_up_is_its_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qserve.runtime.grammar._LIMITS", LLParserLimits(max_lexer_states=60, verbose_errors=False))
    hungry = held("regex", "x(.*a.{3000}.*){301}", temperature=5.0, max_tokens=400)
    assert one(engine, hungry).finish_reason == "error"
    assert one(engine, replace(hungry, max_tokens=1)).finish_reason == "length"


def test_the_worker_is_light() -> None:
    heavy = {"torch", "numpy", "transformers"}
    code = f"import sys, qserve.runtime.grammar_worker; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
