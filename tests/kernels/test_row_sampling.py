"""Tokens drawn in C against the reference in torch, at every cut, point, temperature and shape of logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.kernels import native
from qserve.kernels.row_sampling import RowSampling, draw_reference, draw_rows

pytestmark = pytest.mark.skipif(bool(native.missing()), reason="the C kernels were not built")
BELOW_ONE = 1.0 - 2.0**-53
DRAWS = st.builds(
    RowSampling,
    point=st.sampled_from([0.0, 0.5, BELOW_ONE]) | st.floats(0.0, BELOW_ONE),
    temperature=st.sampled_from([2e-5, 0.1, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 999]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.95, 1.0]) | st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]) | st.floats(0.0, 1.0),
)


def like_reference(row: torch.Tensor, draw: RowSampling, token: int) -> bool:
    """Whether ``token`` is what the reference draws, or lies between what it draws for points and cuts a little to
    either side: sums of float32 weights are no more exact, and leave out what weighs less than float32 can say."""
    if row[token] == row[draw_reference(row, draw)]:
        return True
    ranks = row.argsort(descending=True, stable=True).argsort() if draw.is_ranked else torch.arange(len(row))
    near = [
        draw_reference(
            row,
            dataclasses.replace(
                draw,
                point=min(max(draw.point + nudge, 0.0), 1.0),  # at 1.0 the last token with any weight
                top_p=min(max(draw.top_p + cut, 1e-9), 1.0) if draw.top_p < 1.0 else 1.0,
                min_p=min(draw.min_p * (1 + cut), 1.0),
            ),
        )
        for nudge in (-4e-6, 0.0, 4e-6)
        for cut in (-4e-6, 0.0, 4e-6)
    ]
    places = ranks[near]
    return any(row[token] == row[want] for want in near) or bool(places.min() <= ranks[token] <= places.max())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(DRAWS, min_size=1, max_size=20), st.integers(0, 2**31), st.integers(1, 3000),
    st.sampled_from([0.01, 1.0, 5.0, 100.0]), st.sampled_from([0.0, 0.5, 0.99]),
)  # fmt: skip
def test_a_row_gets_the_token_of_the_reference(
    draws: list[RowSampling], seed: int, vocab: int, spread: float, masked: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(draws), vocab, generator=generator) * spread
    logits = logits.masked_fill(torch.rand(logits.shape, generator=generator) < masked, -torch.inf)
    logits[:, seed % vocab] = 0.0  # something is always allowed
    tokens = draw_rows(list(logits), draws)
    assert all(like_reference(row, draw, token) for row, draw, token in zip(logits, draws, tokens))
    # Alone, in another order, on more threads, and with every kind of kernel.
    assert [draw_rows([row], [draw])[0] for row, draw in zip(logits, draws)] == tokens
    assert draw_rows(list(logits)[::-1], draws[::-1], threads=3) == tokens[::-1]
    for isa in native.available():
        other = draw_rows(list(logits), draws, isa=isa)
        assert all(like_reference(row, draw, token) for row, draw, token in zip(logits, draws, other))


@pytest.mark.parametrize("draw", [RowSampling(0.5), RowSampling(0.5, top_p=0.9), RowSampling(0.999999, top_k=5)])
@pytest.mark.parametrize("vocab", [1, 15, 17, 50_000, 262_145])
def test_equal_logits_rank_by_id(draw: RowSampling, vocab: int) -> None:
    count = min(vocab, draw.top_k or vocab)
    assert draw_rows([torch.full((vocab,), -3.0)], [draw])[0] == pytest.approx(
        int(draw.point * draw.top_p * count), abs=1
    )


def test_infinite_and_huge_logits() -> None:
    row = torch.randn(1000)
    row[[7, 400]] = torch.inf
    for draw in (RowSampling(0.9), RowSampling(0.9, top_p=0.5), RowSampling(0.9, top_k=9), RowSampling(0.9, min_p=0.1)):
        assert draw_rows([row], [draw])[0] in (7, 400)
        assert draw_rows([row.clamp(max=3e38)], [draw])[0] in (7, 400)


def test_each_token_comes_as_often_as_it_should() -> None:
    row = torch.randn(300, generator=torch.Generator().manual_seed(3)) * 2
    points = [(i + 0.5) / 20_000 for i in range(20_000)]
    for kept in (RowSampling(0.0, 0.8), RowSampling(0.0, 0.8, top_p=0.8), RowSampling(0.0, 0.8, top_k=20, min_p=0.02)):
        drawn = draw_rows([row] * len(points), [dataclasses.replace(kept, point=point) for point in points])
        shares = torch.bincount(torch.tensor(drawn), minlength=300) / len(points)
        weights = (row.double() / 0.8).softmax(-1)
        order = weights.argsort(descending=True)
        if kept.top_k:
            weights[order[20:]] = 0
        if kept.top_p < 1:
            ranked = weights[order]
            weights[order[ranked.cumsum(-1) - ranked >= 0.8]] = 0
        weights[weights < kept.min_p * weights.max()] = 0
        assert (shares - weights / weights.sum()).abs().max() < 2e-4


def test_a_row_of_another_type_or_length_is_refused() -> None:
    with pytest.raises(ValueError, match="float32 and of one length"):
        draw_rows([torch.zeros(3), torch.zeros(4)], [RowSampling(0.1)] * 2)
    with pytest.raises(ValueError, match="float32"):
        draw_rows([torch.zeros(3).half()], [RowSampling(0.1)])
