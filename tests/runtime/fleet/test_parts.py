"""The breaker by its clock, and what the router reads of a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from qserve.checkpoint.errors import UsageError
from qserve.runtime.digests import chain_digests
from qserve.runtime.fleet.breaker import FAILURES, PAUSE, Breaker
from qserve.runtime.fleet.fleet import Fleet
from qserve.runtime.fleet.prompts import BLOCK_BYTES, prompt_of

TEXT = "a sentence of the prompt. " * 20


def test_the_breaker_opens_pauses_and_is_quick_to_open_again() -> None:
    breaker = Breaker()
    for second in range(FAILURES - 1):
        breaker.failed(second)
    assert not breaker.is_open(FAILURES)
    breaker.failed(FAILURES)
    assert breaker.is_open(FAILURES) and not breaker.is_open(FAILURES + PAUSE)
    breaker.failed(FAILURES + PAUSE)
    assert breaker.is_open(FAILURES + PAUSE)
    breaker.worked()
    breaker.failed(100)
    assert not breaker.is_open(100)


def test_all_that_fails_with_a_process_fails_once() -> None:
    breaker = Breaker()
    for death in range(1, FAILURES + 1):
        for _ in range(64):
            breaker.failed(death)
        assert breaker.is_open(death)
        breaker.died(death)
        assert breaker.is_open(death) == (death == FAILURES), "a process that ends again and again"
    breaker.worked()
    breaker.died(100)
    assert not breaker.is_open(100)


def test_failures_far_apart_open_nothing() -> None:
    breaker = Breaker()
    for minute in range(20):
        breaker.failed(60.0 * minute)
        assert not breaker.is_open(60.0 * minute)


def test_the_next_turn_of_a_conversation_begins_as_the_last() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]
    first = prompt_of({"messages": messages}, "")
    second = prompt_of({"messages": [*messages, {"role": "assistant", "content": "yes"}], "temperature": 1}, "")
    assert len(first.digests) > 5 and second.digests[: len(first.digests)] == first.digests
    assert prompt_of({"messages": messages}, "alice").digests[0] != first.digests[0]
    assert prompt_of({"messages": messages, "tools": [{"type": "function"}]}, "").digests[0] != first.digests[0]


def test_text_and_tokens_are_digested_by_the_block_managers_chain() -> None:
    tokens = list(range(40))
    assert prompt_of({"prompt": tokens}, "x").digests == chain_digests(tokens, 16, salt="x")
    assert prompt_of({"prompt": tokens}, "x").blocks == 3
    text = prompt_of({"prompt": TEXT}, "")
    changed = prompt_of({"prompt": TEXT[:-40] + "!" + TEXT[-39:]}, "")
    same = sum(a == b for a, b in zip(text.digests, changed.digests))
    assert same == (len(TEXT) - 40) // BLOCK_BYTES < len(text.digests)
    many = prompt_of({"prompt": [TEXT, TEXT]}, "")
    assert many.digests == text.digests and many.blocks == 2 * text.blocks


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": None}, {"prompt": []}, {"prompt": [None]}, {"prompt": [-1]}, {"prompt": [[]]}, {"prompt": 2**70},
     {"messages": None}, {"messages": "\ud800"}, {"input": {"a": [1]}}, {"prompt": [True, 1]}],
)  # fmt: skip
def test_what_cannot_be_read_is_left_to_the_replica(body: dict[str, Any]) -> None:
    found = prompt_of(body, "")
    assert len(found.digests) <= found.blocks


def test_sessions() -> None:
    assert prompt_of({"user": "u", "input": "x"}, "").session == "u"
    assert prompt_of({"user": "u", "prompt_cache_key": "k"}, "").session == "k"
    assert prompt_of({"user": "u"}, "", "header").session == "header"
    assert prompt_of({"user": 3}, "").session == ""


@pytest.mark.parametrize("urls", [["localhost:8000"], ["http://"], ["http://a/v1"], ["ftp://a"], ["http://a", "http://a/"]])
def test_urls_that_are_none(urls: list[str]) -> None:
    with pytest.raises(UsageError):
        Fleet(urls, "prefix-aware", None, 1.0)
