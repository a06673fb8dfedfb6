"""``qserve bench``: how fast a model runs."""

from __future__ import annotations

from typing import Annotated

import typer

from qserve import console
from qserve.checkpoint.errors import UsageError
from qserve.commands.options import ENGINE, JsonOut, Kernels, MarkdownOut, Model, Threads
from qserve.commands.values import command_line, integers
from qserve.runtime.config import EngineConfig


def bench(
    model: Model,
    concurrency: Annotated[str, typer.Option(help="Requests at once, one batch for each number.")] = "1,8,16",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    output: Annotated[int, typer.Option(help="Tokens of each output.")] = 64,
    repeats: Annotated[int, typer.Option(help="Runs of each batch; the median counts.")] = 3,
    against: Annotated[
        str | None,
        typer.Option(help="Run this dense model in transformers too, one prompt at a time.", metavar="MODEL"),
    ] = None,
    min_ratio: Annotated[
        str | None,
        typer.Option(help="Gate: output rate over that of --against, as 1=3,16=8.", metavar="N=RATIO,..."),
    ] = None,
    json_path: JsonOut = None,
    markdown_path: MarkdownOut = None,
    kernels: Kernels = ENGINE.kernels,
    threads: Threads = None,
) -> None:
    """Measure prefill and decode rates at fixed concurrency, if asked beside transformers in the same run."""
    from qserve import steps
    from qserve.evals import throughput
    from qserve.evals.gate import enforce

    levels = integers(concurrency, "--concurrency")
    gates = throughput.ratio_gates(min_ratio) if min_ratio else {}
    if gates and against is None:
        raise UsageError("--min-ratio compares with a model: give --against")
    if not gates.keys() <= set(levels):
        raise UsageError(f"--min-ratio names a concurrency that --concurrency {concurrency} does not run")
    if min(prompt, output, repeats) < 1:
        raise UsageError("--prompt, --output and --repeats must be at least 1")
    source = steps.open_source(model)
    base = None if against is None else steps.open_source(against)
    if base is not None and base.spec is not None:
        raise UsageError(f"--against {against} is quantized: transformers runs the dense model it was made from")
    most = max(levels)
    config = EngineConfig(
        kernels=kernels,
        threads=threads,
        max_num_seqs=max(most, ENGINE.max_num_seqs),
        max_num_batched_tokens=max(most, ENGINE.max_num_batched_tokens),
        max_waiting=max(most, ENGINE.max_waiting),
    )
    engine = steps.load(source, config)
    load = throughput.Load(prompt, output)
    text = throughput.text_tokens(source)
    if len(text) < most * repeats + prompt:
        raise UsageError("--concurrency, --repeats and --prompt need more text than there is: lower them")
    found = []
    with console.progress("bench") as update:
        for i, level in enumerate(levels):
            update(i, len(levels))
            found.append(throughput.measure(engine, text, level, load, repeats))
        update(len(levels), len(levels))
    peer = None
    if base is not None:
        peer = throughput.fastest_transformers(base, text, load, config.threads, console.note)
    report = throughput.report(engine, found, load, peer, gates, command_line())
    report.write(json_path, markdown_path)
    for section in report.sections:
        console.table(section.title, section.header, section.rows)
    enforce(report.gates)
