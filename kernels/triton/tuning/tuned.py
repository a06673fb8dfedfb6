"""Measured configurations: a JSON file for each GPU and version of Triton, and which one is in use.

Those in ``data`` are shipped; ``qserve bench kernels --device cuda --tune`` makes them. A GPU for which there is none
goes by that of another with the same architecture and as many multiprocessors. Products that no file names have the
default of their kernel. If a file cannot be used, all have it: that is a line to show, never an error.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import triton

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import read_json_object, write_atomically
from qserve.kernels.triton.target import Target
from qserve.kernels.triton.tuning.configs import BUCKETS, FOR_MANY, Config, bucket_of

DATA = Path(__file__).parent / "data"
_MOST = "more"  # the name of the last bucket in a file
_TEXTS = ("gpu", "architecture", "triton", "torch", "kernels", "command", "date")


@dataclass(frozen=True)
class Measured:
    """The best of the configurations that were timed, with its time, and the time of the one before it (say the
    default) in the same minute."""

    config: Config
    microseconds: float
    before_microseconds: float


Entries = dict[str, dict[int, Measured]]
"""By the key of a product and the bucket of its rows."""


@dataclass(frozen=True)
class TunedFile:
    """``architecture`` and ``sms``: as ``Target`` has them. ``kernels``: the hash of their source. ``command`` made the
    file; ``date`` is the day, in UTC. ``left_out``: kernels for many rows (``FOR_MANY``) that are never used on this
    GPU; written by hand, as a way back."""

    gpu: str
    architecture: str
    sms: int
    triton: str
    torch: str
    kernels: str
    command: str
    date: str
    entries: Entries = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Raises ``CheckpointError`` where the file cannot be written."""
        content = asdict(self) | {
            "entries": {
                key: {_MOST if rows == BUCKETS[-1] else str(rows): asdict(each) for rows, each in found.items()}
                for key, found in self.entries.items()
            }
        }
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())

    @property
    def count(self) -> int:
        return sum(map(len, self.entries.values()))


def begin(target: Target, command: str) -> TunedFile:
    """An empty file for what is measured now."""
    today = datetime.now(UTC).date().isoformat()
    gpu = target.name, target.architecture, target.sms
    return TunedFile(*gpu, triton.__version__, torch.__version__, kernels_hash(), command, today)


def resume(path: Path, target: Target, command: str) -> TunedFile:
    """The content of ``path``, to add to, if it is for this GPU, Triton and source; else an empty file."""
    new = begin(target, command)
    try:
        held = read(path, target)
    except CheckpointError:
        return new
    return replace(new, entries=held.entries if held.kernels == new.kernels else {}, left_out=held.left_out)


_PACKAGE = "qserve.kernels.triton"
PRODUCTS = ("weight_only", "eight_bit")
"""The modules of the products that have configurations."""


@lru_cache
def kernels_hash() -> str:
    """The hash of the source of ``kernels``: after a change, an older measurement need not be the best any more."""
    return sha256("".join(kernels().values()).encode()).hexdigest()[:12]


def kernels() -> dict[str, str]:
    """The source of every function of Triton's that ``PRODUCTS`` and what they import define, by module and name.

    Read from the files: the modules of the products import this one, and an interpreted kernel has the same source."""
    found: dict[str, str] = {}
    waiting, seen = list(PRODUCTS), set(PRODUCTS)
    while waiting:
        module = waiting.pop()
        source = (Path(__file__).parents[1] / f"{module}.py").read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                lines = source.splitlines(keepends=True)[node.decorator_list[0].lineno - 1 : node.end_lineno]
                if lines[0].startswith("@triton.jit"):
                    found[f"{module}.{node.name}"] = "".join(lines)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                new = {name for name in _modules(node) if name not in seen}
                seen |= new
                waiting += new
    return dict(sorted(found.items()))


def _modules(node: ast.ImportFrom) -> Iterator[str]:
    """The modules beside the kernels that a line imports; not those of folders."""
    if node.module == _PACKAGE:
        yield from (alias.name for alias in node.names)
    elif node.module is not None and node.module.rpartition(".")[0] == _PACKAGE:
        yield node.module.rpartition(".")[2]


def file_of(target: Target, folder: Path) -> Path:
    """The file in ``folder`` with the measured configurations of a GPU for this Triton."""
    name = re.sub(r"[^a-z0-9]+", "-", target.name.lower()).strip("-")
    return folder / f"{name}-triton-{_minor(triton.__version__)}.json"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def read(path: Path, target: Target) -> TunedFile:
    """A file for this GPU and Triton. Raises ``CheckpointError`` where it is missing, damaged, for another GPU or
    Triton, or names what cannot be."""
    try:
        made = _parse(read_json_object(path))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if (made.gpu, _minor(made.triton)) != (target.name, _minor(triton.__version__)):
        raise CheckpointError(f"{path} was measured on {made.gpu} with Triton {made.triton}")
    return made


def _parse(content: dict[str, Any]) -> TunedFile:
    _require_names("the file", content, TunedFile)
    for name in _TEXTS:
        if not isinstance(content[name], str):
            raise ValueError(f"{name} must be a text")
    entries: Entries = {}
    for key, found in _mapping("entries", content["entries"]).items():
        entries[key] = {}
        for rows, each in _mapping(key, found).items():
            bucket = BUCKETS[-1] if rows == _MOST else int(rows) if rows.isdigit() else 0
            if bucket not in BUCKETS:
                raise ValueError(f"{key}: {rows!r} is no bucket of rows")
            entries[key][bucket] = _measured(f"{key}, {rows} rows", _mapping(key, each))
    if type(content["sms"]) is not int:
        raise ValueError("sms must be a number")
    left_out = content["left_out"]
    if not isinstance(left_out, list) or not all(name in FOR_MANY for name in left_out):
        raise ValueError(f"left_out must be a list of some of {', '.join(FOR_MANY)}")
    texts = {name: content[name] for name in _TEXTS}
    return TunedFile(**texts, sms=content["sms"], entries=entries, left_out=left_out)


def _measured(where: str, content: dict[str, Any]) -> Measured:
    _require_names(where, content, Measured)
    values = _mapping(where, content["config"])
    _require_names(where, values, Config)
    for each in fields(Config):
        if type(values[each.name]).__name__ != each.type:
            raise ValueError(f"{where}: {each.name} must be of type {each.type}")
    config = Config(**values)
    if fault := config.fault() or ("" if config.splits else "splits must be at least 1"):
        raise ValueError(f"{where}: {fault}")
    times = [content[name] for name in ("microseconds", "before_microseconds")]
    if not all(isinstance(each, int | float) and 0 < each < math.inf for each in times):
        raise ValueError(f"{where}: a time must be a positive number")
    return Measured(config, *times)


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object")
    return value


def _require_names(where: str, content: dict[str, Any], of: type) -> None:
    names = {each.name for each in fields(of)}
    if unknown := sorted(content.keys() - names):
        raise ValueError(f"{where} has the unknown field {unknown[0]!r}")
    if absent := sorted(names - content.keys()):
        raise ValueError(f"{where} lacks {absent[0]!r}")


@dataclass(frozen=True)
class InUse:
    """The configurations that a GPU's products use. ``reason``: why no file is used, or empty; ``refused``: entries of
    the file that cannot be used here, with the reason. ``is_borrowed``: it is of another GPU, or another Triton."""

    path: Path
    reason: str
    file: TunedFile | None = None
    is_borrowed: bool = False
    refused: dict[tuple[str, int], str] = field(default_factory=dict)

    def find(self, key: str, rows: int) -> Config | None:
        """What was measured in bfloat16 is used for float16, too, whose numbers are as large."""
        entries = {} if self.file is None else self.file.entries
        found: Mapping[int, Measured] = entries.get(key) or entries.get(key.replace(" float16 ", " bfloat16 "), {})
        bucket = bucket_of(rows)
        return found[bucket].config if bucket in found and (key, bucket) not in self.refused else None

    def lines(self) -> list[str]:
        """The state for people."""
        if self.file is None:
            return [f"defaults: {self.reason}"]
        other = "" if self.file.kernels == kernels_hash() else ", of an earlier version of the kernels"
        where = f", on {self.file.gpu} with Triton {self.file.triton}" if self.is_borrowed else ""
        name = f"{self.path.name}{other}"
        first = f"{self.file.count} measured on {self.file.date}{where} ({name}); defaults for the others"
        return [first, *(f"not used: {key}, {_up_to(rows)}: {why}" for (key, rows), why in self.refused.items())]


def _up_to(bucket: int) -> str:
    return "any rows" if bucket == BUCKETS[-1] else f"up to {bucket} rows"


@lru_cache
def in_use(target: Target) -> InUse:
    """The configurations shipped for a GPU, or for one like it, or the defaults and the reason."""
    path = file_of(target, DATA)
    if not path.exists():
        alike = {other: file for other in DATA.glob("*.json") if (file := _alike(other, target)) is not None}
        if not alike:
            return InUse(path, f"nothing was measured on {target.name} with Triton {_minor(triton.__version__)}")
        best = max(alike, key=lambda other: (alike[other].gpu == target.name, alike[other].date, other.name))
        return InUse(best, "", alike[best], is_borrowed=True)
    try:
        return InUse(path, "", read(path, target))
    except CheckpointError as error:
        return InUse(path, str(error))


def _alike(path: Path, target: Target) -> TunedFile | None:
    """A file of a GPU that is divided as ``target`` is: an H100 and an H200 differ in their memory alone."""
    try:
        made = _parse(read_json_object(path))
    except (CheckpointError, TypeError, ValueError):
        return None
    return made if (made.architecture, made.sms) == (target.architecture, target.sms) else None


def left_out(target: Target) -> frozenset[str]:
    """The kernels for many rows that must not be used on a GPU, according to the file shipped for it."""
    found = in_use(target).file
    return frozenset() if found is None else frozenset(found.left_out)


def choose(
    key: str, rows: int, target: Target, default: Callable[[int], Config], fits: Callable[[Config], bool]
) -> Config:
    """The configuration of ``key`` for ``rows`` rows: a measured one that fits, else the default."""
    table = in_use(target)
    found = table.find(key, rows)
    if found is None:
        return default(rows)
    if not fits(found):
        table.refused[key, bucket_of(rows)] = f"{found} does not fit the weight"
        return default(rows)
    return found
