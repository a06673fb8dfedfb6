"""``ModelSource``: a model that can be read, however it is stored; ``open_model`` finds one for a MODEL argument."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from qserve.checkpoint.bucket import fetch_bucket, is_bucket_url
from qserve.checkpoint.calibration_record import CalibrationRecord
from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.demo import DEMOS, fetch_demo
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats.format import Format, is_embedding
from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.hub import fetch_snapshot, is_hub_id
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import QuantSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ModelSource(Protocol):
    """A readable model. Tensor and module names are those of Hugging Face transformers.

    ``config`` is the content of ``config.json`` (for GGUF: made from its metadata); ``spec`` and ``format``
    (of the packed modules) are None for a dense model. Every method raises ``CheckpointError`` where the files
    are damaged.
    """

    @property
    def path(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def part_of(self) -> str | None:
        """The type of the whole model, where this is the text part of one that also takes images or sound."""
        ...

    @property
    def spec(self) -> QuantSpec | None: ...
    @property
    def format(self) -> Format | None: ...
    @property
    def card(self) -> QualityCard | None: ...
    @property
    def calibration(self) -> CalibrationRecord | None: ...

    def names(self) -> list[str]:
        """Names of all dense tensors; the parts of packed linears are not among them."""
        ...

    def linears(self) -> list[str]:
        """Names of the modules whose weight is stored packed."""
        ...

    def has(self, name: str) -> bool:
        """Whether ``name`` is a dense tensor of this model."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a dense tensor, or of a packed module's weight [out, in], without reading it."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes that ``tensor(name)`` takes in memory, without reading it."""
        ...

    def keeps_float32(self, name: str) -> bool:
        """Whether ``name`` is a dense tensor that the model stores in float32."""
        ...

    def tensor(self, name: str, rows: range | None = None) -> Tensor:
        """One dense tensor in its stored dtype (GGUF block types: float32), in memory of its own. ``rows``: those
        alone, of its first dimension."""
        ...

    def linear(self, module: str) -> QuantizedWeight:
        """One packed weight, with its bias where it has one."""
        ...

    def dtype(self) -> torch.dtype:
        """The dtype the model was made for (float16 for GGUF)."""
        ...

    def stored_bytes(self) -> int:
        """Bytes of the weight files."""
        ...

    def parameters(self) -> int:
        """Number of weights, each counted once."""
        ...

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer with its chat template."""
        ...

    def save_tokenizer(self, out: Path) -> None:
        """Write the tokenizer's files into the directory ``out``."""
        ...

    def generation_config(self) -> dict[str, Any]:
        """The content of ``generation_config.json``, or {}."""
        ...

    def sha256(self) -> str:
        """Identity of weights and configuration, for cards and caches."""
        ...

    def verify(self) -> None:
        """Raise ``CheckpointError`` where a file differs from the hashes stored beside it."""
        ...


def dense_linears(source: ModelSource) -> list[str]:
    """The modules whose weight is a matrix in floating point, but for embeddings, which only look up rows. Loaders take
    them for quantized unless the configuration names them."""
    modules = [name.removesuffix(".weight") for name in source.names() if name.endswith(".weight")]
    return [module for module in modules if len(source.shape(f"{module}.weight")) == 2 and not is_embedding(module)]


def open_model(
    model: str | Path, *, offline: bool = False, progress: Callable[[int, int], None] | None = None,
    in_floats: bool = False,
) -> ModelSource:  # fmt: skip
    """Open ``model``: a Hugging Face directory, a ``*.gguf`` file, ``demo`` or ``demo-gemma``, a hub id with or without
    ``@revision``, or the URL of a checkpoint in a bucket, as ``s3://bucket/prefix`` or ``gs://bucket/prefix``.

    ``offline`` forbids the network: what is not a path must then be in the cache already.
    ``progress(done, total)`` counts the bytes of a download of a demo model or from a bucket. ``in_floats``: an engine
    holds a GGUF file in floats, as the base of what is made of it. Demo models it always does.
    """
    text = os.fspath(model)
    if is_bucket_url(text):
        copy = fetch_bucket(text, progress or (lambda done, total: None), offline=offline)
        return HFDirectory(copy.path, name=text.rstrip("/").rpartition("/")[2])
    if text in DEMOS and not Path(text).is_dir():
        return GGUFFile(fetch_demo(progress, offline=offline, model=DEMOS[text]), name=text, in_floats=True)
    path = Path(os.path.expanduser(text))
    if path.is_dir():
        return HFDirectory(path)
    if path.suffix.lower() == ".gguf" or path.is_file():
        return GGUFFile(path, in_floats=in_floats)
    if isinstance(model, str) and is_hub_id(text):
        return _open_snapshot(fetch_snapshot(text, offline=offline), text, in_floats)
    raise CheckpointError(
        f"{text} does not exist; give a model directory, a .gguf file, a hub id such as org/name, s3://BUCKET/PREFIX, "
        "or demo"
    )


def _open_snapshot(path: Path, name: str, in_floats: bool) -> ModelSource:
    """A model in the hub's cache: a directory of safetensors, or one GGUF file."""
    ggufs = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if len(ggufs) > 1:
        raise CheckpointError(f"{name} is {len(ggufs)} GGUF files in the hub cache; give the path of one: {ggufs[0]}")
    return GGUFFile(ggufs[0], name=name, in_floats=in_floats) if ggufs else HFDirectory(path, name=name)
