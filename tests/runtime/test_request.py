from __future__ import annotations

from typing import Any

import pytest

from qserve.runtime.request import Request, Status
from qserve.runtime.sampling import RequestError, SamplingParams


def request(prompt: Any = (1, 2, 3), *, limit: int = 100, eos: Any = (), **params: Any) -> Request:
    return Request(
        "r", prompt, SamplingParams(**params), eos_token_ids=frozenset(eos), max_total_tokens=limit
    )


def feed(r: Request, *tokens: int) -> list[str | None]:
    return [r.append(token) for token in tokens]


def test_new_request_waits_with_nothing_computed() -> None:
    r = request([1, 2, 3])
    assert r.prompt_token_ids == (1, 2, 3) and r.status is Status.WAITING and not r.is_finished
    assert (r.num_tokens, r.num_computed, r.output_token_ids, r.finish_reason) == (3, 0, [], None)


@pytest.mark.parametrize("prompt", [(), (1, -1)])
def test_bad_prompt_is_refused(prompt: tuple[int, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        request(prompt)
    assert caught.value.param == "prompt"


def test_priority_is_bounded() -> None:
    with pytest.raises(RequestError) as caught:
        Request("r", (1,), SamplingParams(), priority=1001)
    assert caught.value.param == "priority"


@pytest.mark.parametrize(("prompt", "salt"), [((1, 2), ""), ((1, 2, 3), "other")])
def test_parent_must_have_the_same_prompt_and_salt(prompt: tuple[int, ...], salt: str) -> None:
    with pytest.raises(RequestError) as caught:
        Request("child", prompt, SamplingParams(), cache_salt=salt, parent=request((1, 2, 3)))
    assert caught.value.param == "parent"


@pytest.mark.parametrize(
    ("prompt_length", "limit", "max_tokens", "outputs", "positions"),
    [
        (3, 100, 16, 16, 18),
        (3, 100, None, 97, 99),
        (3, 10, 16, 7, 9),
        (9, 10, 16, 1, 9),
        (10, 10, 16, 1, 10),  # a prompt that fills the context still yields one token
        (3, 100, 1, 1, 3),
    ],
)
def test_lengths(
    prompt_length: int, limit: int, max_tokens: int | None, outputs: int, positions: int
) -> None:
    r = request(range(prompt_length), limit=limit, max_tokens=max_tokens)
    assert (r.max_output_tokens, r.max_positions) == (outputs, positions)
    assert [reason for reason in feed(r, *[5] * outputs) if reason] == ["length"]


def test_eos_ends_it_without_a_stop_reason() -> None:
    r = request(eos={7})
    assert feed(r, 5, 7) == [None, "stop"] and r.stop_reason is None


def test_ignored_eos_does_not_end_it() -> None:
    assert feed(request(eos={7}, ignore_eos=True, max_tokens=3), 7, 7, 7) == [None, None, "length"]


def test_stop_token_ends_it_and_is_the_reason() -> None:
    r = request(stop_token_ids=[8], eos={7})
    assert feed(r, 5, 8) == [None, "stop"] and r.stop_reason == 8


def test_stop_on_the_last_allowed_token_counts_as_stop() -> None:
    assert feed(request(eos={7}, max_tokens=2), 5, 7) == [None, "stop"]


def test_min_tokens_delays_both_kinds_of_stop() -> None:
    r = request(eos={7}, stop_token_ids=[8], min_tokens=2)
    assert feed(r, 7, 8, 8) == [None, None, "stop"] and r.stop_reason == 8


def test_min_tokens_does_not_delay_the_length_limit() -> None:
    assert feed(request(min_tokens=2, max_tokens=2), 5, 5) == [None, "length"]


def test_tokens_spans_prompt_outputs_and_placeholders() -> None:
    r = request((1, 2, 3))
    feed(r, 4, 5)
    r.num_in_flight = 2
    assert r.tokens(0, 7) == (1, 2, 3, 4, 5, -1, -1)
    assert r.tokens(2, 4) == (3, 4) and r.tokens(4, 6) == (5, -1) and r.tokens(6, 7) == (-1,)
    assert r.tokens(0, 2) == (1, 2) and r.num_tokens == 7


def test_decoding_means_only_the_newest_token_is_left() -> None:
    r = request((1, 2, 3))
    r.num_computed = 2
    assert not r.is_decoding  # the last prompt token is prefill, whatever the cache held
    feed(r, 4)
    r.num_computed = 3
    assert r.is_decoding
    r.num_computed = 2
    assert not r.is_decoding


def test_tokens_in_flight_count_towards_the_length_limit() -> None:
    r = request(max_tokens=3)
    feed(r, 4)
    r.num_in_flight = 1
    assert not r.is_fully_sampled
    r.num_in_flight = 2
    assert r.is_fully_sampled
