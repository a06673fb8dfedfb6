"""Memory in huge pages holds what was put there, whatever its size and dtype."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from qserve.kernels import pages


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2, 3, 70_001)])
def test_an_empty_tensor_has_its_shape_and_takes_values(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = pages.empty(shape, dtype)
    assert made.shape == shape and made.dtype == dtype and made.is_contiguous()
    made.view(torch.uint8).fill_(7)
    assert (made.view(torch.uint8) == 7).all()


def test_the_arena_keeps_what_it_was_given() -> None:
    arena = pages.Arena()
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
    arena = pages.Arena()
    kept = arena.take((1000,), torch.int64).copy_(torch.arange(1000))
    del arena
    pages.Arena().take((1000,), torch.int64).zero_()
    assert torch.equal(kept, torch.arange(1000))
