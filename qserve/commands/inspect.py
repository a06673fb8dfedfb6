"""``qserve inspect``: what a model is made of."""

from __future__ import annotations

from typing import Annotated

import typer

from qserve import console
from qserve.commands.options import Model


def inspect(
    model: Model,
    layers: Annotated[bool, typer.Option(help="List every linear.")] = False,
) -> None:
    """Show what a model is made of: layers, bits, size, and its quality card."""
    from qserve import steps
    from qserve.checkpoint.hf import HFDirectory
    from qserve.checkpoint.summary import summarize

    source = steps.open_source(model)
    summary = summarize(source)
    for text in summary.lines():
        console.line(text)
    console.line(f"operations      {steps.operations(source)}")
    if layers:
        console.table("", ("linear", "out", "in", "bits", "group"), summary.layer_rows())
    if source.card is not None:
        steps.show_card(source.card, [])
        if isinstance(source, HFDirectory) and (problem := source.card_problem()):
            console.line(f"NOT THIS MODEL  {problem}")
