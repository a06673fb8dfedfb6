"""Fields of 16-bit words as numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _field(word, SHIFT: tl.constexpr, MASK: tl.constexpr, MAGIC: tl.constexpr, PTX: tl.constexpr):
    """(word >> SHIFT) & MASK | MAGIC.

    Compilers take 16-bit words one by one. Here a 32-bit register holds two: the mask removes what the shift moves from
    the upper word into the lower. The interpreter cannot run assembly.
    """
    if PTX:
        ASM: tl.constexpr = (
            f"{{ .reg .b32 t; shr.b32 t, $1, {SHIFT}; lop3.b32 $0, t, {MASK * 0x10001}, {MAGIC * 0x10001}, 0xEA; }}"
        )
        return tl.inline_asm_elementwise(ASM, "=r,r", [word], dtype=tl.int16, is_pure=True, pack=2)
    else:
        return ((word >> SHIFT) & MASK) | MAGIC


@triton.jit
def unpack(word, zero, PLANE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Field PLANE of each 16-bit word less its zero point, in DTYPE, in units of ``unit``, exactly.

    Nothing is converted from integers, which is several times slower. In float16 the field lies under the bits of 1024,
    whose last place is one; a field that is not shifted counts 16 times. In bfloat16, whose last place has seven bits
    above it, a bare field is a subnormal number or the next above them: its value times 2**-133, for up to 8 bits.
    """
    if tl.float16 == DTYPE:
        if BITS == 4 and PLANE % 2 == 1:
            high = _field(word, PLANE * 4 - 4, 0xF0, 0x6400, PTX).to(tl.float16, bitcast=True)
            return high * 0.0625 - (zero + 64.0)
        else:
            return _field(word, PLANE * BITS, (1 << BITS) - 1, 0x6400, PTX).to(tl.float16, bitcast=True) - (
                zero + 1024.0
            )
    elif tl.bfloat16 == DTYPE:
        # Every second 4-bit field stays where it is and counts 16 times.
        SHIFT: tl.constexpr = PLANE * BITS // 8 * 8
        PLACE: tl.constexpr = PLANE * BITS % 8
        field = _field(word, SHIFT, ((1 << BITS) - 1) << PLACE, 0, PTX).to(tl.bfloat16, bitcast=True)
        return field * 2.0 ** (127 - PLACE) - zero * 0.015625
    else:
        return ((word >> (PLANE * BITS)) & ((1 << BITS) - 1)).to(tl.float32) - zero


@triton.jit
def e2m1(word, PLANE: tl.constexpr, DTYPE: tl.constexpr):
    """Field PLANE of each 16-bit word as an e2m1 number in DTYPE.

    Its bits are moved to where DTYPE has them. That is the number, subnormals included, times a power of two: the
    difference of the exponents' biases.
    """
    if tl.bfloat16 == DTYPE:
        return (_moved(word, PLANE, 6)).to(tl.bfloat16, bitcast=True) * 2.0**126
    else:
        return ((_moved(word, PLANE, 9)).to(tl.float16, bitcast=True) * 16384.0).to(DTYPE)


@triton.jit
def _moved(word, PLANE: tl.constexpr, PLACE: tl.constexpr):
    """The sign of field PLANE as bit 15, its other three bits from PLACE on."""
    sign = (word << (12 - 4 * PLANE)) & -0x8000
    if PLACE >= 4 * PLANE:
        return sign | ((word << (PLACE - 4 * PLANE)) & (7 << PLACE))
    else:
        return sign | ((word >> (4 * PLANE - PLACE)) & (7 << PLACE))


@triton.jit
def unit(DTYPE: tl.constexpr):
    """The value of one in numbers of ``unpack``: no bfloat16 is large enough to bring a subnormal number to one."""
    return 64.0 if tl.bfloat16 == DTYPE else 1.0


@triton.jit
def half(word, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """The 16-bit number in one half of a 32-bit word."""
    return (word >> (16 * HIGH)).to(tl.int16).to(DTYPE, bitcast=True)
