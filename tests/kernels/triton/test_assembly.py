"""The lines of assembly in the kernels, read by a small machine of two 16-bit lanes: the interpreter skips them."""

from __future__ import annotations

import operator
import re

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from qserve.checkpoint.trellis import codes_of_states
from qserve.kernels.triton import target, trellis, unpack

pytestmark = pytest.mark.skipif(not target.is_interpreted(), reason="on a GPU the kernels' own tests run it")


def assembly(shift: int, mask: int, magic: int) -> str:
    """The program as ``_field`` writes it for these constants."""
    field = unpack._field
    assert isinstance(field, InterpretedFunction)
    found: list[str] = []

    class Recorder:
        int16 = None
        constexpr = None

        @staticmethod
        def inline_asm_elementwise(text: str, *_: object, **__: object) -> None:
            found.append(text)

    namespace = field.fn.__globals__ | {"tl": Recorder}
    type(field.fn)(field.fn.__code__, namespace)(None, shift, mask, magic, True)
    return found[0]


TWO_OPERANDS = {"and.b32": operator.and_, "add.u32": operator.add, "mul.lo.u32": operator.mul}


def execute(program: str, *inputs: int) -> int:
    """$0 from $1 and so on, of a block of a few instructions (PTX ISA, 9.7.1 and 9.7.8)."""
    registers = {f"${at}": value for at, value in enumerate(inputs, 1)}
    for line in program.strip("{} ").split(";"):
        if (words := re.split(r"[ ,]+", line.strip())) and words[0] == "shr.b32":
            registers[words[1]] = registers[words[2]] >> int(words[3])
        elif words[0] in TWO_OPERANDS:
            a, b = (registers[word] if word in registers else int(word, 0) for word in words[2:4])
            registers[words[1]] = TWO_OPERANDS[words[0]](a, b) % (1 << 32)
        elif words[0] == "prmt.b32":
            assert words[4] == "0x5410"
            registers[words[1]] = registers[words[2]] & 0xFFFF | (registers[words[3]] & 0xFFFF) << 16
        elif words[0] == "lop3.b32":
            a, b, c = (registers[word] if word in registers else int(word) for word in words[2:5])
            table = int(words[5], 16)
            registers[words[1]] = sum(
                (table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)) & 1) << bit for bit in range(32)
            )
        else:
            assert words[0] in ("", ".reg"), line
    return registers["$0"]


FIELDS = [
    *[(shift, mask, 0x6400) for shift in (0, 8) for mask in (0xF, 0xF0, 0xFF)],
    *[(shift, mask, 0) for shift in (0, 8) for mask in (0xF, 0xF0, 0xFF)],
]


@pytest.mark.parametrize(("shift", "mask", "magic"), FIELDS)
def test_two_words_are_unpacked_at_once(shift: int, mask: int, magic: int) -> None:
    program = assembly(shift, mask, magic)
    generator = torch.Generator().manual_seed(shift)
    for word in torch.randint(0, 1 << 32, (200,), generator=generator).tolist():
        low, high = word & 0xFFFF, word >> 16
        wanted = ((low >> shift) & mask | magic) | (((high >> shift) & mask | magic) << 16)
        assert execute(program, word) == wanted


def test_two_windows_are_hashed_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = codes_of_states(torch.arange(1 << 12, dtype=torch.int32)).tolist()
    for state, code in enumerate(codes):
        above, other = torch.randint(0, 1 << 20, (2,), generator=generator).tolist()
        made = execute(trellis._CODES.value, above << 12 | state, other)
        assert made & 0xFF00FF == code | codes[other & 0xFFF] << 16


NAMES = {tl.float16: "float16", tl.bfloat16: "bfloat16"}


class Bits:
    """16-bit words on their way to numbers, in the only way that ``unpack`` turns them into some."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words

    def to(self, dtype: tl.dtype, bitcast: bool) -> torch.Tensor:
        assert bitcast
        return self.words.to(torch.uint16).view(getattr(torch, NAMES[dtype])).double()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", NAMES)
def test_every_field_is_the_number_that_it_is(dtype: tl.dtype, bits: int) -> None:
    """In bfloat16 too, which the interpreter gets wrong: in float64, and whatever is made is a number of that type."""
    unpacked, unit = unpack.unpack, unpack.unit
    assert isinstance(unpacked, InterpretedFunction) and isinstance(unit, InterpretedFunction)
    namespace = unpacked.fn.__globals__ | {
        "_field": lambda word, shift, mask, magic, _: Bits((word >> shift) & mask | magic)
    }
    read = type(unpacked.fn)(unpacked.fn.__code__, namespace)
    words = torch.arange(1 << 16)
    for plane in range(16 // bits):
        for zero in (0, 1, 1 << (bits - 1), (1 << bits) - 1):
            made = read(words, torch.tensor(zero).double(), plane, bits, dtype, True)
            assert torch.equal(made, made.to(getattr(torch, NAMES[dtype])).double())
            assert torch.equal(made * unit.fn(dtype), ((words >> plane * bits) & ((1 << bits) - 1)).double() - zero)
