"""``qserve pull`` and ``qserve list``: the models of this machine, for people."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from qserve import console
from qserve.checkpoint.bucket import fetch_bucket, is_bucket_url
from qserve.checkpoint.demo import DEMOS, demo_path, fetch_demo
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.pull import find_remote

if TYPE_CHECKING:
    from qserve.checkpoint.store import StoredModel


def pull(model: str, file: str | None = None) -> list[str]:
    """Fetch a model; returns the result in lines."""
    if demo := DEMOS.get(model):
        if file is not None:
            raise UsageError(f"--file is for models on the hub: {model} is one file")
        before = demo_path(demo).exists()
        if demo.notice and not before:
            console.note(demo.notice)
        with console.progress("download") as update:
            path = fetch_demo(update, model=demo)
        return [f"{model}: {path} ({console.size(path.stat().st_size)}, {'there already' if before else 'fetched'})"]
    if is_bucket_url(model):
        if file is not None:
            raise UsageError(f"--file is for models on the hub: {model} is one checkpoint")
        with console.progress("pull") as update:
            copy = fetch_bucket(model, update)
        came = f"{console.size(copy.came)} fetched" if copy.came else "there already"
        return [f"{model}: {copy.path} ({console.size(copy.bytes)}, {came}, every file matches its hash)"]
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()  # we show our own
    remote = find_remote(model, file)
    console.note(f"{model} at {remote.commit[:12]}: {len(remote.files)} files, {console.size(remote.bytes)}")
    with console.progress("pull") as update:
        path, fetched = remote.pull(update)
    came = f"{console.size(fetched)} fetched" if fetched else "there already"
    return [f"{model}: {path} ({console.size(remote.bytes)}, {came}, every file matches its hash)"]


def show(directories: list[Path], *, as_json: bool) -> None:
    """The models found, as a table or as JSON."""
    from qserve.checkpoint.store import find_models  # imports torch

    models = list(find_models(directories))
    if as_json:
        console.out.print(json.dumps([model.to_json() for model in models], indent=2))
        return
    if not models:
        console.line("no models here; qserve pull demo fetches a small one")
        return
    header = ("model", "format", "bits", "size", "KL", "perplexity", "top-1", "modified")
    console.table("", header, [_row(model) for model in models])
    for model in models:
        if model.problem is not None:
            console.line(model.problem)


def _row(model: StoredModel) -> tuple[str, ...]:
    bits = "" if model.bits_per_weight is None else f"{model.bits_per_weight:.2f}"
    card = model.card
    quality = ("", "", "")
    if card is not None:
        quality = (f"{card.kl_mean:.4f}", f"{card.perplexity_increase:+.1%}", f"{card.top1_agreement:.1%}")
    date = datetime.fromtimestamp(model.modified).strftime("%Y-%m-%d %H:%M")
    return (model.name, model.format or "unreadable", bits, console.size(model.bytes), *quality, date)
