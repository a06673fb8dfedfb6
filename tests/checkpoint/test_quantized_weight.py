from __future__ import annotations

import dataclasses

import pytest
import torch

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows, take_inputs, take_rows
from qserve.checkpoint.spec import WeightScheme

SCHEME = WeightScheme(4, 8, symmetric=False)


def weight(out: int = 4, seed: int = 0) -> QuantizedWeight:
    g = torch.Generator().manual_seed(seed)
    return QuantizedWeight(
        SCHEME,
        stored=torch.randint(0, 16, (out, 16), dtype=torch.uint8, generator=g),
        scales=torch.rand(out, 2, generator=g),
        zeros=torch.randint(0, 16, (out, 2), dtype=torch.uint8, generator=g),
    )


@pytest.mark.parametrize(
    "part, value, words",
    [
        ("stored", torch.zeros(4, 16), "uint8"),
        ("stored", torch.full((4, 16), 16, dtype=torch.uint8), "code exceeds"),
        ("scales", torch.ones(4, 3), "scales are"),
        ("scales", torch.tensor([[float("nan"), 1.0]] * 4), "NaN"),
        ("scales", torch.tensor([[float("inf"), 1.0]] * 4), "infinite"),
        ("zeros", None, "needs zero points"),
        ("zeros", torch.zeros(4, 1, dtype=torch.uint8), "zeros are"),
        ("zeros", torch.full((4, 2), 16, dtype=torch.uint8), "zero exceeds"),
        ("g_idx", torch.zeros(8, dtype=torch.int32), "g_idx"),
        ("g_idx", torch.full((16,), 2, dtype=torch.int32), "g_idx"),
    ],
)
def test_check(part, value, words) -> None:
    weight().check()
    with pytest.raises(CheckpointError, match=words):
        dataclasses.replace(weight(), **{part: value}).check()


def test_dequantize_element_by_element() -> None:
    shuffled = dataclasses.replace(weight(), g_idx=torch.tensor([0, 1] * 8, dtype=torch.int32))
    for case in (weight(), shuffled):
        groups = case.g_idx.tolist() if case.g_idx is not None else [0] * 8 + [1] * 8
        for o in range(4):
            for i in range(16):
                g = groups[i]
                expected = (int(case.codes[o, i]) - int(case.zeros[o, g])) * float(case.scales[o, g])
                assert float(case.dequantize()[o, i]) == pytest.approx(expected, abs=1e-6)


def test_concat_rows() -> None:
    a, b = weight(4, 1), dataclasses.replace(weight(8, 2), bias=torch.ones(8))
    fused = concat_rows([a, b])
    assert torch.equal(fused.dequantize(), torch.cat([a.dequantize(), b.dequantize()]))
    assert fused.bias.tolist() == [0.0] * 4 + [1.0] * 8
    with pytest.raises(ValueError, match="fused"):
        concat_rows([a, dataclasses.replace(b, g_idx=torch.zeros(16, dtype=torch.int32))])


@pytest.mark.parametrize("zeros", [False, True])
def test_rows_are_taken_with_their_scales(zeros: bool) -> None:
    rows = torch.tensor([3, 0, 2])
    whole = dataclasses.replace(weight(), bias=torch.arange(4.0))
    if not zeros:
        whole = dataclasses.replace(whole, scheme=WeightScheme(4, 8, rows=2), zeros=None)
    taken = take_rows(whole, rows)
    taken.check()
    assert torch.equal(taken.dequantize(), whole.dequantize()[rows]) and taken.bias is not None
    assert taken.bias.tolist() == [3.0, 0.0, 2.0]


@pytest.mark.parametrize("group", [8, -1])
@pytest.mark.parametrize("zeros", [False, True])
def test_terms_of_some_inputs_add_up_to_the_product(group: int, zeros: bool) -> None:
    """The last group is short."""
    scheme = WeightScheme(4, group, symmetric=not zeros)
    codes, groups = torch.arange(4 * 20).view(4, 20).remainder(16).to(torch.uint8), scheme.groups(20)
    scales = torch.rand(4, groups) + 0.1
    whole = QuantizedWeight(scheme, codes, scales, torch.full_like(scales, 3).to(torch.uint8) if zeros else None)
    first, rest = take_inputs(whole, range(8)), take_inputs(whole, range(8, 20))
    for part in (first, rest):
        part.check()
    assert torch.equal(torch.cat([first.dequantize(), rest.dequantize()], 1), whole.dequantize())


def test_a_group_is_not_divided() -> None:
    with pytest.raises(CheckpointError, match="inputs 4 to 16 are not whole groups of 8 inputs"):
        take_inputs(weight(), range(4, 16))
    shuffled = dataclasses.replace(weight(), g_idx=torch.zeros(16, dtype=torch.int32))
    with pytest.raises(CheckpointError, match="inputs 0 to 8 are not whole groups"):
        take_inputs(shuffled, range(8))
