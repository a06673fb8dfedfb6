"""``qserve bench``: how fast a model runs, or a server serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qserve import console
from qserve.checkpoint.errors import QServeError, UsageError
from qserve.commands.options import ENGINE, GateFile, HtmlOut, JsonOut, Kernels, MarkdownOut, Threads
from qserve.commands.values import command_line, integers, numbers
from qserve.runtime.config import EngineConfig

if TYPE_CHECKING:
    from qserve.evals.bench.job import Job
    from qserve.evals.report import Report


def bench(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face directory, a hub id, a .gguf file, demo, or the URL of any OpenAI-compatible server.",
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
        str, typer.Option(help="Tokens of each prompt: 64; of a server also lognormal:MEDIAN:SIGMA or 10/50/200.")
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
        Path | None,
        typer.Option(help="Ask what users asked: JSON lines of conversations, messages, or prompt and output.",
                     metavar="JSONL"),
    ] = None,
    prefixes: Annotated[int | None, typer.Option(help="As many prefixes are shared by the prompts.")] = None,
    prefix_tokens: Annotated[int | None, typer.Option(help="Tokens of each prefix, before those of --prompt.")] = None,
    turns: Annotated[int | None, typer.Option(help="Turns of each session, every one after the last's answer.")] = None,
    think: Annotated[float | None, typer.Option(help="Seconds before each further turn.")] = None,
    slo: Annotated[
        str | None, typer.Option(help="What counts as good, as ttft=500ms,tpot=50ms.", metavar="SPEC")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="completions or chat. [default: completions]")] = None,
    name: Annotated[
        str | None,
        typer.Option("--model", help="Which model of a server. [default: the first that it lists]", metavar="NAME"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The key that a server wants; OPENAI_API_KEY of the environment where it is not given.",
            metavar="KEY",
            envvar="OPENAI_API_KEY",
            show_envvar=False,
        ),
    ] = None,
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
    repeats: Annotated[int, typer.Option(help="Without a server: runs of each batch; the median counts.")] = 3,
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
) -> None:
    """Measure speed: of MODEL in this process, or of a server under load.

    A MODEL runs closed batches, if asked beside transformers or beside static batching. A URL, or a MODEL with any
    option of a load (--serve, --rate, --requests, --slo ...), is asked over HTTP: by so many users at once or at a
    rate, and a list of either is a sweep that finds where the objective breaks.
    """
    from qserve.evals.gate import enforce, judge_values, read_gates

    wanted = [] if gate is None else read_gates(gate)
    load = {
        "--rate": rate, "--requests": requests, "--warmup": warmup, "--burst": burst, "--trace": trace,
        "--dataset": dataset, "--prefixes": prefixes, "--prefix-tokens": prefix_tokens, "--turns": turns,
        "--think": think, "--slo": slo, "--endpoint": endpoint, "--model": name, "--timeout": timeout, "--seed": seed,
    }  # fmt: skip
    given = [option for option, value in load.items() if value is not None]
    if "://" in model and (serve or static or against is not None or (kernels, threads) != (ENGINE.kernels, None)):
        raise UsageError("--serve, --static, --against, --kernels and --threads are for a MODEL, not for a URL")
    if static:
        others = [*given, *["--serve"] * serve, *["--against"] * (against is not None)]
        if others := [option for option in others if option not in ("--requests", "--seed")]:
            raise UsageError(f"--static is measured in this process: leave out {others[0]}")
        report = _static(model, concurrency or "64", prompt, output, requests or 0, seed or 0, kernels, threads)
    elif "://" in model or serve or given:
        if against is not None:
            raise UsageError(f"--against is measured in this process: leave out {[*given, '--serve'][0]}")
        job = _job(
            concurrency, rate, prompt, output or "64", endpoint or "completions", slo,
            dict(
                requests=requests, warmup=warmup, burst=burst or 1, trace=trace, dataset=dataset,
                prefixes=prefixes or 0, prefix_tokens=prefix_tokens or 0, turns=turns or 1, think=think or 0.0,
                seed=seed or 0,
            ),
        )  # fmt: skip
        fields = {"temperature": 0.0, **({"ignore_eos": True} if ignore_eos else {})}
        engine = EngineConfig(kernels=kernels, threads=threads)
        report = _load(model, job, name, api_key, fields, timeout or 600.0, engine)
    else:
        report = _batches(
            model, concurrency or "1,8,16", prompt, output or "64", repeats, against, min_ratio, kernels, threads
        )
    if wanted:
        values = {metric.name: metric.value for metric in report.metrics}
        judged = judge_values(wanted, values, 1, report.environment["machine"])
        report = replace(report, gates=(*report.gates, *judged))
    report.write(json_path, markdown_path, html_path)
    for section in report.sections:
        console.table(section.title, section.header, section.rows)
    enforce(report.gates)
    if report.data.get("partial"):
        raise QServeError(f"not all of it was measured: {report.data['stopped']}")


def _job(
    concurrency: str | None,
    rate: str | None,
    prompt: str,
    output: str,
    endpoint: str,
    slo: str | None,
    rest: dict[str, Any],
) -> Job:
    """The loads that the options describe. Raises ``UsageError`` where they contradict each other."""
    from qserve.evals.bench.job import Job
    from qserve.evals.simulator.traffic import Lengths
    from qserve.evals.slo import UNLIMITED, parse_slo

    is_open = rate is not None or rest["trace"] is not None
    if sum(each is not None for each in (concurrency, rate, rest["trace"])) > 1:
        raise UsageError("a load has one rhythm: give --concurrency, --rate or --trace")
    if not is_open and rest["burst"] > 1:
        raise UsageError("--burst is for a load that comes at a --rate")
    match endpoint:
        case "completions" | "chat":
            kind = endpoint
        case _:
            raise UsageError(f"--endpoint is completions or chat, not {endpoint!r}")
    levels: list[float] = [1.0]
    if rate is not None:
        levels = numbers(rate, "--rate")
    elif rest["trace"] is None:
        levels = [float(each) for each in integers(concurrency or "1,8,16", "--concurrency")]
    lengths = Lengths.parse(prompt, "--prompt"), Lengths.parse(output, "--output")
    objective = UNLIMITED if slo is None else parse_slo(slo, UNLIMITED)
    return Job(tuple(levels), is_open, *lengths, endpoint=kind, slo=objective, **rest)


def _load(
    model: str,
    job: Job,
    name: str | None,
    api_key: str | None,
    fields: dict[str, Any],
    timeout: float,
    engine: EngineConfig,
) -> Report:
    """Of a server, which is started where MODEL is none."""
    from contextlib import ExitStack

    from qserve.chat_client import api_url
    from qserve.evals.bench.client import Client
    from qserve.evals.bench.job import run
    from qserve.evals.bench.summary import bench_report

    if not 0 < timeout <= 86400:
        raise UsageError(f"--timeout must be above 0 seconds and at most a day, not {timeout:g}")
    with ExitStack() as stack:
        if "://" in model:
            url = api_url(model)
        else:
            from qserve import steps
            from qserve.evals.reliability.server import ServerProcess
            from qserve.runtime.server.config import ServerConfig

            source = steps.open_source(model)  # what is wrong with it is known before a process is started
            console.note(f"serving {source.name} on a free port of this machine")
            server = stack.enter_context(ServerProcess(model, engine, ServerConfig()))
            url = f"http://127.0.0.1:{server.port}/v1"
            api_key = None
        client = Client(url, api_key, timeout)
        with console.progress("bench") as update:
            found = run(job, client, name, fields, update)
    place = model if "://" in model else "a server of its own"
    more = {"model": found.model, "server": place, "workload": job.to_json()}
    return bench_report(found.levels, found.unit, f"Load on {found.model}", command_line(), more, job.slo)


def _static(
    model: str,
    concurrency: str,
    prompt: str,
    output: str | None,
    requests: int,
    seed: int,
    kernels: str,
    threads: int | None,
) -> Report:
    from qserve import steps
    from qserve.evals import throughput
    from qserve.evals.bench import batching
    from qserve.evals.simulator.traffic import Lengths

    levels, (tokens,) = integers(concurrency, "--concurrency"), integers(prompt, "--prompt")[:1]
    if len(levels) > 1:
        raise UsageError("--static compares at one --concurrency")
    requests = requests or 16 * levels[0]
    lengths = batching.lengths_of(Lengths.parse(output or "10/50/200/500", "--output"), requests, levels[0], seed)
    source = steps.open_source(model)
    config = EngineConfig(
        kernels=kernels,
        threads=threads,
        max_num_seqs=levels[0],
        max_num_batched_tokens=max(levels[0], ENGINE.max_num_batched_tokens),
        max_waiting=max(requests, ENGINE.max_waiting),
        max_waiting_tokens=max(1, requests * tokens),
    )
    engine = steps.load(source, config)
    with console.progress("bench") as update:
        found = batching.compare(engine, throughput.text_tokens(source), tokens, lengths, update)
    return batching.batching_report(found, f"Static and continuous batching of {source.name}", command_line())


def _batches(
    model: str,
    concurrency: str,
    prompt: str,
    output: str,
    repeats: int,
    against: str | None,
    min_ratio: str | None,
    kernels: str,
    threads: int | None,
) -> Report:
    from qserve import steps
    from qserve.evals import throughput

    levels = integers(concurrency, "--concurrency")
    gates = throughput.ratio_gates(min_ratio) if min_ratio else {}
    if gates and against is None:
        raise UsageError("--min-ratio compares with a model: give --against")
    if not gates.keys() <= set(levels):
        raise UsageError(f"--min-ratio names a concurrency that --concurrency {concurrency} does not run")
    try:
        load = throughput.Load(int(prompt), int(output))
    except ValueError:
        raise UsageError("closed batches have prompts and outputs of one length: give --prompt and --output a number, "
                         "or --serve") from None
    if min(load.prompt, load.output, repeats) < 1:
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
    text = throughput.text_tokens(source)
    if len(text) < most * repeats + load.prompt:
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
    return throughput.report(engine, found, load, peer, gates, command_line())
