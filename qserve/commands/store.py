"""``qserve pull``, ``list`` and ``rm``: the models of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qserve import console


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="A hub id, as org/name or org/name@revision, s3://BUCKET/PREFIX, gs://..., or demo."
        ),
    ],
    file: Annotated[str | None, typer.Option(help="Which one of several GGUF files.", metavar="NAME.gguf")] = None,
) -> None:
    """Fetch a model into the cache of the Hugging Face hub, and check every file against its hash there.

    Only safetensors, GGUF, JSON and tokenizer files: never pickles, never code. Called again after an interruption it
    goes on with the file it was at; called on a model that is there it checks it, and repairs it.

    From a bucket comes a checkpoint that qserve wrote, checked against its own manifest, into a cache of qserve's.
    """
    from qserve import store

    for text in store.pull(model, file):
        console.line(text)


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
