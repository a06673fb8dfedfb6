"""Damage to a checkpoint is noticed: by its hashes, or, if it came before them, on reading or by the gate.

Each damage is a mistake of a writer or of a disk, to a checkpoint that was good before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qserve.calibration.text import Text, load_text
from qserve.checkpoint.errors import CheckpointError, GateFailed
from qserve.checkpoint.formats import format_named
from qserve.checkpoint.grid import E4M3
from qserve.checkpoint.manifest import write_manifest
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.source import open_model
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme
from qserve.checkpoint.writer import CheckpointWriter
from qserve.evals import gate, quality
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine

Tensors = dict[str, Tensor]
WINDOW = 40
FP8_ROWS, FP8_BLOCKS = WeightScheme(8, -1, dtype="fp8"), WeightScheme(8, 32, dtype="fp8", rows=32)
TOKENS, GROUPS = ActivationScheme("fp8"), ActivationScheme("fp8", "group", group_size=32)


@dataclass(frozen=True)
class Kind:
    """A format and what it holds; ``codes``, ``scales`` and ``zeros`` are the names of its parts."""

    format: str
    scheme: WeightScheme
    codes: str
    scales: str
    zeros: str | None = None
    activations: ActivationScheme | None = None


KINDS = {
    "gptq": Kind("gptq", WeightScheme(4, 32), "qweight", "scales", "qzeros"),
    "gptq, 8 bits": Kind("gptq", WeightScheme(8, 32), "qweight", "scales", "qzeros"),
    "gptq_v2, asymmetric": Kind("gptq_v2", WeightScheme(4, 32, False), "qweight", "scales", "qzeros"),
    "awq": Kind("awq", WeightScheme(4, 32, False), "qweight", "scales", "qzeros"),
    "pack-quantized": Kind("compressed-tensors", WeightScheme(4, 32), "weight_packed", "weight_scale"),
    "pack-quantized, asymmetric": Kind(
        "compressed-tensors", WeightScheme(4, 32, False), "weight_packed", "weight_scale", "weight_zero_point"
    ),
    "int-quantized": Kind(
        "compressed-tensors", WeightScheme(8, -1), "weight", "weight_scale", None, ActivationScheme("int8")
    ),
    "float-quantized": Kind("compressed-tensors", FP8_ROWS, "weight", "weight_scale", None, TOKENS),
    "fp8": Kind("fp8", FP8_BLOCKS, "weight", "weight_scale_inv", None, GROUPS),
}


def rounded(weight: Tensor, kind: Kind) -> QuantizedWeight:
    """``weight`` [out, in] to the nearest of what ``kind`` holds."""
    scheme = kind.scheme
    out, inp = weight.shape
    height, width = scheme.row_height(out), scheme.group_width(inp)
    blocks = weight.reshape(out // height, height, inp // width, width).transpose(1, 2).reshape(
        out // height, inp // width, -1
    )
    if scheme.symmetric:
        limit = E4M3.largest if scheme.dtype == "fp8" else scheme.zero - 1
        scales, least = blocks.abs().amax(-1) / limit, None
    else:
        least = blocks.amin(-1).clamp(max=0)
        scales = (blocks.amax(-1).clamp(min=0) - least) / scheme.max_code
    scales = scales.half().float()
    spread = scales.repeat_interleave(height, 0)
    each = spread.repeat_interleave(width, 1)
    if scheme.dtype == "fp8":
        codes = (weight / each).clamp(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn).view(torch.uint8)
        return QuantizedWeight(scheme, codes, spread, activations=kind.activations)
    zeros = None if least is None else (-least / scales).round().to(torch.uint8)
    zero = scheme.zero if zeros is None else zeros.repeat_interleave(width, 1)
    codes = ((weight / each).round() + zero).clamp(0, scheme.max_code).to(torch.uint8)
    return QuantizedWeight(scheme, codes, spread, zeros, activations=kind.activations)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def base(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with outputs of unequal size, as trained models have: equal ones could be swapped unseen."""
    out = shutil.copytree(tiny_model, tmp_path_factory.mktemp("base") / "model")
    tensors = load_file(out / "model.safetensors")
    g = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            blocks = torch.randn(len(tensor) // 32, generator=g).repeat_interleave(32)
            tensors[name] = tensor * (blocks + 0.5 * torch.randn(len(tensor), generator=g)).exp()[:, None]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def good(kind: Kind, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base in ``kind``. Not to be written to."""
    source, format = open_model(base), format_named(kind.format)
    spec = QuantSpec("rtn", kind.scheme, kind.activations)
    out = tmp_path_factory.mktemp("good") / "model"
    with CheckpointWriter(out, format=format) as writer:
        for name in source.names():
            if name.endswith("proj.weight"):
                writer.put_linear(name.removesuffix(".weight"), rounded(source.tensor(name).float(), kind))
            else:
                writer.put(name, source.tensor(name))
        writer.put_json("config.json", {**source.config, "quantization_config": format.config_of(spec)})
        source.save_tokenizer(writer.directory)
        writer.finish()
    return out


def engine(path: Path) -> Engine:
    config = EngineConfig(max_model_len=WINDOW + 1, max_num_seqs=16, max_num_batched_tokens=64, threads=1)
    return Engine(open_model(path), config)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("hello world, the lazy dog and the quick brown fox: user system. " * 10)
    return load_text(str(path), "evaluate")


@pytest.fixture(scope="module")
def judged(base: Path, good: Path, text: Text) -> Callable[[Path], None]:
    """Holds a checkpoint against a gate that the good one passes, whose interval ends a tenth below it."""
    reference, job = engine(base), quality.EvalJob(text, tokens=3 * WINDOW, window=WINDOW)
    limit = 1.1 * quality.measure(reference, engine(good), job).card.end("kl_mean", "high")

    def held(path: Path) -> None:
        card = quality.measure(reference, engine(path), job).card
        gate.enforce(gate.judge(gate.quality_gates(max_kl=limit), card))

    held(good)
    return held


def modules(tensors: Tensors, kind: Kind) -> list[str]:
    return [name.removesuffix(f".{kind.scales}") for name in tensors if name.endswith(f".{kind.scales}")]


def zero_offset(tensors: Tensors, kind: Kind) -> None:
    """Zero points, or where there are none the codes around them, one too high in every module; signed bytes taken for
    unsigned ones."""
    if kind.scheme.dtype == "fp8":  # floats have none; what readers mistake is the bias of the exponent (e4m3fnuz)
        for tensor in tensors.values():
            if tensor.dtype == torch.float8_e4m3fn:
                codes = tensor.view(torch.uint8)
                codes += 8 * ((codes & 0x7F) < 0x70)
        return
    for module in modules(tensors, kind):
        name = f"{module}.{kind.zeros or kind.codes}"
        if tensors[name].dtype == torch.int8:
            tensors[name] = tensors[name] ^ -128
        elif kind.scheme.bits == 4:
            low, high = tensors[name] & 0x0F0F0F0F, (tensors[name] >> 4) & 0x0F0F0F0F
            low, high = (low + 0x01010101) & 0x0F0F0F0F, (high + 0x01010101) & 0x0F0F0F0F
            tensors[name] = low | (high << 4)
        else:
            tensors[name] = tensors[name] ^ 1


def nibble_order(tensors: Tensors, kind: Kind) -> None:
    """Both halves of every byte swapped; neighbours swapped where a number has a byte."""
    for module in modules(tensors, kind):
        name = f"{module}.{kind.codes}"
        words = tensors[name]
        if words.element_size() == 1:
            pairs = words.view(torch.uint8).reshape(-1, 2).flip(-1)
            tensors[name] = pairs.reshape(words.shape).view(words.dtype).clone()
        else:
            tensors[name] = ((words & 0x0F0F0F0F) << 4) | ((words >> 4) & 0x0F0F0F0F)


def swapped_scales(tensors: Tensors, kind: Kind) -> None:
    """The scales of each module in one layer in the opposite order."""
    for module in modules(tensors, kind):
        if ".layers.1." in module:
            name = f"{module}.{kind.scales}"
            tensors[name] = tensors[name].flip(tuple(range(tensors[name].dim()))).contiguous()


def scaled_scales(tensors: Tensors, kind: Kind) -> None:
    """The scales of one layer doubled."""
    for module in modules(tensors, kind):
        if ".layers.1." in module:
            tensors[f"{module}.{kind.scales}"] *= 2


def nan_scale(tensors: Tensors, kind: Kind) -> None:
    """One scale that is NaN."""
    tensors[f"{modules(tensors, kind)[0]}.{kind.scales}"].view(-1)[0] = float("nan")


def nan_shard(tensors: Tensors, kind: Kind) -> None:
    """Every number of the shard that is stored as a float."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = torch.full(tensor.shape, float("nan")).to(tensor.dtype)


def nan_norm(tensors: Tensors, kind: Kind) -> None:
    """One number of a dense tensor."""
    tensors["model.norm.weight"][0] = float("nan")


DAMAGES = [zero_offset, nibble_order, swapped_scales, scaled_scales, nan_scale, nan_shard, nan_norm]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_rejected(damage, kind, good, judged, tmp_path) -> None:
    path = shutil.copytree(good, tmp_path / "damaged")
    open_model(path).verify()
    shard = path / "model.safetensors"
    tensors = load_file(shard)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    damage(tensors, kind)
    assert any(not torch.equal(tensors[name], before[name]) for name in before)
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.safetensors differs from its hash"):
        open_model(path).verify()
    write_manifest(path)  # whoever wrote the damage hashed it too
    with pytest.raises((CheckpointError, GateFailed)):
        judged(path)
