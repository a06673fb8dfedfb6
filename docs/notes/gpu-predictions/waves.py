"""What the parts of K leave idle, of decodes of 4-bit weights.

``python docs/notes/gpu-predictions/waves.py`` prints it.

A GPU runs so many programs at a time (``slots``); where their number is no multiple of it, slots of the last wave are
empty. That is lost time only where the programs that are left cannot keep the memory busy: they must have asked for
enough bytes ahead (Little's law), and the multiprocessor with the most of them must issue their instructions in time.
"""

from __future__ import annotations

from dataclasses import dataclass

from qserve.kernels.triton import weight_only
from qserve.kernels.triton.prepack import _shape
from qserve.kernels.triton.target import DEFAULT
from qserve.kernels.triton.tuning.configs import resolve

SHAPES = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (28672, 4096), "8B down": (4096, 14336),
    "70B qkv": (10240, 8192), "70B o": (8192, 8192), "70B gate_up": (57344, 8192), "70B down": (8192, 28672),
}  # fmt: skip
"""(outputs, inputs) of Llama 3."""
MEMORY = 4.3e12
"""Bytes a second of an H200, measured."""
LATENCY = 0.8e-6
"""Seconds from asking for bytes to having them, while the memory is busy."""
CLOCK = 1.755e9
PER_BYTE = 518 / 128
"""Instructions of a thread for a byte of weights in bfloat16, of those that it has in a block of them; counted, and 516
in float16 (``test_words_are_unpacked_where_they_are_multiplied``)."""
_LANES = 128  # that issue an instruction in a clock, on a multiprocessor
_RESIDENT = 2  # programs on a multiprocessor


@dataclass(frozen=True)
class Waves:
    """Of one product. ``idle``: the share of all slots' time that is empty; ``asked``: bytes that the programs of the
    last wave have asked for, over those that keep the memory busy; ``busiest``: of the time in which the memory gives
    a multiprocessor with two of them its bytes, the share that it issues instructions; ``sums``: bytes of partial sums
    that are written and read, over those of the weight."""

    programs: int
    splits: int
    waves: int
    idle: float
    asked: float
    busiest: float
    sums: float


def waves(n: int, k: int, rows: int, group: int = 128) -> Waves:
    """Of [n, k] in 4 bits with ``rows`` rows at most, by the default configuration on an H200."""
    size = _shape(group, k // group, k, 4)[0]
    blocks, bytes_of_block = -(-k // (4 * size)), size * 2 * 128
    config = weight_only.default(rows, 4, group, DEFAULT)
    config = resolve(config, rows, n, blocks, DEFAULT.sms)
    tiles, slots = n // config.block_n, _RESIDENT * DEFAULT.sms
    programs = tiles * config.splits
    count, part = -(-programs // slots), -(-blocks // config.splits)
    last = programs - (count - 1) * slots
    ahead = min(config.stages - 1, part) * bytes_of_block
    share = min(last, _RESIDENT) / last * MEMORY  # of the memory, that the fullest multiprocessor has
    return Waves(
        programs, config.splits, count,
        idle=1 - tiles * blocks / (count * slots * part),
        asked=last * ahead / (MEMORY * LATENCY),
        busiest=share * PER_BYTE / (_LANES * CLOCK),
        sums=2 * config.splits * rows * n * 4 / (n * k / 2) if config.splits > 1 else 0.0,
    )  # fmt: skip


def main() -> None:
    print("product        rows programs splits waves  idle slots  asked ahead  busiest issues  partial sums")
    for name, (n, k) in SHAPES.items():
        for rows in (1, 16):
            made = waves(n, k, rows)
            print(f"{name:12} {rows:6} {made.programs:8} {made.splits:6} {made.waves:5} {made.idle:11.1%} "
                  f"{made.asked:11.1f}x {made.busiest:14.0%} {made.sums:13.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
