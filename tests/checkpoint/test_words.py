from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.checkpoint.grid import INTEGERS
from qserve.checkpoint.words import pack_words, period, unpack_words, words_for


def slow_words(values: list[int], bits: int) -> list[int]:
    """The specification as one long little-endian integer, cut into signed 32-bit words."""
    number = sum(value << (bits * i) for i, value in enumerate(values))
    words = [(number >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(values) * bits // 32))]
    return [word - (1 << 32) if word >> 31 else word for word in words]


@pytest.mark.parametrize("bits", INTEGERS.bits)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_words_are_a_little_endian_bit_stream(bits: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=1, max_size=100))
    packed = pack_words(torch.tensor([values], dtype=torch.uint8), bits)
    assert packed.dtype == torch.int32 and packed.shape == (1, words_for(len(values), bits))
    assert packed[0].tolist() == slow_words(values, bits)
    assert unpack_words(packed, bits, len(values))[0].tolist() == values


def test_rows_are_independent() -> None:
    values = torch.randint(0, 64, (37, 5), dtype=torch.uint8).t()
    packed = pack_words(values, 6)
    assert packed.shape == (5, 7)
    assert all(packed[j].tolist() == slow_words(values[j].tolist(), 6) for j in range(5))
    assert torch.equal(unpack_words(packed, 6, 37), values)


def test_periods() -> None:
    assert {bits: period(bits) for bits in INTEGERS.bits} == {
        2: (16, 1), 3: (32, 3), 4: (8, 1), 5: (32, 5), 6: (16, 3), 8: (4, 1)
    }  # fmt: skip
