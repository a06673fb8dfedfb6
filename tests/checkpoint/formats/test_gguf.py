"""Linears in llama.cpp's blocks: the bytes that the ``gguf`` package reads, and refusals of what they cannot hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats import format_named, format_of
from qserve.checkpoint.gguf_blocks import minima_of, two_levels
from qserve.checkpoint.gguf_schemes import GGUF_SCHEMES
from qserve.checkpoint.quantized_weight import QuantizedWeight, take_rows
from qserve.checkpoint.spec import ActivationScheme, KVScheme, QuantSpec, WeightScheme

FORMAT = format_named("gguf")


def random_weight(name: str, out: int = 9, superblocks: int = 3) -> QuantizedWeight:
    """Any codes; float16 from the smallest on, and any integers beside them but a scale of 0."""
    scheme, generator = GGUF_SCHEMES[name], torch.Generator().manual_seed(len(name) + out)
    inp = 256 * superblocks
    groups = scheme.groups(inp)

    def halves(*shape: int) -> torch.Tensor:
        size = 10.0 ** -torch.randint(0, 7, shape, generator=generator)
        return (torch.rand(shape, generator=generator) * size + 1e-7).half().float()

    def levels(low: int) -> torch.Tensor:
        if not scheme.scale_bits:
            return halves(out, groups)
        whole = torch.randint(low, (1 << scheme.scale_bits) + low, (out, groups), generator=generator)
        return halves(out, superblocks).repeat_interleave(groups // superblocks, 1) * torch.where(whole == 0, 1, whole)

    codes = torch.randint(0, 1 << scheme.bits, (out, inp), generator=generator).to(torch.uint8)
    scales = levels(-(1 << scheme.scale_bits - 1) if scheme.symmetric and scheme.scale_bits else 0)
    zeros = None if scheme.symmetric else levels(0) / scales
    return QuantizedWeight(scheme, codes, scales, zeros)


@pytest.mark.parametrize("name", GGUF_SCHEMES)
def test_blocks_hold_the_very_numbers(name: str) -> None:
    weight = replace(random_weight(name), bias=torch.randn(9))
    parts = FORMAT.pack(weight)
    numbers, size = GGML_QUANT_SIZES[Kind[name]]
    assert parts["qblocks"].shape == (9, 768 // numbers * size)
    found = FORMAT.unpack(parts, weight.scheme)
    assert torch.equal(found.codes, weight.codes) and torch.equal(found.scales, weight.scales)
    assert (found.zeros is None) == weight.scheme.symmetric and found.bias is not None
    assert weight.zeros is None or (found.zeros is not None and torch.equal(found.zeros, weight.zeros))
    read = torch.from_numpy(np.ascontiguousarray(dequantize(parts["qblocks"].numpy(), Kind[name])))
    width = weight.scheme.group_width(768)
    numbers_of = weight.codes.float() - (weight.scheme.zero if weight.scheme.symmetric else 0)
    want = numbers_of * weight.scales.repeat_interleave(width, 1)
    if not weight.scheme.symmetric:  # rounded once, as llama.cpp does it; (code - zero) * scale is rounded twice
        want -= minima_of(weight).repeat_interleave(width, 1)
    assert torch.equal(read, want)
    assert FORMAT.shape(weight.scheme, {"qblocks": tuple(parts["qblocks"].shape)}, lambda part: parts[part]) == (9, 768)
    rows = torch.tensor([4, 0, 7])
    assert torch.equal(FORMAT.pack(take_rows(weight, rows))["qblocks"], parts["qblocks"][rows])


def test_minima_are_found_from_zero_points() -> None:
    """Every float16 times every integer, over a scale that is one too."""
    generator = torch.Generator().manual_seed(0)
    halves = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    minima = halves[:, None] * torch.arange(64)
    scales = halves[torch.randint(0, len(halves), minima.shape, generator=generator)]
    scales *= torch.randint(1, 64, minima.shape, generator=generator)
    keep = (minima / scales).isfinite() & (minima / scales > 1e-37) | (minima == 0)
    weight = QuantizedWeight(GGUF_SCHEMES["Q4_K"], torch.empty(0), scales, minima / scales)
    assert torch.equal(minima_of(weight)[keep], minima[keep])


def test_other_scales_are_no_two_levels() -> None:
    d, whole = two_levels(torch.tensor([[1.5, -0.75, 0.0], [0.0, 0.0, 0.0], [-128.0, 1.0, 127.0]]), -128, 127)
    assert torch.equal(d.float()[:, None] * whole, torch.tensor([[1.5, -0.75, 0], [0, 0, 0], [-128, 1, 127]]))
    for numbers, low, high in ([1.0, 64.0], 0, 63), ([1.0, -1.0], 0, 63), ([1.0, 1.0001], -32, 31), ([5e6, 5e6], 0, 63):
        with pytest.raises(CheckpointError, match="integers up to"):
            two_levels(torch.tensor([numbers]), low, high)
    with pytest.raises(CheckpointError, match="not integers up to 63 times a float16 of 256 inputs"):
        weight = random_weight("Q4_K")
        FORMAT.pack(replace(weight, scales=torch.rand_like(weight.scales)))
    with pytest.raises(CheckpointError, match="would be rounded to float16"):
        weight = random_weight("Q5_1")
        FORMAT.pack(replace(weight, zeros=torch.rand_like(weight.scales)))


def test_the_configuration_comes_back() -> None:
    spec = QuantSpec("gptq", GGUF_SCHEMES["Q4_K"], overrides={"a.b": GGUF_SCHEMES["Q6_K"]}, ignored=("lm_head", "c"))
    config = FORMAT.config_of(spec)
    assert (config["type"], config["types"]) == ("Q4_K", {"a.b": "Q6_K"})
    assert format_of(config) is FORMAT and FORMAT.spec_of(config, ["a.b", "d"]) == spec
    for change, words in (({"type": "Q2_K"}, "'Q2_K' is not supported"), ({"types": None}, "types must be an object"),
                          ({"types": {"a": 3}}, "3 is not supported"),
                          ({"modules_to_not_convert": "lm_head"}, "must be a list of names")):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            FORMAT.spec_of({**config, **change})


@pytest.mark.parametrize(
    ("spec", "inp", "words"),
    [
        (QuantSpec("gptq", WeightScheme(4, 64)), 256, "no block of llama.cpp's holds 4 bit g64"),
        (QuantSpec("gptq", WeightScheme(4, 32, False)), 256, "no block of llama.cpp's holds 4 bit g32 asymmetric"),
        (QuantSpec("gptq", GGUF_SCHEMES["Q4_K"]), 576, "no block type holds 4 bit g32 asymmetric"),
        (QuantSpec("gptq", GGUF_SCHEMES["Q8_0"]), 48, "weights of 48 inputs are no blocks of 32"),
        (QuantSpec("gptq", GGUF_SCHEMES["Q8_0"], ActivationScheme("int8")), 64, "quantized weights only"),
        (QuantSpec("gptq", GGUF_SCHEMES["Q8_0"], kv_cache=KVScheme("fp8")), 64, "quantized weights only"),
        (QuantSpec("gptq", GGUF_SCHEMES["Q6_K"]), 256, None),
    ],
    ids=str,
)
def test_limits(spec: QuantSpec, inp: int, words: str | None) -> None:
    found = FORMAT.limit(spec, {"a": spec.weights}, {"a": (8, inp)})
    assert found is None if words is None else words in str(found)


def test_what_is_damaged_or_no_block_is_refused() -> None:
    weight = random_weight("Q4_K")
    parts = FORMAT.pack(weight)
    for change, words in (({}, "qblocks is missing"), ({"qblocks": parts["qblocks"][:, 1:]}, "blocks of Q4_K have 144"),
                          ({"qblocks": parts["qblocks"].short()}, "must be uint8"),
                          ({"qblocks": torch.full((2, 144), 255, dtype=torch.uint8)}, "a scale is NaN")):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            FORMAT.unpack(change, weight.scheme)
    with pytest.raises(CheckpointError, match="hold weights only, not inputs"):
        FORMAT.pack(replace(random_weight("Q8_0"), activations=ActivationScheme("int8")))
