"""``qserve plan``: options in, the planner's answer out."""

from __future__ import annotations

from typing import Annotated

import typer

from qserve import console
from qserve.commands.options import HtmlOut, JsonOut, MarkdownOut
from qserve.commands.values import command_line
from qserve.evals.planner.demand import Traffic, parse_traffic
from qserve.evals.planner.efficiency import Efficiency
from qserve.evals.planner.wish import Wish
from qserve.evals.slo import Slo, parse_duration, parse_slo

_SHARES, _WISH = Efficiency(), Wish()


def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A directory with a config.json, such a file, or a shape as llama-3-70b."),
    ],
    gpu: Annotated[str, typer.Option(help="GPUs to choose from, as h200,l40s, or all.")] = "all",
    slo: Annotated[str, typer.Option(help="Limits of the means, as ttft=500ms,tpot=50ms.")] = str(Slo()),
    traffic: Annotated[
        str,
        typer.Option(
            help="Requests, and tokens of each, as rate=10/s,prompt=2048,output=256; tokens also as "
            "lognormal:MEDIAN:SIGMA, uniform:LEAST:MOST or 10/50/200; also hit=0.5, the share of prompts that the "
            "prefix cache has."
        ),
    ] = str(Traffic()),
    quantization: Annotated[
        str | None,
        typer.Option(help="Of the weights: bf16, fp8, w8a8, or wBITSgGROUP. [default: bf16, fp8, w8a8 and w4g128]"),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="fp16, fp8, int8 or int4_per_token_head. [default: fp16, and what the GPU has of 8 bits]"),
    ] = None,
    tp: Annotated[
        int, typer.Option(help="GPUs that split every matrix. [default: 1, 2, 4 and 8]", show_default=False)
    ] = _WISH.tp,
    pp: Annotated[
        int,
        typer.Option(help="Stages of layers. [default: 1, more where a machine is too small]", show_default=False),
    ] = _WISH.pp,
    gpu_price: Annotated[
        float | None, typer.Option(help="Dollars of a GPU for an hour. [default: a listed price]", metavar="DOLLARS")
    ] = None,
    api: Annotated[
        str | None,
        typer.Option(help="Compare with this service, or with IN/OUT dollars per million tokens. [default: all known]"),
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens of a prompt computed in a step.")] = _WISH.chunk,
    mfu: Annotated[float, typer.Option(help="Share of the peak operations that is reached.")] = _SHARES.mfu,
    mbu: Annotated[float, typer.Option(help="Share of the memory bandwidth that is reached.")] = _SHARES.mbu,
    link: Annotated[float, typer.Option(help="Share of the bandwidth between GPUs.")] = _SHARES.link,
    all_reduce: Annotated[
        str, typer.Option(help="Time of an all-reduce before its first hop; the default is NCCL's own figure.")
    ] = "6.6us",
    memory: Annotated[float, typer.Option(help="Share of the memory for weights and KV cache.")] = _SHARES.memory,
    overhead: Annotated[str, typer.Option(help="Time of a step beside its kernels.")] = "1ms",
    utilization: Annotated[
        float, typer.Option(help="Share of a replica's capacity that is planned for.")
    ] = _SHARES.utilization,
    spare: Annotated[int, typer.Option(help="Replicas that may be lost: 1 is N + 1.")] = _WISH.spare,
    explain: Annotated[bool, typer.Option("--explain", help="Show the arithmetic of every figure.")] = False,
    json_path: JsonOut = None,
    markdown_path: MarkdownOut = None,
    html_path: HtmlOut = None,
) -> None:
    """Say which GPUs, quantization and parallelism serve a model's traffic for the least money, from config.json alone.

    Nothing is loaded or fetched: bytes, operations and a roofline. The cheapest plan within the limits wins, of
    equally cheap ones the least compressed. Times are means; what quality a quantization costs qserve eval says.
    """
    from qserve.evals.planner import catalog
    from qserve.evals.planner.deployment import choose
    from qserve.evals.planner.document import Document
    from qserve.evals.report_files import write_report

    efficiency = Efficiency(
        mfu=mfu, mbu=mbu, link=link, all_reduce=parse_duration("--all-reduce", all_reduce), memory=memory,
        overhead=parse_duration("--overhead", overhead), utilization=utilization,
    )
    wish = Wish(quantization, kv_cache_dtype, tp, pp, gpu_price, chunk, spare)
    known = catalog.gpus()
    gpus = list(known.values()) if gpu == "all" else [catalog.gpu(key.strip()) for key in gpu.split(",")]
    services = list(catalog.api_prices().values()) if api is None else [catalog.api_price(api)]
    shape = catalog.model(model)
    best, tried = choose(shape, gpus, parse_traffic(traffic), parse_slo(slo), efficiency, wish)
    document = Document(best, tried, services, command_line())
    write_report(document.report(), json_path, markdown_path, html_path)
    for table in document.answer():
        console.table(table.title, table.header, table.rows)
    if explain:
        for what, how in document.arithmetic().rows:
            console.line(f"{what:<20} {how}")
    console.line(document.assumptions())
