"""``qserve demo``: the whole job in three minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qserve.pace import ladder


def demo(
    samples: Annotated[
        int | None, typer.Option(help="Calibration samples. [default: what this machine can do in three minutes]")
    ] = None,
    effort: Annotated[
        str | None, typer.Option(help="Of GPTQ: fast or normal. [default: what this machine can do in three minutes]")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to evaluate. [default: what this machine can do in three minutes]")
    ] = None,
    keep: Annotated[bool, typer.Option(help="Leave the server running until Ctrl-C.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Keep the checkpoint in this directory.", metavar="DIR")
    ] = None,
) -> None:
    """The whole job in three minutes: fetch a small model, quantize it, gate it, serve it, and ask it a question.

    How much text it calibrates on and evaluates is what this machine, measured for a few seconds, can do in that time.
    """
    recipes = ladder(samples, effort, tokens)
    from qserve.demo import run_demo

    run_demo(recipes, keep=keep, out=out)
