"""The tiles of codes that lie in a checkpoint are bit for bit those that torch makes of the same codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.packed_codes import PackedCodes, join
from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows, take_rows
from qserve.checkpoint.spec import WeightScheme
from qserve.checkpoint.words import pack_words
from qserve.kernels import native
from qserve.kernels.code_tiles import LANES, tile_codes_reference
from qserve.kernels.fusion import alternating
from qserve.kernels.prepack import int_tiles
from tests.kernels.quantized_weights import make_weight

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="no C kernels here")

STORED = ("bytes", "along the input", "across outputs", "interleaved")
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(codes: Tensor, bits: int, how: str) -> Tensor | PackedCodes:
    """``codes`` as GPTQ (words of an input beside each other), compressed-tensors, or AWQ lay them."""
    if how == "bytes":
        return codes
    if how == "interleaved":
        turned = codes.t().reshape(codes.shape[1], -1, 8)[..., list(INTERLEAVED)].reshape(codes.shape[1], -1)
        return PackedCodes((pack_words(turned, 4),), 4, codes.shape[1], INTERLEAVED)
    words = pack_words(codes, bits)
    return PackedCodes((words if how == "along the input" else words.t().contiguous().t(),), bits, codes.shape[1])


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_tiles_are_those_of_the_reference(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([2, 3, 4, 5, 6, 8]), label="bits")
    how = data.draw(st.sampled_from(STORED if bits == 4 else STORED[:3]), label="how")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 20), label="seed"))
    inputs = data.draw(st.integers(1, 200), label="inputs")
    ordered = data.draw(st.booleans(), label="ordered")
    inputs = inputs if ordered else -(-inputs // 8) * 8  # kernels take whole words of codes
    parts = []
    for _ in range(data.draw(st.integers(1, 3), label="parts")):
        outputs = data.draw(st.integers(1, 70))
        outputs = -(-outputs // 8) * 8 if how == "interleaved" else outputs
        parts.append(torch.randint(0, 1 << bits, (outputs, inputs), generator=generator).to(torch.uint8))
    codes = torch.cat(parts)
    stored = join([packed(part, bits, how) for part in parts])
    if data.draw(st.booleans(), label="rows"):
        rows = torch.randint(0, len(codes), (data.draw(st.integers(1, 80)),), generator=generator)
        codes, stored = codes[rows], stored[rows]
    order = None
    if ordered:
        order = torch.randperm(-(-inputs // 8) * 8, generator=generator)
        order[order >= inputs] = -1
    k = inputs if order is None else len(order)
    for width in (8, 4) if bits <= 4 else (4,):
        shape = -(-len(codes) // LANES), k // width, LANES, 4
        expected, found = torch.empty(shape, dtype=torch.uint8), torch.full(shape, 77, dtype=torch.uint8)
        tile_codes_reference(codes, order, expected)
        native.tile_codes(stored, order, found, threads=data.draw(st.sampled_from([1, 2])))
        assert torch.equal(found, expected)
    assert isinstance(stored, Tensor) or torch.equal(stored.unpack(), codes)


FORMATS_OF = [
    ("gptq", WeightScheme(4, 32), False), ("gptq", WeightScheme(4, 32), True), ("gptq", WeightScheme(8, -1), False),
    ("gptq", WeightScheme(2, 16), True), ("gptq_v2", WeightScheme(3, 32, symmetric=False), True),
    ("gptq_v2", WeightScheme(4, 64, symmetric=False), False), ("awq", WeightScheme(4, 32, symmetric=False), False),
    ("compressed-tensors", WeightScheme(4, 32), False), ("compressed-tensors", WeightScheme(3, 32, False), False),
    ("compressed-tensors", WeightScheme(8, 32), False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "scheme", "shuffled"), FORMATS_OF)
def test_a_weight_is_tiled_as_it_is_stored(name: str, scheme: WeightScheme, shuffled: bool) -> None:
    """Rows that were chosen, joined and made to alternate; the packed codes are never unpacked on the way."""
    format, ways = FORMATS[name], []
    weights = [make_weight(out, 192, scheme, shuffled=shuffled) for out in (64, 96, 96)]
    weights = [replace(weight, g_idx=weights[0].g_idx) for weight in weights]
    read = [format.unpack(format.pack(weight), scheme) for weight in weights]
    assert all(isinstance(weight.stored, PackedCodes) for weight in read)
    for each in ([replace(weight, stored=weight.stored.unpack()) for weight in read], read):
        joined = concat_rows([take_rows(each[0], torch.arange(64).flip(0)), *each[1:]])
        gated = alternating(concat_rows(each[1:]))
        assert isinstance(gated, QuantizedWeight)
        tile = native.tile_codes if each is read else tile_codes_reference
        ways.append([int_tiles(weight, tile=tile) for weight in (each[0], joined, gated)])
        if each is read:
            assert all(isinstance(weight.stored, PackedCodes) for weight in (*read, joined, gated))
    for bytes_, words in zip(*ways):
        for field in ("weight", "scales", "zeros", "permutation"):
            one, other = getattr(bytes_, field), getattr(words, field)
            assert (one is None and other is None) or torch.equal(one, other)
