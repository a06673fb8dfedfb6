"""Orders of rows: what they gather, and that a packed weight takes them like a dense one."""

from __future__ import annotations

import pytest
import torch

from qserve.checkpoint.quantized_weight import take_rows
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize import fp8, rtn
from qserve.runtime.models.row_order import half_split, qkv_rows


def test_neighbouring_pairs_come_to_lie_half_a_rotation_apart() -> None:
    assert half_split(6, 9).tolist() == [0, 2, 4, 1, 3, 5, 6, 7, 8]


@pytest.mark.parametrize("grouped", [False, True])
def test_rows_of_a_joined_matrix(grouped: bool) -> None:
    heads, kv_heads, dim = 6, 2, 3
    q, k, v = qkv_rows(heads, kv_heads, dim, grouped=grouped, pairs=torch.tensor([0, 2, 1]))
    if grouped:  # q q q k v, q q q k v
        assert q.view(heads, dim)[:, 0].tolist() == [0, 3, 6, 15, 18, 21]
        assert (k.tolist(), v.tolist()) == ([9, 11, 10, 24, 26, 25], [12, 13, 14, 27, 28, 29])
    else:
        assert q.view(heads, dim)[:, 0].tolist() == [0, 3, 6, 9, 12, 15]
        assert (k.tolist(), v.tolist()) == ([18, 20, 19, 21, 23, 22], [24, 25, 26, 27, 28, 29])
    assert sorted([*q.tolist(), *k.tolist(), *v.tolist()]) == list(range((heads + 2 * kv_heads) * dim))


@pytest.mark.parametrize(
    "scheme", [WeightScheme(4, 16, symmetric=False), WeightScheme(3, 16), WeightScheme(8, 32, dtype="fp8", rows=4)]
)
def test_a_packed_weight_takes_rows_like_a_dense_one(scheme: WeightScheme) -> None:
    weight = torch.randn(12, 64, generator=torch.Generator().manual_seed(3))
    nearest = fp8.nearest if scheme.dtype == "fp8" else rtn.nearest
    packed, rows = nearest(weight, torch.ones(64), scheme), torch.tensor([11, 0, 5, 7, 2])
    taken = take_rows(packed, rows)
    taken.check()
    assert torch.equal(taken.dequantize(), packed.dequantize()[rows])
