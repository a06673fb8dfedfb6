"""``write_gguf``: a model as one file of llama.cpp's format, with the very numbers that it has.

Symmetric integers in groups become ``Q4_0``, ``Q5_0`` or ``Q8_0``, what was quantized to llama.cpp's types keeps them,
floats stay floats. The file is opened again before it is published: configuration and tokenizer must come back as they
were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.files import whole
from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.gguf_blocks import block_type, pack_blocks
from qserve.checkpoint.gguf_metadata import check_read_back, metadata_of, writable
from qserve.checkpoint.gguf_tensors import Stored, file_tensors
from qserve.checkpoint.gguf_undo import (
    log_of_rates,
    minus_one,
    rates,
    regroup,
    transposed,
    unpermute,
    untiled,
    untiled_columns,
)
from qserve.checkpoint.gguf_vocabulary import vocabulary_of
from qserve.checkpoint.kv import is_kv
from qserve.checkpoint.quantized_weight import QuantizedWeight, take_rows
from qserve.checkpoint.source import ModelSource

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]

_DTYPES = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_PLAIN = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight", "ssm_conv1d.weight")
"""Matrices that llama.cpp wants in float32, besides all vectors."""
_WINDOWLESS = ("llama", "phi3")
"""Architectures of which llama.cpp attends to everything, seen in version 0.3.36 of llama-cpp-python."""
_FILE_TYPES = {
    Kind.F32: 0, Kind.F16: 1, Kind.Q4_0: 2, Kind.Q4_1: 3, Kind.Q8_0: 7, Kind.Q5_0: 8, Kind.Q5_1: 9, Kind.Q3_K: 12,
    Kind.Q4_K: 15, Kind.Q5_K: 17, Kind.Q6_K: 18, Kind.BF16: 32,
}  # fmt: skip
"""llama.cpp's numbers of what most of a file is stored in; of a K-quant the number of its recipe M."""


@dataclass(frozen=True)
class _Planned:
    """A tensor of the file: its shape there, and what makes its bytes, in pieces that follow each other."""

    shape: tuple[int, ...]
    kind: Kind
    pieces: list[Callable[[], Array]]

    @property
    def nbytes(self) -> int:
        elements = int(np.prod(self.shape))
        if self.kind in _DTYPES:
            return elements * _DTYPES[self.kind].itemsize
        numbers, size = GGML_QUANT_SIZES[self.kind]
        return elements // numbers * size


def write_gguf(source: ModelSource, out: Path, *, overwrite: bool = False, progress: Progress | None = None
               ) -> list[str]:  # fmt: skip
    """Write ``source`` to the file ``out``, which appears complete or not at all. Returns a line for each thing that
    the file does not hold. Raises ``UsageError`` for a model or a tokenizer that cannot be written, and
    ``CheckpointError`` for a weight that blocks would change, or where ``out`` cannot be written."""
    if out.suffix != ".gguf":
        raise UsageError(f"{out}: give a file name that ends in .gguf")
    if out.is_dir() or (out.exists() and not overwrite):
        raise CheckpointError(f"{out} exists; choose another name or pass --overwrite")
    architecture = writable(source.config, source.name)[1].architecture
    said, tensors = metadata_of(source.config, source.name)
    rows = int(said[f"{architecture}.vocab_size"])
    vocabulary = vocabulary_of(source.tokenizer(), rows, source.config, source.name)
    source.verify()
    plan = {name: _Planned(tuple(tensor.shape), Kind.F32, [partial(_floats, tensor, torch.float32)])
            for name, tensor in tensors.items()}  # fmt: skip
    plan |= _planned(source)
    kinds = [each.kind for each in plan.values() if len(each.shape) > 1]
    most = max(kinds, key=lambda kind: sum(each.nbytes for each in plan.values() if each.kind is kind))
    keys = {"general.name": source.name, "general.file_type": _FILE_TYPES[most], "general.quantization_version": 2,
            "general.quantized_by": f"qserve {metadata.version('qserve-llm')}", **said, **vocabulary}  # fmt: skip
    check_read_back(source.config, {"general.architecture": architecture, **keys},
                    {name: each.shape for name, each in plan.items()}, tensors, source.name)  # fmt: skip
    with whole(out) as partial_file:
        _write(partial_file, architecture, keys, plan, progress or (lambda done, total: None))
        GGUFFile(partial_file)
    return _notes(source, architecture, said)


def _notes(source: ModelSource, architecture: str, said: dict[str, Any]) -> list[str]:
    notes = []
    window = said.get(f"{architecture}.attention.sliding_window")
    if window and architecture in _WINDOWLESS:
        notes.append(f"llama.cpp ignores the window of {window:,} tokens: beyond it answers differ")
    if source.spec is not None and source.spec.activations is not None:
        notes.append(f"inputs are no longer rounded as in the checkpoint ({source.spec.activations})")
    if source.spec is not None and source.spec.kv_cache is not None:
        notes.append(f"what was calibrated for the KV cache ({source.spec.kv_cache.dtype}) is left out")
    return notes


def _planned(source: ModelSource) -> dict[str, _Planned]:
    """The tensors of the file by name. Reads no weights."""
    packed = set(source.linears())

    def has(name: str) -> bool:
        module, _, part = name.rpartition(".")
        if module not in packed:
            return source.has(name)
        return part == "weight" or _has_bias(source, module)

    layout = file_tensors(source.config, has)
    left = [name for name in (*source.names(), *(f"{module}.weight" for module in packed))
            if name not in layout and not is_kv(name)]  # fmt: skip
    if left:
        raise UsageError(f"{source.name}: its tensor {left[0]} has no place in a GGUF file")
    plan: dict[str, _Planned] = {}
    for name, stored in layout.items():
        for number, (target, laid) in enumerate(zip(stored.names, stored.laid)):
            kind, piece = _piece(source, packed, name, stored, number)
            if stored.place is None:
                shape = tuple(n for n in laid if n != 1) or (1,)
                if target.endswith(_PLAIN) and kind in _DTYPES:
                    kind = Kind.F32
                plan[target] = _Planned(shape, kind, [partial(piece, kind)])
                continue
            before = plan.get(target, _Planned((0, *laid), kind, []))
            if before.kind is not kind or before.shape[0] != stored.place:
                raise UsageError(f"{source.name}: the experts of {target} are not stored alike; give all the same bits")
            plan[target] = _Planned((stored.place + 1, *laid), kind, [*before.pieces, partial(piece, kind)])
    return plan


def _has_bias(source: ModelSource, module: str) -> bool:
    try:
        return bool(source.shape(f"{module}.bias"))
    except CheckpointError:
        return False


def _piece(
    source: ModelSource, packed: set[str], name: str, stored: Stored, number: int
) -> tuple[Kind, Callable[[Kind], Array]]:
    """The type in which part ``number`` of a tensor is stored, and what makes its bytes."""
    module, _, part = name.rpartition(".")
    if module in packed and part == "weight":
        assert source.spec is not None
        scheme = source.spec.scheme_of(module) or source.spec.weights
        try:
            kind = block_type(scheme, stored.laid[number][-1])
        except CheckpointError as error:
            raise UsageError(f"{source.name}: {module}: {error}") from None
        return kind, lambda kind: _blocks(source, module, stored, number)
    if module in packed:
        return Kind.F32, lambda kind: _floats(_done(source.linear(module).bias, stored, number), torch.float32)
    vector = sum(n > 1 for n in stored.shape) < 2
    wide = source.nbytes(name) >= 4 * int(np.prod(source.shape(name)))
    kind = Kind.F32 if vector or wide else Kind.BF16 if source.dtype() == torch.bfloat16 else Kind.F16
    return kind, lambda kind: _narrowed(name, _done(source.tensor(name), stored, number), _DTYPES[kind])


def _blocks(source: ModelSource, module: str, stored: Stored, number: int) -> Array:
    weight = source.linear(module)
    try:
        return pack_blocks(_in_order_of_file(weight, stored, number))
    except CheckpointError as error:
        raise CheckpointError(f"{source.name}: {module}: {error}") from None


def moved_columns(stored: Stored) -> Tensor | None:
    """int64 [in]: transformers' columns in the order of the file, where that is another one."""
    if not isinstance(stored.undo, partial) or stored.undo.func is not untiled_columns:
        return None
    return _done(torch.arange(stored.shape[1])[None], stored, 0)[0]


def _in_order_of_file(weight: QuantizedWeight, stored: Stored, number: int) -> QuantizedWeight:
    """The rows, or the groups of columns, of a weight as the file has them."""
    columns = moved_columns(stored)
    if columns is None:
        return take_rows(weight, _done(torch.arange(weight.out_features), stored, number))
    width = weight.scheme.group_width(weight.in_features)
    groups = columns.view(-1, min(width, weight.in_features)) // width
    if not bool((groups == groups[:, :1]).all()):
        raise CheckpointError(f"a head has {weight.scheme} weights in groups that it shares; use --group-size 32")
    order = groups[:, 0]
    zeros = None if weight.zeros is None else weight.zeros[:, order]
    return replace(weight, stored=weight.codes[:, columns], scales=weight.scales[:, order], zeros=zeros)


def _done(tensor: Tensor | None, stored: Stored, number: int) -> Tensor:
    """What llama.cpp's converter makes of transformers' ``tensor``: the inverse of ``Stored.made``, of which part
    ``number`` is meant."""
    assert tensor is not None
    undo = stored.undo
    if undo is minus_one:
        return tensor.float() + 1
    if undo is transposed:
        return transposed(tensor)
    if undo is not None:
        assert isinstance(undo, partial)
        if undo.func is log_of_rates:
            return rates(tensor, **undo.keywords)
        if undo.func is untiled_columns:
            return _done(tensor.T, replace(stored, undo=partial(untiled, **undo.keywords)), number).T
        assert undo.func in (unpermute, regroup, untiled)  # they put rows in another order
        order: Tensor = undo(torch.arange(len(tensor)).unsqueeze(1)).squeeze(1)
        return tensor[order.argsort()]
    if len(stored.names) == 1:
        return tensor
    heights = [laid[-2] if len(laid) > 1 else laid[0] for laid in stored.laid]
    parts: tuple[Tensor, ...] = tensor.split(heights, -2 if tensor.dim() > 1 else 0)
    return parts[number]


def _narrowed(name: str, tensor: Tensor, dtype: torch.dtype) -> Array:
    if not torch.equal(tensor.to(dtype).float(), tensor.float()):
        raise CheckpointError(f"{name} would be rounded to {str(dtype).removeprefix('torch.')}")
    return _floats(tensor, dtype)


def _floats(tensor: Tensor, dtype: torch.dtype) -> Array:
    """uint8: the bytes of ``tensor`` in ``dtype``."""
    stored = tensor.to(dtype).contiguous()
    return stored.view(-1).view(torch.uint8).numpy()


def _write(path: Path, architecture: str, keys: dict[str, Any], plan: dict[str, _Planned], tell: Progress) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        _add(writer, key, value)
    for name, each in plan.items():
        writer.add_tensor_info(name, each.shape, np.dtype(np.float32), each.nbytes, raw_dtype=each.kind)
    writer.write_header_to_file()
    try:
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, each in enumerate(plan.values()):
            writer.write_tensor_data(_whole(each))
            tell(done + 1, len(plan))
    finally:
        writer.close()


def _whole(each: _Planned) -> Array:
    pieces = [piece().reshape(-1) for piece in each.pieces]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)


