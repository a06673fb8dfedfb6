"""Structured output over HTTP: every spelling of it, every bad one, and a worker that may die at any moment."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pytest
from jsonschema import validate
from llguidance import LLParserLimits
from pydantic import BaseModel

from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.listening import claim_socket
from qserve.runtime.server.limits.constraints import Worker
from qserve.runtime.server.limits.shared_pool import SharedPool
from qserve.runtime.server.serve import ServerHandle, serve

from ..waiting import wait_until

USER = {"role": "user", "content": "Where is the parcel?"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "weight": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "weight"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "parcel", "schema": SCHEMA, "strict": True}}
SLOW_SCHEMA = {"type": "integer", "multipleOf": 999_983}  # seconds to compile
ENDLESS_SCHEMA = {"allOf": [{"type": "string", "pattern": f"^(.*x{i}){{5}}.*$"} for i in range(200)]}  # minutes, 20 GB


@pytest.fixture
def own(engine: Engine) -> Iterator[ServerHandle]:
    """A server without keys, with a worker for one test alone."""
    with ServerHandle(engine, config=ServerConfig()) as handle:
        yield handle
    engine.check()
    assert engine.stats().kv_blocks_used == engine.stats().num_running == 0


def post(server: ServerHandle, path: str = "completions", **body: Any) -> httpx.Response:
    body = {"max_tokens": 200, "seed": 1} | body
    body |= {"prompt": "hi"} if path == "completions" else {"messages": [USER]}
    headers = {"Authorization": "Bearer first-key"}
    return httpx.post(f"{server.url}/{path}", json=body, headers=headers, timeout=60)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def refused(response: httpx.Response, param: str | None, why: str = "") -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and why in error["message"], error
    assert "\n" not in error["message"] and len(error["message"]) < 600


def worker(server: ServerHandle) -> Worker:
    return server.service.constraints._worker


GOOD: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": FORMAT}, SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}}, SCHEMA),
    ({"guided_json": SCHEMA}, SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
    ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    ({"structured_outputs": {"regex": "[ab]{3}", "json": None}}, "[ab]{3}"),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"structured_outputs": {"choice": ["a|b"]}}, r"a\|b"),
    ({"guided_grammar": 'start: "x" /[0-9]{2}/'}, "x[0-9]{2}"),
    ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] [0-9]'}}, "x[0-9]{2}"),
]


@pytest.mark.parametrize(("fields", "language"), GOOD, ids=lambda value: f"{value!s:.50}")
def test_every_spelling(server: ServerHandle, fields: dict[str, Any], language: Any) -> None:
    text = text_of(post(server, "chat/completions" if "response_format" in fields else "completions", **fields))
    if isinstance(language, str):
        assert re.fullmatch(language, text)
    else:
        validate(json.loads(text), language)


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object(server: ServerHandle, fields: dict[str, Any]) -> None:
    choice = post(server, **fields).json()["choices"][0]
    assert choice["text"].startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["text"]), dict)


def test_no_constraint_asked_for(server: ServerHandle) -> None:
    plain = post(server, ignore_eos=True, max_tokens=9).json()["choices"]
    for fields in ({"response_format": {"type": "text"}}, {"guided_json": None}, {"structured_outputs": {}}):
        assert post(server, ignore_eos=True, max_tokens=9, **fields).json()["choices"] == plain


RF, JS = "response_format", "response_format.json_schema"
BAD: list[tuple[dict[str, Any], str]] = [
    ({RF: "json"}, RF),
    ({RF: {}}, RF),
    ({RF: {"type": "xml"}}, RF),
    ({RF: {"type": "json_object", "schema": SCHEMA}}, f"{RF}.schema"),
    ({RF: {"type": "json_schema"}}, JS),
    ({RF: {"type": "json_schema", "json_schema": {"name": "x"}}}, f"{JS}.schema"),
    ({RF: {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}}, f"{JS}.schema"),
    ({RF: {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, f"{JS}.name"),
    ({RF: {"type": "json_schema", "json_schema": {"name": "a b", "schema": SCHEMA}}}, f"{JS}.name"),
    ({RF: {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": 1}}}, f"{JS}.strict"),
    ({RF: {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "what"}}}}, f"{JS}.schema"),
    ({RF: FORMAT, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"structured_outputs": ["a"]}, "structured_outputs"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": SLOW_SCHEMA}, "guided_json"),
    ({"guided_json": ENDLESS_SCHEMA}, "guided_json"),
    ({"guided_json": {"enum": list(range(5000))}}, "guided_json"),
    ({"guided_json": {"description": "a" * 70_000}}, "guided_json"),
    ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}}, "guided_json"),
    ({"guided_json": {"$ref": "http://127.0.0.1/schema"}}, "guided_json"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_regex": "a" * 5000}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_choice": [str(i) for i in range(1001)]}, "guided_choice"),
    ({"guided_grammar": 'start: "a" missing'}, "guided_grammar"),
    ({"guided_grammar": "start: " + "(" * 50_000}, "guided_grammar"),
    ({"guided_grammar": "root ::= " + "(" * 50_000}, "guided_grammar"),
    ({"guided_grammar": ["start"]}, "guided_grammar"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: f"{value!s:.60}")
def test_bad_constraints(server: ServerHandle, fields: dict[str, Any], param: str) -> None:
    refused(post(server, "chat/completions", stream=True, **fields), param)


def test_streams_and_steps_go_on_while_one_compiles(server: ServerHandle, engine: Engine, slow: None) -> None:
    body = {"prompt": "the", "max_tokens": 300, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer first-key"}
    with httpx.stream("POST", f"{server.url}/completions", json=body, headers=headers, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        first = engine.scheduler._step
        refused(post(server, guided_json=SLOW_SCHEMA | {"title": "not remembered"}), "guided_json", "0.75 s")
        assert engine.scheduler._step > first + 3
        assert next(line for line in lines if line).startswith("data: {")


class Parcel(BaseModel):
    city: Literal["Oslo", "Rome"]
    weight: int
    fragile: bool | None


def test_the_parse_method_of_the_sdk(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=[USER], response_format=Parcel, seed=1, max_completion_tokens=200, temperature=0.7
    )
    assert isinstance(answer.choices[0].message.parsed, Parcel)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=model, messages=[USER], response_format=Parcel, max_tokens=2)


def test_streaming_gives_the_same(client: openai.OpenAI, model: str) -> None:
    common: dict[str, Any] = {"model": model, "messages": [USER], "response_format": FORMAT, "seed": 5, "n": 2}
    whole = client.chat.completions.create(**common)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**common, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    for text in texts:
        validate(json.loads(text), SCHEMA)


def test_what_fails_on_the_way_is_the_fault_of_the_request(own: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LLParserLimits(max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr("qserve.runtime.grammar._LIMITS", limits)
    hard = {"guided_regex": "x(.*a.{3000}.*){299}", "temperature": 5.0, "max_tokens": 400}
    refused(post(own, **hard), "guided_regex", "too many states")
    events = post(own, stream=True, **hard).text.strip().split("\n\n")
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["param"] == "guided_regex" and error["type"] == "invalid_request_error"


def test_a_worker_that_is_killed_is_replaced(own: ServerHandle) -> None:
    assert worker(own).pid is None, "nobody needed it yet"
    text_of(post(own, guided_regex="first"))
    first = worker(own).pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    text_of(post(own, guided_regex="second"))
    assert worker(own).pid not in (None, first)
    assert text_of(post(own, guided_regex="first")) == "first"


def test_a_worker_that_is_killed_at_work(own: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qserve.runtime.server.limits.constraints.COMPILE_SECONDS", 5.0)
    answers: list[httpx.Response] = []
    text_of(post(own, guided_regex="up and running"))
    asking = threading.Thread(target=lambda: answers.append(post(own, guided_json=ENDLESS_SCHEMA)))
    asking.start()
    seen: set[int] = set()
    while asking.is_alive():
        pid = worker(own).pid
        if pid is not None and pid not in seen and worker(own)._ready:
            seen.add(pid)
            os.kill(pid, signal.SIGKILL)
        asking.join(0.05)
    refused(answers[0], "guided_json")
    assert text_of(post(own, guided_regex="and again")) == "and again"


def test_the_worker_ends_with_the_server(engine: Engine) -> None:
    with ServerHandle(engine) as handle:
        text_of(post(handle, guided_regex="bye"))
        pid = worker(handle).pid
        assert pid is not None
        waiting = threading.Thread(target=lambda: post(handle, guided_json=ENDLESS_SCHEMA))
        waiting.start()
        wait_until(lambda: handle.service.constraints._trials)
    waiting.join()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_trials_of_one_key_leave_room_for_others(server: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = server.service.constraints
    monkeypatch.setattr(constraints, "_waiting", SharedPool(3))
    untried = ENDLESS_SCHEMA | {"title": "another"}
    waiting = threading.Thread(target=lambda: post(server, guided_json=untried))
    waiting.start()
    wait_until(lambda: constraints._trials)
    assert post(server, guided_regex="one too many").status_code == 503
    body = {"prompt": "hi", "max_tokens": 9, "guided_regex": "another"}
    other = httpx.post(
        f"{server.url}/completions", json=body, headers={"Authorization": "Bearer second-key"}, timeout=60
    )
    assert other.status_code == 200, other.text
    waiting.join()
    assert constraints._waiting.free == 3


def test_too_many_at_once(own: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own.service.constraints, "_waiting", SharedPool(1))
    response = post(own, guided_regex="one too many")
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["code"] == "queue_full"


def test_many_with_one_new_schema(own: ServerHandle, engine: Engine) -> None:
    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"prompt": "hi", "max_tokens": 8, "guided_choice": ["all", "at", "once"], "temperature": 0.0}
            return await asyncio.gather(*(client.post(f"{own.url}/completions", json=body) for _ in range(40)))

    assert len({text_of(response) for response in asyncio.run(ask_all())}) == 1


def test_a_worker_that_does_not_start_fails_the_request_alone(
    own: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("qserve.runtime.server.limits.constraints.START_SECONDS", 0.0)
        assert post(own, guided_regex="never tried").status_code == 500
    assert text_of(post(own, guided_regex="never tried")) == "never tried"


def test_a_worker_that_does_not_start_with_the_server_starts_later(
    own: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("qserve.runtime.server.limits.constraints.START_SECONDS", 0.0)
        own.service.constraints.start()
    assert not worker(own).ready
    assert text_of(post(own, guided_regex="later")) == "later"


def test_the_first_constraint_waits_for_no_worker(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sock = claim_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"

    def ask() -> httpx.Response:
        try:
            wait_until(lambda: httpx.get(f"{url}/ready", timeout=20).status_code == 200)
            monkeypatch.setattr("qserve.runtime.server.limits.constraints.START_SECONDS", 0.0)  # what starts now fails
            return httpx.post(f"{url}/v1/completions", json={"prompt": "hi", "guided_json": SLOW_SCHEMA}, timeout=60)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        serve(engine, sock=sock)
        refused(asked.result(), "guided_json", "0.75 s")


def beside_ten_slow_ones(server: ServerHandle) -> tuple[httpx.Response, list[httpx.Response]]:
    """The answers to a good constraint that comes after ten slow ones, and to those."""
    text_of(post(server, guided_regex="up and running"))
    constraints, url = server.service.constraints, f"{server.url}/completions"

    async def ask_all() -> list[httpx.Response]:
        slow = [{"prompt": "hi", "guided_json": SLOW_SCHEMA | {"title": f"{i}"}} for i in range(10)]
        async with httpx.AsyncClient(timeout=60) as client:
            asking = [asyncio.ensure_future(client.post(url, json=body)) for body in slow]
            while not constraints._turns.waited_for():
                await asyncio.sleep(0.001)
            good = await client.post(url, json={"prompt": "hi", "guided_regex": "beside"})
            return [good, *await asyncio.gather(*asking)]

    good, *bad = asyncio.run(ask_all())
    return good, bad


def test_ten_slow_ones_at_once_are_answered_soon(own: ServerHandle) -> None:
    """In less than a second, on a machine that has time."""
    _, bad = beside_ten_slow_ones(own)
    assert max(response.elapsed.total_seconds() for response in bad) < 3
    for response in bad:
        assert response.status_code in (400, 503), response.text
        assert response.status_code == 400 or int(response.headers["retry-after"]) >= 1


def test_slow_ones_do_not_keep_a_good_one_from_its_turn(own: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qserve.runtime.server.limits.constraints.WAIT_SECONDS", 50.0)
    good, bad = beside_ten_slow_ones(own)
    assert text_of(good) == "beside"
    assert any(response.status_code == 503 for response in bad), "they were cut short for the others' sake"
