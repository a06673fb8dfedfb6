"""The tokens of largest divergence, against sorting all of them."""

from __future__ import annotations

import torch

from qserve.evals.worst import WorstTokens


class Letters:
    """A tokenizer: token n is the nth letter."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


def test_the_worst_of_several_chunks_and_windows() -> None:
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(0, 26, (3, 21), generator=generator)
    p, q = (torch.randn(3, 20, 26, generator=generator).mul(3).log_softmax(-1) for _ in range(2))
    kl = (p.exp() * (p - q)).sum(-1)
    worst = WorstTokens(count=5, context=4)
    for window, base, model, value in zip(windows, p, q, kl):
        for start, stop in ((0, 8), (8, 13), (13, 20)):
            part = slice(start, stop)
            worst.add(window, start, base[part], model[part], value[part])
    found = worst.decoded(Letters())
    order = kl.flatten().sort(descending=True).indices[:5].tolist()
    text = Letters()
    for token, index in zip(found, order, strict=True):
        sample, row = divmod(index, 20)
        assert token.kl == float(kl[sample, row])
        assert token.context == text.decode(windows[sample, max(0, row - 3) : row + 1].tolist())
        assert token.expected == text.decode([int(windows[sample, row + 1])])
        assert token.base_choice == text.decode([int(p[sample, row].argmax())])
        assert token.choice == text.decode([int(q[sample, row].argmax())])
        assert abs(token.base_probability - float(p[sample, row].exp().max())) < 1e-6
        assert abs(token.probability - float(q[sample, row].exp().max())) < 1e-6


def test_fewer_tokens_than_asked_for_and_equal_ones() -> None:
    window = torch.tensor([0, 1, 2, 3])
    p = torch.zeros(3, 4).log_softmax(-1)
    worst = WorstTokens(count=2)
    worst.add(window, 0, p[:1], p[:1], torch.zeros(1))
    assert [token.expected for token in worst.decoded(Letters())] == ["b"]
    worst.add(window, 1, p[1:], p[1:], torch.zeros(2))
    assert [token.expected for token in worst.decoded(Letters())] == ["b", "c"]
