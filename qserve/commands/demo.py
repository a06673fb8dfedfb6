"""``qserve demo``: the whole job in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    keep: Annotated[bool, typer.Option(help="Leave the server running until Ctrl-C.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Keep the checkpoint in this directory.", metavar="DIR")
    ] = None,
) -> None:
    """The whole job in a few minutes: fetch a small model, quantize it, gate it, serve it, and ask it a question."""
    from qserve.demo import run_demo

    run_demo(keep=keep, out=out)
