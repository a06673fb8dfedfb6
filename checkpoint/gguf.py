"""``GGUFFile``: a model in llama.cpp's single-file format, read as if it were a Hugging Face directory.

The ``gguf`` package reads the container and the block formats. This file undoes llama.cpp's row order of q and k.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from qserve.checkpoint.calibration_record import CalibrationRecord
from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import FAMILIES
from qserve.checkpoint.files import file_sha256
from qserve.checkpoint.formats.format import Format
from qserve.checkpoint.gguf_config import ROPE_FACTORS, config_of, hf_name
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import QuantSpec
from qserve.checkpoint.tokenizer import load_tokenizer, save_portable, split_digits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
BLOCKS = (
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q6_K,
)

# How text is cut before BPE, by ``tokenizer.ggml.pre``. First the names that transformers follows, with an expression
# of their own or GPT-2's; then the names where each digit stands alone before GPT-2's expression cuts the rest.
# An unknown name is refused: a model fed with wrong tokens talks nonsense without any error.
_PRE_KNOWN = {"gpt-2", "llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3", "pixtral", "tekken",
              "qwen2", "deepseek-r1-qwen", "megrez"}
_PRE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}


class GGUFFile:
    """A ``ModelSource`` over one GGUF file of an architecture that ``families`` names; always dense.

    Raises ``CheckpointError`` where the file is damaged or holds an architecture or a tensor type that is not
    supported.
    """

    spec: QuantSpec | None = None
    format: Format | None = None
    card: QualityCard | None = None
    calibration: CalibrationRecord | None = None

    def __init__(self, path: str | Path, *, name: str | None = None) -> None:
        self.path = Path(path)
        self.name = name or self.path.stem
        self.part_of: str | None = None
        # It holds every token and merge of the vocabulary, and is kept until the tokenizer is made.
        self._reader: GGUFReader | None = (reader := _open(self.path))
        try:
            self._metadata = {key: field.contents() for key, field in reader.fields.items()
                              if not key.startswith("tokenizer.ggml.") or len(field.data) == 1}
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.path}: its metadata is damaged ({error})") from None
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        if int(self._metadata.get("split.count", 1)) > 1:
            raise CheckpointError(
                f"{self.path} is one of several parts; merge them with llama-gguf-split --merge"
            )
        for tensor in reader.tensors:
            if not int(tensor.n_elements):
                raise CheckpointError(f"{self.path}: {tensor.name} is empty")
            if tensor.tensor_type not in PLAIN and tensor.tensor_type not in BLOCKS:
                supported = ", ".join(kind.name for kind in (*PLAIN, *BLOCKS))
                raise CheckpointError(f"{self.path}: {tensor.name} is stored as {tensor.tensor_type.name}, "
                                      f"which is not supported; supported: {supported}")
        shapes = {name: tuple(int(n) for n in reversed(tensor.shape))
                  for name, tensor in self._stored.items()}
        try:
            self.config: dict[str, Any] = config_of(self._metadata, shapes, self._read)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        self._gguf_name = {hf: name for name in self._stored
                           if name != ROPE_FACTORS and (hf := hf_name(name)) is not None}
        self._shapes = {hf: shapes[name] for hf, name in self._gguf_name.items()}

    def names(self) -> list[str]:
        return list(self._gguf_name)

    def linears(self) -> list[str]:
        return []

    def has(self, name: str) -> bool:
        return name in self._gguf_name

    def shape(self, name: str) -> tuple[int, ...]:
        self._require(name)
        return self._shapes[name]

    def nbytes(self, name: str) -> int:
        self._require(name)
        stored = self._stored[self._gguf_name[name]]
        return int(stored.n_elements) * (2 if stored.tensor_type.name in ("F16", "BF16") else 4)

    def tensor(self, name: str) -> Tensor:
        self._require(name)
        tensor = self._read(self._gguf_name[name])
        gguf = FAMILIES[self.config["model_type"]].gguf
        if gguf is not None and gguf.permuted:
            if ".q_proj." in name:
                return unpermute(tensor, self.config["num_attention_heads"])
            if ".k_proj." in name:
                return unpermute(tensor, self.config["num_key_value_heads"])
        return tensor

    def linear(self, module: str) -> QuantizedWeight:
        raise CheckpointError(f"{self.path}: {module} is not stored packed; a GGUF file is read dense")

    def _require(self, name: str) -> None:
        if name not in self._gguf_name:
            raise CheckpointError(f"{self.path} lacks the tensor {name}")

    def _read(self, gguf_name: str) -> Tensor:
        """One tensor by its GGUF name, in memory of its own; block types become float32."""
        stored = self._stored[gguf_name]
        shape = [int(n) for n in reversed(stored.shape)]
        if stored.tensor_type in PLAIN:
            # Read as bytes, since numpy has no bfloat16.
            raw = torch.from_numpy(np.ascontiguousarray(stored.data).view(np.uint8).copy())
            return raw.view(PLAIN[stored.tensor_type]).reshape(shape)
        return torch.from_numpy(dequantize(stored.data, stored.tensor_type)).reshape(shape)

    def dtype(self) -> torch.dtype:
        return torch.float16

    def stored_bytes(self) -> int:
        return self.path.stat().st_size

    def parameters(self) -> int:
        return sum(int(self._stored[name].n_elements) for name in self._gguf_name.values())

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        model, pre = (self._metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        if model not in ("gpt2", "llama") or (model == "gpt2" and pre not in _PRE_KNOWN | _PRE_DIGITS):
            raise CheckpointError(f"{self.path}: the tokenizer {model!r} with pre-tokenizer {pre!r} is not "
                                  "supported; open the model's Hugging Face directory instead")
        assert self._reader is not None
        with _lent(self._reader):
            tokenizer = load_tokenizer(self.path.parent, vocab_size=self.config["vocab_size"],
                                       gguf_file=self.path.name)
        self._reader = None
        if pre in _PRE_DIGITS:
            split_digits(tokenizer)
        return tokenizer

    def save_tokenizer(self, out: Path) -> None:
        save_portable(self._tokenizer, out)

    def generation_config(self) -> dict[str, Any]:
        return {key: self.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")
                if key in self.config}

    def sha256(self) -> str:
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        return file_sha256(self.path)

    def verify(self) -> None:
        """Nothing to compare: a GGUF file carries no hashes."""


def unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order of q and k (weight [out, in] or bias [out]).

    Its RoPE turns neighbouring rows (0, 1), (2, 3), ... of a head; Hugging Face's turns row i with i + dim/2.
    """
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


class _Reader(GGUFReader):
    """Views the file as a plain array. A slice is made for every token and merge, and slices of a ``memmap`` cost
    several times as much."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray[Any, Any]:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray[Any, Any]) -> None:
        self._data = mapped.view(np.ndarray)


@contextmanager
def _lent(reader: GGUFReader) -> Iterator[None]:
    """Lend ``reader`` to transformers, which would read the file again: most of the load time of a small model."""
    before = gguf.GGUFReader
    gguf.GGUFReader = lambda path: reader  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader = before  # type: ignore[misc]


def _open(path: Path) -> GGUFReader:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise CheckpointError(
            f"{path} is no GGUF file (it starts with {magic!r}); give a model directory or a .gguf file"
        )
    try:
        reader = _Reader(path)
    except (IndexError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        if "GGMLQuantizationType" in str(error):
            raise CheckpointError(f"{path} holds a tensor of unknown type ({error})") from None
        raise CheckpointError(f"{path} is truncated or damaged ({error}); fetch it again") from None
    if reader.byte_order != "I":
        raise CheckpointError(f"{path} was written for the other byte order; convert it for this machine")
    return reader
