"""The output of the command line: progress bars, tables, and errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table


class _Stderr:
    """The current ``sys.stderr``. Where it cannot be written, as on a full disk, only its lines are lost: the work goes
    on."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


# Output comes from models, files and users: nothing in it is markup, and ``:abc:`` is no emoji. Without a terminal to
# fit into, a table is as wide as it needs to be.
out = Console(
    highlight=False, markup=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160
)
err = Console(file=cast(IO[str], _Stderr()), highlight=False, markup=False, emoji=False, soft_wrap=True)

Update = Callable[[int, int], None]


@contextmanager
def progress(label: str) -> Iterator[Update]:
    """A bar on stderr with elapsed and remaining time, from the first ``update(done, total)`` on."""
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(24),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=err)
    task = bars.add_task(label, total=None)
    with ExitStack() as shown:

        def update(done: int, total: int) -> None:
            if not bars.live.is_started:
                shown.enter_context(bars)
            bars.update(task, completed=done, total=max(total, 1))

        yield update


def note(text: str) -> None:
    """A line about progress, on stderr; results go to stdout."""
    err.print(text)


def line(text: str = "") -> None:
    out.print(text)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; every column but the first is right-aligned."""
    shown = Table(title=title or None, title_justify="left")
    for index, name in enumerate(header):
        shown.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    out.print(shown)


def error(text: str) -> None:
    err.print(f"error: {text}", style="bold red")


def size(count: float) -> str:
    """Bytes for a person: ``83.1 MB`` (decimal, as disks and model cards count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
