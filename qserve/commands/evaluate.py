"""``qserve eval``: a checkpoint against its base, with gates."""

from __future__ import annotations

from typing import Annotated

import typer

from qserve.commands.options import (
    ENGINE,
    Data,
    JsonOut,
    Kernels,
    MarkdownOut,
    MaxKl,
    MaxPpl,
    MinTop1,
    Threads,
    Tokens,
    Window,
)
from qserve.commands.values import command_line, eval_job, gates


def evaluate(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="The model to judge.")],
    against: Annotated[str, typer.Option(help="The base model it was made from.", metavar="MODEL")],
    data: Data = "builtin",
    tokens: Tokens = 16384,
    window: Window = 1024,
    json_path: JsonOut = None,
    markdown_path: MarkdownOut = None,
    max_kl: MaxKl = None,
    max_ppl_increase: MaxPpl = None,
    min_top1: MinTop1 = None,
    kernels: Kernels = ENGINE.kernels,
    threads: Threads = None,
    card: Annotated[bool, typer.Option("--card/--no-card", help="Store the result inside CKPT.")] = True,
) -> None:
    """Measure perplexity, KL divergence and top-1 agreement of CKPT against its base, on the kernels that serve.

    The result becomes the checkpoint's quality card. A gate that fails ends with exit code 3.
    """
    from qserve import steps
    from qserve.checkpoint.card import write_card
    from qserve.evals.gate import enforce, judge
    from qserve.evals.quality_report import quality_report

    wanted = gates(max_kl, max_ppl_increase, min_top1)
    job = eval_job(data, tokens, window)
    model, base = steps.open_source(checkpoint), steps.open_source(against)
    found = steps.measure(model, base, job, kernels, threads)
    reports = judge(wanted, found)
    steps.show_card(found, reports)  # first: a file that cannot be written must not lose the measurement
    quality_report(found, model.name, command_line(), reports).write(json_path, markdown_path)
    if card and model.spec is not None:
        write_card(model.path, found)
    enforce(reports)
