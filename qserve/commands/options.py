"""The options and arguments that several commands have: name, type and help, declared once.

Defaults are with each command, because they may differ. The parsing of option texts is in ``values``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qserve.checkpoint.extras import require
from qserve.runtime.config import GPU_STEP_TOKENS, STEP_TOKENS, EngineConfig

ENGINE = EngineConfig()  # the source of the engine options' defaults


def needs_plots(path: Path | None) -> Path | None:
    """For an option whose file has plots: refuse it before any work where nothing can draw them."""
    if path is not None:
        require("matplotlib", "a page with plots")
    return path



Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face directory, a hub id, a .gguf file, s3:// or gs:// and a prefix, demo, or demo-gemma.",
    ),
]
ServedModel = Annotated[
    str | None,
    typer.Option("--model", help="Which model of a server. [default: the first that it lists]", metavar="NAME"),
]
ServerKey = Annotated[
    str | None,
    typer.Option(
        help="The key that a server wants; OPENAI_API_KEY of the environment where it is not given.",
        metavar="KEY",
        envvar="OPENAI_API_KEY",
        show_envvar=False,
    ),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the new checkpoint.")]
Loaders = Annotated[
    str,
    typer.Option("--for", help="Loaders that must accept it: qserve, vllm, sglang, transformers.", metavar="LIST"),
]
Overwrite = Annotated[bool, typer.Option(help="Replace a checkpoint at OUT.")]

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
        help="Evaluation text: builtin, a text or JSONL file (lines with text or messages), wikitext2, or another "
        "dataset name.",
        metavar="SOURCE",
    ),
]
AllowCalibrationText = Annotated[
    bool,
    typer.Option(
        "--allow-calibration-text",
        help="Evaluate on text that the checkpoint was calibrated on, too. Such figures say nothing of other text.",
    ),
]
Tokens = Annotated[int, typer.Option(help="Tokens to evaluate, rounded down to whole windows.")]
Window = Annotated[int, typer.Option(help="Tokens per evaluation window.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.", metavar="PATH")]
HtmlOut = Annotated[
    Path | None,
    typer.Option("--html", help="Write the report as an HTML page.", metavar="PATH", callback=needs_plots),
]
MarkdownOut = Annotated[Path | None, typer.Option("--markdown", help="Write the report as Markdown.", metavar="PATH")]
GateFile = Annotated[
    Path | None,
    typer.Option(
        "--gate", help="Gates: a TOML file with max or min for each metric of the report, as [kl_mean] max = 0.1.",
        metavar="FILE",
    ),
]

ServedModelName = Annotated[str | None, typer.Option(help="What requests call the model. [default: its name]")]
ChatTemplate = Annotated[
    Path | None, typer.Option(help="A Jinja chat template instead of the model's own.", metavar="FILE")
]
GenerationConfigOf = Annotated[
    str,
    typer.Option(
        "--generation-config",
        help="Sampling defaults, for requests that do not say: auto (the model's generation_config.json), vllm (none), "
        "or another such file.",
        metavar="auto|vllm|PATH",
    ),
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Tokens of prompt and output. [default: what model and memory allow]")
]
MaxNumSeqs = Annotated[int, typer.Option(help="Requests running at once.")]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(help=f"Tokens of one step. [default: {STEP_TOKENS}, on a GPU {GPU_STEP_TOKENS}]")
]
KvCacheMemory = Annotated[
    str | None,
    typer.Option(help="Size of the KV cache, as 512MiB or 4GB. [default: half of what is free]", metavar="SIZE"),
]
Kernels = Annotated[str, typer.Option(help="Kernels to compute with; qserve doctor lists them.")]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        "-tp",
        help="Processes that share the model on the CPUs of this machine, or on its GPUs, each with a shard of its "
        "weights. On CPUs answers stay the same.",
    ),
]
PipelineParallelSize = Annotated[
    int,
    typer.Option(
        "--pipeline-parallel-size",
        "-pp",
        help="Stages of the model on the CPUs of this machine, each with some of its layers and a step of its own, in "
        "as many processes as --tensor-parallel-size says. Answers stay the same.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads of the CPU kernels, for each process that shares the model. [default: all cores]"),
]
SpeculativeConfigJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help="Draft tokens, so that a step may yield several; answers stay the same. JSON in vLLM's spelling: method "
        "(ngram; suffix, which also looks in recent answers; draft_model, which asks a smaller model; eagle3, which "
        "asks a head of the model in the speculators format), model (the smaller one, or the head), "
        "num_speculative_tokens (at most), prompt_lookup_min, prompt_lookup_max, "
        "suffix_decoding_max_cached_requests.",
        metavar="JSON",
    ),
]
CpuList = Annotated[
    str | None,
    typer.Option(
        help="CPUs to pin the threads of the CPU kernels to, one each, as 0,2-3. [default: where the system puts them]",
        metavar="LIST",
    ),
]

# Of whoever listens.
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")]
Uds = Annotated[Path | None, typer.Option(help="Listen on a Unix socket, in place of host and port.", metavar="PATH")]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        help="A key that callers must show; may be given several times. Other users of the machine see it in ps: "
        "set QSERVE_API_KEY in the environment instead, or use --api-keys.",
        metavar="KEY",
    ),
]
ApiKeysFile = Annotated[
    Path | None,
    typer.Option(help="TOML file of hashed keys with limits, see qserve key; SIGHUP reads it again.", metavar="FILE"),
]
TlsCert = Annotated[
    Path | None,
    typer.Option("--tls-cert", "--ssl-certfile", help="Certificate chain (PEM), for HTTPS.", metavar="FILE"),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", "--ssl-keyfile", help="Its private key (PEM).", metavar="FILE")
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        help="A name, besides localhost, that a server without keys answers to; may be given several times.",
        metavar="NAME",
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(help="A web origin whose pages may call; may be given several times.", metavar="URL"),
]
BatchDir = Annotated[
    Path | None,
    typer.Option(
        help="Where files and batches of /v1/files and /v1/batches are kept, over restarts. [default: none are taken]",
        metavar="DIR",
    ),
]
BatchDirSize = Annotated[str, typer.Option(help="What all of them may have on disk.", metavar="SIZE")]
LogFormat = Annotated[str, typer.Option(help="Log lines as text or json.")]
LogLevel = Annotated[str, typer.Option(help="Least level that is logged: debug, info, warning or error.")]
