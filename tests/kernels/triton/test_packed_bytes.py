"""The memory plan's bytes for a weight, against those that its prepared product holds."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels.ops import Linear
from qserve.kernels.triton import linear, target
from qserve.kernels.triton.tuning.tune import Tunable, weight_bytes
from qserve.kernels.triton.workspace import Workspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INT8, FP8 = ActivationScheme("int8"), ActivationScheme("fp8")
GROUPS = (32, 64, 128, 24, -1)
ROUNDED = [
    (WeightScheme(8, -1), INT8),
    (WeightScheme(4, 128), INT8),
    (WeightScheme(4, 64, False), INT8),
    (WeightScheme(8, 64), ActivationScheme("int8", "group", group_size=64)),
    (WeightScheme(8, -1, dtype="fp8"), FP8),
    (WeightScheme(8, -1, dtype="fp8", rows=-1), ActivationScheme("fp8", "tensor", dynamic=False)),
    (WeightScheme(8, 128, dtype="fp8", rows=128), ActivationScheme("fp8", "group", group_size=128)),
    (WeightScheme(4, 128), FP8),
]

pytestmark = pytest.mark.skipif(target.missing() is not None, reason=str(target.missing()))


def held(scheme: WeightScheme, activations: ActivationScheme | None, out: int, inp: int, scale: float) -> int:
    """Bytes of a weight, all of whose scales are ``scale``, made ready for inputs in float16."""
    scales = torch.full((out, scheme.groups(inp)), scale)
    zeros = None if scheme.symmetric else torch.ones(scales.shape, dtype=torch.uint8)
    static = activations is not None and not activations.dynamic
    weight = QuantizedWeight(
        scheme, torch.ones(out, inp, dtype=torch.uint8), scales, zeros, activations=activations,
        input_scale=1.0 if static else None,
    )  # fmt: skip
    weight.check()
    x = torch.zeros(1, inp, dtype=torch.float16, device=DEVICE)
    made = linear.prepare(Linear(x, weight, torch.zeros(1, out, dtype=torch.float16, device=DEVICE)), Workspace(DEVICE))
    assert isinstance(made, Tunable)
    return weight_bytes(made)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), list(product((2, 3, 4, 5, 6, 8), GROUPS, (True, False))), ids=str
)  # fmt: skip
@pytest.mark.parametrize(("out", "inp"), [(256, 1024), (70, 600)])
def test_of_integers_it_is_the_most(bits: int, group: int, symmetric: bool, out: int, inp: int) -> None:
    scheme = WeightScheme(bits, group, symmetric)
    planned = linear.packed_bytes(scheme, None, out, inp)
    assert held(scheme, None, out, inp, 1e-9) == planned, "scales that float16 does not hold"
    assert 0.7 * planned < held(scheme, None, out, inp, 0.25) <= planned


@pytest.mark.parametrize(("scheme", "activations"), ROUNDED, ids=str)
@pytest.mark.parametrize(("out", "inp"), [(256, 1024), (70, 640)])
def test_with_rounded_inputs_it_is_exact(
    scheme: WeightScheme, activations: ActivationScheme, out: int, inp: int
) -> None:
    planned = linear.packed_bytes(scheme, activations, out, inp)
    assert held(scheme, activations, out, inp, 1e-9) == held(scheme, activations, out, inp, 0.25) == planned


def test_four_bits_with_rounded_inputs_take_a_byte() -> None:
    for activations in (INT8, FP8):
        assert linear.packed_bytes(WeightScheme(4, 128), activations, 1024, 1024) == 1024 * (1024 + 8 * 4)
    assert linear.packed_bytes(WeightScheme(4, 128), None, 1024, 1024) == 1024 * (512 + 8 * 4)
