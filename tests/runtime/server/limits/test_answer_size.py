"""How much a request may ask to be told: too many log-probabilities are refused, with the numbers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.limits import answer_size
from qserve.runtime.server.limits.answer_size import bounded
from qserve.runtime.server.serve import ServerHandle

CONTEXT = 1 << 17


def test_sixteen_answers_of_8192_tokens_with_twenty_alternatives_are_too_much() -> None:
    asked = {"n": 16, "logprobs": 20}
    with pytest.raises(RequestError, match=r"2,752,512 log-probabilities are more than the 524,288 .* at most 1560"):
        bounded(SamplingParams(max_tokens=8192, **asked), [[1, 2]], CONTEXT)
    most = SamplingParams(max_tokens=1560, **asked)
    assert bounded(most, [[1, 2]], CONTEXT) is most
    with pytest.raises(RequestError, match="max_tokens of at most 780"):  # the answers to both prompts count
        bounded(most, [[1, 2], [3]], CONTEXT)


def test_an_open_end_comes_earlier_and_is_not_refused() -> None:
    params = bounded(SamplingParams(max_tokens=None, logprobs=20), [[1] * 72], CONTEXT)
    assert params.max_tokens == (1 << 19) // 21
    short = SamplingParams(max_tokens=None, logprobs=20)
    assert bounded(short, [[1] * 72], 8192) is short


def test_text_alone_is_not_counted() -> None:
    params = SamplingParams(n=128, max_tokens=8192)
    assert bounded(params, [[1]], CONTEXT) is params


def test_those_of_prompts_count_once_for_all_choices() -> None:
    params = SamplingParams(n=64, max_tokens=16, prompt_logprobs=20)
    assert bounded(params, [[1] * 900], CONTEXT) is params
    with pytest.raises(RequestError, match="840,000 log-probabilities of 40,000 prompt tokens") as refused:
        bounded(params, [[1] * 20_000] * 2, CONTEXT)
    assert refused.value.param == "prompt_logprobs"
    with pytest.raises(RequestError, match="max_tokens of at most 4966"):  # what the prompt leaves
        bounded(SamplingParams(max_tokens=5000, logprobs=20, prompt_logprobs=20), [[1] * 20_000], CONTEXT)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_it_is_refused_over_http(server: ServerHandle, monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    monkeypatch.setattr(answer_size, "MAX_TOLD", 60)
    told: dict[str, Any] = (
        {"prompt": "the", "logprobs": 4}
        if route == "completions"
        else {"messages": [{"role": "user", "content": "the"}], "logprobs": True, "top_logprobs": 4}
    )

    def ask(**more: Any) -> httpx.Response:
        headers = {"Authorization": "Bearer first-key"}
        return httpx.post(f"{server.url}/{route}", json=told | more, headers=headers, timeout=60)

    refused = ask(n=2, max_tokens=7)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
    assert "at most 6" in refused.json()["error"]["message"]
    assert ask(n=2, max_tokens=6).status_code == 200
