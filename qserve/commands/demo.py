"""``qserve demo``: the whole job in three minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qserve.checkpoint.errors import UsageError
from qserve.pace import ladder

_MODELS = {"smollm2": "demo", "gemma": "demo-gemma"}


def demo(
    model: Annotated[
        str, typer.Option(help="smollm2 or gemma (Gemma 3 270M, under Google's terms of use).")
    ] = "smollm2",
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
    if model not in _MODELS:
        raise UsageError(f"--model of the demo must be {' or '.join(_MODELS)}, not {model!r}")
    recipes = ladder(samples, effort, tokens)
    from qserve.demo import run_demo

    run_demo(recipes, keep=keep, out=out, model=_MODELS[model])
