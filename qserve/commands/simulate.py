"""``qserve simulate``: what a fleet would do with a load, from the engine's own scheduler and a cost model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qserve import console
from qserve.checkpoint.errors import QServeError, UsageError
from qserve.commands.options import (
    ENGINE,
    HtmlOut,
    JsonOut,
    MarkdownOut,
    MaxNumSeqs,
    ServedModel,
    ServerKey,
    Threads,
)
from qserve.commands.values import command_line
from qserve.evals.planner.efficiency import Efficiency
from qserve.runtime.config import GPU_STEP_TOKENS, STEP_TOKENS, EngineConfig

_SHARES = Efficiency()

if TYPE_CHECKING:
    from qserve.evals.bench.client import Client
    from qserve.evals.report import Report
    from qserve.evals.simulator.cost import CostModel, FittedCost
    from qserve.evals.simulator.model_cost import ModelCost
    from qserve.evals.simulator.replica import ReplicaConfig
    from qserve.evals.simulator.traffic import Arrival
    from qserve.runtime.limits import SchedulerConfig


def simulate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="To measure: a model, or the URL of a server; with --gpu a config.json or a shape as llama-3-70b.",
        ),
    ] = None,
    cost: Annotated[
        Path | None, typer.Option(help="A step takes what this file says, which --fit wrote.", metavar="FILE")
    ] = None,
    roofline: Annotated[
        str | None,
        typer.Option(
            help="A step takes what the hardware allows: flops=989e12,bandwidth=3.35e12,parameters=8e9,weights=16e9,"
            "kv=131072 in operations and bytes a second, bytes read by each step, and bytes a position; also "
            "attention (operations a position) and overhead (seconds a step).",
            metavar="SPEC",
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="A step takes what qserve plan says of MODEL on this GPU, as h200.")
    ] = None,
    tp: Annotated[int, typer.Option(help="With --gpu: as many of them split every matrix.")] = 1,
    quantization: Annotated[
        str, typer.Option(help="With --gpu: of the weights: bf16, fp8, w8a8, or wBITSgGROUP.")
    ] = "bf16",
    kv_cache_dtype: Annotated[str, typer.Option(help="With --gpu: fp16, fp8, int8 or int4_per_token_head.")] = "fp16",
    mfu: Annotated[float, typer.Option(help="With --gpu: share of the peak operations.")] = _SHARES.mfu,
    mbu: Annotated[float, typer.Option(help="With --gpu: share of the memory bandwidth.")] = _SHARES.mbu,
    fit: Annotated[
        Path | None,
        typer.Option(help="Measure steps of MODEL and write what they cost.", metavar="FILE"),
    ] = None,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Serve three workloads with MODEL, simulate them, and compare; or send this traffic to the URL.",
        ),
    ] = False,
    validate_seconds: Annotated[float, typer.Option(help="About how long each of the three is.")] = 15.0,
    rate: Annotated[float, typer.Option(help="Requests per second, as a Poisson process.")] = 1.0,
    requests: Annotated[int, typer.Option(help="Requests in all.")] = 1000,
    burst: Annotated[int, typer.Option(help="So many arrive together.")] = 1,
    prompt: Annotated[
        str, typer.Option(help="Tokens of a prompt: 512, lognormal:MEDIAN:SIGMA, uniform:LEAST:MOST or 10/50/200.")
    ] = "512",
    output: Annotated[str, typer.Option(help="Tokens of an output, in the same way.")] = "200",
    prefixes: Annotated[int, typer.Option(help="As many prefixes are shared by the prompts.")] = 0,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of each prefix, before those of --prompt.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded traffic: JSON lines with arrival, prompt, output, and prefix.", metavar="JSONL"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which traffic is drawn.")] = 0,
    replicas: Annotated[
        int, typer.Option(help="Engines, all the same; with --max-replicas the least, which may be 0.")
    ] = 1,
    routing: Annotated[str, typer.Option(help="round-robin, least-loaded or prefix-aware.")] = "least-loaded",
    prefix_reports: Annotated[
        bool,
        typer.Option(
            "--prefix-reports/--no-prefix-reports",
            help="Engines tell a prefix-aware router what they hold; without, it predicts that.",
        ),
    ] = True,
    kv_transfer: Annotated[
        float | None,
        typer.Option(help="Engines fetch KV blocks from each other, so many seconds for each.", metavar="SECONDS"),
    ] = None,
    prefill_replicas: Annotated[
        int, typer.Option(help="With --kv-transfer: so many engines compute the long prompts for the others.")
    ] = 0,
    kv_offload_blocks: Annotated[
        int, typer.Option(help="KV blocks in memory beside the cache of an engine, also those that are fetched.")
    ] = 0,
    max_replicas: Annotated[
        int | None, typer.Option(help="Start and end engines, up to so many, as an autoscaled qserve fleet does.")
    ] = None,
    scale_queue: Annotated[float, typer.Option(help="Waiting requests per engine that start another.")] = 4.0,
    cooldown: Annotated[float, typer.Option(help="Seconds for which engines stay that were needed.")] = 120.0,
    spare_replicas: Annotated[
        int, typer.Option(help="Engines beyond those that a load needs, ready for a burst; none without a load.")
    ] = 0,
    start_delay: Annotated[float, typer.Option(help="Seconds until an engine that is started serves.")] = 60.0,
    interference: Annotated[
        float,
        typer.Option(
            help="Engines share one machine: a step takes so many times as long while all others compute.",
        ),
    ] = 1.0,
    max_model_len: Annotated[int, typer.Option(help="Tokens of prompt and output.")] = 8192,
    max_num_seqs: MaxNumSeqs = ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help=f"Tokens of one step. [default: {STEP_TOKENS}; {GPU_STEP_TOKENS} with --gpu]")
    ] = None,
    max_waiting: Annotated[int, typer.Option(help="Requests in the queue of an engine.")] = ENGINE.max_waiting,
    kv_blocks: Annotated[
        int | None, typer.Option(help="KV blocks of 16 tokens. [default: enough for all; what fits with --gpu]")
    ] = None,
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching/--no-prefix-caching", help="Reuse the KV of equal prompt beginnings.")
    ] = ENGINE.enable_prefix_caching,
    name: ServedModel = None,
    api_key: ServerKey = None,
    static: Annotated[
        bool, typer.Option("--static", help="Static batching: the next batch starts when all of the last has ended.")
    ] = False,
    slo: Annotated[
        str | None, typer.Option(help="What counts as good, as ttft=500ms,tpot=50ms.", metavar="SPEC")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(help="Of one replica per hour. [default: 0; the listed price of its GPUs with --gpu]"),
    ] = None,
    animate: Annotated[
        Path | None,
        typer.Option(
            help="Write a page that shows static beside continuous batching of the first 40 requests on 8 slots.",
            metavar="PAGE.html",
        ),
    ] = None,
    json_path: JsonOut = None,
    markdown_path: MarkdownOut = None,
    html_path: HtmlOut = None,
    threads: Threads = None,
) -> None:
    """Simulate replicas of the engine under a load: latency, goodput, utilisation, KV usage and cost.

    The scheduler and the block manager are those of the engine; only the time that a step takes is computed: of MODEL
    on GPUs as qserve plan has it (--gpu), of other hardware (--roofline), or measured (--fit, then --cost). The URL of
    an OpenAI-compatible server is measured as its client sees it, while it serves nobody else; give the limits that it
    has. With --validate the URL, of a server or of a router before several, gets the very traffic that is simulated.
    """
    from qserve.chat_client import api_url
    from qserve.evals.lengths import Lengths
    from qserve.evals.simulator.cost import FittedCost, RooflineCost
    from qserve.evals.simulator.fleet import Fleet, FleetConfig, KvTransfer
    from qserve.evals.simulator.model_cost import ModelCost
    from qserve.evals.simulator.replica import ReplicaConfig
    from qserve.evals.simulator.summary import Price, simulation_report
    from qserve.evals.simulator.traffic import Traffic, read_trace
    from qserve.evals.slo import UNLIMITED, parse_slo
    from qserve.runtime.autoscale import Autoscale
    from qserve.runtime.limits import SchedulerConfig

    step_tokens = STEP_TOKENS if gpu is None else GPU_STEP_TOKENS
    step_tokens = step_tokens if max_num_batched_tokens is None else max_num_batched_tokens
    written = (json_path, markdown_path, html_path)
    measures = fit is not None or validate
    if measures:
        if model is None:
            raise UsageError("--fit and --validate measure a model or a server: name it")
        if fit is None and cost is None:
            raise UsageError("--validate needs what --fit wrote: give --cost, or --fit too")
        if not 1 <= validate_seconds <= 3600:
            raise UsageError("--validate-seconds must be 1..3600")
        if gpu is not None or roofline is not None:
            raise UsageError("--fit and --validate measure: leave out --gpu and --roofline")
    server = api_url(model) if measures and model is not None and "://" in model else None
    unused = {"--threads": threads, "--slo": slo, "--price": price, "--animate": animate}
    if server is not None and (given := [name for name, value in unused.items() if value is not None]):
        raise UsageError(f"{given[0]} has no meaning where the URL of a server is measured: leave it out")
    if measures and model is not None and server is None:
        limits = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=step_tokens,
            max_waiting=1 << 20,  # a crowd waits, nobody is refused
            max_waiting_tokens=1 << 40,
            threads=threads,
        )
        known = None if cost is None else FittedCost.load(cost)
        _measure(model, limits, fit, known, validate_seconds if validate else None, seed, written)
        return
    if server is None and (model is None) != (gpu is None):
        raise UsageError("MODEL is measured with --fit or --validate, or simulated with --gpu: give both or neither")
    if server is None and [cost, roofline, gpu].count(None) != 2:
        raise UsageError("give either --cost FILE, which --fit wrote, or --roofline SPEC, or MODEL and --gpu")
    steps: CostModel
    fits = max_num_seqs * -(-max_model_len // 16)
    if model is not None and gpu is not None:
        steps = _on_gpu(model, gpu, tp, quantization, kv_cache_dtype, Efficiency(mfu=mfu, mbu=mbu))
        max_model_len, fits = min(max_model_len, steps.roofline.shape.context), steps.num_blocks(max_num_seqs)
        listed = steps.roofline.gpu.price
        price = listed.dollars * tp if price is None and listed is not None else price
    elif server is None:
        steps = RooflineCost.parse(roofline) if roofline is not None else FittedCost.load(cost or Path())
    try:
        limits_of_one = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=step_tokens,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting * max_model_len,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    if server is not None:
        from qserve.evals.bench.client import Client

        client = Client(server, api_key)
        steps = _fit_server(client, name, limits_of_one, fit) if fit is not None else FittedCost.load(cost or Path())
        if not validate:
            return
    if kv_blocks is not None and not 1 <= kv_blocks <= 1 << 24:
        raise UsageError(f"--kv-blocks must be 1..{1 << 24}, not {kv_blocks}")
    one = ReplicaConfig(
        limits_of_one, kv_blocks or min(fits, 1 << 24), prefix_caching=prefix_caching, static=static,
        offload_blocks=kv_offload_blocks,
    )
    money, objective = Price(price or 0.0), UNLIMITED if slo is None else parse_slo(slo, UNLIMITED)
    scale = None
    if max_replicas is not None:
        scale = Autoscale(
            replicas, max_replicas, scale_queue, objective.ttft, float(max_num_seqs), cooldown,
            spare_replicas=spare_replicas,
        )  # fmt: skip
    elif spare_replicas:
        raise UsageError("--spare-replicas needs --max-replicas")
    if prefill_replicas and kv_transfer is None:
        raise UsageError("--prefill-replicas needs --kv-transfer")
    if not 0 <= kv_offload_blocks <= 1 << 24:
        raise UsageError(f"--kv-offload-blocks must be 0..{1 << 24}, not {kv_offload_blocks}")
    transfer = None if kv_transfer is None else KvTransfer(kv_transfer, prefill=prefill_replicas)
    fleet = FleetConfig(one, replicas, routing, scale, start_delay, prefix_reports, transfer, interference)
    arrivals: list[Arrival] | Traffic = (
        read_trace(trace)
        if trace is not None
        else Traffic(
            rate, requests, Lengths.parse(prompt, "--prompt"), Lengths.parse(output, "--output"), burst, prefixes,
            prefix_tokens, max_model_len, seed,
        )
    )  # fmt: skip
    if server is not None:
        from qserve.evals.bench.validation import compare  # loads torch, as the next
        from qserve.evals.simulator.measure import comparison_report

        with console.progress("validate") as update:
            compared = compare(client, name, list(arrivals), fleet, steps, update)
        _show(comparison_report([compared], f"Simulated and measured: {model}", command_line()), written)
        return
    total = len(arrivals) if isinstance(arrivals, list) else arrivals.requests
    simulation = Fleet(fleet, steps)  # refuses an unknown routing
    with console.progress("simulate") as update:
        outcome = simulation.run(arrivals, lambda done: update(done, total))
        update(total, total)
    load = {"trace": trace.name} if trace is not None else {"rate": rate, "prompt": prompt, "output": output,
        "burst": burst, "prefixes": prefixes, "prefix_tokens": prefix_tokens, "seed": seed}  # fmt: skip
    if isinstance(steps, ModelCost):
        source: dict[str, object] = {"model": model, "gpu": gpu, "tp": tp, "quantization": quantization,
                                     "kv_cache_dtype": kv_cache_dtype, "mfu": mfu, "mbu": mbu}  # fmt: skip
    elif roofline is not None:
        source = {"roofline": roofline}
    else:
        source = {"fitted": json.loads((cost or Path()).read_text())}
    more = {"traffic": load, "cost_model": source}
    report = simulation_report(outcome, fleet, objective, money, command_line(), more)
    _show(report, written)
    if animate is not None:
        _animate(animate, arrivals, one, steps)


def _on_gpu(
    model: str, gpu: str, tp: int, quantization: str, kv_cache_dtype: str, efficiency: Efficiency
) -> ModelCost:
    """What the planner would say of such a replica; nothing is loaded. Raises ``UsageError``."""
    from qserve.evals.planner import catalog
    from qserve.evals.planner.deployment import replica_roofline
    from qserve.evals.planner.replica_roofline import Layout
    from qserve.evals.simulator.model_cost import ModelCost

    return ModelCost(
        replica_roofline(catalog.model(model), catalog.gpu(gpu), Layout(tp), quantization, kv_cache_dtype, efficiency)
    )


def _measure(
    model: str,
    config: EngineConfig,
    fit: Path | None,
    cost: FittedCost | None,
    seconds: float | None,
    seed: int,
    written: tuple[Path | None, Path | None, Path | None],
) -> None:
    """Fit, compare, or both, on one engine."""
    from qserve import steps
    from qserve.evals import throughput
    from qserve.evals.simulator import fit as fitting
    from qserve.evals.simulator.measure import compare, comparison_report, workloads

    source = steps.open_source(model)
    engine = steps.load(source, config)
    text = throughput.text_tokens(source)
    if fit is not None:
        with console.progress("measure") as update:
            cost = fitting.fit(fitting.timed_steps(engine, text, progress=update), engine.model_name)
        _write_cost(fit, cost)
    if seconds is None:
        return
    assert cost is not None
    # Eight requests at once, their prompts included.
    per_token = cost.seconds(8, 8, 0, 8 * 128) / 8 + cost.seconds(96, 1, 96 * 48, 0) / 48
    found = []
    with console.progress("validate") as update:
        loads = workloads(per_token, seconds, seed)
        for number, (name, arrivals) in enumerate(loads.items()):
            update(number, len(loads))
            found.append(compare(engine, cost, name, arrivals, text))
        update(len(loads), len(loads))
    report = comparison_report(found, f"Simulated and measured: {engine.model_name}", command_line())
    _show(report, written)


def _fit_server(client: Client, name: str | None, limits: SchedulerConfig, path: Path) -> FittedCost:
    from qserve.evals.bench.validation import fit

    with console.progress("measure") as update:
        cost = fit(client, name, limits, update)
    _write_cost(path, cost)
    return cost


def _write_cost(path: Path, cost: FittedCost) -> None:
    from qserve.checkpoint.files import write_atomically

    try:
        write_atomically(path, (json.dumps(cost.to_json(), indent=2) + "\n").encode())
    except OSError as error:
        raise QServeError(f"cannot write {path}: {error.strerror or error}") from None
    console.line(f"{path}: the steps of {cost.model}, median error {cost.error:.1%} over those measured")


def _show(report: Report, written: tuple[Path | None, Path | None, Path | None]) -> None:
    from qserve.evals.report_files import write_report

    write_report(report, *written)
    for section in report.sections:
        console.table(section.title, section.header, section.rows)


def _animate(path: Path, arrivals: Iterable[Arrival], one: ReplicaConfig, cost: CostModel) -> None:
    from qserve.checkpoint.files import write_atomically
    from qserve.evals.simulator.animation import REQUESTS, page

    first = list(islice(arrivals, REQUESTS))
    try:
        write_atomically(path, page(first, one, cost, "Static and continuous batching").encode())
    except OSError as error:
        raise QServeError(f"cannot write {path}: {error.strerror or error}") from None
    console.line(f"animation: {path}")
