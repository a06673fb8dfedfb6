"""The ``qserve`` command: options in, the work of the other packages composed, results and exit codes out.

Every heavy import is inside the command that needs it, so that asking for help is cheap. Exit codes: 0 done,
1 failed, 2 bad usage, 3 a gate failed.
"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from qserve import __version__, console
from qserve.checkpoint.errors import QServeError, UsageError
from qserve.commands.plan import plan
from qserve.commands.simulate import simulate
from qserve.quantize.job import QuantizeJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.sampling import RequestError

if TYPE_CHECKING:
    from qserve.checkpoint.card import QualityCard
    from qserve.evals.gate import Gate, GateReport
    from qserve.evals.quality import EvalJob
    from qserve.runtime.engine import Engine

_JOB = QuantizeJob()
_ENGINE = EngineConfig()


class _Group(TyperGroup):
    """Turns expected failures into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (QServeError, RequestError, MemoryError, RuntimeError, OSError, KeyboardInterrupt) as error:
            # Torch says by a RuntimeError that memory is short; any other is a defect, whose traceback is wanted.
            defect = isinstance(error, RuntimeError) and "allocate memory" not in str(error)
            if ctx.params.get("debug") or defect:
                raise
            failure, code = _explain(error)
            failure = "\n".join([failure, *getattr(error, "__notes__", ())])
        console.error(failure)
        sys.exit(code)


def _explain(error: BaseException) -> tuple[str, int]:
    """An expected failure as (line, exit code)."""
    match error:
        case MemoryError() | RuntimeError():
            return "out of memory: use a smaller model, --samples or --kv-cache-memory", 1
        case OSError():
            name = f"{error.filename}: " if error.filename else ""
            return f"{name}{error.strerror or error}", 1
        case KeyboardInterrupt():
            return "interrupted", 130
    return str(error), getattr(error, "exit_code", 1)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Quantize a language model, prove what it cost, and serve it.",
)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face directory, a hub id, a .gguf file, or demo.")
]
MaxKl = Annotated[
    float | None, typer.Option("--max-kl", help="Gate: mean KL divergence from the base, in nats.", metavar="NATS")
]
MaxPpl = Annotated[
    str | None,
    typer.Option("--max-ppl-increase", help="Gate: rise in perplexity over the base, as 3% or 0.03.", metavar="RATIO"),
]
MinTop1 = Annotated[
    str | None,
    typer.Option("--min-top1", help="Gate: share of tokens with the base's first choice, as 90%.", metavar="RATIO"),
]
Data = Annotated[
    str,
    typer.Option(
        help="Evaluation text: builtin, a text or JSONL file, wikitext2, or another dataset name.", metavar="SOURCE"
    ),
]
Tokens = Annotated[int, typer.Option(help="Tokens to evaluate, rounded down to whole windows.")]
Window = Annotated[int, typer.Option(help="Tokens per evaluation window.")]
Kernels = Annotated[str, typer.Option(help="Kernels to compute with; qserve doctor lists them.")]
Threads = Annotated[int | None, typer.Option(help="Threads of the CPU kernels. [default: all cores]")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.", metavar="PATH")]
MarkdownOut = Annotated[Path | None, typer.Option("--markdown", help="Write the report as Markdown.", metavar="PATH")]


def _version(show: bool) -> None:
    if show:
        console.line(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def quantize(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the new checkpoint.")],
    scheme: Annotated[
        str,
        typer.Option(
            help="Which numbers. weights: integers of --bits, inputs stay floats. w8a8: int8 weights and inputs. fp8: "
            "e4m3 per channel and per token; fp8-tensor: one scale each; fp8-static: the same with calibrated input "
            "scales; fp8-block: blocks of 128 x 128."
        ),
    ] = _JOB.scheme,
    bits: Annotated[int, typer.Option(help="Bits per weight: 2, 3, 4, 6 or 8.")] = _JOB.bits,
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale; -1 for all of them.")] = _JOB.group_size,
    sym: Annotated[bool, typer.Option("--sym/--asym", help="Symmetric codes, or with zero points.")] = _JOB.symmetric,
    method: Annotated[
        str,
        typer.Option(
            help="How codes are chosen. rtn: each weight by itself. gptq: later weights make up for the errors of "
            "earlier ones. awq: channels with large inputs are enlarged first; awq+gptq: both. smoothquant: outliers "
            "move from inputs into weights. auto: gptq, smoothquant for w8a8, rtn for fp8."
        ),
    ] = "auto",
    effort: Annotated[
        str,
        typer.Option(
            help="Of gptq. fast: each layer for the inputs it gets. normal: it also makes up for what earlier layers "
            "lost. best: then learns the rounding (SignRound) and, where the whole model fits memory, tunes all scales "
            "for its predictions; many times slower."
        ),
    ] = _JOB.effort,
    act_order: Annotated[
        bool, typer.Option("--act-order/--no-act-order", help="GPTQ: round the most active inputs first.")
    ] = _JOB.act_order,
    head: Annotated[int, typer.Option(help="Bits of the output head: 8, 6 or 4; 0 keeps it.")] = _JOB.head_bits,
    embeddings: Annotated[int, typer.Option(help="Bits of the embedding: 8; 0 keeps it.")] = _JOB.embedding_bits,
    kv_cache: Annotated[
        str, typer.Option(help="Calibrate scales for a KV cache in int8 or fp8; none leaves that to the server.")
    ] = "none",
    kv_scales: Annotated[
        str, typer.Option(help="Scales of the KV cache: one per tensor, or one per head.")
    ] = _JOB.kv_granularity,
    target_bits: Annotated[
        float | None,
        typer.Option(
            help="Mixed precision: choose each layer's bits so that the average, scales included, is at most this."
        ),
    ] = None,
    minimize: Annotated[
        str | None,
        typer.Option(help="size: mixed precision, the smallest checkpoint within --max-kl.", metavar="size"),
    ] = None,
    format: Annotated[
        str,
        typer.Option(help="gptq, gptq_v2, awq, compressed-tensors or fp8; auto takes the one most loaders read."),
    ] = _JOB.format,
    loaders: Annotated[
        str,
        typer.Option("--for", help="Loaders that must accept it: qserve, vllm, sglang, transformers.", metavar="LIST"),
    ] = ",".join(_JOB.loaders),
    calibration: Annotated[
        str, typer.Option(help="Calibration text: builtin, a file, a dataset, or none (rtn).", metavar="SOURCE")
    ] = _JOB.calibration or "none",
    samples: Annotated[int, typer.Option(help="Calibration samples.")] = _JOB.samples,
    sequence_length: Annotated[int, typer.Option(help="Tokens per calibration sample.")] = _JOB.sequence_length,
    seed: Annotated[int, typer.Option(help="Which samples are drawn.")] = _JOB.seed,
    overwrite: Annotated[bool, typer.Option(help="Replace a checkpoint at OUT.")] = _JOB.overwrite,
    offload: Annotated[bool, typer.Option(help="Keep hidden states on disk, few of them in memory.")] = _JOB.offload,
    max_memory: Annotated[
        str | None, typer.Option(help="Plan with this much memory, as 16GiB. [default: what is free]", metavar="SIZE")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show plan, forecast and size of the output, and stop.")
    ] = False,
    report_dir: Annotated[
        Path | None,
        typer.Option("--report", help="Write quantization.json, .md and .html with plots there.", metavar="DIR"),
    ] = None,
    max_kl: MaxKl = None,
    max_ppl_increase: MaxPpl = None,
    min_top1: MinTop1 = None,
    data: Data = "builtin",
    tokens: Tokens = 8192,
    window: Window = 512,
) -> None:
    """Compress MODEL into a checkpoint at OUT; with gates, publish it only if it passes them.

    Everything that can be refused is refused before calibration, and OUT appears complete or not at all. A run that
    was interrupted goes on where it stopped when it is called again.
    """
    from qserve import steps
    from qserve.evals import quality
    from qserve.evals.gate import enforce, judge
    from qserve.evals.quantize_report import write_report
    from qserve.evals.worst import WorstTokens

    if minimize not in (None, "size"):
        raise UsageError(f"--minimize knows size, not {minimize!r}")
    if minimize and max_kl is None:
        raise UsageError("--minimize size needs the divergence that is allowed: --max-kl")
    gates = _gates(max_kl, max_ppl_increase, min_top1)
    job = QuantizeJob(
        scheme=scheme,  # type: ignore[arg-type]  # checked by the job itself, as are the others
        bits=bits,
        group_size=group_size,
        symmetric=sym,
        head_bits=head,
        embedding_bits=embeddings,
        kv_cache=None if kv_cache == "none" else kv_cache,  # type: ignore[arg-type]
        kv_granularity=kv_scales,  # type: ignore[arg-type]
        method=None if method == "auto" else method,  # type: ignore[arg-type]
        effort=effort,  # type: ignore[arg-type]
        act_order=act_order,
        target_bits=target_bits,
        max_kl=max_kl if minimize else None,
        calibration=None if calibration == "none" else calibration,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
        format=format,
        loaders=tuple(name.strip() for name in loaders.split(",") if name.strip()),
        overwrite=overwrite,
        offload=offload,
        max_memory=None if max_memory is None else _bytes(max_memory),
    )
    source = steps.open_source(model)
    if dry_run:
        for text in steps.plan(source, out, job):
            console.line(text)
        return
    evaluation = _eval_job(data, tokens, window) if gates or report_dir else None
    if evaluation is not None:
        quality.check(evaluation, source)
    verdicts: list[GateReport] = []
    worst: list[WorstTokens] = []  # of each attempt of mixed precision

    def measure(staged: Path) -> QualityCard:
        assert evaluation is not None
        worst.append(WorstTokens())
        return steps.measure(steps.open_source(str(staged)), source, evaluation, worst=worst[-1])

    def accept(card: QualityCard) -> None:
        verdicts.extend(judge(gates, card))
        enforce(verdicts)

    report = steps.quantize(source, out, job, measure if evaluation else None, accept)
    for layer in report.layers:
        if layer.fallback:
            console.line(f"{layer.module}: {layer.fallback}")
    peak = console.size(report.peak_bytes)
    console.line(f"{out}: {len(report.layers)} linears in {report.seconds:.0f} s, peak memory {peak}")
    for verdict in report.verdicts:
        console.line(f"  {verdict}")
    if report.card is not None:
        steps.show_card(report.card, verdicts)
    if report_dir is not None:
        decoded = worst[-1].decoded(source.tokenizer())
        for path in write_report(report_dir, report, name=out.name, command=_command(), worst=decoded):
            console.line(f"report: {path}")


@app.command()
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A quantized checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the new checkpoint.")],
    format: Annotated[
        str, typer.Option(help="gptq, gptq_v2, awq, compressed-tensors or fp8; hf dequantizes to 16 bits.")
    ],
    loaders: Annotated[
        str,
        typer.Option("--for", help="Loaders that must accept it: qserve, vllm, sglang, transformers.", metavar="LIST"),
    ] = "qserve",
    overwrite: Annotated[bool, typer.Option(help="Replace a checkpoint at OUT.")] = False,
) -> None:
    """Rewrite a quantized checkpoint in another format: the same weights bit for bit, or a refusal that says why."""
    from qserve import steps

    names = tuple(name.strip() for name in loaders.split(",") if name.strip())
    for text in steps.convert(steps.open_source(model), out, format, names, overwrite=overwrite):
        console.line(text)


@app.command("eval")
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
    kernels: Kernels = _ENGINE.kernels,
    threads: Threads = None,
    card: Annotated[bool, typer.Option("--card/--no-card", help="Store the result inside CKPT.")] = True,
) -> None:
    """Measure perplexity, KL divergence and top-1 agreement of CKPT against its base, on the kernels that serve.

    The result becomes the checkpoint's quality card. A gate that fails ends with exit code 3.
    """
    from qserve import steps
    from qserve.checkpoint.card import write_card
    from qserve.evals.gate import enforce, judge
    from qserve.evals.report import quality_report

    gates = _gates(max_kl, max_ppl_increase, min_top1)
    job = _eval_job(data, tokens, window)
    model, base = steps.open_source(checkpoint), steps.open_source(against)
    found = steps.measure(model, base, job, kernels, threads)
    reports = judge(gates, found)
    steps.show_card(found, reports)  # first: a file that cannot be written must not lose the measurement
    quality_report(found, model.name, _command(), reports).write(json_path, markdown_path)
    if card and model.spec is not None:
        write_card(model.path, found)
    enforce(reports)


@app.command()
def run(
    model: Model = "demo",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that callers must show; may be given several times.", metavar="KEY")
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of hashed keys with limits, see qserve key; SIGHUP reads it again.", metavar="FILE"
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM), for HTTPS.", metavar="FILE")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).", metavar="FILE")] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="A web origin whose pages may call; may be given several times.", metavar="URL"),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call the model. [default: its name]")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and output. [default: what model and memory allow]")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests running at once.")] = _ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = _ENGINE.max_num_batched_tokens,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more get a 503.")] = _ENGINE.max_waiting,
    max_waiting_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens that may wait; more get a 503. [default: 32 contexts]")
    ] = None,
    step_timeout: Annotated[
        float, typer.Option(help="Seconds after which a stuck step of the model ends the server; 0 for never.")
    ] = 120.0,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(help="Size of the KV cache, as 512MiB or 4GB. [default: half of what is free]", metavar="SIZE"),
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(help="auto (what the checkpoint was calibrated for, else fp16), fp16, fp32, int8 or fp8."),
    ] = _ENGINE.kv_cache_dtype,
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching/--no-prefix-caching", help="Reuse the KV of equal prompt beginnings.")
    ] = _ENGINE.enable_prefix_caching,
    head: Annotated[str, typer.Option(help="Output head of a quantized model: auto (int8) or dense.")] = _ENGINE.head,
    kernels: Kernels = _ENGINE.kernels,
    threads: Threads = None,
    stream_interval: Annotated[
        int, typer.Option(help="Tokens of one event of a stream, after the first.", min=1, max=1024)
    ] = 1,
    vllm_metrics: Annotated[bool, typer.Option(help="Repeat the metrics under vLLM's names.")] = False,
    log_format: Annotated[str, typer.Option(help="Log lines as text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="Least level that is logged: debug, info, warning or error.")] = "info",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="OpenTelemetry collector that gets the traces; needs the tracing extra.", metavar="URL"),
    ] = None,
    tool_format: Annotated[
        str, typer.Option(help="How the model writes tool calls: auto, none, hermes, llama, mistral or mistral-named.")
    ] = "auto",
    reasoning: Annotated[
        str, typer.Option(help="Split reasoning off answers: auto (where the chat template marks it) or none.")
    ] = "auto",
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API until a signal ends it; the first one drains."""
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        kv_cache_memory=None if kv_cache_memory is None else _bytes(kv_cache_memory),
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=prefix_caching,
        kernels=kernels,
        threads=threads,
        head=head,
    )
    from qserve import steps
    from qserve.runtime.server import logs
    from qserve.runtime.server.config import ServerConfig
    from qserve.runtime.server.serve import claim_socket, serve
    from qserve.runtime.server.tracing import otlp_exporter

    server = ServerConfig(
        api_keys=tuple(api_key or ()),
        api_keys_file=api_keys,
        tls_cert=tls_cert,
        tls_key=tls_key,
        cors_origins=tuple(cors_origin or ()),
        step_timeout=step_timeout,
        model_name=served_model_name,
        stream_interval=stream_interval,
        vllm_metrics=vllm_metrics,
        otlp_endpoint=otlp_endpoint,
        tool_format=tool_format,
        reasoning=reasoning,
    )
    if otlp_endpoint is not None:
        otlp_exporter(otlp_endpoint).shutdown()  # what is wrong with it is known before the model is loaded
    source = steps.open_source(model)
    say = logs.start(log_format, log_level, console.note)
    sock = claim_socket(host, port)  # before the model is loaded: a port in use is known at once

    def load() -> Engine:
        say(f"loading {source.name}")
        engine = steps.load(source, config, quiet=log_format == "json")
        for text in engine.memory.lines():
            say(text)
        return engine

    def opened(engine: Engine) -> None:
        address, number = sock.getsockname()[:2]
        place = f"[{address}]" if ":" in address else address
        scheme = "http" if tls_cert is None else "https"
        say(f"serving {served_model_name or engine.model_name} on {scheme}://{place}:{number}/v1")

    serve(load, config=server, sock=sock, opened=opened)


@app.command()
def key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.")],
    file: Annotated[Path, typer.Option(help="Where its hash goes, for run --api-keys.", metavar="FILE")] = Path(
        "keys.toml"
    ),
) -> None:
    """Make an API key: its hash is added to FILE, the key itself is printed once and kept nowhere."""
    from qserve.runtime.server.keys import add_key

    console.line(add_key(name, file))
    console.note(f"{file} lets it in with 'qserve run --api-keys {file}'; limits are lines of its entry")


@app.command()
def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A Hugging Face directory, a hub id, a .gguf file, demo, or the URL of a server."
        ),
    ] = "demo",
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The key that a server wants; OPENAI_API_KEY of the environment where it is not given.",
            metavar="KEY",
            envvar="OPENAI_API_KEY",
            show_envvar=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--model", help="Which model of a server. [default: the first that it lists]", metavar="NAME"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the most likely tokens. [default: 0.7; a server's own]")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from this share of the probability.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same answers.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of the conversation. [default: what model and memory allow]")
    ] = None,
    kernels: Kernels = _ENGINE.kernels,
    threads: Threads = None,
) -> None:
    """Talk to MODEL in the terminal: loaded into this process, or behind the URL of any OpenAI-compatible server.

    Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. Where the input is no terminal, each line of it is
    a message.
    """
    asked = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    options = {key: value for key, value in asked.items() if value is not None}
    from qserve import chat as conversation

    if "://" in model:
        if (max_model_len, kernels, threads) != (None, _ENGINE.kernels, None):
            raise UsageError("--max-model-len, --kernels and --threads are for a model in this process")
        conversation.with_server(model, api_key, name, system, options)
    else:
        if name is not None:
            raise UsageError("--model is for a server that has several")
        engine = EngineConfig(max_model_len=max_model_len, max_num_seqs=1, kernels=kernels, threads=threads)
        conversation.with_model(model, engine, system, {"temperature": 0.7} | options)


@app.command()
def batch(
    lines: Annotated[Path, typer.Argument(metavar="IN", help="Requests in the format of OpenAI's batches, JSONL.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Answers, JSONL; what it holds is not done again.")],
    model: Annotated[str, typer.Option(help="The model that answers.", metavar="MODEL")] = "demo",
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call the model. [default: its name]")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and output. [default: what model and memory allow]")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests running at once.")] = _ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = _ENGINE.max_num_batched_tokens,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(help="Size of the KV cache, as 512MiB or 4GB. [default: half of what is free]", metavar="SIZE"),
    ] = None,
    kernels: Kernels = _ENGINE.kernels,
    threads: Threads = None,
) -> None:
    """Answer the requests of a file at full throughput, as the server would, without a server.

    A line that cannot be answered gets an error and the rest goes on. A run that was interrupted goes on where it
    stopped when it is called again.
    """
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory=None if kv_cache_memory is None else _bytes(kv_cache_memory),
        kernels=kernels,
        threads=threads,
    )
    if out.exists() and lines.exists() and out.samefile(lines):
        raise UsageError("IN and OUT are the same file")
    from qserve import steps
    from qserve.answer_file import AnswerFile
    from qserve.batch import check_lines, is_done, run_batch

    check_lines(lines)  # before the model is loaded
    with AnswerFile(out) as answers:
        if is_done(lines, answers):
            console.line(f"{out} holds the answer to every line already")
            return
        engine = steps.load(steps.open_source(model), config)
        with console.progress("batch") as update:
            report = run_batch(engine, lines, answers, model_name=served_model_name, update=update)
    for text in report.summary():
        console.line(text)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(metavar="ID", help="A hub id, as org/name or org/name@revision, or demo.")],
    file: Annotated[str | None, typer.Option(help="Which one of several GGUF files.", metavar="NAME.gguf")] = None,
) -> None:
    """Fetch a model into the cache of the Hugging Face hub, and check every file against its hash there.

    Only safetensors, GGUF, JSON and tokenizer files: never pickles, never code. Called again after an interruption it
    goes on with the file it was at; called on a model that is there it checks it, and repairs it.
    """
    from qserve import store

    for text in store.pull(model, file):
        console.line(text)


@app.command("list")
def list_models(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Where to look, two levels deep. [default: the current directory]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the whole quality cards.")] = False,
) -> None:
    """List the models in directories and in the hub's cache, with their sizes and what their quality cards say."""
    from qserve import store

    store.show(directories or [Path()], as_json=as_json)


@app.command()
def rm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint directory, a cached hub id, or demo.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a checkpoint that qserve wrote, a model in the hub's cache, or the demo model, after asking."""
    from qserve.checkpoint.removal import find_removal

    removal = find_removal(model)
    size = console.size(removal.bytes)
    if not yes:
        typer.confirm(f"Remove {removal.what}: {size}?", abort=True)
    removal.run()
    console.line(f"removed {removal.what}: {size} are free")


@app.command()
def inspect(
    model: Model,
    layers: Annotated[bool, typer.Option(help="List every linear.")] = False,
    verify: Annotated[bool, typer.Option(help="Compare every file with its stored hash.")] = False,
) -> None:
    """Show what a model is made of: layers, bits, size, and its quality card."""
    from qserve import steps
    from qserve.checkpoint.summary import summarize

    source = steps.open_source(model)
    if verify:
        source.verify()
    summary = summarize(source)
    for text in summary.lines():
        console.line(text)
    if layers:
        console.table("", ("linear", "out", "in", "bits", "group"), summary.layer_rows())
    if source.card is not None:
        steps.show_card(source.card, [])
    if verify:
        console.line("every file matches its hash")


@app.command()
def doctor() -> None:
    """Say which kernels this machine can run, what is missing, and what that costs."""
    from importlib.metadata import PackageNotFoundError, version

    from qserve.evals.report import environment
    from qserve.kernels import registry

    for key, value in environment().items():
        console.line(f"{key:<13}{value}")
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed (no GPU kernels on this platform)"
    console.line(f"{'triton':<13}{triton}")
    for candidate in registry.candidates():
        state = f"available ({candidate.detail})" if candidate.reason is None else f"missing: {candidate.reason}"
        console.line(f"{candidate.name:<13}{state}")
        if candidate.reason is not None:
            console.line(f"{'':<13}without it: {candidate.cost}")
    console.line(f"{'selected':<13}{registry.make().name}")


@app.command()
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
    kernels: Kernels = _ENGINE.kernels,
    threads: Threads = None,
) -> None:
    """Measure prefill and decode rates at fixed concurrency, if asked beside transformers in the same run."""
    from qserve import steps
    from qserve.evals import throughput
    from qserve.evals.gate import enforce

    levels = _integers(concurrency, "--concurrency")
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
        max_num_seqs=max(most, _ENGINE.max_num_seqs),
        max_num_batched_tokens=max(most, _ENGINE.max_num_batched_tokens),
        max_waiting=max(most, _ENGINE.max_waiting),
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
    report = throughput.report(engine, found, load, peer, gates, _command())
    report.write(json_path, markdown_path)
    for section in report.sections:
        console.table(section.title, section.header, section.rows)
    enforce(report.gates)


app.command()(simulate)


@app.command()
def demo(
    keep: Annotated[bool, typer.Option(help="Leave the server running until Ctrl-C.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Keep the checkpoint in this directory.", metavar="DIR")
    ] = None,
) -> None:
    """The whole job in a few minutes: fetch a small model, quantize it, gate it, serve it, and ask it a question."""
    from qserve.demo import run_demo

    run_demo(keep=keep, out=out)


app.command()(plan)


def main() -> None:
    """The entry point of the ``qserve`` command."""
    # An exit, so that what is half-written is removed; the server has a handler of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    app()


def _gates(max_kl: float | None, max_ppl_increase: str | None, min_top1: str | None) -> list[Gate]:
    if max_kl is None and max_ppl_increase is None and min_top1 is None:
        return []
    from qserve.evals.gate import quality_gates

    return quality_gates(max_kl=max_kl, max_ppl_increase=max_ppl_increase, min_top1=min_top1)


def _eval_job(data: str, tokens: int, window: int) -> EvalJob:
    from qserve.calibration.text import load_text
    from qserve.evals.quality import EvalJob

    if window < 2:
        raise UsageError("--window must be at least 2")
    if tokens < window:
        raise UsageError(f"--tokens {tokens} does not fill one --window of {window}")
    return EvalJob(load_text(data, "evaluate"), tokens, window)


def _bytes(text: str) -> int:
    """``512MiB``, ``4GB`` or a plain number of bytes."""
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.rstrip("BKMGIbkmgi ")
    try:
        value = float(number) * units[text[len(number) :].strip().upper()]
    except (ValueError, KeyError):
        value = 0.0
    if not 1 <= value < 2**63:
        raise UsageError(f"a size must be like 512MiB or 4GB, not {text!r}")
    return int(value)


def _integers(text: str, option: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise UsageError(f"{option} must be positive numbers with commas between, not {text!r}")
    return values


def _command() -> str:
    """This command line, for the reports; without the directory of the script."""
    return shlex.join(["qserve", *sys.argv[1:]])
