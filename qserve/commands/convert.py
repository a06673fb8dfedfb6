"""``qserve convert``: another format for a quantized checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from qserve import console
from qserve.commands.options import Loaders, Out, Overwrite
from qserve.commands.values import names


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A quantized checkpoint; for gguf any model.")],
    out: Out,
    format: Annotated[
        str,
        typer.Option(
            help="gptq, gptq_v2, awq, compressed-tensors or fp8; gguf writes a file for llama.cpp; hf dequantizes to "
            "16 bits."
        ),
    ],
    loaders: Loaders = "qserve",
    overwrite: Overwrite = False,
) -> None:
    """Rewrite a quantized checkpoint in another format: the same weights bit for bit, or a refusal that says why."""
    from qserve import steps

    for text in steps.convert(steps.open_source(model), out, format, names(loaders), overwrite=overwrite):
        console.line(text)
