"""What ranks exchange in the middle of a program: columns of a buffer, or sums."""

from __future__ import annotations

from collections.abc import Callable

from qserve.kernels import process_group
from qserve.kernels.ops import AllGather, AllReduce
from qserve.kernels.triton.launch import only_compiles
from qserve.kernels.triton.workspace import Workspace

Exchange = Callable[[int], None]
"""Of the first so many rows."""


def all_gather(op: AllGather, max_rows: int, memory: Workspace) -> Exchange:
    """``op`` made ready for at most ``max_rows`` rows. Parts travel one behind the other, padded to the widest."""
    size, widest = len(op.split), max(map(len, op.split))
    columns, out = op.split[op.ranks.rank], op.out
    own = out[:, columns.start : columns.stop] if op.own is None else op.own
    sent = memory.take("sent", max_rows * widest, out.dtype)
    received = memory.take("received", max_rows * widest * size, out.dtype)

    def run(rows: int) -> None:
        if not rows or only_compiles():
            return
        mine, theirs = own[:rows], received[: rows * widest * size]
        if len(columns) < widest or not mine.is_contiguous():
            mine = sent[: rows * widest].view(rows, widest)
            mine[:, : len(columns)] = own[:rows]
        process_group.all_gather(op.ranks, theirs, mine.view(-1))
        parts = theirs.view(size, rows, widest)
        if size * widest == out.shape[1]:
            out[:rows].view(rows, size, widest).copy_(parts.transpose(0, 1))
            return
        for wrote, part in zip(op.split, parts):
            out[:rows, wrote.start : wrote.stop] = part[:, : len(wrote)]

    return run


def all_reduce(op: AllReduce) -> Exchange:
    """``op`` made ready."""

    def run(rows: int) -> None:
        if rows and not only_compiles():
            process_group.all_reduce(op.ranks, op.out[:rows])

    return run
