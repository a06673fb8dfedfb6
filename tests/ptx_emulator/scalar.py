"""Instructions of one thread (PTX ISA, 9.7.1 to 9.7.9).

Sums and products of 16-bit numbers, and fused ones, are formed in float64, where they are exact or nearly so, and
rounded once. Approximations (``ex2.approx``, ``div.full``, ``rsqrt.approx``) are as exact as numpy's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .lanes import Mask, Operands, Run, State
from .program import SIZES, Instruction

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""The numbers of all codes."""


def bf16_of(values: Any) -> Any:
    """float64 [...] rounded once to the bits of bfloat16, half to even: by way of float32 with its last bit standing
    for all that follow."""
    values = np.asarray(values, np.float64)
    near = values.astype(np.float32)
    bits = near.view(np.uint32)
    inexact = near.astype(np.float64) != values
    over = np.abs(near.astype(np.float64)) > np.abs(values)
    bits = np.where(inexact, (bits - over) | 1, bits).astype(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def number_of(bits: Any, kind: str) -> Any:
    """Halves, and pairs of them as [..., 2] with the lower first, as float64."""
    bits = np.asarray(bits)
    if kind in ("f16x2", "bf16x2"):
        pair = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], -1).astype(np.uint16)
        return number_of(pair, kind[:-2])
    if kind == "bf16":
        return (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return bits.astype(np.float64)


def bits_of(values: Any, kind: str) -> Any:
    """The other way, rounded."""
    if kind in ("f16x2", "bf16x2"):
        pair = np.asarray(bits_of(values, kind[:-2])).view(np.uint16).astype(np.uint32)
        return pair[..., 0] | (pair[..., 1] << np.uint32(16))
    if kind == "bf16":
        return bf16_of(values)
    return np.asarray(values).astype({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind])


def _flush(value: Any) -> Any:
    """Subnormal numbers as zero."""
    return np.where(np.abs(value) < np.float32(2.0**-126), np.copysign(np.float32(0), value), value).astype(np.float32)


def _arithmetic(operate: Callable[..., Any]) -> Callable[[Operands, Instruction], Run]:
    """An instruction whose last part is the type, of all operands and of the result."""

    def lower(names: Operands, instruction: Instruction) -> Run:
        kind = instruction.opcode[-1]
        reads = [names.read(each, kind) for each in instruction.operands[1:]]
        write = names.write(instruction.operands[0])
        halves = kind in ("f16", "bf16", "f16x2", "bf16x2")
        fused = instruction.opcode[0] == "fma"
        flushes = "ftz" in instruction.opcode

        def run(state: State, mask: Mask) -> None:
            values = [read(state) for read in reads]
            if flushes:
                values = [_flush(value) for value in values]
            if halves:
                write(state, bits_of(operate(*(number_of(value, kind) for value in values)), kind), mask)
                return
            if fused:
                values = [value.astype(np.float64) for value in values]
            result = operate(*values)
            if fused:
                result = result.astype(np.float32)
            write(state, _flush(result) if flushes else result, mask)

        return run

    return lower


def _shifted(left: bool) -> Callable[[Operands, Instruction], Run]:
    """``shl`` and ``shr``: what is shifted out of a register is gone."""

    def lower(names: Operands, instruction: Instruction) -> Run:
        kind = instruction.opcode[-1]
        width = 8 * SIZES[kind]
        value, amount = names.read(instruction.operands[1], kind), names.read(instruction.operands[2], "u32")
        write = names.write(instruction.operands[0])

        def run(state: State, mask: Mask) -> None:
            a, by = value(state), amount(state)
            a = np.asarray(a)
            held = np.minimum(by, np.uint32(width - 1)).astype(a.dtype)
            made = a << held if left else a >> held
            write(state, np.where((by < width) | (a.dtype.kind == "i"), made, a.dtype.type(0)), mask)

        return run

    return lower


def _divide(quotient: bool) -> Callable[..., Any]:
    """Toward zero; by zero it is something, as on a GPU."""

    def operate(a: Any, b: Any) -> Any:
        if np.asarray(a).dtype.kind == "f":
            return a / b
        a, b = np.asarray(a), np.asarray(b)
        by = np.where(b == 0, np.ones_like(b), b)
        exact = np.abs(a.astype(np.int64)) // np.abs(by.astype(np.int64))
        signed = np.where((a < 0) != (by < 0), -exact, exact).astype(a.dtype)
        return signed if quotient else (a - signed * by).astype(a.dtype)

    return operate


COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b)) if _floats(a, b) else a != b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "neu": lambda a, b: a != b, "equ": lambda a, b: ~((a < b) | (a > b)), "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b), "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip


def _floats(a: Any, b: Any) -> bool:
    return np.asarray(a).dtype.kind == "f" or np.asarray(b).dtype.kind == "f"


def _setp(names: Operands, instruction: Instruction) -> Run:
    _, compare, kind = instruction.opcode
    a, b = (names.read(each, kind) for each in instruction.operands[1:])
    write = names.write(instruction.operands[0])
    return lambda state, mask: write(state, COMPARE[compare](a(state), b(state)), mask)


def _set(names: Operands, instruction: Instruction) -> Run:
    """1.0 where it is so, of two halves each."""
    _, compare, to, kind = instruction.opcode
    if to != kind or kind not in ("f16x2", "bf16x2"):
        raise NotImplementedError(instruction.text)
    a, b = (names.read(each, kind) for each in instruction.operands[1:])
    write = names.write(instruction.operands[0])

    def run(state: State, mask: Mask) -> None:
        found = COMPARE[compare](number_of(a(state), kind), number_of(b(state), kind))
        write(state, bits_of(found.astype(np.float64), kind), mask)

    return run


def _selp(names: Operands, instruction: Instruction) -> Run:
    kind = instruction.opcode[-1]
    a, b = (names.read(each, kind) for each in instruction.operands[1:3])
    which, write = names.read(instruction.operands[3], "pred"), names.write(instruction.operands[0])
    return lambda state, mask: write(state, np.where(which(state), a(state), b(state)), mask)


def _mov(names: Operands, instruction: Instruction) -> Run:
    kind, (to, source) = instruction.opcode[-1], instruction.operands
    if isinstance(source, tuple):  # halves into a whole, the lower first
        part = f"b{8 * SIZES[kind] // len(source)}"
        reads, write = [names.read(each, part) for each in source], names.write(to)
        width = 8 * SIZES[part]

        def join(state: State, mask: Mask) -> None:
            made: Any = 0
            for at, read in enumerate(reads):
                made = made | (np.asarray(read(state)).astype(np.uint64) << np.uint64(width * at))
            write(state, made.astype(f"u{SIZES[kind]}"), mask)

        return join
    read = names.read(source, kind)
    if isinstance(to, tuple):
        writes = [names.write(each) for each in to]
        width = 8 * SIZES[kind] // len(to)

        def split(state: State, mask: Mask) -> None:
            whole = np.asarray(read(state)).astype(np.uint64)
            for at, write in enumerate(writes):
                write(
                    state,
                    ((whole >> np.uint64(width * at)) & np.uint64((1 << width) - 1)).astype(f"u{width // 8}"),
                    mask,
                )

        return split
    write = names.write(to)
    return lambda state, mask: write(state, read(state), mask)


def _cvt(names: Operands, instruction: Instruction) -> Run:
    parts = instruction.opcode[1:]
    to, source = (each for each in parts if re.fullmatch(r"(b?f|[us]|e4m3x|tf|bf16x|f16x)\d+(x2)?|e4m3x2", each))
    write = names.write(instruction.operands[0])
    reads = [names.read(each, source) for each in instruction.operands[1:]]

    def convert(values: list[Any]) -> Any:
        if to in ("f16x2", "bf16x2") and source == "f32":  # the upper is written first
            return bits_of(np.stack([np.broadcast_to(v, values[0].shape) for v in reversed(values)], -1)
                           .astype(np.float64), to)  # fmt: skip
        if to == "e4m3x2":
            pair = np.stack(np.broadcast_arrays(*reversed(values)), -1)
            codes = torch.from_numpy(np.clip(pair, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            codes = codes.astype(np.uint16)
            return codes[..., 0] | (codes[..., 1] << np.uint16(8))
        (value,) = values
        if source == "e4m3x2":
            pair = np.stack([E4M3[value & np.uint16(0xFF)], E4M3[value >> np.uint16(8)]], -1)
            return bits_of(pair.astype(np.float64), to)
        if to == "tf32":
            bits = value.view(np.uint32)
            return (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)  # rna
        number = number_of(value, source) if source in ("f16", "bf16", "f32", "f64") else np.asarray(value)
        if to in ("f16", "bf16", "f32", "f64"):
            if number.dtype.kind in "iu":
                number = number.astype(np.float64)
            return bits_of(number, to)
        if number.dtype.kind == "f":
            number = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[
                next(each for each in parts if each in ("rzi", "rni", "rmi", "rpi"))
            ](np.nan_to_num(number, nan=0.0))
            least, most = np.iinfo(_integer(to)).min, np.iinfo(_integer(to)).max
            return np.clip(number, least, most).astype(_integer(to))
        return number.astype(_integer(to))

    return lambda state, mask: write(state, convert([read(state) for read in reads]), mask)


def _integer(kind: str) -> Any:
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{SIZES[kind]}")


def _multiply(names: Operands, instruction: Instruction) -> Run:
    """``mul`` and ``mad`` of integers: the lower half, the upper, or all of it."""
    _, part, kind = instruction.opcode
    a, b = (names.read(each, kind) for each in instruction.operands[1:3])
    wide = f"{kind[0]}{2 * int(kind[1:])}" if part == "wide" else kind
    more = names.read(instruction.operands[3], wide) if instruction.opcode[0] == "mad" else None
    write = names.write(instruction.operands[0])

    def run(state: State, mask: Mask) -> None:
        x, y = np.asarray(a(state)), np.asarray(b(state))
        if part == "wide":
            made = x.astype(_integer(wide)) * y.astype(_integer(wide))
        elif part == "hi":
            double = _integer(f"{kind[0]}{2 * int(kind[1:])}")
            made = ((x.astype(double) * y.astype(double)) >> double.type(int(kind[1:]))).astype(x.dtype)
        else:
            made = x * y
        write(state, made if more is None else made + more(state), mask)

    return run


def _prmt(names: Operands, instruction: Instruction) -> Run:
    a, b, which = (names.read(each, "u32") for each in instruction.operands[1:])
    write = names.write(instruction.operands[0])

    def run(state: State, mask: Mask) -> None:
        both = np.asarray(a(state)).astype(np.uint64) | (np.asarray(b(state)).astype(np.uint64) << np.uint64(32))
        select = np.asarray(which(state)).astype(np.uint64)
        made: Any = np.uint64(0)
        for at in range(4):
            digit = (select >> np.uint64(4 * at)) & np.uint64(0xF)
            byte = (both >> ((digit & np.uint64(7)) * np.uint64(8))) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            made = made | (np.where(digit & np.uint64(8), sign, byte) << np.uint64(8 * at))
        write(state, np.asarray(made).astype(np.uint32), mask)

    return run


def _lop3(names: Operands, instruction: Instruction) -> Run:
    a, b, c = (names.read(each, "u32") for each in instruction.operands[1:4])
    table = int(str(instruction.operands[4]), 0)
    write = names.write(instruction.operands[0])

    def run(state: State, mask: Mask) -> None:
        x, y, z = a(state), b(state), c(state)
        made: Any = np.uint32(0)
        for at in range(8):
            if table >> at & 1:
                made = made | ((x if at & 4 else ~x) & (y if at & 2 else ~y) & (z if at & 1 else ~z))
        write(state, made, mask)

    return run


def _funnel(names: Operands, instruction: Instruction) -> Run:
    _, side, _, _ = instruction.opcode
    low, high, by = (names.read(each, "u32") for each in instruction.operands[1:])
    write = names.write(instruction.operands[0])

    def run(state: State, mask: Mask) -> None:
        both = np.asarray(low(state)).astype(np.uint64) | (np.asarray(high(state)).astype(np.uint64) << np.uint64(32))
        amount = (np.asarray(by(state)) & np.uint32(31)).astype(np.uint64)
        made = (both << amount) >> np.uint64(32) if side == "l" else both >> amount
        write(state, (made & np.uint64(0xFFFFFFFF)).astype(np.uint32), mask)

    return run


def _extract(names: Operands, instruction: Instruction) -> Run:
    """``bfe`` of 32 bits."""
    signed = instruction.opcode[-1] == "s32"
    a, begin, length = (names.read(each, "u32") for each in instruction.operands[1:])
    write = names.write(instruction.operands[0])

    def run(state: State, mask: Mask) -> None:
        first, count = np.asarray(begin(state)).astype(np.int64), np.asarray(length(state)).astype(np.int64)
        value = np.asarray(a(state)).astype(np.int64) >> np.minimum(first, 32)
        value &= (np.int64(1) << np.minimum(count, 32)) - 1
        if signed:
            sign = (value >> np.maximum(count - 1, 0)) & 1
            value = np.where((sign == 1) & (count > 0), value - (np.int64(1) << np.minimum(count, 32)), value)
        write(state, (value & 0xFFFFFFFF).astype(np.uint32), mask)

    return run


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "fma": lambda a, b, c: a * b + c,
    "div": _divide(True), "rem": _divide(False), "neg": lambda a: -a, "abs": np.abs, "not": lambda a: ~a,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "ex2": np.exp2, "lg2": np.log2, "rsqrt": lambda a: np.float32(1) / np.sqrt(a), "sqrt": np.sqrt,
    "rcp": lambda a: np.float32(1) / a, "tanh": np.tanh,
}  # fmt: skip


def _extreme(names: Operands, instruction: Instruction) -> Run:
    """``max`` and ``min``: of a number and NaN the number, unless NaN is asked for. With ``xorsign`` of their sizes,
    with the sign of the product."""
    largest = instruction.opcode[0] == "max"
    if "NaN" in instruction.opcode or instruction.opcode[-1][0] != "f":
        chosen: Any = np.maximum if largest else np.minimum
    else:
        chosen = np.fmax if largest else np.fmin
    if "xorsign" not in instruction.opcode:
        return _arithmetic(chosen)(names, instruction)
    one = np.float32(1)
    signed = _arithmetic(
        lambda a, b: np.copysign(chosen(np.abs(a), np.abs(b)), np.copysign(one, a) * np.copysign(one, b))
    )
    return signed(names, instruction)


def _product(names: Operands, instruction: Instruction) -> Run:
    if instruction.opcode[1] in ("lo", "hi", "wide"):
        return _multiply(names, instruction)
    return _arithmetic(lambda a, b: a * b)(names, instruction)


def _space(instruction: Instruction) -> tuple[str, str]:
    """Which memory, and the type of what moves."""
    if instruction.opcode[1] not in ("global", "shared", "param"):
        raise NotImplementedError(instruction.text)
    return instruction.opcode[1], instruction.opcode[-1]


def _ld(names: Operands, instruction: Instruction) -> Run:
    space, kind = _space(instruction)
    to, source = instruction.operands
    writes = [names.write(each) for each in (to if isinstance(to, tuple) else (to,))]
    signed = np.dtype(_integer(kind)) if kind[0] == "s" else None
    if space == "param":
        parameter = names.parameter(source)
        size = SIZES[kind]

        def constant(state: State, mask: Mask) -> None:
            value = np.frombuffer(state.parameters[parameter.name][:size], f"u{size}")[0]
            if signed is not None and names.kind(to) == "b64":
                value = value.view(signed).astype(np.int64)
            writes[0](state, value, mask)

        return constant
    unit, count = SIZES[kind], len(writes)
    address = names.address(source, "u32" if space == "shared" else "u64")

    def run(state: State, mask: Mask) -> None:
        if space == "shared":
            if mask is None:
                values = state.shared.load(address(state), state.program, unit, count)
            else:
                values = np.zeros((state.lanes, count), f"u{unit}")
                values[mask] = state.shared.load(address(state)[mask], state.program[mask], unit, count)
        else:
            values = state.memory.load(address(state), mask, unit, count)
        for at, write in enumerate(writes):
            write(state, np.ascontiguousarray(values[:, at]), mask)

    return run


def _st(names: Operands, instruction: Instruction) -> Run:
    space, kind = _space(instruction)
    to, source = instruction.operands
    unit = SIZES[kind]
    reads = [names.read(each, kind) for each in (source if isinstance(source, tuple) else (source,))]
    address = names.address(to, "u32" if space == "shared" else "u64")

    def run(state: State, mask: Mask) -> None:
        values = np.stack([np.broadcast_to(read(state), (state.lanes,)) for read in reads], -1).view(f"u{unit}")
        if space != "shared":
            state.memory.store(address(state), mask, values)
        elif mask is None:
            state.shared.store(address(state), state.program, values)
        else:
            state.shared.store(address(state)[mask], state.program[mask], values[mask])

    return run


def _atom(names: Operands, instruction: Instruction) -> Run:
    """One lane after another, in their order."""
    operation, kind = instruction.opcode[-2:]
    if operation not in ("add", "inc", "max", "min", "exch"):
        raise NotImplementedError(instruction.text)
    operate = {"add": lambda a, b: a + b, "max": max, "min": min, "exch": lambda a, b: b}[operation]
    address, amount = names.address(instruction.operands[1]), names.read(instruction.operands[2], kind)
    write = names.write(instruction.operands[0])

    def run(state: State, mask: Mask) -> None:
        at, values = address(state), np.broadcast_to(amount(state), (state.lanes,))
        out = np.zeros(state.lanes, f"u{SIZES[kind]}")
        for lane in np.flatnonzero(np.ones(state.lanes, bool) if mask is None else mask):
            one = np.zeros(state.lanes, bool)
            one[lane] = True
            old = state.memory.load(at, one, SIZES[kind], 1)
            out[lane] = old[lane, 0]
            changed = old.copy()
            changed[lane, 0] = operate(old[lane, 0], values[lane])
            state.memory.store(at, one, changed)
        write(state, out, mask)

    return run


def _cvta(names: Operands, instruction: Instruction) -> Run:
    read, write = names.read(instruction.operands[1], "u64"), names.write(instruction.operands[0])
    return lambda state, mask: write(state, read(state), mask)


LOWER: dict[str, Callable[[Operands, Instruction], Run]] = {
    **{name: _arithmetic(operate) for name, operate in ARITHMETIC.items()},
    "shl": _shifted(True), "shr": _shifted(False), "shf": _funnel, "set": _set, "setp": _setp, "selp": _selp,
    "mov": _mov, "cvt": _cvt, "mul": _product, "mad": _multiply, "prmt": _prmt, "lop3": _lop3, "bfe": _extract,
    "max": _extreme, "min": _extreme, "ld": _ld, "st": _st, "atom": _atom, "cvta": _cvta,
}  # fmt: skip
