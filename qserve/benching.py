"""The measurements of ``qserve bench``: closed batches, static against continuous batching, or a server under load.

Every function returns a report.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

from qserve import console, steps
from qserve.chat_client import api_url
from qserve.checkpoint.errors import UsageError
from qserve.commands.options import ENGINE
from qserve.commands.values import command_line, integers, numbers
from qserve.evals import throughput
from qserve.evals.bench import batching
from qserve.evals.bench import engine_time as engine_speed
from qserve.evals.bench import kernels as linear_speed
from qserve.evals.bench import speculation as speculative
from qserve.evals.bench.client import Client
from qserve.evals.bench.job import Job, run
from qserve.evals.bench.server_process import ServerProcess
from qserve.evals.bench.summary import bench_report
from qserve.evals.bench.workload import read_dataset
from qserve.evals.lengths import Lengths
from qserve.evals.report import Report
from qserve.evals.report_files import write_report
from qserve.evals.slo import UNLIMITED, parse_slo
from qserve.kernels import registry
from qserve.kernels.native import NativeExecutor
from qserve.kernels.threads import default_threads
from qserve.runtime.config import EngineConfig
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.server.config import ServerConfig


def job(
    concurrency: str | None,
    rate: str | None,
    prompt: str,
    output: str,
    endpoint: str,
    slo: str | None,
    rest: dict[str, Any],
) -> Job:
    """The loads that the options describe. Raises ``UsageError`` where options contradict each other."""
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


def load(
    model: str,
    job: Job,
    name: str | None,
    api_key: str | None,
    fields: dict[str, Any],
    timeout: float,
    engine: EngineConfig,
) -> Report:
    """Load the server at the URL MODEL, or one that is started for the model MODEL."""
    if not 0 < timeout <= 86400:
        raise UsageError(f"--timeout must be above 0 seconds and at most a day, not {timeout:g}")
    with ExitStack() as stack:
        if "://" in model:
            url = api_url(model)
        else:
            source = steps.open_source(model)  # finds errors before a process is started
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


def static(
    model: str,
    concurrency: str,
    prompt: str,
    output: str | None,
    requests: int | None,
    seed: int,
    engine: EngineConfig,
) -> Report:
    """The same requests in static batches and in continuous batching, in this process."""
    levels, prompts = integers(concurrency, "--concurrency"), integers(prompt, "--prompt")
    if len(levels) > 1 or len(prompts) > 1:
        raise UsageError("--static compares at one --concurrency and one --prompt")
    tokens = prompts[0]
    requests = 16 * levels[0] if requests is None else requests
    if requests < 1:
        raise UsageError("--requests must be at least 1")
    lengths = batching.lengths_of(Lengths.parse(output or "10/50/200/500", "--output"), requests, levels[0], seed)
    source = steps.open_source(model)
    config = replace(
        engine,
        max_num_seqs=levels[0],
        max_waiting=max(requests, ENGINE.max_waiting),
        max_waiting_tokens=max(1, requests * tokens),
    )
    loaded = steps.load(source, config)
    with console.progress("bench") as update:
        found = batching.compare(loaded, throughput.text_tokens(source), tokens, lengths, update)
    return batching.batching_report(found, f"Static and continuous batching of {source.name}", command_line())


def speculation(
    model: str, concurrency: str, prompt: str, output: str, dataset: Path | None, requests: int | None, repeats: int,
    engine: EngineConfig,
) -> Report:  # fmt: skip
    """The same requests with and without drafts, in this process: greedy answers to a dataset, or drawn ones to
    ordinary text."""
    levels = integers(concurrency, "--concurrency")
    lengths = [*integers(prompt, "--prompt"), *integers(output, "--output")]
    if len(lengths) != 2 or repeats < 1 or (requests is not None and requests < 1):
        raise UsageError("--speculative-config takes one --prompt and --output, and --repeats and --requests of at "
                         "least 1")
    source = steps.open_source(model)
    most = max(levels)
    config = replace(engine, max_num_seqs=max(most, ENGINE.max_num_seqs), max_waiting=max(most, ENGINE.max_waiting))
    loaded = steps.load(source, config)
    drafter = loaded.drafter
    assert drafter is not None and config.speculative_config is not None
    count = max(most, requests or 6)
    if dataset is None:
        name, texts = "drawn answers to ordinary text", throughput.text_tokens(source)
        asked = [
            (tokens, SamplingParams(max_tokens=lengths[1], temperature=1.0, ignore_eos=True, seed=seed))
            for seed, tokens in enumerate(throughput.prompts_of(texts, count, lengths[0]))
        ]
    else:
        name, talks = f"greedy answers to {dataset.stem}", islice(read_dataset(dataset, 1, 0), count)
        asked = [
            (speculative.prompt_tokens(loaded, turn.text or ""),
             SamplingParams(max_tokens=turn.output, temperature=0.0))
            for talk in talks for turn in talk.turns
        ]
    found = []
    for level in levels:
        with console.progress(f"{level} at once") as update:
            some = asked[: max(level, requests or 6)]
            found.append(speculative.compare(loaded, drafter, some, level, repeats, update))
    settings = asdict(config.speculative_config)
    return speculative.report(source.name, found, name, settings, command_line())


def engine_time(model: str, concurrency: str, prompt: str, output: str, repeats: int) -> Report:
    """The engine's own part of a step, by part, on a model that computes nothing. MODEL gives the tokenizer."""
    loads = list(product(integers(concurrency, "--concurrency"), integers(prompt, "--prompt")))
    outputs = integers(output, "--output")
    if len(outputs) > 1 or repeats < 1:
        raise UsageError("--without-model takes one --output, and --repeats of at least 1")
    source = steps.open_source(model)
    found = []
    with console.progress("bench") as update:
        for i, (level, context) in enumerate(loads):
            update(i, len(loads))
            found.append(engine_speed.measure(source, level, context, outputs[0], repeats))
        update(len(loads), len(loads))
    return engine_speed.report(source.name, found, command_line())


def batches(
    model: str,
    concurrency: str,
    prompt: str,
    output: str,
    repeats: int,
    against: str | None,
    min_ratio: str | None,
    engine: EngineConfig,
) -> Report:
    """Requests that start together, in this process; beside transformers if ``against`` names the dense model."""
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
    config = replace(
        engine,
        max_num_seqs=max(most, ENGINE.max_num_seqs),
        max_waiting=max(most, ENGINE.max_waiting),
    )
    loaded = steps.load(source, config)
    text = throughput.text_tokens(source)
    if len(text) < most * repeats + load.prompt:
        raise UsageError("--concurrency, --repeats and --prompt need more text than there is: lower them")
    found = []
    with console.progress("bench") as update:
        for i, level in enumerate(levels):
            update(i, len(levels))
            found.append(throughput.measure(loaded, text, level, load, repeats))
        update(len(levels), len(levels))
    peer = None
    if base is not None:
        peer = throughput.fastest_transformers(base, text, load, config.num_threads, console.note)
    return throughput.report(loaded, found, load, peer, gates, command_line())


def kernels(
    engine: EngineConfig, repeats: int, device: str = "cpu", tune: Path | None = None, limit: float | None = None,
    json_path: Path | None = None,
) -> Report:  # fmt: skip
    """The C kernels beside the machine's peaks, or those of a GPU beside others' and the GPU's peaks. With ``tune``,
    the best configurations of the latter, in a file in that folder. After ``limit`` seconds nothing new begins. Results
    so far are written to ``json_path`` meanwhile."""
    name = engine.kernels
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu or cuda, not {device}")
    if repeats < 1:
        raise UsageError("--repeats must be at least 1")
    if limit is not None and not 0 < limit <= 86400:
        raise UsageError(f"--limit must be above 0 seconds and at most a day, not {limit:g}")
    if device == "cuda":
        return _gpu_kernels(engine, repeats, tune, limit, json_path)
    if tune is not None or limit is not None:
        raise UsageError("--tune and --limit are for --device cuda")
    if name != "auto" and not name.startswith("native"):
        raise UsageError(f"qserve bench kernels times the C kernels: --kernels native or native-ISA, not {name}")
    executor = registry.make("native" if name == "auto" else name, engine.threads, cpus=engine.cpu_list)
    assert isinstance(executor, NativeExecutor)
    with console.progress("kernels") as update:
        return linear_speed.run(executor, command_line(), repeats=repeats, update=update)


def _gpu_kernels(
    engine: EngineConfig, repeats: int, tune: Path | None, limit: float | None, json_path: Path | None
) -> Report:
    if replace(engine, kernels="auto") != EngineConfig() or engine.kernels not in ("auto", "triton"):
        raise UsageError("--device cuda times the Triton kernels: leave out --kernels, --threads and --cpu-list")
    if find_spec("triton") is None:
        raise UsageError("--device cuda: triton is not installed (no GPU kernels on this platform)")
    from qserve.evals.bench.gpu import kernels as of_gpu  # imports Triton, which takes a while
    from qserve.evals.bench.gpu import tuning
    from qserve.kernels.triton.tuning.stopwatch import Stopwatch
    from qserve.kernels.triton.tuning.tune import Tuner

    watch = Stopwatch(of_gpu.require_gpu(), repeats)
    if tune is not None and not tune.is_dir():
        raise UsageError(f"--tune {tune}: there is no such folder")
    with console.progress("kernels" if tune is None else "tune") as update:
        if tune is None:
            seconds = of_gpu.LIMIT if limit is None else limit
            return of_gpu.run(
                command_line(), watch, limit=seconds, update=update,
                save=lambda report: write_report(report, json_path, None),
            )
        until = math.inf if limit is None else time.monotonic() + limit
        return tuning.run(command_line(), tune, Tuner(watch, default_threads(), until), update=update)
