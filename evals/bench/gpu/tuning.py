"""``qserve bench kernels --device cuda --tune``: the best configurations of Llama 3's products, as a file to ship."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from qserve.evals.bench.gpu import linears
from qserve.evals.bench.gpu.shapes import SHAPES, adds
from qserve.evals.report import Metric, Report, Section, environment
from qserve.kernels import ops
from qserve.kernels.triton import linear
from qserve.kernels.triton.target import NEEDED, Target, target
from qserve.kernels.triton.tuning.configs import BUCKETS, bucket_of
from qserve.kernels.triton.tuning.tune import MOST_ROWS, Tunable, Tuner, rows_of, weight_bytes
from qserve.kernels.triton.tuning.tuned import TunedFile, file_of, resume
from qserve.kernels.triton.workspace import Workspace

SCHEMES = ("W4A16 g128", "FP8 channel", "W8A16 g128", "FP8 128x128", "W8A8 int8")
"""The most wanted first: the time may be over before the last has its turn."""
Update = Callable[[int, int], None]


@dataclass(frozen=True)
class Found:
    """One line of the report. ``rows``: the number of rows with which it was timed."""

    scheme: str
    shape: str
    rows: int
    microseconds: float
    before_microseconds: float
    configuration: str


def run(
    command: str,
    folder: Path,
    tuner: Tuner,
    dtype: torch.dtype = torch.bfloat16,
    schemes: Sequence[str] = SCHEMES,
    shapes: Mapping[str, tuple[int, int]] = SHAPES,
    *,
    most_rows: int = MOST_ROWS,
    update: Update = lambda done, total: None,
) -> Report:
    """Time every candidate and write the best into ``folder``, in the file of this GPU and Triton, after each weight.

    Entries of that file for the same source of the kernels stay, and are not timed again. Raises ``CheckpointError``
    where the file cannot be written.
    """
    device = tuner.watch.device
    gpu = target(device)
    path = file_of(gpu, folder)
    held = resume(path, gpu, command)
    before = held.count
    weights = [(scheme, shape) for scheme in schemes for shape in shapes]
    found: list[Found] = []
    late: list[str] = []
    for done, (scheme, shape) in enumerate(weights):
        update(done, len(weights))
        reason = linear_reason(scheme, gpu)
        if reason is None and time.monotonic() > tuner.until:
            reason = "no time was left"
        if reason is not None:
            late.append(f"{scheme}, {shape}: {reason}")
            continue
        products = _products(tuner, scheme, shapes[shape], most_rows, dtype, adds(shape))
        key = products[0].key
        for bucket in BUCKETS:
            if bucket in held.entries.get(key, {}) or bucket > bucket_of(most_rows):
                continue
            try:
                best = tuner.tune(products, bucket)
            except Exception as error:  # the default failed, so there is nothing to compare with
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                late.append(f"{scheme}, {shape}, {rows_of(bucket, products[0])} rows: {reason}")
                continue
            if best is None:
                late.append(f"{scheme}, {shape}, {rows_of(bucket, products[0])} rows: no time was left")
                continue
            held.entries.setdefault(key, {})[bucket] = best
            found.append(Found(scheme, shape, rows_of(bucket, products[0]), best.microseconds,
                               best.before_microseconds, str(best.config)))  # fmt: skip
            held.write(path)
        del products
        if device.type == "cuda":
            torch.cuda.empty_cache()
    update(len(weights), len(weights))
    return _report(command, path, held, before, found, late)


def linear_reason(scheme: str, gpu: Target) -> str | None:
    """None, or why the GPU has no product of ``scheme``."""
    needed = linears.needs(scheme)
    return None if needed is None or needed in gpu.features else f"needs {NEEDED[needed]}"


def _products(
    tuner: Tuner, scheme: str, shape: tuple[int, int], rows: int, dtype: torch.dtype, accumulate: bool = False
) -> list[Tunable]:
    """As many products of the weight as it takes to exceed every cache. ``accumulate``: into float32."""
    device = tuner.watch.device
    problem = linears.problem(scheme, shape, rows, device, dtype)
    out = torch.zeros(rows, shape[0], dtype=torch.float32 if accumulate else dtype, device=device)
    op = ops.Linear(problem.x, problem.weight, out, accumulate=accumulate)
    memory = Workspace(device)

    def prepared() -> Tunable:
        product = linear.prepare(op, memory)
        assert isinstance(product, Tunable)
        return product

    first = prepared()
    return [first, *(prepared() for _ in range(tuner.watch.copies(weight_bytes(first)) - 1))]


def _report(
    command: str, path: Path, held: TunedFile, before: int, found: Sequence[Found], late: Sequence[str]
) -> Report:
    header = ("weight", "rows", "before, us", "best, us", "gain", "configuration")
    sections = [
        Section(f"{scheme}: {path.name}", header, tuple(
            (each.shape, f"{each.rows}", f"{each.before_microseconds:.1f}", f"{each.microseconds:.1f}",
             f"{each.before_microseconds / each.microseconds:.2f}x", each.configuration)
            for each in found if each.scheme == scheme
        ))
        for scheme in dict.fromkeys(each.scheme for each in found)
    ]  # fmt: skip
    if late:
        sections.append(Section("Not timed", ("what",), tuple((line,) for line in late)))
    metrics = [Metric(f"{each.scheme}, {each.shape}, {each.rows} rows", each.microseconds, "us", "lower")
               for each in found]  # fmt: skip
    data = {"file": str(path), "known": before, "timed": [asdict(each) for each in found], "not_timed": list(late)}
    versions = {"gpu": held.gpu, "triton": held.triton, "kernels": held.kernels}
    return Report("gpu-tuning", "The best configurations of a GPU", command, data, tuple(sections),
                  environment=environment() | versions, metrics=tuple(metrics))  # fmt: skip
