"""The data files of the planner: GPUs, prices and published shapes; and a model by its name, directory or config.json.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.files import read_json
from qserve.evals.planner.family import shape_of
from qserve.evals.planner.shape import ModelShape


@dataclass(frozen=True)
class Price:
    """Dollars, with the source and the date."""

    dollars: float
    source: str
    date: date


@dataclass(frozen=True)
class Gpu:
    """``memory`` in bytes as the driver reports it, ``bandwidth`` and ``link`` (to a neighbour, one direction) in
    bytes per second, ``flops`` dense operations per second by dtype, ``price`` of an hour or None."""

    key: str
    name: str
    memory: int
    bandwidth: float
    link: float
    flops: dict[str, float]
    price: Price | None


@dataclass(frozen=True)
class ApiPrice:
    """Dollars per million prompt tokens and per million output tokens of a service."""

    key: str
    input: float
    output: float
    source: str
    date: date | None

    def per_request(self, prompt: float, output: float) -> float:
        """Dollars of a request with that many tokens."""
        return (self.input * prompt + self.output * output) / 1e6

    def blended(self, prompt: float, output: float) -> float:
        """Dollars per million tokens, prompt and output together, of such requests."""
        return self.per_request(prompt, output) / (prompt + output) * 1e6


def gpus() -> dict[str, Gpu]:
    """Every known GPU, by key."""
    return {
        key: Gpu(
            key=key,
            name=entry["name"],
            memory=entry["memory_mib"] * 2**20,
            bandwidth=entry["bandwidth_gb"] * 1e9,
            link=entry["link_gb"] * 1e9,
            flops={dtype: tera * 1e12 for dtype, tera in entry["tflops"].items()},
            price=Price(**entry["price"]) if "price" in entry else None,
        )
        for key, entry in _table("gpus").items()
    }


def gpu(key: str) -> Gpu:
    """The GPU ``key``. Raises ``UsageError`` that lists the known ones for any other."""
    known = gpus()
    if key.lower() not in known:
        raise UsageError(f"unknown GPU {key!r}: choose from {', '.join(known)}, or all")
    return known[key.lower()]


def api_prices() -> dict[str, ApiPrice]:
    return {key: ApiPrice(key=key, **entry) for key, entry in _table("prices").items()}


def api_price(text: str) -> ApiPrice:
    """A listed service, or ``IN/OUT`` in dollars per million tokens. Raises ``UsageError`` for anything else."""
    known = api_prices()
    if text in known:
        return known[text]
    try:
        given, made = (float(part) for part in text.split("/"))
    except ValueError:
        given = made = -1.0
    if not (0 <= given < 1e6 and 0 < made < 1e6):
        raise UsageError(
            f"an API is one of {', '.join(known)}, or dollars per million tokens as IN/OUT, not {text!r}"
        )
    return ApiPrice(text, given, made, "the command line", None)


def model(text: str) -> ModelShape:
    """The shape of a published model by its name, or of the config.json at or in a path.

    Raises ``CheckpointError`` where neither is there, or the architecture is not known.
    """
    path = Path(text)
    shapes = _table("shapes")
    if text.lower() in shapes and not path.exists():
        return shape_of(shapes[text.lower()], text.lower())
    config = path / "config.json" if path.is_dir() else path
    if not config.exists():
        raise CheckpointError(
            f"{text} is no directory with a config.json, no such file, and no known shape: {', '.join(shapes)}"
        )
    return shape_of(read_json(config), path.resolve().name if path.is_dir() else config.resolve().parent.name)


@cache
def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((files(__package__) / "data" / f"{name}.toml").read_text(encoding="utf-8"))
