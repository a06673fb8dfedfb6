"""A dense weight as int8 is bit for bit what torch makes of it."""

from __future__ import annotations

import pytest
import torch

from qserve.kernels import abi, native
from qserve.kernels.int8 import round_to_int8, round_to_int8_reference

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="no C kernels here")


@pytest.mark.parametrize("dtype", abi.FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (33, 192), (7, 100), (150, 576), (2, 4100)])
def test_codes_and_scales_are_those_of_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    sizes = 10.0 ** torch.randint(-9, 5, (shape[0], 1), generator=generator)
    weight = torch.randn(shape, generator=generator) * sizes
    weight.view(-1)[::5] = (weight.view(-1)[::5] * 64).round() / 64  # ties
    weight[0] *= 0.0
    weight = weight.clamp(-6e4, 6e4).to(dtype)
    if dtype != torch.float16:
        weight[-1] *= 1e9  # scales beyond float16
    found, expected = round_to_int8(weight), round_to_int8_reference(weight)
    assert found.scheme == expected.scheme
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)


def test_a_value_that_is_not_finite_makes_the_scale_of_its_group_so() -> None:
    weight = torch.ones(2, 128)
    weight[0, 3], weight[1, 70] = float("nan"), float("inf")
    scales = round_to_int8(weight).scales
    assert scales[0, 0].isnan() and scales[1, 1].isinf() and scales[0, 1] == scales[1, 0]
