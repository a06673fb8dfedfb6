"""Products of tiles: the very bits of products of vectors, for rows, widths and weights of every kind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.checkpoint.spec import MXFP4, NVFP4, ActivationScheme, WeightScheme
from qserve.kernels import native
from qserve.kernels.ops import Linear
from tests.kernels.quantized_weights import make_weight
from tests.kernels.test_operations import make_step, run

pytestmark = pytest.mark.skipif("amx" not in native.available(), reason="this machine has no AMX")

TOKENS = ActivationScheme("int8")
WEIGHTS: dict[str, tuple[WeightScheme, ActivationScheme | None]] = {
    "codes below a zero point": (WeightScheme(4, 64), None),
    "two weight groups to an input group": (WeightScheme(4, 32), None),
    "two input groups to a weight group": (WeightScheme(4, 128), None),
    "one group": (WeightScheme(4, -1), None),
    "groups of 24": (WeightScheme(4, 24), None),
    "zero points": (WeightScheme(4, 64, symmetric=False), None),
    "real zero points": (WeightScheme(4, 64, symmetric=False, dtype="hqq"), None),
    "bytes": (WeightScheme(8, 64), None),
    "bytes with zero points": (WeightScheme(8, 64, symmetric=False), None),
    "five bits": (WeightScheme(5, 64), None),
    "inputs rounded by token": (WeightScheme(8, -1), TOKENS),
    "nibbles, inputs rounded by token": (WeightScheme(4, -1), TOKENS),
    "a book": (MXFP4, None),
    "a book, scales in e4m3": (NVFP4, None),
    "a book of two bytes": (WeightScheme(4, 64, dtype="nf4"), None),
    "trellis codes": (WeightScheme(3, 64, dtype="trellis"), None),
}


@pytest.mark.parametrize("name", WEIGHTS)
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 200),
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 24).map(lambda n: 64 * n),
    bias=st.booleans(),
    accumulate=st.booleans(),
    threads=st.integers(1, 3),
    large=st.booleans(),
)
def test_tiles_give_the_bits_of_vectors(
    name: str, rows: int, outputs: int, inputs: int, bias: bool, accumulate: bool, threads: int, large: bool
) -> None:
    scheme, activations = WEIGHTS[name]
    if scheme.group_size > 0:
        inputs = -(-inputs // scheme.group_size) * scheme.group_size
    weight = make_weight(outputs, inputs, scheme, activations)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    if large:
        x[rows // 2] *= 1e6  # codes at both ends
        x[rows // 3, inputs // 2] = torch.nan
    added = torch.linspace(-1, 1, outputs) if bias else None
    found = []
    for isa in ("avx512", "amx"):
        out = torch.full((rows, outputs), 0.5)
        run(native.NativeExecutor(threads, isa), [Linear(x, weight, out, added, accumulate)], make_step(rows))
        found.append(out)
    assert torch.equal(found[0].isnan(), found[1].isnan())
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())
