"""Fields of 16-bit words as the numbers that they are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _field(word, SHIFT: tl.constexpr, MASK: tl.constexpr, MAGIC: tl.constexpr, COMPILED: tl.constexpr):
    """(word >> SHIFT) & MASK | MAGIC.

    Compilers take 16-bit words one by one. Here a register of 32 bits holds two, for what the shift moves from the
    upper to the lower is masked. The interpreter knows no assembly.
    """
    if COMPILED:
        ASM: tl.constexpr = (
            f"{{ .reg .b32 t; shr.b32 t, $1, {SHIFT}; lop3.b32 $0, t, {MASK * 0x10001}, {MAGIC * 0x10001}, 0xEA; }}"
        )
        return tl.inline_asm_elementwise(ASM, "=r,r", [word], dtype=tl.int16, is_pure=True, pack=2)
    else:
        return ((word >> SHIFT) & MASK) | MAGIC


@triton.jit
def unpack(word, zero, PLANE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Field PLANE of each 16-bit word less its zero point, in DTYPE, exactly.

    The bits of a power of two whose last place is worth one or less are put over the field, so that a subtraction
    replaces the conversion from integers, which is several times slower: 1024 in float16, where a field that is not
    shifted counts 16, and 128 in bfloat16, whose seven bits an 8-bit field exceeds: its highest bit is apart.
    """
    if tl.float16 == DTYPE:
        if BITS == 4 and PLANE % 2 == 1:
            high = _field(word, PLANE * 4 - 4, 0xF0, 0x6400, COMPILED).to(tl.float16, bitcast=True)
            return high * 0.0625 - (zero + 64.0)
        else:
            return _field(word, PLANE * BITS, (1 << BITS) - 1, 0x6400, COMPILED).to(tl.float16, bitcast=True) - (
                zero + 1024.0
            )
    elif tl.bfloat16 == DTYPE:
        if BITS == 4:
            return _field(word, PLANE * 4, 0xF, 0x4300, COMPILED).to(tl.bfloat16, bitcast=True) - (zero + 128.0)
        else:
            low = _field(word, PLANE * 8, 0x7F, 0x4300, COMPILED).to(tl.bfloat16, bitcast=True)
            high = _field(word, PLANE * 8, 0x80, 0x4300, COMPILED).to(tl.bfloat16, bitcast=True)
            return (low - 256.0) + (high - zero)
    else:
        return ((word >> (PLANE * BITS)) & ((1 << BITS) - 1)).to(tl.float32) - zero


@triton.jit
def half(word, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """The 16-bit number in one half of a 32-bit word."""
    return (word >> (16 * HIGH)).to(tl.int16).to(DTYPE, bitcast=True)
