"""Converts a checkpoint from one on-disk format to another: the same numbers, or a refusal.

Every packed weight is unpacked again and compared before anything is published, so a format that would round it is
found out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.calibration_record import CALIBRATION_FILE
from qserve.checkpoint.card import write_card
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import format_named
from qserve.checkpoint.formats.format import Format
from qserve.checkpoint.gguf_writer import write_gguf
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.kv import is_kv
from qserve.checkpoint.loaders import LoaderVerdict, verdicts
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.source import ModelSource, dense_linears
from qserve.checkpoint.spec import QuantSpec
from qserve.checkpoint.writer import CheckpointWriter

DENSE = "hf"
"""The name under which weights are written in floating point."""
GGUF = "gguf"
"""That of llama.cpp's files."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ConvertReport:
    """What was written: the number of ``modules`` rewritten, what the loaders say, and a line for each difference."""

    format: str
    modules: int
    verdicts: tuple[LoaderVerdict, ...]
    notes: tuple[str, ...]


def convert(
    source: ModelSource,
    out: Path,
    format: str,
    *,
    overwrite: bool = False,
    loaders: Iterable[str] = ("qserve",),
    progress: Progress | None = None,
) -> ConvertReport:
    """Rewrite ``source`` in ``format`` into the directory ``out``, which appears complete or not at all; ``gguf`` is a
    file, see ``write_gguf``, and takes dense models too.

    Every packed weight dequantizes to the same bits, and the quality card is carried along. ``hf`` is the exception:
    it dequantizes and rounds to 16 bits, and has no card. ``progress(done, total)`` counts tensors and modules.
    Raises ``UsageError`` for what the format or one of ``loaders`` cannot hold. Raises ``CheckpointError`` where a
    weight would change, version 1 of GPTQ would get a zero point of 0, or ``out`` cannot be written.
    """
    if source.path.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{out} is or contains the model itself; choose another directory")
    try:
        json.dumps([source.config, source.generation_config()], allow_nan=False)
    except ValueError:
        raise CheckpointError(f"{source.name}: its configuration holds NaN or infinity") from None
    if source.format is not None and source.format.name == "mxfp4":
        raise UsageError(f"{source.name}: experts that are stored together in mxfp4 are served, but not rewritten")
    tell = progress or (lambda done, total: None)
    if format == DENSE:
        return _dense(source, out, overwrite, tell)
    if format == GGUF:
        notes = write_gguf(source, out, overwrite=overwrite, progress=tell)
        return ConvertReport(GGUF, len(source.linears()), (), tuple(notes))
    target = format_named(format)
    if source.spec is None or source.format is None:
        raise UsageError(f"{source.name} is not quantized; qserve quantize writes it as {target.name}")
    if source.format.name == target.name:
        raise UsageError(f"{source.name} is in the format {target.name} already")
    spec = source.spec if target.name.startswith("gptq") else replace(source.spec, act_order=False)
    judged = _judge(source, spec, target, loaders)
    kept = dict.fromkeys((*spec.ignored, *dense_linears(source)))  # not every format names them all
    config = target.config_of(replace(spec, ignored=tuple(kept)))
    source.verify()
    # As other readers will understand the configuration, rather than as it was meant.
    understood = target.spec_of(config, [*source.linears(), *dense_linears(source)])
    with CheckpointWriter(out, overwrite=overwrite, expected_bytes=source.stored_bytes(), format=target) as writer:
        _write_rest(source, config, source.config, writer)
        modules, names = source.linears(), source.names()
        for done, module in enumerate(modules):
            for part, tensor in _repack(module, source.linear(module), target, understood).items():
                writer.put(f"{module}.{part}", tensor)
            tell(done + 1, len(modules) + len(names))
        for done, name in enumerate(names, len(modules)):
            writer.put(name, source.tensor(name))
            tell(done + 1, len(modules) + len(names))
        if source.calibration is not None:
            writer.put_json(CALIBRATION_FILE, source.calibration.to_json())
        staged = writer.seal()
        if source.card is not None and HFDirectory(source.path).card_problem() is None:
            origin = f"measured on the {source.format.name} files that these were rewritten from, bit for bit"
            scope = "; ".join(filter(None, (source.card.scope, origin)))
            write_card(staged, replace(source.card, scope=scope, model_sha256=HFDirectory(staged).sha256()))
        writer.finish()
    return ConvertReport(target.name, len(modules), tuple(judged), ())


def _judge(source: ModelSource, spec: QuantSpec, target: Format, loaders: Iterable[str]) -> list[LoaderVerdict]:
    """What every loader says. ``UsageError`` where the format cannot hold the checkpoint, or one of ``loaders`` refuses
    it."""
    shapes = {module: (shape[0], shape[1]) for module in source.linears() if (shape := source.shape(module))}
    schemes = {module: spec.scheme_of(module) or spec.weights for module in shapes}
    if target.name == "gptq" and not all(scheme.symmetric for scheme in schemes.values()):
        # The zero points are known here: ``pack`` refuses those that version 1 lacks. Otherwise the versions are alike.
        target = format_named("gptq_v2")
    if limit := target.limit(spec, schemes, shapes):
        raise UsageError(f"{source.name} cannot be written as {target.name}: {limit}")
    for module in dense_linears(source):
        if spec.scheme_of(module) is None:
            shape = source.shape(f"{module}.weight")
            shapes[module] = (shape[0], shape[1])
    wanted = tuple(loaders)
    verdicts(spec, {}, wanted, format=target)  # checks the names
    judged = verdicts(spec, shapes, format=target)
    for verdict in judged:
        if verdict.loader in wanted and not verdict.accepts:
            raise UsageError(f"{verdict.loader} would refuse this checkpoint: {verdict.reason}")
    return judged


def _repack(module: str, weight: QuantizedWeight, target: Format, spec: QuantSpec) -> dict[str, Tensor]:
    """The parts of ``weight`` in ``target``; ``CheckpointError`` where they would not give the same numbers."""
    scheme = spec.scheme_of(module)
    if scheme is None:
        raise CheckpointError(f"{module}: the configuration of {target.name} leaves it in floating point")
    try:
        parts = target.pack(weight)
        again = target.unpack(parts, scheme, spec.activations_of(module))
    except CheckpointError as error:
        raise CheckpointError(f"{module}: {error}") from None
    if not torch.equal(weight.scales, again.scales):
        raise CheckpointError(f"{module}: {target.name} would round its scales to float16; compressed-tensors does not")
    if weight.bias is not None and (again.bias is None or not torch.equal(weight.bias, again.bias)):
        raise CheckpointError(f"{module}: {target.name} would round its bias to float16; compressed-tensors does not")
    same_inputs = weight.activations == again.activations and weight.input_scale == again.input_scale
    same_codes = torch.equal(weight.codes, again.codes) and torch.equal(_zeros(weight), _zeros(again))
    if not (same_inputs and same_codes and torch.equal(weight.group_of_input(), again.group_of_input())):
        raise CheckpointError(f"{module}: {target.name} would change it")
    return parts


def _zeros(weight: QuantizedWeight) -> Tensor:
    """uint8 [out, groups]."""
    if weight.zeros is not None:
        return weight.zeros
    return torch.full(weight.scales.shape, weight.scheme.zero, dtype=torch.uint8)


def _dense(source: ModelSource, out: Path, overwrite: bool, tell: Progress) -> ConvertReport:
    """Everything in floating point, as 16 bits."""
    dtype = torch.bfloat16 if source.dtype() == torch.bfloat16 else torch.float16
    dtype_name = str(dtype).removeprefix("torch.")
    modules = source.linears()
    names = [name for name in source.names() if not is_kv(name)]
    notes = [f"weights are rounded to {dtype_name}"]
    if source.spec is None and source.path.is_dir():
        raise UsageError(f"{source.name} is in floating point already")
    if source.spec is not None and source.spec.activations is not None:
        notes.append(f"inputs are no longer rounded ({source.spec.activations})")
    if source.spec is not None and source.spec.kv_cache is not None:
        notes.append(f"the KV cache is no longer rounded ({source.spec.kv_cache.dtype})")
    source.verify()
    with CheckpointWriter(out, overwrite=overwrite, expected_bytes=2 * source.parameters()) as writer:
        config = {key: value for key, value in source.config.items() if key != "quantization_config"}
        _write_rest(source, None, config | {"dtype": dtype_name, "torch_dtype": dtype_name}, writer)
        for done, module in enumerate(modules):
            weight = source.linear(module)
            writer.put(f"{module}.weight", _narrow(f"{module}.weight", weight.dequantize(), dtype))
            if weight.bias is not None:
                writer.put(f"{module}.bias", _narrow(f"{module}.bias", weight.bias, dtype))
            tell(done + 1, len(modules) + len(names))
        for done, name in enumerate(names, len(modules)):
            writer.put(name, _narrow(name, source.tensor(name), dtype))
            tell(done + 1, len(modules) + len(names))
        writer.finish()
    return ConvertReport(DENSE, len(modules), (), tuple(notes))


def _narrow(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    narrow = tensor.to(dtype)
    if not bool(torch.isfinite(narrow).all()):
        raise CheckpointError(f"{name} holds values that {str(dtype).removeprefix('torch.')} cannot")
    return narrow


def _write_rest(
    source: ModelSource, quantization: dict[str, Any] | None, config: dict[str, Any], writer: CheckpointWriter
) -> None:
    """Configuration and tokenizer. They come first, so a tokenizer that cannot be written is found at once."""
    if quantization is not None:
        config = config | {"quantization_config": quantization}
        if quantization["quant_method"] == "gptq":
            writer.put_json("quantize_config.json", quantization)
    writer.put_json("config.json", config)
    if generation := source.generation_config():
        writer.put_json("generation_config.json", generation)
    source.save_tokenizer(writer.directory)
