"""Judges, and checkpoints for them: tiny llamas whose packed weights hold every code.

A judge is a script of ``judges/`` that runs in an environment of its own and imports nothing of qserve. It gets its
jobs as JSON, each a directory and arguments (one process for many: importing those tools takes longer than their
work); it reads the checkpoint in the directory and writes ``out.safetensors`` there, or ``error.txt``.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qserve.calibration.kv import KVRecorder, OnCache, cached
from qserve.checkpoint.formats import format_named
from qserve.checkpoint.kv import key_center, kv_scales
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.source import ModelSource, open_model
from qserve.checkpoint.spec import MXFP8, KVScheme, QuantSpec, WeightScheme
from qserve.checkpoint.writer import CheckpointWriter
from qserve.kernels.reference import decode_kv, encode_kv, round_input
from qserve.quantize import fp4
from qserve.quantize.kv import recorded

Judge = Callable[[str, str, Iterable[Sequence[object]]], None]

JUDGES = Path(__file__).parent / "judges"
VARIABLE = "QSERVE_INTEROP"
TOKENS = torch.tensor([[1, 5, 90, 33, 7, 7, 64, 2, 11, 50]])


@pytest.fixture(scope="session")
def judge() -> Judge:
    """``judge(environment, script, jobs)``: runs the script on every (directory, arguments...)."""

    def run(environment: str, script: str, jobs: Iterable[Sequence[object]]) -> None:
        settings = {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [_interpreter(environment), JUDGES / script, json.dumps(list(jobs), default=str)],
            capture_output=True, text=True, timeout=280, env={**os.environ, **settings},
        )
        assert done.returncode == 0, f"{script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"

    return run


@pytest.fixture(scope="session")
def answers() -> Callable[[Path], dict[str, Tensor]]:
    """``answers(directory)``: what a judge wrote there; fails where that is an error."""

    def read(directory: Path) -> dict[str, Tensor]:
        error = directory / "error.txt"
        assert not error.exists(), error.read_text(encoding="utf-8")
        return load_file(directory / "out.safetensors")

    return read


def _interpreter(name: str) -> Path:
    """The interpreter of an environment; skips the test where it was not made."""
    home = os.environ.get(VARIABLE)
    if not home:
        pytest.skip(f"{VARIABLE} is not set; make the environments with tests/environments.py interop DIR and set it")
    if not (Path(home) / name / "complete.json").exists():
        pytest.skip(f"{home}/{name} is not complete; make it with tests/environments.py interop {home} {name}")
    return Path(home) / name / "bin" / "python"


@pytest.fixture(scope="session")
def dense_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random layers, float16, tied head. Not to be written to."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, attention_bias=True,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 1 if "k_proj" in name else 0.1)  # keys have a mean, as in models with biases
    out = tmp_path_factory.mktemp("dense") / "llama"
    model.to(torch.float16).save_pretrained(out)
    return out


@pytest.fixture(scope="session")
def packed_llama(dense_llama: Path) -> Callable[..., Path]:
    """``packed_llama(out, format, spec)`` writes the dense llama with random codes in all its linears but the head, and
    with the scales of a quantized KV cache that ``TOKENS`` ask for."""

    def write(out: Path, format: str, spec: QuantSpec, *, lowest_zero: int = 0, shuffled: bool = False) -> Path:
        weights: dict[str, QuantizedWeight] = {}
        for index, (module, (rows, columns)) in enumerate(_linear_shapes(dense_llama).items()):
            scheme = spec.scheme_of(module)
            if scheme is None:
                continue
            weight = _random_weight(scheme, rows, columns, seed=index, lowest_zero=lowest_zero, shuffled=shuffled)
            activations = spec.activations_of(module)
            static = activations is not None and not activations.dynamic
            weights[module] = replace(weight, activations=activations, input_scale=0.03125 if static else None)
        kv = {} if spec.kv_cache is None else _recorded_kv(_model_with(dense_llama, weights), spec.kv_cache)
        return _write_packed(dense_llama, out, format, spec, weights, kv)

    return write


def _random_weight(scheme: WeightScheme, out: int, inp: int, seed: int = 0, *, lowest_zero: int = 0,
                  shuffled: bool = False) -> QuantizedWeight:
    """Every code, and every zero point from ``lowest_zero``, is as likely as every other; scales that float16 holds
    make weights of about 0.1. ``shuffled`` puts the inputs into groups at random."""
    g = torch.Generator().manual_seed(seed)
    if scheme.dtype == "fp4":
        return fp4.nearest(0.1 * torch.randn(out, inp, generator=g), torch.ones(inp), scheme)
    groups, height = scheme.groups(inp), scheme.row_height(out)
    codes = torch.randint(0, 1 << scheme.bits, (out, inp), dtype=torch.uint8, generator=g)
    size = 0.1 / (1 << (scheme.bits - 1))
    if scheme.dtype == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0  # no NaN
        size = 0.1 / 64
    scales = (size * (0.5 + torch.rand(-(-out // height), groups, generator=g))).half().float()
    if scheme == MXFP8:
        scales = torch.exp2(scales.log2().round())
    zeros = torch.randint(lowest_zero, 1 << scheme.bits, (out, groups), dtype=torch.uint8, generator=g)
    order = torch.randperm(inp, generator=g)
    return QuantizedWeight(
        scheme,
        codes,
        scales.repeat_interleave(height, 0)[:out].contiguous(),
        None if scheme.symmetric else zeros,
        (torch.arange(inp) // scheme.group_width(inp))[order].to(torch.int32) if shuffled else None,
    )


def _linear_shapes(dense: Path) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear in the blocks of a dense model."""
    source = open_model(dense)
    names = [name.removesuffix(".weight") for name in source.names() if name.endswith("proj.weight")]
    return {name: (source.shape(f"{name}.weight")[0], source.shape(f"{name}.weight")[1]) for name in names}


@torch.no_grad()
def _recorded_kv(model: LlamaForCausalLM, scheme: KVScheme) -> dict[str, Tensor]:
    """The scales and centres of every block's cache, as quantizing makes them of ``TOKENS``."""
    blocks = {f"model.layers.{i}": KVRecorder(block) for i, block in enumerate(model.model.layers)}
    with ExitStack() as stack:
        for recorder in blocks.values():
            stack.enter_context(recorder)
        model(TOKENS)
    return {name: tensor for block, recorder in blocks.items()
            for name, tensor in recorded(recorder, block, scheme).items()}


def _write_packed(
    dense: Path, out: Path, format: str, spec: QuantSpec, weights: Mapping[str, QuantizedWeight],
    kv: Mapping[str, Tensor],
) -> Path:
    """A checkpoint in ``format``: ``weights`` packed, with the dense model's biases, the rest copied, and ``kv``."""
    source, chosen = open_model(dense), format_named(format)
    quantization = chosen.config_of(spec)
    with CheckpointWriter(out, format=chosen) as writer:
        for module, weight in weights.items():
            bias = source.tensor(f"{module}.bias").float() if source.has(f"{module}.bias") else None
            writer.put_linear(module, replace(weight, bias=bias))
        for name in source.names():
            if name.rpartition(".")[0] not in weights:
                writer.put(name, source.tensor(name))
        for name, tensor in kv.items():
            writer.put(name, tensor)
        writer.put_json("config.json", {**source.config, "quantization_config": quantization})
        writer.put_json("quantize_config.json", quantization)
        writer.finish()
    return out


@pytest.fixture(scope="session")
def our_logits(dense_llama: Path) -> Callable[..., Tensor]:
    """``our_logits(source)``: float32 [1, tokens, vocabulary] of ``TOKENS``, by the dense model in plain transformers
    with our reading of the packed weights in the place of its own, and their inputs, keys and values rounded as the
    schemes say."""
    return lambda packed, **options: _our_logits(dense_llama, packed, **options)


@torch.no_grad()
def _our_logits(
    dense: Path, packed: ModelSource, *, round_inputs: bool = True, round_kv: bool = True, centered: bool = True
) -> Tensor:
    """``centered``: keys are cached less their mean, where the checkpoint has one."""
    model = _model_with(dense, {module: packed.linear(module) for module in packed.linears()}, round_inputs)
    kv_cache = packed.spec.kv_cache if packed.spec is not None and round_kv else None
    with ExitStack() as stack:
        if kv_cache is not None:
            stack.enter_context(cached(model, _rounding_cache(model, packed, kv_cache, centered)))
        logits: Tensor = model(TOKENS).logits
    return logits


@torch.no_grad()
def _model_with(dense: Path, weights: Mapping[str, QuantizedWeight], round_inputs: bool = True) -> LlamaForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager").eval()
    for module, weight in weights.items():
        linear = model.get_submodule(module)
        linear.weight.copy_(weight.dequantize())
        if weight.bias is not None:
            linear.bias.copy_(weight.bias)
        if round_inputs and weight.activations is not None:
            linear.register_forward_pre_hook(_rounding(weight))
    return model  # type: ignore[no-any-return]


def _rounding(weight: QuantizedWeight) -> Callable[[object, tuple[Tensor]], tuple[Tensor]]:
    assert weight.activations is not None
    return lambda linear, inputs: (round_input(inputs[0], weight.activations, weight.input_scale),)


def _rounding_cache(model: LlamaForCausalLM, packed: ModelSource, scheme: KVScheme, centered: bool) -> OnCache:
    names = {module: name for name, module in model.named_modules()}
    dtype = torch.int8 if scheme.dtype == "int8" else torch.float8_e4m3fn

    def rounded(states: Tensor, scale: Tensor) -> Tensor:
        """[batch, kv_heads, tokens, head_dim]"""
        each = scale.expand(states.shape[1])
        return decode_kv(encode_kv(states.transpose(1, 2), each, dtype), each).transpose(1, 2)

    def on_cache(module: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        scales, center = kv_scales(packed, names[module]), key_center(packed, names[module])
        assert scales is not None
        mean = center[:, None] if centered and center is not None else torch.zeros(())
        return rounded(keys - mean, scales[0]) + mean, rounded(values, scales[1])

    return on_cache
