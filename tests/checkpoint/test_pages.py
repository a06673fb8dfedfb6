"""Memory in huge pages holds what was put there, whatever its size and dtype."""

from __future__ import annotations

import pytest
import torch

from qserve.checkpoint import pages


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2, 3, 70_001)])
def test_an_empty_tensor_has_its_shape_and_takes_values(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = pages.empty(shape, dtype)
    assert made.shape == shape and made.dtype == dtype and made.is_contiguous()
    made.view(torch.uint8).fill_(7)
    assert (made.view(torch.uint8) == 7).all()
