"""How a kernel divides its work: safe defaults in code, and measured configurations per GPU and Triton version.

Measured ones are JSON files under ``data``, written by ``tune``; what a file does not name has the default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import triton

from qserve.kernels.triton.target import Target

DATA = Path(__file__).parent / "data"
BUCKETS = (16, 32, 64, 128, 256, 1024, 1 << 30)
"""The most rows that each configuration is for."""
MAX_SPLITS = 16
SPLIT_ROWS = 256
"""The most rows that a launch with a split K has: it bounds the workspace of partial sums."""
_FILL = 2  # blocks that a program costs besides its own: filling its pipeline, writing its part


@dataclass(frozen=True)
class Config:
    """Tiles and threads of one launch. ``splits`` of K: 0 where the size of the product decides. ``kernel``: "tiles" is
    what computes any number of rows; for many there are "persistent" (8-bit inputs) and "dequantize" (16-bit ones)."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    swap: bool = False
    splits: int = 0
    kernel: str = "tiles"


def bucket_of(rows: int) -> int:
    return next(bucket for bucket in BUCKETS if rows <= bucket)


def splits(tiles: int, blocks: int, sms: int) -> int:
    """Parts of K for ``tiles`` tiles of ``blocks`` steps, so that the last wave of programs is nearly full.

    Two programs share a multiprocessor. The time is that of the waves, each as long as a part and its overhead.
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


def file_of(target: Target) -> Path:
    """Where the measured configurations of a GPU are, for this Triton."""
    name = re.sub(r"[^a-z0-9]+", "-", target.name.lower()).strip("-")
    version = ".".join(triton.__version__.split(".")[:2])
    return DATA / f"{name}-triton-{version}.json"


@lru_cache
def _measured(path: Path) -> dict[str, dict[str, Config]]:
    if not path.exists():
        return {}
    entries = json.loads(path.read_text())["entries"]
    return {key: {rows: Config(**config) for rows, config in found.items()} for key, found in entries.items()}


@lru_cache
def left_out(path: Path) -> frozenset[str]:
    """The kernels for many rows that a GPU's data keep from being used there: ``"left_out": ["persistent"]``."""
    return frozenset(json.loads(path.read_text()).get("left_out", ())) if path.exists() else frozenset()


def choose(
    key: str, rows: int, target: Target, default: Callable[[int], Config], fits: Callable[[Config], bool]
) -> Config:
    """The configuration of ``key`` for ``rows`` rows: measured where there is one that fits, else the default."""
    found = _measured(file_of(target)).get(key, {}).get(str(bucket_of(rows)))
    if found is not None and fits(found) and found.kernel not in left_out(file_of(target)):
        return found
    return default(rows)
