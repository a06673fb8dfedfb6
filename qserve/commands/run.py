"""``qserve run``: the server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qserve import console
from qserve.checkpoint.errors import UsageError
from qserve.commands import values
from qserve.commands.options import (
    ENGINE,
    AllowedHosts,
    ApiKey,
    ApiKeysFile,
    BatchDir,
    BatchDirSize,
    ChatTemplate,
    CorsOrigin,
    CpuList,
    GenerationConfigOf,
    Host,
    Kernels,
    KvCacheMemory,
    LogFormat,
    LogLevel,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    PipelineParallelSize,
    Port,
    SpeculativeConfigJson,
    TensorParallelSize,
    Threads,
    TlsCert,
    TlsKey,
    Uds,
)
from qserve.commands.vllm_options import options_of_file
from qserve.runtime.config import EngineConfig

if TYPE_CHECKING:
    from qserve.runtime.engine import Engine


def run(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="A Hugging Face directory, a hub id, a .gguf file, s3:// or gs:// and a prefix, demo, or demo-gemma. "
            "Several get a process each, behind one address; requests choose by their model. [default: demo]",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of options, as max-model-len: 4096; the command line goes first.",
            metavar="FILE",
            is_eager=True,
            callback=options_of_file,
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    uds: Uds = None,
    api_key: ApiKey = None,
    api_keys: ApiKeysFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    allowed_hosts: AllowedHosts = None,
    cors_origin: CorsOrigin = None,
    batch_dir: BatchDir = None,
    batch_dir_size: BatchDirSize = "16GiB",
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="What requests call the model; may be given several times, and answers have the first. Of several "
            "models, one for each, in their order. [default: its name]",
            metavar="NAME",
        ),
    ] = None,
    unload_after: Annotated[
        float | None,
        typer.Option(
            help="Of several models: end the process of one that had no request for so long; the next request starts "
            "it again, and waits. [default: never]",
            metavar="SECONDS",
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(help="A model that --unload-after leaves alone; may be given several times.", metavar="NAME"),
    ] = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = ENGINE.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more get a 503.")] = ENGINE.max_waiting,
    max_waiting_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens that may wait; more get a 503. [default: 32 contexts]")
    ] = None,
    step_timeout: Annotated[
        float, typer.Option(help="Seconds after which a stuck step of the model ends the server; 0 for never.")
    ] = 120.0,
    kv_cache_memory: KvCacheMemory = None,
    kv_offload_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for KV blocks that the cache evicts, as 8GiB; they come back when a prompt needs them. "
            "[default: none; 1GiB with --kv-offload-dir]",
            metavar="SIZE",
        ),
    ] = None,
    kv_offload_dir: Annotated[
        Path | None,
        typer.Option(help="The same on disk: where a server that is restarted finds its prefixes.", metavar="DIR"),
    ] = None,
    kv_offload_dir_size: Annotated[
        str, typer.Option(help="What it may grow to; blocks used least recently make room.", metavar="SIZE")
    ] = f"{ENGINE.kv_offload_dir_size >> 30}GiB",
    kv_transfer: Annotated[
        bool,
        typer.Option(
            "--kv-transfer",
            help="Exchange KV blocks with other replicas behind a router whose key is in --api-keys, by way of "
            "--kv-offload-memory, then 1GiB if it is not given.",
        ),
    ] = False,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of the GPU's memory that may be used, as 0.9; on a CPU of the machine's. "
            "The KV cache gets what is left of it.",
            metavar="SHARE",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="auto (what the checkpoint was calibrated for, else fp16), fp16, bf16, fp32, int8, fp8 or "
            "int4_per_token_head."
        ),
    ] = ENGINE.kv_cache_dtype,
    dtype: Annotated[
        str, typer.Option(help="In which products compute: auto, float16 or bfloat16 on a GPU, float32 on a CPU.")
    ] = ENGINE.dtype,
    quantization: Annotated[
        str | None, typer.Option(help="Refuse a checkpoint that is stored in another format than this, as awq.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the draws of requests that have none. [default: drawn for each request]")
    ] = None,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse the KV of equal prompt beginnings.",
        ),
    ] = ENGINE.enable_prefix_caching,
    head: Annotated[str, typer.Option(help="Output head of a quantized model: auto (int8) or dense.")] = ENGINE.head,
    reranker: Annotated[
        str,
        typer.Option(
            help='qwen3: judge pairs of texts as Qwen3-Reranker does, in its template and by "yes" over "no"; '
            "auto does so where config.json says it."
        ),
    ] = ENGINE.reranker,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            "--model-impl",
            help="What computes the model: native; transformers, which serves more model types and is slower; auto "
            "takes native where it serves the model.",
        ),
    ] = ENGINE.backend,
    kernels: Kernels = ENGINE.kernels,
    autotune: Annotated[
        bool,
        typer.Option(
            "--autotune", help="On a GPU: time the kernels' configurations for this model first, and remember the best."
        ),
    ] = ENGINE.autotune,
    tensor_parallel_size: TensorParallelSize = ENGINE.tensor_parallel_size,
    pipeline_parallel_size: PipelineParallelSize = ENGINE.pipeline_parallel_size,
    threads: Threads = None,
    cpu_list: CpuList = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora",
            "--lora-modules",
            help="A LoRA adapter: what requests call it as their model, and its directory in PEFT's layout; may be "
            "given several times.",
            metavar="NAME=PATH",
        ),
    ] = None,
    enable_lora: Annotated[
        bool, typer.Option("--enable-lora", help="Serve adapters although none is loaded at the start.")
    ] = ENGINE.enable_lora,
    max_loras: Annotated[int, typer.Option(help="Adapters loaded at once.")] = ENGINE.max_loras,
    max_lora_rank: Annotated[int, typer.Option(help="Highest rank of an adapter.")] = ENGINE.max_lora_rank,
    lora_dir: Annotated[
        Path | None,
        typer.Option(
            help="Load adapters from below this directory while the server runs, by /v1/load_lora_adapter.",
            metavar="DIR",
        ),
    ] = None,
    speculative_config: SpeculativeConfigJson = None,
    engine_process: Annotated[
        bool,
        typer.Option(
            "--engine-process", help="Run the engine in a process of its own: pays from thousands of tokens a second."
        ),
    ] = False,
    stream_interval: Annotated[
        int, typer.Option(help="Tokens of one event of a stream, after the first.", min=1, max=1024)
    ] = 1,
    vllm_metrics: Annotated[bool, typer.Option(help="Repeat the metrics under vLLM's names.")] = False,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            "--otlp-endpoint",
            "--otlp-traces-endpoint",
            help="OpenTelemetry collector that gets the traces; needs the tracing extra.",
            metavar="URL",
        ),
    ] = None,
    chat_template: ChatTemplate = None,
    generation_config: GenerationConfigOf = ENGINE.generation_config,
    tool_format: Annotated[
        str,
        typer.Option(
            "--tool-format",
            "--tool-call-parser",
            help="How the model writes tool calls: auto, none, or a format of docs/serving.md.",
        ),
    ] = "auto",
    reasoning: Annotated[
        str,
        typer.Option(
            "--reasoning",
            "--reasoning-parser",
            help="Split reasoning off answers: auto (where the chat template marks it), none, or how it is marked.",
        ),
    ] = "auto",
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API until a signal ends it; the first one drains.

    Several models get a process each, with equal parts of the threads and of the KV cache's memory. --kv-cache-memory
    is of each, --threads and --cpu-list are of all together.
    """
    if uds is not None and (host, port) != ("127.0.0.1", 8000):
        raise UsageError("--uds takes the place of --host and --port")
    engine_config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        kv_cache_memory=values.byte_count(kv_cache_memory),
        kv_offload_memory=values.byte_count(kv_offload_memory),
        kv_transfer=kv_transfer,
        kv_offload_dir=None if kv_offload_dir is None else str(kv_offload_dir),
        kv_offload_dir_size=values.byte_count(kv_offload_dir_size) or ENGINE.kv_offload_dir_size,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
        quantization=quantization,
        seed=seed,
        enable_prefix_caching=prefix_caching,
        backend=backend,
        kernels=kernels,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        threads=threads,
        cpu_list=values.cpu_list(cpu_list),
        head=head,
        reranker=reranker,
        autotune=autotune,
        generation_config=generation_config,
        enable_lora=enable_lora or lora_dir is not None,
        lora_modules=values.named_paths(lora or ()),
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        speculative_config=values.speculative_config(speculative_config),
    )
    names, models = served_model_name or [], model or ["demo"]
    if len(models) > 1:
        from qserve.commands.run_models import run_models

        run_models(context, models, names, engine_config, unload_after, pin or ())
        return
    if unload_after is not None or pin:
        raise UsageError("--unload-after and --pin are for several models")
    from qserve import steps
    from qserve.kernels.threads import cpu_ranges
    from qserve.runtime.client.process_host import ProcessHost
    from qserve.runtime.generation_config import GenerationConfig
    from qserve.runtime.server.config import ServerConfig
    from qserve.runtime.server.http.listening import claim_socket, url_of
    from qserve.runtime.server.serve import serve
    from qserve.runtime.server.telemetry import logs
    from qserve.runtime.server.telemetry.tracing import otlp_exporter
    from qserve.runtime.server.unix_socket import UnixSocket

    server = ServerConfig(
        api_keys=values.api_keys(api_key, os.environ),
        api_keys_file=api_keys,
        tls_cert=tls_cert,
        tls_key=tls_key,
        allowed_hosts=tuple(allowed_hosts or ()),
        cors_origins=tuple(cors_origin or ()),
        batch_dir=batch_dir,
        batch_dir_size=values.byte_count(batch_dir_size) or 0,
        step_timeout=step_timeout,
        model_name=names[0] if names else None,
        model_aliases=tuple(names[1:]),
        lora_dir=lora_dir,
        stream_interval=stream_interval,
        vllm_metrics=vllm_metrics,
        otlp_endpoint=otlp_endpoint,
        tool_format=tool_format,
        reasoning=reasoning,
    )
    if otlp_endpoint is not None:
        otlp_exporter(otlp_endpoint).shutdown()  # finds errors before the model is loaded
    source = steps.open_source(models[0], chat_template)
    say = logs.start(log_format, log_level, console.note)
    # Before the model is loaded: a port in use is known at once.
    sock = claim_socket(host, port) if uds is None else UnixSocket(uds)

    def load() -> Engine | ProcessHost:
        say(f"loading {source.name}")
        if defaults := GenerationConfig.of(source, generation_config).line():
            say(defaults)
        if autotune:
            say("timing how this GPU divides the products of the model: minutes at the first start, then it is known")
        if engine_process:
            return ProcessHost(source, engine_config)
        engine = steps.load(source, engine_config, quiet=log_format == "json")
        for text in [*engine.memory.lines(), *engine.notes]:
            say(text)
        if engine_config.cpu_list is not None:
            say(f"threads: pinned to the CPUs {cpu_ranges(engine_config.cpu_list)}, one each")
        return engine

    def opened() -> None:
        say(f"serving {server.model_name or source.name} on {url_of(sock, server)}")

    serve(load, config=server, sock=sock, opened=opened)
