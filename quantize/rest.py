"""Writes what is not inside a decoder block: embeddings, norms, the output head, configuration and tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows
from qserve.checkpoint.stacked_experts import stack, together
from qserve.checkpoint.writer import CheckpointWriter
from qserve.quantize import rtn
from qserve.quantize.layer import LayerReport
from qserve.quantize.prepare import Preparation, narrow


def write_rest(
    prepared: Preparation, written: Iterable[str], writer: CheckpointWriter, importance: Tensor | None
) -> list[LayerReport]:
    """Write everything except the tensors ``written`` with the blocks. ``importance`` float32 [hidden] is the mean
    square of each input of the output head. Returns a line for each packed module."""
    source, spec, embedding = prepared.skeleton.source, prepared.spec, prepared.shapes.embedding
    packed_modules = [module for module in prepared.skeleton.shapes if spec.scheme_of(module) is not None]
    done = {*written, *(f"{module}.{part}" for module in packed_modules for part in ("weight", "bias"))}
    reports = []
    for module, stored in (("lm_head", _head_of(prepared)), (embedding, f"{embedding}.weight")):
        if module not in spec.overrides:
            continue
        if module in writer.committed():  # rounding a large vocabulary takes as long as some blocks
            report = LayerReport.from_json(writer.part(module)[1])
        else:
            # Rows of an embedding are looked up, so all its columns count the same.
            packed, report = _round(prepared, module, stored, importance if module == "lm_head" else None)
            writer.put_linear(module, packed)
            writer.commit(module, report.to_json())
        reports.append(report)
        done.add(f"{module}.weight")
    if embedding in spec.overrides and prepared.shapes.tied:
        done.add("lm_head.weight")
    def dense(name: str) -> Tensor:
        return narrow(source, name, source.tensor(name), prepared.dtype)

    rest = [name for name in source.names() if name not in done]
    stacks = together(source, rest)
    for whole, members in stacks.items():
        writer.put(whole, stack(members, dense))
    stacked = {name for members in stacks.values() for name in members}
    for name in rest:
        if name not in stacked:
            writer.put(name, dense(name))
    _write_configuration(prepared, writer)
    return reports


def _head_of(prepared: Preparation) -> str:
    source = prepared.skeleton.source
    return "lm_head.weight" if source.has("lm_head.weight") else f"{prepared.shapes.embedding}.weight"


def _round(
    prepared: Preparation, module: str, stored: str, importance: Tensor | None
) -> tuple[QuantizedWeight, LayerReport]:
    """Round to nearest, with the scales of least error weighted by ``importance``. In slices: a large vocabulary in
    float32 is gigabytes."""
    scheme = prepared.spec.overrides[module]
    weight = prepared.skeleton.source.tensor(stored)
    counts = torch.ones(weight.shape[1]) if importance is None else importance
    slices, error, energy = [], 0.0, 0.0
    for part in weight.split(4096):
        part = part.to(torch.float32)
        slices.append(rtn.nearest(part, counts, scheme))
        error += float((slices[-1].dequantize() - part).square_().matmul(counts).double().sum())
        energy += float(part.square().matmul(counts).double().sum())
    return concat_rows(slices), LayerReport(module, scheme, error / energy)


def _write_configuration(prepared: Preparation, writer: CheckpointWriter) -> None:
    source, spec = prepared.skeleton.source, prepared.spec
    quantization = prepared.format.config_of(spec)
    dtype_name = str(prepared.dtype).removeprefix("torch.")
    config: dict[str, Any] = {
        **source.config, "dtype": dtype_name, "torch_dtype": dtype_name, "quantization_config": quantization
    }  # fmt: skip
    if "lm_head" in spec.overrides:
        config["tie_word_embeddings"] = False
    writer.put_json("config.json", config)
    if prepared.format.name in ("gptq", "gptq_v2"):
        writer.put_json("quantize_config.json", quantization)  # older loaders look here
    if generation := source.generation_config():
        writer.put_json("generation_config.json", generation)
    source.save_tokenizer(writer.directory)
