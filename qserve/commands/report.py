"""``qserve report``: reports of earlier runs, shown again or compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qserve import console
from qserve.checkpoint.errors import UsageError
from qserve.commands.options import HtmlOut, JsonOut, MarkdownOut
from qserve.commands.values import command_line


def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.json...", help="Reports that --json wrote.")],
    tolerance: Annotated[str, typer.Option(help="Relative changes below this never count.", metavar="RATIO")] = "1%",
    noise: Annotated[
        str, typer.Option(help="Relative noise of a metric that has no interval.", metavar="RATIO")
    ] = "5%",
    fail_on_regression: Annotated[
        bool, typer.Option("--fail-on-regression", help="Exit with 3 where something is worse beyond noise.")
    ] = False,
    json_path: JsonOut = None,
    markdown_path: MarkdownOut = None,
    html_path: HtmlOut = None,
) -> None:
    """Compare runs of the same kind with the first, and mark what is worse beyond noise; one report is shown again.

    Where two runs scored the same windows or documents, their differences are tested in pairs.
    """
    from qserve.evals.comparison import Tolerance, comparison_report, enforce_no_regression
    from qserve.evals.gate import ratio
    from qserve.evals.report_files import read_report, write_report

    limits = Tolerance(ratio(tolerance, "--tolerance"), ratio(noise, "--noise"))
    found = [read_report(path) for path in files]
    if len(found) == 1:
        if fail_on_regression:
            raise UsageError("--fail-on-regression compares reports: give at least two")
        shown = found[0]
    else:
        shown = comparison_report(found, _names(files), command_line(), limits)
    write_report(shown, json_path, markdown_path, html_path)
    for section in shown.tables():
        console.table(section.title, section.header, section.rows)
    if fail_on_regression:
        enforce_no_regression(shown)


def _names(files: list[Path]) -> list[str]:
    """The names of the files where these are distinct, else their paths."""
    names = [path.stem for path in files]
    return names if len(set(names)) == len(names) else [str(path) for path in files]
