"""How a kernel divides its work: the possible configurations, and the number of parts into which K is split.

Measured configurations are in ``tuned``; the safe default of each kernel is in the kernel's file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

BUCKETS = (16, 32, 64, 128, 256, 512, 1 << 30)
"""The largest number of rows that each configuration serves."""
FOR_MANY = ("persistent", "scaled_mm", "dequantize")
"""Kernels for more rows than a decode has, beside "tiles", which computes any number of them: a persistent product of
8-bit operands, that of cuBLAS, and dequantizing a weight before cuBLAS multiplies by it."""
TILE_SIDES = (16, 256)
"""The least that a matrix unit takes, and the most that registers hold."""
MAX_SPLITS = 16
SPLIT_ROWS = 256
"""The most rows that a launch with a split K has: it bounds the workspace of partial sums."""
_FILL = 2  # blocks' worth of overhead of a program: filling its pipeline, writing its part


@dataclass(frozen=True)
class Config:
    """Tiles and threads of one launch. ``splits`` of K; 0 lets the size of the product decide. ``kernel``: "tiles" or
    one of ``FOR_MANY``."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    swap: bool = False
    splits: int = 0
    kernel: str = "tiles"

    def fault(self) -> str | None:
        """Why no kernel can be launched with this, or None."""
        sides = [("block_m", self.block_m, TILE_SIDES), ("block_n", self.block_n, TILE_SIDES)]
        for name, value, (least, most) in (*sides, ("warps", self.warps, (1, 16))):
            if not least <= value <= most or value & (value - 1):
                return f"{name} must be a power of two from {least} to {most}, not {value}"
        for name, value, most in (("stages", self.stages, 8), ("splits", self.splits, 2 * MAX_SPLITS)):
            if not (name == "stages") <= value <= most:
                return f"{name} must be at most {most}, not {value}"
        if self.kernel not in ("tiles", *FOR_MANY):
            return f"there is no kernel {self.kernel!r}"
        return None


def bucket_of(rows: int) -> int:
    return next(bucket for bucket in BUCKETS if rows <= bucket)


def splits(tiles: int, blocks: int, sms: int) -> int:
    """Parts of K for ``tiles`` tiles of ``blocks`` steps, so that the last wave of programs is nearly full.

    Two programs share a multiprocessor. The time is the sum of the waves; each takes as long as a part with overhead.
    """
    slots = 2 * sms
    choices = range(1, max(2, min(MAX_SPLITS, blocks // 2) + 1))
    return min(choices, key=lambda count: (-(-tiles * count // slots) * (-(-blocks // count) + _FILL), count))


def resolve(config: Config, rows: int, padded_n: int, blocks: int, sms: int) -> Config:
    """``config`` with its splits decided, for at most ``rows`` rows."""
    if config.splits:
        return config
    tiles = -(-rows // config.block_m) * (padded_n // config.block_n)
    return replace(config, splits=splits(tiles, blocks, sms))
