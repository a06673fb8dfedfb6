"""``qserve batch``: the requests of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qserve import console
from qserve.checkpoint.errors import UsageError
from qserve.commands.options import (
    ENGINE,
    ChatTemplate,
    GenerationConfigOf,
    Kernels,
    KvCacheMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    ServedModelName,
    Threads,
)
from qserve.commands.values import byte_count
from qserve.runtime.config import EngineConfig


def batch(
    lines: Annotated[Path, typer.Argument(metavar="IN", help="Requests in the format of OpenAI's batches, JSONL.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Answers, JSONL; what it holds is not done again.")],
    model: Annotated[str, typer.Option(help="The model that answers.", metavar="MODEL")] = "demo",
    served_model_name: ServedModelName = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = ENGINE.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_waiting: Annotated[
        int, typer.Option(help="Lines in flight at most, and choices of one line.")
    ] = ENGINE.max_waiting,
    kv_cache_memory: KvCacheMemory = None,
    chat_template: ChatTemplate = None,
    generation_config: GenerationConfigOf = ENGINE.generation_config,
    kernels: Kernels = ENGINE.kernels,
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
        max_waiting=max_waiting,
        kv_cache_memory=byte_count(kv_cache_memory),
        kernels=kernels,
        threads=threads,
        generation_config=generation_config,
    )
    if out.exists() and lines.exists() and out.samefile(lines):
        raise UsageError("IN and OUT are the same file")
    from qserve import steps
    from qserve.batch import check_lines, is_done, run_batch
    from qserve.runtime.server.batches.answer_file import AnswerFile

    check_lines(lines)  # checked before the model is loaded
    with AnswerFile(out) as answers:
        if is_done(lines, answers):
            console.line(f"{out} holds the answer to every line already")
            return
        engine = steps.load(steps.open_source(model, chat_template), config)
        with console.progress("batch") as update:
            report = run_batch(engine, lines, answers, model_name=served_model_name, update=update)
    for text in report.summary():
        console.line(text)
