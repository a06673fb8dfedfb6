"""Tokens drawn many rows at a time, against the sampler's own draw of each, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.kernels.row_sampling import RowSampling, draw_reference
from qserve.runtime import device_sampler
from qserve.runtime.request import Request
from qserve.runtime.sampler import outputs_before, sample, sample_on_device
from qserve.runtime.sampling import SamplingParams

PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([2e-5, 0.1, 0.7, 1.0, 3.0, 100.0]),
        "top_k": st.sampled_from([0, 1, 2, 7, 50, 999]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.95, 1.0]) | st.floats(0.01, 1.0),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]) | st.floats(0.0, 1.0),
    },
)
BELOW_ONE = 1.0 - 2.0**-53
POINTS = st.sampled_from([0.0, 0.5, BELOW_ONE]) | st.floats(0.0, BELOW_ONE)


def sample_rows(logits: torch.Tensor, draws: list[tuple[int, RowSampling]]) -> list[int]:
    tokens: list[int] = device_sampler.sample_rows(logits, draws).tolist()
    return tokens


def the_draw(params: SamplingParams, point: float) -> RowSampling:
    return RowSampling(point, params.temperature, params.top_k, params.top_p, params.min_p)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(PARAMS, POINTS), min_size=1, max_size=20), st.integers(0, 2**31), st.integers(1, 700),
    st.sampled_from([0.01, 1.0, 5.0, 100.0]),
)  # fmt: skip
def test_a_row_gets_the_token_that_it_would_get_alone(
    asked: list[tuple[dict[str, Any], float]], seed: int, vocab: int, spread: float
) -> None:
    logits = torch.randn(len(asked), vocab, generator=torch.Generator().manual_seed(seed)) * spread
    params = [SamplingParams(**each) for each, _ in asked]
    # At the ends a token with a share of less than 1e-12 may come or not: they are tested below.
    points = [min(max(point, 2.0**-38), 1.0 - 2.0**-38) for _, point in asked]
    draws = [(row, the_draw(p, point)) for row, (p, point) in enumerate(zip(params, points))]
    want = [draw_reference(row, draw) for row, (_, draw) in zip(logits, draws)]
    # Equal logits are ranked by token id here, and as it happens by the reference: the logit is the same.
    got = sample_rows(logits, draws)
    assert [float(row[t]) for row, t in zip(logits, got)] == [float(row[t]) for row, t in zip(logits, want)]
    assert all(g == w or (row == row[w]).sum() > 1 for row, g, w in zip(logits, got, want))
    # In another order, and alone.
    assert sample_rows(logits, draws[::-1]) == got[::-1]
    assert [sample_rows(logits, [each])[0] for each in draws] == got


@given(PARAMS, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_the_ends_are_tokens_that_are_kept(asked: dict[str, Any], seed: int) -> None:
    params = SamplingParams(**asked)
    row = torch.randn(1, 300, generator=torch.Generator().manual_seed(seed)) * 4
    kept = set(sample_rows(row.expand(512, -1), [(point, the_draw(params, point / 512)) for point in range(512)]))
    first, last = (sample_rows(row, [(0, the_draw(params, point))])[0] for point in (0.0, BELOW_ONE))
    assert first in kept and row[0, last] > row[0, first] - 40 * params.temperature
    if params.top_k:
        assert {first, last} <= set(row[0].topk(min(300, params.top_k)).indices.tolist())


@pytest.mark.parametrize("vocab", [1, 1 << 18, (1 << 18) + 1, (1 << 20) + 3])
def test_the_largest_vocabulary_does_not_overflow(vocab: int) -> None:
    point = 0.9
    assert sample_rows(torch.zeros(1, vocab), [(0, RowSampling(point)), (0, RowSampling(point, top_p=0.95))]) == [
        int(point * vocab), int(point * math.ceil(0.95 * vocab))
    ]  # fmt: skip


def test_equal_logits_are_ranked_by_their_token() -> None:
    row = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]])
    kept = {sample_rows(row, [(0, RowSampling(point / 64, top_k=2))])[0] for point in range(64)}
    assert kept == {1, 3}


def test_a_large_vocabulary_has_room_for_its_sum() -> None:
    row = torch.zeros(1, 1 << 18)
    assert sample_rows(row, [(0, RowSampling(0.5))]) == [1 << 17]
    assert sample_rows(row, [(0, RowSampling(BELOW_ONE, top_p=0.5))]) == [(1 << 17) - 1]


def test_impossible_tokens_are_not_drawn() -> None:
    row = torch.full((1, 50), -torch.inf)
    row[0, 17] = -3.0
    draws = [RowSampling(p, top_p=top_p) for p in (0.0, BELOW_ONE) for top_p in (1.0, 0.9)]
    assert sample_rows(row.expand(4, -1), list(enumerate(draws))) == [17] * 4


CASES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_p": 0.9, "logprobs": 2},
    {"top_k": 5, "min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "logprobs": 0},
    {"logit_bias": {3: 5.0}},
    {"min_tokens": 9, "temperature": 0.0},
    {"allowed_token_ids": range(0, 900, 7), "temperature": 0.9},
    {"bad_words": ["a"], "temperature": 0.0},
    {"temperature": 0.0, "use_beam_search": True, "n": 2},
]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_sampled_there_is_what_is_sampled_here(seed: int) -> None:
    """Whatever a request asks for, alone in its row or masked."""
    torch.manual_seed(seed)
    asked = [SamplingParams(**each) for each in CASES * 2]
    requests = [Request(str(i), (1, 2, 3), p, eos_token_ids=frozenset({0})) for i, p in enumerate(asked)]
    for request in requests:
        request.output_token_ids += [4, 4, 5]
        if request.params.bad_words:
            request.bad_words = tuple((5, token) for token in range(0, 900, 2))
    logits = torch.randn(len(asked), 900) * 3
    logits[4, 7] = torch.nan
    greedy = torch.where(logits.isnan().any(-1), -1, logits.argmax(-1)).int()
    masks: list[torch.Tensor | None] = [None] * len(CASES) + [torch.rand(900) < 0.2 for _ in CASES]
    masks[-2] = torch.zeros(900, dtype=torch.bool)
    seeds = list(range(seed, seed + len(asked)))
    want = sample(logits, greedy, requests, seeds, masks)
    assert sample_on_device(logits, greedy.tolist(), requests, seeds, masks, outputs_before(requests, None)) == want
    assert [i for i, each in enumerate(want) if each.token_id is None] == [4, len(asked) - 2]


def test_only_the_rows_that_are_read_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [SamplingParams(**each) for each in CASES]
    requests = [Request(str(i), (1, 2, 3), p) for i, p in enumerate(asked)]
    logits, made = torch.randn(len(asked), 100), torch.empty
    shapes: list[tuple[int, ...]] = []

    def empty(*shape: int, **options: Any) -> torch.Tensor:
        shapes.append(shape)
        return made(*shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    nobody, outputs = [None] * len(asked), outputs_before(requests, None)
    sample_on_device(logits, logits.argmax(-1).tolist(), requests, [0] * len(asked), nobody, outputs)
    assert shapes[0] == (8, 100)
