"""The arena gives each tensor a place of its own."""

from __future__ import annotations

from itertools import pairwise

import torch

from qserve.kernels.arena import Arena


def test_the_arena_keeps_what_it_was_given() -> None:
    arena = Arena()
    given = [
        torch.arange(1 + 977 * i, dtype=torch.int32 if i % 2 else torch.uint8) % 251 for i in range(40)
    ] + [torch.empty(0), torch.randn(5_000_000 * 2), torch.randn(3, 7).half()]
    kept = [arena.take(tensor.shape, tensor.dtype).copy_(tensor) for tensor in given]
    for tensor, copy in zip(given, kept):
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor)
    places = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in kept if t.numel())
    assert all(start % 64 == 0 for start, _ in places), "the kernels load whole lines"
    assert all(end <= start for (_, end), (start, _) in pairwise(places))


def test_the_memory_lives_as_long_as_its_tensors() -> None:
    arena = Arena()
    kept = arena.take((1000,), torch.int64).copy_(torch.arange(1000))
    del arena
    Arena().take((1000,), torch.int64).zero_()
    assert torch.equal(kept, torch.arange(1000))
