"""A tiny dense model on disk, random packed weights, and an exact comparison of two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    """A dense llama with random weights, saved by transformers as a Hugging Face directory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    directory = tmp_path / "tiny"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def _random_weight(
    scheme: WeightScheme,
    out: int,
    inp: int,
    seed: int = 0,
    *,
    lowest_zero: int = 0,
    shuffled: bool = False,
    bias: bool = False,
    activations: ActivationScheme | None = None,
) -> QuantizedWeight:
    g = torch.Generator().manual_seed(seed)
    groups, height = scheme.groups(inp), scheme.row_height(out)
    codes = torch.randint(0, 1 << scheme.bits, (out, inp), dtype=torch.uint8, generator=g)
    if scheme.dtype == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0  # no NaN
    scales = torch.randn(-(-out // height), groups, generator=g).to(torch.float16).to(torch.float32)
    zeros = torch.randint(lowest_zero, 1 << scheme.bits, (out, groups), dtype=torch.uint8, generator=g)
    order = torch.randperm(inp, generator=g)
    return QuantizedWeight(
        scheme,
        codes,
        scales.repeat_interleave(height, 0)[:out],
        None if scheme.symmetric else zeros,
        (torch.arange(inp) // scheme.group_width(inp))[order].to(torch.int32) if shuffled else None,
        torch.randn(out, generator=g).to(torch.float16).to(torch.float32) if bias else None,
        activations,
        0.03125 if activations is not None and not activations.dynamic else None,
    )


def _assert_same(a: QuantizedWeight, b: QuantizedWeight) -> None:
    for name in ("scheme", "activations", "input_scale"):
        assert getattr(a, name) == getattr(b, name), name
    for name in ("codes", "scales", "zeros", "g_idx", "bias"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        assert x is None or (x.dtype == y.dtype and torch.equal(x, y)), name


@pytest.fixture(scope="session")
def random_weight() -> Callable[..., QuantizedWeight]:
    """``random_weight(scheme, out, in, seed)``: any code and zero point, scales that float16 holds."""
    return _random_weight


@pytest.fixture(scope="session")
def assert_same() -> Callable[[QuantizedWeight, QuantizedWeight], None]:
    return _assert_same
