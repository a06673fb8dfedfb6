"""What can be counted towards the goals of the GPU where none is.

``python docs/notes/gpu-predictions/counted.py`` prints it, from the root of the repository.

The kernels are compiled for sm_90 and the instructions of their loops counted. What a launch needs of an H200 follows:
the seconds in which its memory moves the bytes, its matrix units multiply the tiles, padding included, and the fullest
multiprocessor issues its instructions. Copies run ahead of both. So a launch takes at least the longest of the three,
and about the sum of the last two if unpacking and multiplying take turns; before that it waits for its first bytes, and
parts of K meet after three more such waits. Others are credited with their roofline and one wait. A goal that
even the slower figure reaches is argued for, one that the faster misses is argued against. Nothing here is a time that
anybody measured, and whatever is not named (clocks that fall, lines of the cache that clash) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from waves import CLOCK, LATENCY, MEMORY

from qserve.evals.bench.gpu.kernels import DECODES, HEADS
from qserve.evals.bench.gpu.report import LONG
from qserve.evals.bench.gpu.shapes import SHAPES
from qserve.kernels.triton import dequantize, eight_bit, weight_only
from qserve.kernels.triton.attention import CHUNK, decode_shape, resident, tile_shape
from qserve.kernels.triton.target import DEFAULT
from qserve.kernels.triton.tuning.configs import Config, resolve
from tests.kernels.triton.aot import Case, Compiled, compile_file, loops
from tests.kernels.triton.engine_cases import attention_cases, attention_op
from tests.kernels.triton.linear_cases import eight_bit_case, weight_only_case

SM_90, SMS, SCHEDULERS = DEFAULT, DEFAULT.sms, 4
PRODUCTS = 790e12
"""Operations a second of large products in bf16 on an H200, measured; those of e4m3 have twice the rate."""
MMA_SYNC = 0.5
"""Of the rate of wgmma, that the older instruction has on sm_90: it does in a clock what it did on sm_80."""
MEETING = 3
"""Waits in a row of the parts of K: to store, to count, to load."""
W4 = 0.5 + 2 / 128
"""Bytes of a weight in groups of 128."""
SMALL = [shape for name, shape in SHAPES.items() if name.startswith("8B")]
LARGE = [SHAPES[name] for name in ("70B gate_up", "70B down")]
TILE_ROWS = {"w4": (16, 32, 64), "fp8": (16, 32, 128, 256)}
"""Rows up to which a default configuration is another."""
PUBLISHED = {"gemlite": (1.73, 1.18, 0.89), "Marlin": (2.60, 2.58, 1.86)}
"""Speed-ups over float16 with 1, 16 and 64 rows of 16384 x 16384 on an H100, from gemlite's plots."""
LAYERS, HIDDEN, INNER, KV_HEADS, WIDTH, VOCABULARY = 32, 4096, 14336, 8, 128, 128256
LAYER_KERNELS, OTHER_KERNELS = 10, 6
"""Kernels of a decoded token. A layer: norm, qkv, rotate and store, attend, merge, o, norm, gate and up, SiLU, down.
Besides: fill, embed, gather, norm, head, its largest."""
HEAD = 1 + 2 / 64
"""Bytes of a weight of the output head, int8 in groups of 64."""


@dataclass(frozen=True)
class Span:
    """Seconds at least, and where what may overlap does not."""

    least: float
    most: float

    def __add__(self, other: Span) -> Span:
        return Span(self.least + other.least, self.most + other.most)


def total(spans: Iterable[Span]) -> Span:
    return sum(spans, Span(0.0, 0.0))


def launch(moved: float, issued: float, multiplied: float, waits: int = 1) -> Span:
    """``moved`` bytes by all; warp instructions and operations (at the full rate of bf16) of the fullest
    multiprocessor."""
    memory, issue, matrix = moved / MEMORY, issued / (SCHEDULERS * CLOCK), multiplied / (PRODUCTS / SMS)
    fixed = waits * LATENCY
    return Span(fixed + max(memory, issue, matrix), fixed + max(memory, issue + matrix))


def roofline(moved: float, operations: float, rate: float = PRODUCTS) -> float:
    """Of somebody else's product."""
    return LATENCY + max(moved / MEMORY, operations / rate)


def instructions(made: Compiled) -> int:
    return len(loops(made)[0])


def tiled(found: dict[str, Compiled], kind: str, rows: int, n: int, k: int, invariant: bool = False) -> Span:
    """A product by tiles, with its default configuration, or with the one that fits every number of rows."""
    held = min(rows, 32) if invariant else rows
    key = next((each for each in TILE_ROWS[kind] if held <= each), TILE_ROWS[kind][-1])
    block_k = 256 if kind == "w4" else 128

    def default(rows: int) -> Config:
        plain = kind == "w4"
        if plain:
            return weight_only.default(rows, 4, 128, SM_90, invariant)
        return eight_bit.default(rows, False, SM_90)

    config = resolve(default(held), rows, n, k // block_k, SMS)
    if invariant:
        config = replace(config, splits=resolve(default(1), 1, n, k // block_k, SMS).splits)
    programs = -(-rows // config.block_m) * (n // config.block_n) * config.splits
    blocks = -(-programs // SMS) * -(-(k // block_k) // config.splits)
    rate = (1 if kind == "w4" else 2) * (1 if config.swap or config.block_m > 32 else MMA_SYNC)
    return launch(
        n * k * (W4 if kind == "w4" else 1) + rows * (k * (2 if kind == "w4" else 1) + 2 * n),
        blocks * instructions(found[f"{kind} {key}{' invariant' * (invariant and key == 32)}"]) * config.warps,
        blocks * 2 * config.block_m * config.block_n * block_k / rate,
        1 + MEETING * (config.splits > 1),
    )


def w4(found: dict[str, Compiled], rows: int, n: int, k: int) -> Span:
    if rows < dequantize.FEWEST_ROWS:
        return tiled(found, "w4", rows, n, k)
    seconds = LATENCY + n * k * (W4 + 2) / MEMORY + bf16(rows, n, k)
    return Span(seconds, seconds)


def bf16(rows: int, n: int, k: int) -> float:
    return roofline(2 * n * k + 2 * rows * (n + k), 2 * rows * n * k)


def fp8(rows: int, n: int, k: int) -> float:
    return roofline(n * k + rows * (k + 2 * n), 2 * rows * n * k, 2 * PRODUCTS)


@dataclass(frozen=True)
class Decode:
    """``moved``: bytes of keys and values; ``partial``: of what the first kernel leaves for the second; ``asked``: of
    what is asked for ahead, over those that keep the memory busy; ``issued``: of the time in which the memory moves the
    keys of a unit, the share that a multiprocessor issues its instructions."""

    span: Span
    moved: float
    partial: float
    asked: float
    issued: float


def decode(found: dict[str, Compiled], name: str, batch: int, context: int) -> Decode:
    """``name``: one of the cases of attention."""
    case, bodies = cases()[name], loops(found[name])
    heads, item = HEADS[name.split()[1]], 1 if "fp8" in name else 2
    keys, width = case.constexprs["KEYS"], heads.width
    tasks = batch * -(-context // CHUNK) * heads.keys
    op = attention_op("fp8e4nv" if item == 1 else "bf16", dim=width, heads=heads.queries, kv_heads=heads.keys)
    shape = tile_shape(op, DEFAULT, True) if "invariant" in name else decode_shape(op)
    programs = min(resident(op, shape, DEFAULT.shared_bytes) * SMS, tasks)
    mine = -(-tasks // programs) * -(-programs // SMS)
    inner, outer = len(bodies[0]), len(bodies[-1])
    issued = case.num_warps * (CHUNK // keys * inner + outer - inner)
    moved = batch * context * heads.keys * width * 2 * item
    partial = 2 * tasks * heads.queries // heads.keys * (width + 2) * 4
    multiplied = mine * 4 * case.constexprs["ROWS"] * CHUNK * width
    rate = MMA_SYNC if case.constexprs["ROWS"] <= 32 else 1
    return Decode(
        launch(moved + partial, mine * issued, multiplied / rate, 1 + MEETING), moved, partial,
        programs * (case.num_stages - 1) * keys * width * 2 * item / (MEMORY * LATENCY),
        issued / (SCHEDULERS * CLOCK) / (CHUNK * width * 2 * item / (MEMORY / SMS)),
    )  # fmt: skip


def cases() -> dict[str, Case]:
    found = {f"w4 {rows}": weight_only_case(SM_90, rows, dtype="bf16") for rows in TILE_ROWS["w4"]}
    found["w4 32 invariant"] = weight_only_case(
        SM_90, 32, dtype="bf16", config=weight_only.default(32, 4, 128, SM_90, invariant=True)
    )
    found |= {f"fp8 {rows}": eight_bit_case(SM_90, rows, "fp8e4nv", out="bf16") for rows in TILE_ROWS["fp8"]}
    for model, heads in HEADS.items():
        for cache in ("bf16", "fp8e4nv"):
            for mode in ("", " invariant"):
                made = attention_cases(SM_90, cache, heads=heads.queries, invariant=bool(mode))
                found[f"attention {model} {cache}{mode}"] = made["attention decodes"]
    return found


@dataclass(frozen=True)
class Figure:
    """``low`` where nothing more overlaps, ``high`` where everything does; both are better when higher."""

    name: str
    goal: float
    low: float
    high: float

    @property
    def says(self) -> str:
        if self.low >= self.goal:
            return "argues for it"
        if self.high < self.goal:
            return f"argues against it, unless others take {self.goal / self.high:.2f} times their roofline"
        return f"argues for {self.low:.2f} at least"


def quotient(theirs: float, ours: Span) -> tuple[float, float]:
    return theirs / ours.most, theirs / ours.least


def end_to_end(found: dict[str, Compiled], requests: int, prompt: int = 64, output: int = 128) -> tuple[float, float]:
    """Tokens a second of the 8B model at 4 bits, as ``end_to_end.py`` counts them; Python runs beside."""

    def step(rows: int, attended: Span) -> Span:
        products = total(w4(found, rows, n, k) for n, k in SMALL)
        head = VOCABULARY * HIDDEN * HEAD / MEMORY
        rest = ((LAYER_KERNELS - len(SMALL) - 2) * LAYERS + OTHER_KERNELS) * LATENCY + head
        return total([products, attended] * LAYERS) + Span(rest, rest)

    attended = decode(found, "attention 8B bf16", requests, prompt + output // 2).span
    prefill = step(requests * prompt, Span(0.0, 0.0))  # scores of so few tokens are nothing
    spans = total([prefill, *[step(requests, attended)] * output])
    return requests * output / spans.most, requests * output / spans.least


def figures(found: dict[str, Compiled]) -> list[Figure]:
    made = []
    shares = [(n * k * W4 / MEMORY, tiled(found, "w4", rows, n, k)) for n, k in LARGE for rows in (1, 16)]
    low, high = (min(at) for at in zip(*(quotient(*each) for each in shares)))
    made.append(Figure("W4A16, 70B gate_up and down, 1 and 16 rows: share of the copies' rate", 0.7, low, high))
    for rows, goal in ((1, 2.3), (16, 2.3), (32, 2.0), (64, 1.4), (128, 1.0), (256, 0.9), (512, 0.9), (1024, 0.9),
                       (2048, 0.9)):  # fmt: skip
        ours, theirs = total(w4(found, rows, *shape) for shape in SMALL), sum(bf16(rows, *shape) for shape in SMALL)
        name = f"the four 8B products against bf16, {rows} row{'s' * (rows > 1)}"
        made.append(Figure(name, goal, *quotient(theirs, ours)))
    for name, goal in (("gemlite", 1.3), ("Marlin", 0.8)):
        ratios = []
        for rows, published in zip((1, 16, 64), PUBLISHED[name]):
            low, high = quotient(bf16(rows, 16384, 16384), w4(found, rows, 16384, 16384))
            ratios.append((low / published, high / published))
        mean = [math.prod(each) ** (1 / 3) for each in zip(*ratios)]
        made.append(Figure(f"against {name} as published, 16384 x 16384, 1, 16 and 64 rows: mean", goal, *mean))
        worst = [min(each) for each in zip(*ratios)]
        made.append(Figure(f"against {name} as published: worst", min(goal, 1.0), *worst))
    for rows in (1, 16, 32, 64, 128, 256):
        ours, theirs = total(tiled(found, "fp8", rows, *shape) for shape in SMALL), sum(fp8(rows, *s) for s in SMALL)
        made.append(Figure(f"FP8, the four 8B products against their roofline, {rows} row{'s' * (rows > 1)}", 0.95,
                           *quotient(theirs, ours)))  # fmt: skip
    # Of 256 clocks of adding to 1,024 of multiplying a quarter is beneath products (``persistent``).
    made.append(Figure("FP8 against its roofline, more than 512 rows", 0.95, 1024 / (1024 + 192), 1.0))
    for model in HEADS:
        at = [(decode(found, f"attention {model} fp8e4nv", *each), decode(found, f"attention {model} bf16", *each))
              for each in DECODES]  # fmt: skip
        shares = [quotient(coded.moved / MEMORY, coded.span) for coded, _ in at if coded.moved >= LONG]
        least = [min(each) for each in zip(*shares)]
        name = f"FP8 decode attention, {model}, over {LONG >> 20} MiB or more: least share of the copies' rate"
        made.append(Figure(name, 0.7, *least))
        ratios = [(plain.span.most / coded.span.most, plain.span.least / coded.span.least) for coded, plain in at]
        low, high = (math.prod(each) ** (1 / len(at)) for each in zip(*(sorted(each) for each in ratios)))
        made.append(Figure(f"FP8 decode attention, {model}, against bf16: mean", 1.6, low, high))
    for requests, goal in ((1, 450), (32, 9000)):
        made.append(Figure(f"8B at 4 bits end to end, tokens/s at {requests}", goal, *end_to_end(found, requests)))
    return made


def main() -> None:
    found = compile_file(Path(__file__))
    print("| goal | | least overlap | most | what it says |\n|---|---|---|---|---|")
    for each in figures(found):
        low, high = (f"{value:,.0f}" if value > 100 else f"{value:.2f}" for value in (each.low, each.high))
        print(f"| {each.name} | {each.goal:,g} | {low} | {high} | {each.says} |")
    print("\n| loops for sm_90 | instructions | registers |\n|---|---|---|")
    for name, made in found.items():
        print(f"| {name} | {', '.join(str(len(body)) for body in loops(made))} | {made.registers} |")
    print("\n| decode attention | sequences x context | partial sums | asked ahead | issues |\n|---|---|---|---|---|")
    for model in HEADS:
        for cache in ("bf16", "fp8e4nv"):
            for batch, context in DECODES:
                made = decode(found, f"attention {model} {cache}", batch, context)
                print(f"| {model} {cache} | {batch} x {context} | {made.partial / made.moved:.1%} | "
                      f"{made.asked:.1f}x | {made.issued:.0%} |")  # fmt: skip
    print("\n| what the invariant mode takes longer | least overlap | most |\n|---|---|---|")
    for rows in (1, 16, 32, 64, 128, 256, 1024, 2048):
        fixed = total(tiled(found, "w4", rows, *shape, invariant=True) for shape in SMALL)
        free = total(w4(found, rows, *shape) for shape in SMALL)
        slower = f"{fixed.most / free.most:.2f}x | {fixed.least / free.least:.2f}x"
        print(f"| the four 8B products, {rows} rows | {slower} |")
    for model in HEADS:
        for cache in ("bf16", "fp8e4nv"):
            for batch, context in DECODES:
                fixed, free = (decode(found, f"attention {model} {cache}{mode}", batch, context).span
                               for mode in (" invariant", ""))  # fmt: skip
                print(f"| attention {model} {cache}, {batch} x {context} | {fixed.most / free.most:.2f}x | "
                      f"{fixed.least / free.least:.2f}x |")  # fmt: skip


if __name__ == "__main__":
    main()
