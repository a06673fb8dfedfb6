"""``qserve chat``: the options of a conversation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from qserve.checkpoint.errors import UsageError
from qserve.commands.options import ENGINE, ChatTemplate, Kernels, ServedModel, ServerKey, Threads
from qserve.runtime.config import EngineConfig


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A Hugging Face directory, a hub id, a .gguf file, demo, or the URL of a server."
        ),
    ] = "demo",
    api_key: ServerKey = None,
    name: ServedModel = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest tokens. [default: the model's, or 0.7; a server's own]")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from this share of the probability.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same answers.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of the conversation. [default: what model and memory allow]")
    ] = None,
    chat_template: ChatTemplate = None,
    kernels: Kernels = ENGINE.kernels,
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
        if (max_model_len, chat_template, kernels, threads) != (None, None, ENGINE.kernels, None):
            raise UsageError(
                "--max-model-len, --chat-template, --kernels and --threads are for a model in this process"
            )
        conversation.with_server(model, api_key, name, system, options)
    else:
        if name is not None:
            raise UsageError("--model is for a server that has several")
        engine = EngineConfig(max_model_len=max_model_len, max_num_seqs=1, kernels=kernels, threads=threads)
        conversation.with_model(model, chat_template, engine, system, options)
