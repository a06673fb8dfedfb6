"""``HFDirectory``: a model in Hugging Face's layout, dense or with packed linears, read tensor by tensor."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import shutil
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from qserve.checkpoint import pages
from qserve.checkpoint.calibration_record import CalibrationRecord, read_calibration
from qserve.checkpoint.card import QualityCard, read_card
from qserve.checkpoint.container import DTYPES
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import FAMILIES, under_its_family
from qserve.checkpoint.files import file_sha256, read_json_object
from qserve.checkpoint.formats import FORMATS, format_of, modelopt
from qserve.checkpoint.formats.bitsandbytes import name_parts
from qserve.checkpoint.formats.format import Format
from qserve.checkpoint.formats.hqq import stored_config
from qserve.checkpoint.formats.mxfp4 import split_experts
from qserve.checkpoint.kimi_tokenizer import is_kimi
from qserve.checkpoint.manifest import FileEntry, read_manifest, verify_manifest
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.safetensors_index import StoredTensor, read_index
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.checkpoint.text_part import text_part
from qserve.checkpoint.tokenizer import TOKENIZER_FILES, load_tokenizer, save_portable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAPPED = 1 << 20
_FLOATS = {name: DTYPES[name] for name in ("F64", "F32", "F16", "BF16")}


def _named(stored: dict[str, StoredTensor], config: dict[str, Any]) -> dict[str, StoredTensor]:
    family, stored = FAMILIES.get(str(config.get("model_type"))), name_parts(stored)
    if family is None:
        return split_experts(stored)
    layers = config.get("num_hidden_layers")
    return split_experts(
        family.modules(config).named_as_transformers(stored, layers if isinstance(layers, int) else None)
    )


class HFDirectory:
    """A ``ModelSource`` over a directory with ``config.json`` and safetensors. Opening it reads headers only.

    Of a model that also takes images or sound it is the text part, and ``part_of`` is the type of the whole.

    Raises ``CheckpointError`` where a file is missing, malformed or cut short, or where the quantization is
    not one we read.
    """

    def __init__(self, path: str | Path, *, name: str | None = None) -> None:
        self.path = Path(path)
        self.name = name or self.path.resolve().name
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a directory")
        if not (self.path / "config.json").exists():
            raise CheckpointError(f"{self.path} has no config.json; is this a model directory?")
        self.config: dict[str, Any] = under_its_family(read_json_object(self.path / "config.json"))
        stored = read_index(self.path)
        self.part_of: str | None = None
        if (part := text_part(self.config, stored)) is not None:
            self.part_of = str(self.config.get("model_type"))
            self.config, stored = part
        self._tensors = _named(stored, self.config)
        self._files = ExitStack()
        self._open: dict[Path, BinaryIO] = {}
        self._format, quantization, where = self._read_format()
        marks = {mark for format in ([self._format] if self._format else FORMATS.values()) for mark in format.marks}
        parts = {part for format in ([self._format] if self._format else FORMATS.values()) for part in format.parts}
        split = [name.rpartition(".") for name in self._tensors]
        self._linears = list(dict.fromkeys(module for module, _, part in split if part in marks))
        if self._format is None and self._linears:
            raise CheckpointError(f"{where} lacks quantization_config, but {self._linears[0]} is stored packed")
        packed = {f"{module}.{part}" for module in self._linears for part in parts}
        self._dense = [name for name in self._tensors if name not in packed]
        self.spec = self._read_spec(quantization, where)
        self.card: QualityCard | None = read_card(self.path)
        self.calibration: CalibrationRecord | None = read_calibration(self.path)

    def _read_format(self) -> tuple[Format | None, dict[str, Any], Path]:
        """The format, its ``quantization_config`` (None and {} for a dense model), and the file that holds it."""
        where = self.path / "config.json"
        config = self.config.get("quantization_config")
        if config is None and (self.path / "quantize_config.json").exists():
            where = self.path / "quantize_config.json"
            config = read_json_object(where)
        config = modelopt.with_stored(config, self.path)
        if config is None:
            where, config = self.path, stored_config(self._tensors, self.tensor)
        if config is None:
            return None, {}, self.path / "config.json"
        if not isinstance(config, dict):
            raise CheckpointError(f"{where}: quantization_config must be an object")
        try:
            return format_of(config), config, where
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None

    def _read_spec(self, quantization: dict[str, Any], where: Path) -> QuantSpec | None:
        if self._format is None:
            return None
        for name in self._dense:
            if name.endswith(".weight") and self._tensors[name].dtype not in _FLOATS:
                stored = self._tensors[name]
                raise CheckpointError(f"{stored.file}: {name} is stored as {stored.dtype}, but its scale is missing")
        dense = [name.removesuffix(".weight") for name in self._dense
                 if name.endswith(".weight") and len(self._tensors[name].shape) == 2]
        try:
            spec = self._format.spec_of(quantization, self._linears + dense)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        for module in self._linears:
            if spec.scheme_of(module) is None:
                raise CheckpointError(f"{where} skips {module}, but it is stored packed")
        return spec

    @property
    def format(self) -> Format | None:
        """The format of the packed modules, or None for a dense model."""
        return self._format

    def names(self) -> list[str]:
        return list(self._dense)

    def linears(self) -> list[str]:
        return list(self._linears)

    def has(self, name: str) -> bool:
        return name in self._dense_set

    @cached_property
    def _dense_set(self) -> frozenset[str]:
        return frozenset(self._dense)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self._stored(name).shape
        format, scheme = self._format_and_scheme(name)
        shapes = {part: self._tensors[f"{name}.{part}"].shape for part in self._parts(name)}
        try:
            return format.shape(scheme, shapes, lambda part: self.tensor(f"{name}.{part}"))
        except (CheckpointError, KeyError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise CheckpointError(f"{self.path}: {name}: {reason}") from None

    def nbytes(self, name: str) -> int:
        return self._stored(name).nbytes

    def keeps_float32(self, name: str) -> bool:
        return self.has(name) and DTYPES.get(self._stored(name).dtype) == torch.float32

    def tensor(self, name: str, rows: range | None = None) -> Tensor:
        """Read, not mapped: mapped pages count as memory of this process, and those of a large model add up."""
        stored, dtype = self._readable(name)
        shape, nbytes, offset = stored.shape, stored.nbytes, stored.offset
        if rows is not None:
            width = nbytes // shape[0]
            shape, nbytes, offset = (len(rows), *shape[1:]), len(rows) * width, offset + rows.start * width
        data = pages.empty((nbytes,), torch.uint8)
        view, done = memoryview(data.numpy()), 0  # type: ignore[arg-type]
        try:
            file = self._descriptor(stored.file)
            while done < nbytes:
                count = os.preadv(file, [view[done:]], offset + done)
                if not count:
                    raise CheckpointError(f"{stored.file}: tensor {name} cannot be read: the file was cut short")
                done += count
        except OSError as error:
            raise CheckpointError(f"{stored.file}: tensor {name} cannot be read: {error.strerror}") from None
        return data.view(dtype).reshape(shape)

    def _readable(self, name: str) -> tuple[StoredTensor, torch.dtype]:
        stored = self._stored(name)
        dtype = DTYPES.get(stored.dtype)
        if dtype is None or stored.nbytes != stored.numel * dtype.itemsize:
            raise CheckpointError(f"{stored.file}: tensor {name} cannot be read: {stored.nbytes} bytes of "
                                  f"{stored.dtype} {list(stored.shape)}")  # fmt: skip
        return stored, dtype

    def _descriptor(self, file: Path) -> int:
        if file not in self._open:
            self._open[file] = self._files.enter_context(file.open("rb", buffering=0))
        return self._open[file].fileno()

    def _part(self, name: str) -> Tensor:
        """A part of a packed linear. Large words are mapped: a kernel lays them out from there, and the mapping ends
        with the linear. Getting memory for a copy would take longer than all the rest."""
        stored, dtype = self._readable(name)
        start = stored.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        before = stored.offset - start
        if dtype != torch.int32 or stored.nbytes < _MAPPED or before % dtype.itemsize:
            return self.tensor(name)
        try:
            length = before + stored.nbytes
            area = mmap.mmap(self._descriptor(stored.file), length, access=mmap.ACCESS_COPY, offset=start)
        except (OSError, ValueError):  # its file became shorter, or its system maps none
            return self.tensor(name)
        return torch.frombuffer(area, dtype=dtype, count=stored.numel, offset=before).view(stored.shape)

    def linear(self, module: str) -> QuantizedWeight:
        if module not in self._packed:
            raise CheckpointError(f"{self.path} has no packed linear {module}")
        format, scheme = self._format_and_scheme(module)
        assert self.spec is not None
        parts = {part: self._part(f"{module}.{part}") for part in self._parts(module)}
        try:
            return format.unpack(parts, scheme, self.spec.activations_of(module))
        except CheckpointError as error:
            file = self._tensors[f"{module}.{next(iter(parts))}"].file
            raise CheckpointError(f"{file}: {module}: {error}") from None

    def _parts(self, module: str) -> list[str]:
        assert self._format is not None
        return [part for part in self._format.parts if f"{module}.{part}" in self._tensors]

    @cached_property
    def _packed(self) -> frozenset[str]:
        return frozenset(self._linears)

    def _format_and_scheme(self, module: str) -> tuple[Format, WeightScheme]:
        scheme = self.spec.scheme_of(module) if self.spec is not None else None
        assert scheme is not None and self._format is not None, "checked at open"
        return self._format, scheme

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} lacks the tensor {name}; is the checkpoint complete?")
        return self._tensors[name]

    def dtype(self) -> torch.dtype:
        stated = self.config.get("dtype") or self.config.get("torch_dtype")
        known = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS.values()}
        if isinstance(stated, str) and stated.removeprefix("torch.") in known:
            return known[stated.removeprefix("torch.")]
        return next((_FLOATS[self._tensors[name].dtype] for name in self._dense
                     if self._tensors[name].dtype in _FLOATS), torch.float32)

    def stored_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._weight_files())

    def parameters(self) -> int:
        biases = sum(self._tensors[f"{module}.bias"].numel for module in self._linears
                     if f"{module}.bias" in self._tensors)
        return biases + sum(math.prod(self.shape(name)) for name in self._dense + self._linears)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if not any((self.path / name).exists() for name in TOKENIZER_FILES):
            raise CheckpointError(f"{self.path} has no tokenizer (tokenizer.json or tokenizer.model)")
        return load_tokenizer(self.path, vocab_size=self.config.get("vocab_size"))

    def save_tokenizer(self, out: Path) -> None:
        if is_kimi(self.path):  # for readers that would have to run its code
            save_portable(self._tokenizer, out)
            return
        for name in TOKENIZER_FILES:
            if (self.path / name).exists():
                shutil.copyfile(self.path / name, out / name)

    def generation_config(self) -> dict[str, Any]:
        path = self.path / "generation_config.json"
        return read_json_object(path) if path.exists() else {}

    def sha256(self) -> str:
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        """The hash of config.json and the weight files as they are, whatever a manifest says."""
        return self._digest({})

    def _digest(self, known: dict[str, FileEntry]) -> str:
        digest = hashlib.sha256()
        for file in [self.path / "config.json", *self._weight_files()]:
            sha256 = known[file.name].sha256 if file.name in known else file_sha256(file)
            digest.update(f"{file.name} {sha256}\n".encode())
        return digest.hexdigest()

    def card_problem(self) -> str | None:
        """Why the quality card is not of these weights, or None. Files are hashed only if the manifest does not."""
        if self.card is None or not self.card.model_sha256:
            return None
        found = self._digest(read_manifest(self.path) or {})
        if found == self.card.model_sha256:
            return None
        return (
            f"{self.path}: the quality card belongs to other weights (sha256 {self.card.model_sha256[:12]}, these have "
            f"{found[:12]}); measure these with qserve eval"
        )

    def verify(self) -> None:
        """Compare every file with the manifest; without a manifest do nothing."""
        verify_manifest(self.path)

    def _weight_files(self) -> list[Path]:
        return sorted({stored.file for stored in self._tensors.values()})
