"""``qserve compare``: which of several checkpoints of one base to take."""

from __future__ import annotations

from typing import Annotated

import typer

from qserve import console
from qserve.checkpoint.errors import UsageError
from qserve.commands.options import ENGINE, Data, HtmlOut, JsonOut, Kernels, MarkdownOut, Threads, Tokens, Window
from qserve.commands.values import command_line, eval_job, integers


def compare(
    ctx: typer.Context,
    checkpoints: Annotated[list[str], typer.Argument(metavar="CKPT...", help="Two or more checkpoints of one base.")],
    against: Annotated[
        str | None,
        typer.Option(help="The base: then all are measured anew. Else their quality cards count.", metavar="MODEL"),
    ] = None,
    data: Data = "builtin",
    tokens: Tokens = 16384,
    window: Window = 1024,
    concurrency: Annotated[
        str, typer.Option(help="Requests at once whose speed is measured too, here; none for no speed.", metavar="LIST")
    ] = "1,8",
    json_path: JsonOut = None,
    markdown_path: MarkdownOut = None,
    html_path: HtmlOut = None,
    kernels: Kernels = ENGINE.kernels,
    threads: Threads = None,
) -> None:
    """Rank checkpoints of one base by size, divergence and speed, and say which of them another beats in all three.

    With --html, a page draws divergence over size.
    """
    from qserve import evaluation
    from qserve.evals.report_files import write_report

    if len(set(checkpoints)) < 2:
        raise UsageError("give two or more checkpoints to compare")
    if against is None:
        for name in ("data", "tokens", "window"):
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise UsageError(f"--{name} goes with --against: the cards say what they were measured on")
    job = None if against is None else eval_job(data, tokens, window)
    levels = [] if concurrency == "none" else integers(concurrency, "--concurrency")
    report = evaluation.compare_checkpoints(checkpoints, against, job, levels, kernels, threads, command_line())
    for section in report.tables():
        console.table(section.title, section.header, section.rows)
    write_report(report, json_path, markdown_path, html_path)
