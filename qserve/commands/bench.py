"""``qserve bench``: how fast a model runs, or a server serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from qserve import console
from qserve.checkpoint.errors import QServeError, UsageError
from qserve.commands import values
from qserve.commands.options import (
    ENGINE,
    CpuList,
    GateFile,
    HtmlOut,
    JsonOut,
    Kernels,
    MarkdownOut,
    PipelineParallelSize,
    ServedModel,
    ServerKey,
    SpeculativeConfigJson,
    TensorParallelSize,
    Threads,
)
from qserve.runtime.config import EngineConfig


def bench(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face directory, a hub id, a .gguf file, demo, the URL of any OpenAI-compatible server, "
            "or the word kernels.",
        ),
    ],
    concurrency: Annotated[
        str | None,
        typer.Option(help="Requests at once; several are a sweep. [default: 1,8,16; 64 with --static]", metavar="LIST"),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Requests per second, as a Poisson process, answered or not; several are a sweep.",
                     metavar="LIST"),
    ] = None,
    prompt: Annotated[
        str,
        typer.Option(
            help="Tokens of each prompt: 64; of a server also lognormal:MEDIAN:SIGMA, uniform:LEAST:MOST or 10/50/200."
        ),
    ] = "64",
    output: Annotated[
        str | None,
        typer.Option(help="Tokens of each output, in the same way. [default: 64; 10/50/200/500 with --static]"),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Load MODEL over HTTP: any option of a server's load means it too.")
    ] = False,
    requests: Annotated[
        int | None,
        typer.Option(help="Requests of each load. [default: 8 for each at once, or 30 s, at least 16]"),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Requests before each load that do not count. [default: 1 to 16]")
    ] = None,
    burst: Annotated[int | None, typer.Option(help="With --rate: so many arrive together.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Repeat recorded traffic: JSON lines with arrival, prompt, output, and prefix.",
                     metavar="JSONL"),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Ask what users asked: JSON lines of conversations, messages, or prompt and output; or edit, extract "
            "or document, prompts that come with qserve and whose answers repeat them.",
            metavar="JSONL",
        ),
    ] = None,
    prefixes: Annotated[int | None, typer.Option(help="As many prefixes are shared by the prompts.")] = None,
    prefix_tokens: Annotated[int | None, typer.Option(help="Tokens of each prefix, before those of --prompt.")] = None,
    turns: Annotated[int | None, typer.Option(help="Turns of each session, every one after the last's answer.")] = None,
    think: Annotated[float | None, typer.Option(help="Seconds before each further turn.")] = None,
    slo: Annotated[
        str | None, typer.Option(help="What counts as good, as ttft=500ms,tpot=50ms.", metavar="SPEC")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="completions or chat. [default: completions]")] = None,
    name: ServedModel = None,
    api_key: ServerKey = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos", help="Answers go on to the length asked for; not all servers know that."
        ),
    ] = True,
    timeout: Annotated[float | None, typer.Option(help="Seconds of one request. [default: 600]")] = None,
    seed: Annotated[int | None, typer.Option(help="Which lengths and times are drawn. [default: 0]")] = None,
    static: Annotated[
        bool,
        typer.Option("--static", help="Compare with static batching: a batch starts when all of the last has ended."),
    ] = False,
    without_model: Annotated[
        bool,
        typer.Option("--without-model", help="Time the engine's own part of a step, on a model that computes nothing."),
    ] = False,
    speculative_config: SpeculativeConfigJson = None,
    repeats: Annotated[
        int, typer.Option(help="Without a server: runs of each batch, the median counts; with drafts pairs of runs.")
    ] = 3,
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
    html_path: HtmlOut = None,
    gate: GateFile = None,
    kernels: Kernels = ENGINE.kernels,
    threads: Threads = None,
    cpu_list: CpuList = None,
    tensor_parallel_size: TensorParallelSize = ENGINE.tensor_parallel_size,
    pipeline_parallel_size: PipelineParallelSize = ENGINE.pipeline_parallel_size,
    device: Annotated[str, typer.Option(help="With the word kernels: cpu, or cuda for those of the GPU.")] = "cpu",
    tune: Annotated[
        Path | None,
        typer.Option(
            help="With --device cuda: find the best configurations instead, and write them into this folder.",
            metavar="DIR",
        ),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(help="With --device cuda: begin nothing new after so many seconds. [default: 200; none to tune]"),
    ] = None,
) -> None:
    """Measure speed: of MODEL in this process, or of a server under load.

    A MODEL runs closed batches, if asked beside transformers or beside static batching; with --without-model only the
    engine's own part of each step is timed: schedule, arrays, sample, commit and text. With --speculative-config the
    same requests are answered with and without drafts, in turns: those of --dataset, or ordinary text. A URL, or a
    MODEL with any option of a load (--serve, --rate, --requests, --slo ...), is asked over HTTP: by so many users at
    once or at a rate, and a list of either is a sweep that finds where the objective breaks. The word kernels times the
    linear products of the CPU beside what this machine does at most; with --device cuda the products and the attention
    of the GPU, also beside those of torch and of the packages gemlite, vllm (Marlin), humming and flashinfer where they
    are installed, and with --tune the best configurations of the products are found.
    """
    from qserve import benching
    from qserve.evals.bench.workload import dataset_path
    from qserve.evals.gate import enforce, judge_values, read_gates
    from qserve.evals.report import intervals_of
    from qserve.evals.report_files import write_report

    wanted = [] if gate is None else read_gates(gate)
    load = {
        "--rate": rate, "--requests": requests, "--warmup": warmup, "--burst": burst, "--trace": trace,
        "--dataset": dataset, "--prefixes": prefixes, "--prefix-tokens": prefix_tokens, "--turns": turns,
        "--think": think, "--slo": slo, "--endpoint": endpoint, "--model": name, "--timeout": timeout, "--seed": seed,
    }  # fmt: skip
    given = [option for option, value in load.items() if value is not None]
    drafts = values.speculative_config(speculative_config)
    cpus = values.cpu_list(cpu_list)
    engine = EngineConfig(
        kernels=kernels, threads=threads, cpu_list=cpus, speculative_config=drafts,
        tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size,
    )  # fmt: skip
    if "://" in model and (serve or static or without_model or against is not None or engine != ENGINE):
        raise UsageError(
            "--serve, --static, --without-model, --against, --kernels, --threads, --cpu-list, --speculative-config, "
            "--tensor-parallel-size and --pipeline-parallel-size are for a MODEL, not for a URL"
        )
    if model == "kernels":
        here = serve or static or without_model or against is not None
        if given or here or concurrency is not None or output is not None or engine.num_ranks > 1:
            raise UsageError("kernels takes no load and no ranks: leave out what describes them")
        report = benching.kernels(engine, repeats, device, tune, limit, json_path)
    elif device != "cpu" or tune is not None or limit is not None:
        raise UsageError("--device, --tune and --limit are for the word kernels: a MODEL runs where --kernels says")
    elif drafts is not None and not serve:
        others = [*["--static"] * static, *["--without-model"] * without_model, *["--against"] * (against is not None)]
        if others := [*others, *(option for option in given if option not in ("--dataset", "--requests"))]:
            raise UsageError(f"drafts are measured in this process: leave out {others[0]}, or give --serve")
        report = benching.speculation(
            model, concurrency or "1", prompt, output or "128", None if dataset is None else dataset_path(dataset),
            requests, repeats, engine,
        )
    elif without_model:
        others = [*given, *["--serve"] * serve, *["--static"] * static, *["--against"] * (against is not None)]
        if others := [*others, *["--kernels, --threads, --cpu-list and ranks"] * (engine != ENGINE)]:
            raise UsageError(f"--without-model times the engine in this process: leave out {others[0]}")
        report = benching.engine_time(model, concurrency or "64", prompt, output or "64", repeats)
    elif static:
        others = [*given, *["--serve"] * serve, *["--against"] * (against is not None)]
        if others := [option for option in others if option not in ("--requests", "--seed")]:
            raise UsageError(f"--static is measured in this process: leave out {others[0]}")
        report = benching.static(model, concurrency or "64", prompt, output, requests, seed or 0, engine)
    elif "://" in model or serve or given:
        if against is not None:
            raise UsageError(f"--against is measured in this process: leave out {[*given, '--serve'][0]}")
        job = benching.job(
            concurrency, rate, prompt, output or "64", endpoint or "completions", slo,
            dict(
                requests=requests, warmup=warmup, burst=1 if burst is None else burst, trace=trace,
                dataset=None if dataset is None else dataset_path(dataset),
                prefixes=prefixes or 0, prefix_tokens=prefix_tokens or 0, turns=1 if turns is None else turns,
                think=think or 0.0,
                seed=seed or 0,
            ),
        )  # fmt: skip
        fields = {"temperature": 0.0, **({"ignore_eos": True} if ignore_eos else {})}
        report = benching.load(model, job, name, api_key, fields, 600.0 if timeout is None else timeout, engine)
    else:
        report = benching.batches(
            model, concurrency or "1,8,16", prompt, output or "64", repeats, against, min_ratio, engine
        )
    try:
        found = {metric.name: metric.value for metric in report.metrics}
        intervals = intervals_of(report.metrics)
        judged = judge_values(wanted, found, 1, report.environment["machine"], intervals=intervals)
        report = replace(report, gates=(*report.gates, *judged))
    finally:  # the measurement is kept even if a gate names something else
        write_report(report, json_path, markdown_path, html_path)
    for section in report.sections:
        console.table(section.title, section.header, section.rows)
    enforce(report.gates)
    if report.data.get("partial"):
        raise QServeError(f"not all of it was measured: {report.data['stopped']}")
