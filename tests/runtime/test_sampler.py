"""Sampling against its definition: exact sets of candidates, frequencies, seeds, penalties, logprobs."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from qserve.runtime.request import Request
from qserve.runtime.sampler import Sampled, sample, uniform
from qserve.runtime.sampling import SamplingParams

PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


def draw(outputs: list[int] | None = None, seed: int = 0, logits: Any = None, **params: Any) -> Sampled:
    request = Request("r", (0, 1), SamplingParams(**params), eos_token_ids=frozenset({0}))
    request.output_token_ids += outputs or []
    row = (PROBABILITIES.log() if logits is None else torch.tensor(logits, dtype=torch.float32))[None]
    greedy = torch.tensor([-1 if row.isnan().any() else int(row.argmax())], dtype=torch.int32)
    return sample(row, greedy, [request], [seed])[0]


def support(**params: Any) -> set[int | None]:
    return {draw(seed=seed, **params).token_id for seed in range(400)}


def test_frequencies_are_the_probabilities() -> None:
    counts = Counter(draw(seed=seed).token_id for seed in range(6000))
    for token, probability in enumerate(PROBABILITIES.tolist()):
        sigma = math.sqrt(6000 * probability * (1 - probability))
        assert abs(counts[token] - 6000 * probability) < 4.5 * sigma


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.9}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.29}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_n_sigma": 0.3}, {0}),
        ({"top_n_sigma": 1.5}, {0, 1, 2}),
        ({"top_n_sigma": 1.5, "temperature": 100.0}, {0, 1, 2}),
        ({"top_n_sigma": 1.5, "top_k": 2}, {0, 1}),
        ({"top_n_sigma": 100}, {0, 1, 2, 3, 4}),
        ({"top_k": 4, "top_p": 0.6}, {0, 1}),
        ({"temperature": 1e-12}, {0}),
        ({"temperature": 0.01}, {0}),
        ({"min_tokens": 1}, {1, 2, 3, 4}),
        ({"min_tokens": 1, "ignore_eos": True}, {0, 1, 2, 3, 4}),
        ({"min_tokens": 1, "stop_token_ids": (1, 999)}, {2, 3, 4}),
        ({"allowed_token_ids": (4, 1)}, {1, 4}),
        ({"allowed_token_ids": (4, 1, 0), "min_tokens": 1}, {1, 4}),
        ({"allowed_token_ids": (4, 3, 1), "top_k": 2}, {1, 3}),
        ({"allowed_token_ids": (2,), "temperature": 0.0}, {2}),
        ({"allowed_token_ids": (3, 4), "logit_bias": {0: 100, 4: -100}}, {3}),
        ({"allowed_token_ids": (0,), "min_tokens": 1}, {None}),
    ],
)
def test_what_can_be_drawn(params: dict[str, Any], expected: set[int]) -> None:
    assert support(**params) == expected


def test_words_that_may_not_come() -> None:
    """A word of one token never comes; one of several not where all but its last have just come, and not elsewhere."""

    def seen(*outputs: int, **params: Any) -> set[int | None]:
        request = Request("r", (2, 3), SamplingParams(**params), bad_words=((1,), (2, 3, 4), (999,), (0, 998)))
        request.output_token_ids += outputs
        row = PROBABILITIES.log()[None]
        return {sample(row, torch.tensor([0]), [request], [seed])[0].token_id for seed in range(300)}

    assert seen() == seen(3) == seen(2, 3, 0) == seen(3, 2) == {0, 2, 3, 4}  # the prompt (2, 3) does not count
    assert seen(2, 3) == seen(0, 2, 3) == {0, 2, 3}
    assert seen(2, 3, temperature=0.0) == {0}
    assert seen(2, 3, allowed_token_ids=(1, 4)) == {None}
    row, drafted = PROBABILITIES.log()[None], Request("r", (0,), SamplingParams(allowed_token_ids=(4,)))
    drafted.bad_words = ((2, 3, 4),)
    assert sample(row, torch.tensor([0]), [drafted], [0], drafts=[(2, 3)])[0].token_id is None


def test_a_mask_and_the_allowed_tokens_hold_together() -> None:
    row, request = PROBABILITIES.log()[None], Request("r", (0,), SamplingParams(allowed_token_ids=(1, 4)))
    for mask, expected in (([1, 0, 1, 0, 1], {4}), ([1, 1, 1, 0, 1], {1, 4}), ([1, 0, 1, 0, 0], {None})):
        allowed = [torch.tensor(mask, dtype=torch.bool)]
        assert {sample(row, torch.tensor([0]), [request], [s], allowed)[0].token_id for s in range(200)} == expected


def test_a_wide_top_p_falls_back_to_the_whole_vocabulary() -> None:
    flat = [0.0] * 2000
    seen = {draw(seed=s, logits=flat, top_p=0.9).token_id for s in range(3000)}
    assert max(t for t in seen if t is not None) >= 600 and len(seen) > 1000


def test_the_draw_depends_on_seed_and_index_alone() -> None:
    rows = torch.randn(7, 50)
    requests = [Request(str(i), (1,), SamplingParams(seed=i)) for i in range(7)]
    greedy = rows.argmax(-1).int()
    together = sample(rows, greedy, requests, range(7))
    for i in range(7):
        assert sample(rows[i : i + 1], greedy[i : i + 1], requests[i : i + 1], [i])[0] == together[i]
    assert len({uniform(3, i) for i in range(100)} | {uniform(-4, i) for i in range(100)}) == 200
    assert all(0 <= uniform(s, 5) < 1 for s in (-(2**63), 2**63 - 1, 0))


def test_penalties() -> None:
    assert draw(logits=[2.0, 1.9, 0.0], temperature=0.0, repetition_penalty=1.5).token_id == 0
    assert draw(logits=[2.0, 1.9, 1.5], temperature=0.0, repetition_penalty=1.5).token_id == 2  # 0 and 1: prompt
    assert draw([2], logits=[0.0, 0.9, 1.0], temperature=0.0, presence_penalty=0.2).token_id == 1
    assert draw([2, 2, 2], logits=[0.0, 0.5, 1.0], temperature=0.0, frequency_penalty=0.2).token_id == 1
    assert draw([2, 2], logits=[0.0, 0.5, 1.0], temperature=0.0, frequency_penalty=0.2).token_id == 2
    assert draw([2], logits=[0.0, 0.9, 0.5], temperature=0.0, presence_penalty=-2.0).token_id == 2
    assert draw(logits=[-1.0, -9.0, -1.4], temperature=0.0, repetition_penalty=1.5).token_id == 2


def test_logprobs_are_the_models_own() -> None:
    got = draw(temperature=0.0, logprobs=3, min_tokens=1).logprobs
    assert got is not None
    assert (got.chosen.token_id, got.chosen.rank) == (1, 2)
    assert got.chosen.logprob == pytest.approx(math.log(0.25))
    assert [(t.token_id, t.rank) for t in got.top] == [(0, 1), (1, 2), (2, 3)]
    assert draw(temperature=0.0, logprobs=0).logprobs is not None
    assert draw(temperature=0.0).logprobs is None


def test_a_row_with_nan_yields_no_token() -> None:
    assert draw(logits=[1.0, math.nan, 0.0]).token_id is None


def test_biases_come_before_penalties() -> None:
    assert draw(logits=[2.0, 1.9, 0.0], temperature=0.0, logit_bias={2: 2.5}).token_id == 2
    assert draw(logits=[2.0, 1.9, 0.0], temperature=0.0, logit_bias={0: -100}).token_id == 1
    # (3 + 1) / 2 is less than 2.4; 3 / 2 + 1 would not be.
    halved = {"temperature": 0.0, "repetition_penalty": 2.0}
    assert draw([2], logits=[0.0, 0.0, 3.0, 2.4], logit_bias={2: 1}, **halved).token_id == 3
    assert support(logit_bias={0: 100}) == {0}
    assert support(logit_bias=dict.fromkeys(range(5), -100)) == {0, 1, 2, 3, 4}
    got = draw(temperature=0.0, logprobs=1, logit_bias={1: 50}).logprobs
    assert got is not None and got.chosen.token_id == 1 and got.chosen.logprob == pytest.approx(math.log(0.25))


@pytest.mark.parametrize("seed", range(20))
def test_top_n_sigma_keeps_what_its_definition_keeps(seed: int) -> None:
    """Tang et al., 2024, written out; the temperature changes who is likely, and not who is kept."""
    torch.manual_seed(seed)
    logits = (torch.randn(50) * 3).tolist()
    n, bias = 0.5 + seed / 8, {7: 4.0}
    biased = [value + bias.get(token, 0.0) for token, value in enumerate(logits)]
    mean = sum(biased) / len(biased)
    sigma = math.sqrt(sum((value - mean) ** 2 for value in biased) / len(biased))
    kept = {token for token, value in enumerate(biased) if value >= max(biased) - n * sigma}
    for temperature in (0.7, 100.0):
        params = {"top_n_sigma": n, "temperature": temperature, "logit_bias": bias, "logits": logits}
        drawn = {draw(seed=number, **params).token_id for number in range(400)}
        assert drawn <= kept and (temperature < 1 or len(kept) > 30 or drawn == kept)
    without = draw(seed=1, temperature=0.7, logits=[-math.inf if t not in kept else v for t, v in enumerate(biased)])
    assert draw(seed=1, **{**params, "temperature": 0.7}).token_id == without.token_id
    assert draw(temperature=0.0, top_n_sigma=n, logits=logits).token_id == max(range(50), key=logits.__getitem__)


def test_top_n_sigma_leaves_out_of_its_deviation_what_cannot_come() -> None:
    """Forbidden endings would make it infinite, and would then keep everything."""
    assert support(top_n_sigma=0.5, min_tokens=1) == {1}
