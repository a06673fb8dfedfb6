"""``GGUFFile``: a model in llama.cpp's single-file format, read as if it were a Hugging Face directory.

The ``gguf`` package dequantizes the block formats. Experts of GPT-OSS in MXFP4 stay packed, and in ``packed`` all
linears whose blocks kernels multiply as they are.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from qserve.checkpoint.calibration_record import CalibrationRecord
from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import FAMILIES
from qserve.checkpoint.files import file_sha256
from qserve.checkpoint.formats.format import Format
from qserve.checkpoint.formats.mxfp4 import MXFP4, read_e8m0
from qserve.checkpoint.gguf_config import config_of
from qserve.checkpoint.gguf_packed import KINDS, Parts, unpacked
from qserve.checkpoint.gguf_reader import Header, StoredTensor, read_header
from qserve.checkpoint.gguf_tensors import Stored, stored_tensors
from qserve.checkpoint.gguf_tokenizer import tokenizer_of
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import MXFP4 as SCHEME
from qserve.checkpoint.spec import QuantSpec
from qserve.checkpoint.tokenizer import save_portable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
BLOCKS = tuple(
    GGMLQuantizationType[name]
    for name in (
        "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS",
        "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
    )
    if name in GGMLQuantizationType.__members__
)  # fmt: skip
"""The block formats that the installed ``gguf`` package dequantizes."""


class GGUFFile:
    """A ``ModelSource`` over one GGUF file of an architecture that ``families`` names; dense but for experts that the
    family publishes in MXFP4. ``in_floats``: it stays so when an engine holds it, as the base of what is made of it.

    Raises ``CheckpointError`` where the file is damaged or holds an architecture or a tensor type that is not
    supported.
    """

    spec: QuantSpec | None = None
    format: Format | None = None
    card: QualityCard | None = None
    calibration: CalibrationRecord | None = None

    def __init__(self, path: str | Path, *, name: str | None = None, in_floats: bool = False) -> None:
        self.path = Path(path)
        self.in_floats = in_floats
        self.name = name or self.path.stem
        self.part_of: str | None = None
        header = read_header(self.path)
        # It holds every token and merge of the vocabulary, and is kept until the tokenizer is made.
        self._vocabulary: dict[str, Any] | None = header.metadata
        self._tensors = header.tensors
        try:
            self.config, self._stored = self._described(header)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        self._divide(self._mxfp4_experts())
        if self._linears:
            self.format = MXFP4()
            self.spec = self.format.spec_of({}, [name.removesuffix(".weight") for name in self._dense])

    def _divide(self, linears: dict[str, Stored]) -> None:
        """``linears`` are packed, all else is dense."""
        self._linears = linears
        packed = {f"{module}.{part}" for module in linears for part in ("weight", "bias")}
        self._dense = dict.fromkeys(name for name in self._stored if name not in packed)

    def packed(self) -> GGUFFile:
        """The same file with its linears packed as they are stored, where kernels multiply such blocks; embedding and
        output layer stay dense. Itself where nothing changes."""
        modules = FAMILIES[self.config["model_type"]].modules(self.config)
        outer = {f"{module}.weight" for module in (modules.embedding, modules.head, modules.positions)}
        found = {
            name.removesuffix(".weight"): stored
            for name, stored in self._stored.items()
            if name.endswith(".weight") and name not in outer and stored.keeps_rows and self._kind(stored) in KINDS
        }
        if self.in_floats or self.spec is not None or not found:
            return self
        made = copy(self)
        made._divide(found)
        schemes = {module: KINDS[self._kind(stored)].scheme for module, stored in found.items()}
        ((weights, _),) = Counter(schemes.values()).most_common(1)
        made.spec = QuantSpec(
            "unknown", weights, overrides={module: each for module, each in schemes.items() if each != weights},
            ignored=tuple(name.removesuffix(".weight") for name in made._dense if name.endswith(".weight")),
        )  # fmt: skip
        return made

    def _kind(self, stored: Stored) -> GGMLQuantizationType:
        """That of its tensors; ``F32``, which is not packed, where they differ."""
        kinds = {self._tensors[name].kind for name in stored.names}
        return kinds.pop() if len(kinds) == 1 else GGMLQuantizationType.F32

    def _described(self, header: Header) -> tuple[dict[str, Any], dict[str, Stored]]:
        metadata = header.metadata
        parts = metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise CheckpointError("it is one of several parts; merge them with llama-gguf-split --merge")
        for name, tensor in header.tensors.items():
            if not tensor.elements:
                raise CheckpointError(f"{name} is empty")
            if tensor.kind not in PLAIN and tensor.kind not in BLOCKS:
                supported = ", ".join(kind.name for kind in (*PLAIN, *BLOCKS))
                raise CheckpointError(
                    f"{name} is stored as {tensor.kind.name}, which is not supported; supported: {supported}"
                )
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        config = config_of(metadata, shapes, self._read)
        return config, stored_tensors(config, shapes)

    def _mxfp4_experts(self) -> dict[str, Stored]:
        """Those that are packed in any case, and their weights."""
        gguf = FAMILIES[self.config["model_type"]].gguf
        if gguf is None or not gguf.keeps_mxfp4:
            return {}
        mxfp4 = {name for name, tensor in self._tensors.items() if tensor.kind.name == "MXFP4"}
        return {
            name.removesuffix(".weight"): stored
            for name, stored in self._stored.items()
            if stored.place is not None and name.endswith(".weight") and mxfp4.issuperset(stored.names)
        }

    def names(self) -> list[str]:
        return list(self._dense)

    def linears(self) -> list[str]:
        return list(self._linears)

    def has(self, name: str) -> bool:
        return name in self._dense

    def shape(self, name: str) -> tuple[int, ...]:
        return self._linears[name].shape if name in self._linears else self._where(name).shape

    def nbytes(self, name: str) -> int:
        stored = self._where(name)
        kinds = {self._tensors[part].kind.name for part in stored.names}
        return int(np.prod(stored.shape)) * (2 if kinds <= {"F16", "BF16"} else 4)

    def keeps_float32(self, name: str) -> bool:
        """What block types decode to was not stored so."""
        return self.has(name) and any(self._tensors[part].kind.name == "F32" for part in self._stored[name].names)

    def tensor(self, name: str, rows: range | None = None) -> Tensor:
        stored = self._where(name)
        if rows is not None:
            if not stored.is_verbatim:
                return self.tensor(name)[rows.start : rows.stop].clone()
            return self._read(stored.names[0], stored.place, rows)
        return stored.made([self._read(part, stored.place) for part in stored.names])

    def linear(self, module: str) -> QuantizedWeight:
        if module not in self._linears:
            raise CheckpointError(f"{self.path}: {module} is not stored packed; a GGUF file is read dense")
        stored = self._linears[module]
        scheme = SCHEME if self.spec is None else self.spec.scheme_of(module) or SCHEME
        codes, scales, zeros = (
            None if parts[0] is None else stored.joined(parts).contiguous()
            for parts in zip(*(self._parts(name, stored.place) for name in stored.names))
        )
        assert codes is not None and scales is not None
        bias = self.tensor(f"{module}.bias").float() if f"{module}.bias" in self._stored else None
        weight = QuantizedWeight(scheme, codes, scales, zeros, bias=bias)
        try:
            weight.check()
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {module}: {error}") from None
        return weight

    def _parts(self, name: str, place: int | None) -> Parts:
        """Those of a matrix of the file, or of one of those stacked in it."""
        raw, shape = self._raw(name, place)
        kind = self._tensors[name].kind
        if kind.name == "MXFP4":
            return *_mxfp4(raw, shape), None
        return unpacked(kind, raw, shape[0], GGML_QUANT_SIZES[kind][1])

    def _where(self, name: str) -> Stored:
        if name not in self._stored:
            raise CheckpointError(f"{self.path} lacks the tensor {name}")
        return self._stored[name]

    def _read(self, name: str, place: int | None = None, rows: range | None = None) -> Tensor:
        """One tensor by its GGUF name, or one of those stacked in it, or some of its rows, in memory of its own; block
        types become float32."""
        tensor = self._tensors[name]
        raw, shape = self._raw(name, place, rows)
        if tensor.kind in PLAIN:
            return torch.from_numpy(raw).view(PLAIN[tensor.kind]).reshape(shape)
        return _dequantized(tensor, raw, shape)

    def _raw(
        self, name: str, place: int | None = None, rows: range | None = None
    ) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
        """The same as it is stored, and its shape."""
        tensor = self._tensors[name]
        shape, start, nbytes = tensor.shape, tensor.start, tensor.nbytes
        if place is not None:
            nbytes //= shape[0]
            shape, start = shape[1:], start + place * nbytes
        if rows is not None:
            nbytes //= shape[0]
            shape, start, nbytes = (len(rows), *shape[1:]), start + rows.start * nbytes, len(rows) * nbytes
        return self._bytes(start, nbytes), shape

    def _bytes(self, start: int, nbytes: int) -> np.ndarray[Any, Any]:
        try:
            raw = np.fromfile(self.path, np.uint8, nbytes, offset=start)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
        if len(raw) != nbytes:
            raise CheckpointError(f"{self.path} was cut short while it was read; fetch it again")
        return raw

    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config["torch_dtype"] == "bfloat16" else torch.float16

    def stored_bytes(self) -> int:
        return self.path.stat().st_size

    def parameters(self) -> int:
        return sum(int(np.prod(stored.shape)) for stored in self._stored.values())

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        assert self._vocabulary is not None
        try:
            tokenizer = tokenizer_of(self._vocabulary, self.config["vocab_size"])
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        self._vocabulary = None
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


def _dequantized(tensor: StoredTensor, raw: np.ndarray[Any, Any], shape: tuple[int, ...]) -> Tensor:
    values = dequantize(raw.reshape(-1, tensor.nbytes // (tensor.elements // shape[-1])), tensor.kind)
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(shape)


def _mxfp4(raw: np.ndarray[Any, Any], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The codes uint8 [out, in] and scales float32 [out, groups] of a matrix. A block of 32 numbers is the byte of its
    scale and 16 bytes of codes, of which byte j holds those of numbers j and j + 16."""
    blocks = torch.from_numpy(raw).view(shape[0], -1, 17)
    packed = blocks[..., 1:]
    return torch.stack([packed & 15, packed >> 4], 2).reshape(shape), read_e8m0(blocks[..., 0].contiguous())
