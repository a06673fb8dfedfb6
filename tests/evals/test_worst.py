"""The tokens of largest divergence, against sorting all of them."""

from __future__ import annotations

import torch

from qserve.evals.divergence import Divergence
from qserve.evals.pieces import Piece
from qserve.evals.worst import section, worst_tokens


class Letters:
    """A tokenizer: token n is the nth letter."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


def a_divergence(pieces: list[Piece], kl: torch.Tensor) -> Divergence:
    generator = torch.Generator().manual_seed(0)
    count = len(kl)
    choices = torch.randint(0, 26, (2, count), generator=generator)
    sure = torch.rand(2, count, generator=generator, dtype=torch.float64)
    position = torch.cat([torch.arange(piece.first, len(piece.tokens)) for piece in pieces])
    unit = torch.cat([torch.full((piece.scored,), piece.unit) for piece in pieces])
    return Divergence(torch.rand(count), torch.rand(count), kl, *choices, *sure, position, unit)


def test_the_worst_of_several_pieces() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = ((21, 1), (2, 1), (30, 12), (9, 1))
    pieces = [
        Piece(torch.randint(0, 26, (length,), generator=generator), first, unit)
        for unit, (length, first) in enumerate(lengths)
    ]
    places = [(piece, place) for piece in pieces for place in range(piece.first, len(piece.tokens))]
    found = a_divergence(pieces, torch.rand(len(places), generator=generator, dtype=torch.float64))
    text = Letters()
    worst = worst_tokens(found, pieces, text, count=len(places), context=4)
    order = found.kl.sort(descending=True).indices.tolist()
    for token, index in zip(worst, order, strict=True):
        piece, place = places[index]
        assert token.kl == float(found.kl[index])
        assert token.context == text.decode(piece.tokens[max(0, place - 4) : place].tolist())
        assert token.expected == text.decode([int(piece.tokens[place])])
        assert token.base_choice == text.decode([int(found.base_choice[index])])
        assert token.choice == text.decode([int(found.choice[index])])
        assert (token.base_probability, token.probability) == (found.confidence[index], found.probability[index])
    assert worst_tokens(found, pieces, text, count=5, context=4) == worst[:5]


def test_fewer_tokens_than_asked_for_and_equal_ones() -> None:
    pieces = [Piece(torch.tensor([0, 1, 2, 3]), 1, 0)]
    found = a_divergence(pieces, torch.zeros(3, dtype=torch.float64))
    assert [token.expected for token in worst_tokens(found, pieces, Letters(), count=2)] == ["b", "c"]
    shown = section(worst_tokens(found, pieces, Letters()))
    assert [row[:2] for row in shown.rows] == [("…a", "b"), ("…ab", "c"), ("…abc", "d")]
