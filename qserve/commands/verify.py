"""``qserve verify``: whether a checkpoint is what its manifest and its quality card say."""

from __future__ import annotations

from typing import Annotated

import typer

from qserve import console
from qserve.checkpoint.errors import CheckpointError, GateFailed, UsageError
from qserve.commands.options import ENGINE, Data, Kernels, Threads


def verify(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint that qserve wrote.")],
    against: Annotated[
        str | None,
        typer.Option(help="The base of its card: then the figures are measured again.", metavar="MODEL"),
    ] = None,
    data: Data = "builtin",
    tokens: Annotated[int, typer.Option(help="Tokens to measure, rounded down to whole windows.")] = 8192,
    seed: Annotated[
        int | None, typer.Option(help="Draws the windows; without it each run looks elsewhere.")
    ] = None,
    kernels: Kernels = ENGINE.kernels,
    threads: Threads = None,
) -> None:
    """Say whether CKPT is what it claims: every file has its hash, and the quality card belongs to these weights.

    With --against, windows of the card's text that it did not score are measured too: its figures must hold on them.
    A figure that is worse than the card says, beyond the 95 % intervals of both, ends with exit code 3.
    """
    from qserve import evaluation, steps
    from qserve.checkpoint.hf import HFDirectory
    from qserve.checkpoint.manifest import read_manifest

    source = steps.open_source(checkpoint)
    if not isinstance(source, HFDirectory):
        raise UsageError(f"{checkpoint} is one file, which carries no hashes; give a checkpoint that qserve wrote")
    source.verify()
    entries = read_manifest(source.path)
    if entries is None:
        raise CheckpointError(f"{checkpoint} has no manifest.json: nothing says what its files should be")
    console.line(f"files           {len(entries)}, each with the hash of its manifest")
    if source.card is None:
        raise CheckpointError(f"{checkpoint} has no quality card; measure it with qserve eval --against its base")
    if problem := source.card_problem():
        raise CheckpointError(problem)
    console.line(f"card            of these weights: {source.card.data_name}, {source.card.tokens:,} tokens")
    if against is None:
        return
    findings = evaluation.verify_card(source, source.card, against, data, tokens, seed, kernels, threads)
    for found in findings:
        card, sample = (f"{value:.4f} [{low:.4f}, {high:.4f}]" for value, low, high in (found.card, found.sample))
        verdict = "holds" if found.holds else "WORSE"
        console.line(f"{found.name:<20}{verdict}: the card says {card}, here {sample}")
    if broken := [found.name for found in findings if not found.holds]:
        raise GateFailed(f"the card does not hold: {', '.join(broken)} worse than it says")
