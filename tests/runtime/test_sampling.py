from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from qserve.runtime.sampling import RequestError, SamplingParams


def test_defaults_are_those_of_the_openai_completions_api() -> None:
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature, params.top_p, params.top_k) == (
        1,
        16,
        1.0,
        1.0,
        0,
    )
    assert (params.stop, params.stop_token_ids, params.logprobs, params.seed) == ((), (), None, None)
    assert not params.greedy and params.prompt_logprobs is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", v) for v in (0, -1, 129, 10**6, 1.0, True, "2", None)),
        *(("max_tokens", v) for v in (0, -1, 2**31, 10**5000, 1.5, "a")),
        *(("min_tokens", v) for v in (-1, 17, None)),
        *(("temperature", v) for v in (-1, -1e-9, math.nan, math.inf, 100.1, 10**400, "1", None, True)),
        *(("top_k", v) for v in (-2, 2**31, 1.0)),
        *(("top_p", v) for v in (0, 0.0, -0.1, 1.01, math.nan)),
        *(("min_p", v) for v in (-0.1, 1.01, math.nan)),
        *(("repetition_penalty", v) for v in (0, 0.001, -1, 11, math.nan)),
        *(("presence_penalty", v) for v in (-2.1, 2.1, math.nan, "0")),
        *(("frequency_penalty", v) for v in (-2.1, 2.1, -math.inf)),
        *(("seed", v) for v in (2**63, -(2**63) - 1, 1.0, "0", True)),
        *(("stop", v) for v in (list("abcde"), [""], "", [1], 5, {"a": 1}, b"a", ["x" * 1025])),
        *(("stop_token_ids", v) for v in ([-1], ["a"], [2**31], [True], 3, "3", [10**5000], range(129))),
        *(("allowed_token_ids", v) for v in ([], [-1], ["a"], [2**31], [True], 3, "3", range(4097))),
        *(("bad_words", v) for v in (["a"] * 129, [""], [" \n"], [1], "fox", {"a": 1}, ["x" * 257])),
        *(("truncate_prompt_tokens", v) for v in (0, -2, 2**31, 1.5, "1", True)),
        *(("skip_special_tokens", v) for v in (0, None, "true")),
        *(("ignore_eos", v) for v in (1, None, "true")),
        ("include_stop_str_in_output", 0),
        *(("logprobs", v) for v in (-1, -2, 21, 10**6, "a", True)),
        *(("prompt_logprobs", v) for v in (-1, 21, True)),
        *(("logit_bias", v) for v in ([1], ["ab"], "a", 3, None, ((1, 2, 3),), {"a": 1}, {-1: 1}, {True: 1}, {1: "1"})),
        *(("logit_bias", v) for v in ({1: 101}, {1: math.nan}, {1: None}, {1: True}, dict.fromkeys(range(1025), 1))),
        *(("timeout", v) for v in (0, -1, 3601, math.nan, "1", True)),
        *(("use_beam_search", v) for v in (1, None)),
        *(("length_penalty", v) for v in (11, -11, math.nan, None, 0.5)),  # not without a beam search
        ("early_stopping", True),
        *(("pooling", v) for v in ("max", 1, True, "mean")),
    ],
    ids=lambda v: v if isinstance(v, str) and len(v) > 3 else type(v).__name__,  # 10**5000 has no str()
)
def test_bad_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field.removesuffix("_token_ids") in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", v) for v in (1, 128)),
        *(("max_tokens", v) for v in (1, 2**31 - 1, None)),
        ("min_tokens", 16),
        *(("temperature", v) for v in (0.0, 1e-12, 2.0, 100.0)),
        *(("top_p", v) for v in (1e-9, 1.0)),
        *(("min_p", v) for v in (0.0, 1.0)),
        *(("seed", v) for v in (-(2**63), 2**63 - 1, 0)),
        *(("logprobs", v) for v in (0, 20)),
        ("stop", ("a", "b", "c", "d")),
    ],
)
def test_bounds_are_inclusive(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_values_are_normalized() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], top_k=-1, temperature=0, presence_penalty=1)
    assert params.stop == ("END",) and params.stop_token_ids == (1, 2) and params.top_k == 0
    assert isinstance(params.temperature, float) and isinstance(params.presence_penalty, float)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # type: ignore[arg-type]
    assert hash(params) == hash(dataclasses.replace(params, stop=["END"]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_how_much_of_a_prompt_is_kept() -> None:
    def kept(**params: Any) -> int | None:
        return SamplingParams(**params).num_prompt_kept(100)

    assert (kept(), kept(truncate_prompt_tokens=7), kept(truncate_prompt_tokens=100)) == (None, 7, 100)
    for max_tokens, room in ((30, 70), (None, 99), (100, 1), (500, 1)):
        assert kept(truncate_prompt_tokens=-1, max_tokens=max_tokens) == room
    with pytest.raises(RequestError, match="truncate_prompt_tokens 101 is more than the context of 100"):
        kept(truncate_prompt_tokens=101)


@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_words"])
def test_a_beam_search_masks_no_tokens(field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(use_beam_search=True, **{field: ["a"] if field == "bad_words" else [1]})
    assert caught.value.param == field


def test_greedy_is_a_temperature_of_practically_zero() -> None:
    assert SamplingParams(temperature=0.0).greedy and SamplingParams(temperature=1e-12).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_more_min_tokens_than_max_tokens_is_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match=r"min_tokens \(9\) is more than max_tokens \(8\)"):
        SamplingParams(min_tokens=9, max_tokens=8)
    assert SamplingParams(min_tokens=9, max_tokens=None).min_tokens == 9


def test_a_bias_is_kept_as_sorted_pairs() -> None:
    params = SamplingParams(logit_bias={"7": 2, "3": -100.0})
    assert params.biases == ((3, -100.0), (7, 2.0)) == SamplingParams(logit_bias={3: -100, 7: 2}).biases
    assert dataclasses.replace(params, n=2).biases == params.biases
    assert len(SamplingParams(logit_bias={str(token): 1 for token in range(1024)}).biases) == 1024
