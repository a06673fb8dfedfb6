"""Trellis codes as a checkpoint holds them: their bits, their outputs chosen and joined, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qserve.checkpoint.convert import convert
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import COMPRESSED_TENSORS as FORMAT
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.loaders import LOADERS, verdicts
from qserve.checkpoint.packed_codes import Packed, PackedCodes, join
from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows, take_inputs, take_rows
from qserve.checkpoint.source import open_model
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme
from qserve.checkpoint.trellis import LANES, RING, PackedTrellis
from qserve.checkpoint.words import pack_words
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob
from tests.kernels.quantized_weights import make_streams, make_weight

BITS = st.sampled_from([2, 3, 4])
SCHEME = WeightScheme(2, 8, dtype="trellis")
USUAL = replace(SCHEME, group_size=64)


def hashed(state: int) -> int:
    product = 22929 * state % 65536
    return sum(product // 16**place % 16 for place in range(4))


def code_of(streams: Tensor, bits: int, output: int, inp: int) -> int:
    """The code of one weight from the bits of its ring, one number of which the first bit is the lowest. Its state are
    the 12 bits that end with its own; those before the first are the last."""
    ring, lane = divmod(output, 64)
    number, size = int.from_bytes(bytes(streams[4 * ring : 4 * ring + 4, inp].flatten().tolist()), "little"), 64 * bits
    return hashed((number << size | number) >> (size + (lane + 1) * bits - 12) & 4095)


def codes_of(packed: PackedTrellis) -> Tensor:
    return torch.tensor(
        [[code_of(packed.streams, packed.bits, o, i) for i in range(packed.inputs)] for o in range(packed.outputs)],
        dtype=torch.uint8,
    )


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("out", "inp"), [(16, 8), (64, 24), (80, 8), (100, 24), (1, 8)])
def test_a_weight_is_the_hash_of_the_bits_before_it(bits: int, out: int, inp: int) -> None:
    packed = make_streams(out, inp, bits)
    assert packed.shape == (out, inp)
    assert torch.equal(packed.unpack(), codes_of(packed))


def test_no_state_has_a_code_that_its_grid_lacks() -> None:
    codes = torch.tensor([hashed(state) for state in range(4096)], dtype=torch.uint8)
    numbers = SCHEME.grid.numbers(codes)
    assert int(codes.max()) <= SCHEME.max_code and float(numbers.abs().max()) <= SCHEME.grid.largest
    assert torch.equal(numbers, codes.float() - SCHEME.zero) and abs(float(numbers.mean())) < 0.5


@given(data=st.data(), bits=BITS)
@settings(max_examples=30)
def test_symbols_follow_each_other_from_the_lowest_bit(data: st.DataObject, bits: int) -> None:
    rings, inp = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    out = data.draw(st.integers(RING * (rings - 1) + 1, RING * rings))
    symbol = st.integers(0, (1 << bits) - 1)
    symbols = data.draw(st.lists(symbol, min_size=rings * inp * RING, max_size=rings * inp * RING))
    given_symbols = torch.tensor(symbols, dtype=torch.uint8).view(rings, inp, RING)
    packed = PackedTrellis.of_symbols(given_symbols, bits, out)
    for ring in range(rings):
        for i in range(inp):
            number = int.from_bytes(bytes(packed.streams[4 * ring : 4 * ring + 4, i].flatten().tolist()), "little")
            assert number == sum(each << (bits * lane) for lane, each in enumerate(given_symbols[ring, i].tolist()))
    assert torch.equal(packed.unpack(), codes_of(packed))


def rows_of(tiles: list[int]) -> Tensor:
    return torch.cat([torch.arange(LANES) + LANES * tile for tile in tiles])


def streamed(packed: Tensor | Packed) -> PackedTrellis:
    assert isinstance(packed, PackedTrellis)
    return packed


@given(data=st.data(), bits=BITS)
@settings(max_examples=40)
def test_tiles_that_are_joined_and_chosen_stay_streams(data: st.DataObject, bits: int) -> None:
    """And each of them finds the tile before it, by which alone a kernel can decode it."""
    inp = data.draw(st.sampled_from([4, 8]))
    sizes = [16 * size for size in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))]
    sizes[-1] -= data.draw(st.integers(0, 15))
    parts: list[Tensor | Packed] = [make_streams(out, inp, bits, seed) for seed, out in enumerate(sizes)]
    codes = torch.cat([codes_of(streamed(part)) for part in parts])
    packed = streamed(join(parts))
    assert packed.shape == codes.shape and torch.equal(packed.unpack(), codes)
    for _ in range(data.draw(st.integers(0, 2))):
        tiles = data.draw(st.lists(st.integers(0, packed.outputs // LANES - 1), min_size=1, max_size=9)
                          if packed.outputs >= LANES else st.just([]))  # fmt: skip
        if tiles:
            rows = rows_of(tiles)
            packed, codes = streamed(packed[rows]), codes[rows]
    assert torch.equal(packed.unpack(), codes)
    needed, before = packed.linked()
    assert len(before) == -(-packed.outputs // LANES) and before.dtype == torch.int32
    assert set(needed[len(before) :].tolist()) <= set(needed[before.long()].tolist())
    for tile, ahead in enumerate(before.tolist()):
        pair = packed.streams[needed[[ahead, tile]]]
        for i in range(inp):
            number = int.from_bytes(bytes(pair[:, i].flatten().tolist()), "little")
            found = [hashed(number >> (bits * (17 + lane) - 12) & 4095) for lane in range(LANES)]
            mine = codes[LANES * tile : LANES * tile + LANES, i].tolist()
            assert mine == found[: len(mine)]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rows_that_are_no_whole_tiles_are_codes(bits: int) -> None:
    packed = make_streams(100, 8, bits)
    codes = packed.unpack()
    for rows in ([5], [*range(1, 17)], [*range(15), 31], [*range(16, 0, -1)], [*range(100)], [*range(96, 100)]):
        found = packed[torch.tensor(rows)]
        assert isinstance(found, Tensor) and torch.equal(found, codes[rows])
    chosen = streamed(packed[rows_of([4, 1])])
    found = chosen[torch.tensor([17, 3])]
    assert isinstance(found, Tensor) and torch.equal(found, codes[[17, 67]])


OTHERS: dict[str, Callable[[], Tensor | Packed]] = {
    "bytes": lambda: make_streams(32, 8, 2).unpack(),
    "words": lambda: PackedCodes((pack_words(torch.randint(0, 4, (32, 8)).to(torch.uint8), 2),), 2, 8),
    "other bits": lambda: make_streams(32, 8, 3),
}


def unpacked(part: Tensor | Packed) -> Tensor:
    return part if isinstance(part, Tensor) else part.unpack()


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("first", [False, True])
def test_what_cannot_follow_as_a_stream_follows_as_codes(kind: str, first: bool) -> None:
    parts: list[Tensor | Packed] = [make_streams(80, 8, 2), OTHERS[kind]()]
    parts = parts[::-1] if first else parts
    joined = join(parts)
    assert isinstance(joined, Tensor) and torch.equal(joined, torch.cat([unpacked(part) for part in parts]))


def test_nothing_follows_a_tile_that_is_not_full() -> None:
    parts: list[Tensor | Packed] = [make_streams(100, 8, 2), make_streams(32, 8, 2)]
    joined = join(parts)
    assert isinstance(joined, Tensor) and torch.equal(joined, torch.cat([unpacked(part) for part in parts]))
    assert isinstance(join(parts[::-1]), PackedTrellis)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [8, -1])
def test_outputs_and_inputs_of_weights(bits: int, group: int) -> None:
    """Bit for bit those of the same weight in codes, which stay streams where they can."""
    scheme = WeightScheme(bits, group, dtype="trellis")
    parts = [replace(make_weight(out, 24, scheme, seed=out), bias=torch.randn(out)) for out in (80, 48, 100)]
    plain = [replace(part, stored=part.codes) for part in parts]
    tiles = rows_of([9, 3, 0, 12])
    ways: list[tuple[Callable[[list[QuantizedWeight]], QuantizedWeight], bool]] = [
        (concat_rows, True), (lambda each: take_rows(concat_rows(each), tiles), True),
        (lambda each: concat_rows(each[::-1]), False), (lambda each: take_rows(each[0], torch.tensor([3, 1])), False),
        (lambda each: take_inputs(each[0], range(8, 24) if group == 8 else range(3, 7)), True),
    ]  # fmt: skip
    for way, stays in ways:
        found, expected = way(parts), way(plain)
        found.check()
        assert isinstance(found.stored, PackedTrellis) == stays
        assert torch.equal(found.codes, expected.codes) and torch.equal(found.dequantize(), expected.dequantize())
        assert found.bias is not None and expected.bias is not None and torch.equal(found.bias, expected.bias)
    assert isinstance(parts[0].stored, PackedTrellis), "reading the codes does not lose the streams"


@pytest.mark.parametrize("group", [8, 32, -1])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("out", [16, 64, 100])
def test_a_weight_survives_its_parts(bits: int, group: int, out: int) -> None:
    weight = make_weight(out, 96, WeightScheme(bits, group, dtype="trellis"))
    weight = replace(weight, scales=weight.scales.half().float(), bias=torch.ones(out))
    parts = FORMAT.pack(weight)
    assert parts["weight_packed"].shape == (-(-out // 64) * 4, 96, 2 * bits)
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    assert FORMAT.shape(weight.scheme, shapes, parts.__getitem__) == (out, 96)
    again = FORMAT.unpack(parts, weight.scheme)
    assert torch.equal(streamed(again.stored).streams, streamed(weight.stored).streams)
    assert again.stored.shape == (out, 96) and torch.equal(again.scales, weight.scales) and again.bias is not None
    stored = 8 * (parts["weight_packed"].nbytes + parts["weight_scale"].nbytes)
    assert stored == weight.scheme.storage_bits(out, 96, symmetric_zeros=False)


@pytest.mark.parametrize("spoil", [
    lambda weight: replace(weight, stored=weight.codes), lambda weight: take_rows(weight, rows_of([1, 0])),
])  # fmt: skip
def test_codes_without_their_rings_are_not_written(spoil: Callable[[QuantizedWeight], QuantizedWeight]) -> None:
    with pytest.raises(CheckpointError, match="the streams of these trellis codes are not known"):
        FORMAT.pack(spoil(make_weight(64, 8, SCHEME)))


MODULES = [f"model.layers.{i}.{leaf}" for i in range(2) for leaf in ("self_attn.q_proj", "mlp.down_proj")]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [64, -1])
def test_the_specification_survives_its_json(bits: int, group: int) -> None:
    weights = WeightScheme(bits, group, dtype="trellis")
    others = {
        MODULES[1]: WeightScheme(4, 32, dtype="trellis"), "model.embed_tokens": WeightScheme(8, 64),
        MODULES[2]: WeightScheme(3, 32),
    }  # fmt: skip
    for overrides in ({}, others):
        spec = QuantSpec("gptq", weights, overrides=overrides, ignored=("lm_head", MODULES[0]))
        config = json.loads(json.dumps(FORMAT.config_of(spec)))
        assert FORMAT.spec_of(config, ["lm_head", "model.embed_tokens", *MODULES]) == spec
        assert config["format"] == ("mixed-precision" if overrides else "trellis")


@pytest.mark.parametrize(("spec", "words"), [
    (QuantSpec("rtn", SCHEME, ActivationScheme("int8")), "trellis weights only where inputs are not rounded"),
    (QuantSpec("rtn", replace(SCHEME, rows=8)), "cannot say"),
    (QuantSpec("rtn", replace(SCHEME, group_size=-1, rows=-1)), "cannot say"),
])  # fmt: skip
def test_what_the_configuration_cannot_say(spec: QuantSpec, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        FORMAT.config_of(spec)
    found = verdicts(spec, {"model.layers.0.mlp.up_proj": (64, 64)}, format=FORMAT)
    assert not any(verdict.accepts for verdict in found) and words in found[0].reason


Change = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(("part", "change", "words"), [
    ("weight_packed", None, "weight_packed is missing"), ("weight_shape", None, "weight_shape is missing"),
    ("weight_scale", None, "weight_scale is missing"),
    ("weight_packed", lambda t: t[:-1], r"weight_packed is \[7, 24, 6\], expected \[8, 24, 6\]"),
    ("weight_packed", lambda t: t[:, :-1], "weight_packed is"),
    ("weight_packed", lambda t: t[..., :4], "weight_packed is"),
    ("weight_packed", lambda t: t.flatten(1), "weight_packed"),
    ("weight_packed", lambda t: t.view(torch.int8), "uint8"),
    ("weight_packed", lambda t: t.to(torch.int32), "uint8"),
    ("weight_shape", lambda t: t * 2, "weight_packed is"), ("weight_shape", lambda t: t.flip(0), "weight_packed is"),
    ("weight_shape", lambda t: t + torch.tensor([28, 0]), "scale"),  # as many rings
    ("weight_shape", lambda t: t * 0, "weight_shape says"), ("weight_shape", lambda t: -t, "weight_shape says"),
    ("weight_shape", lambda t: t[:1], "weight_shape says"),
    ("weight_scale", lambda t: t[:-1], "scale"), ("weight_scale", lambda t: t * torch.nan, "NaN"),
])  # fmt: skip
def test_damaged_parts_are_refused_in_one_line(part: str, change: Change | None, words: str) -> None:
    weight = make_weight(100, 24, WeightScheme(3, 8, dtype="trellis"))
    parts = FORMAT.pack(weight)
    if change is None:
        del parts[part]
    else:
        parts[part] = change(parts[part])
    with pytest.raises(CheckpointError, match=words) as caught:
        FORMAT.unpack(parts, weight.scheme)
    assert "\n" not in str(caught.value)


def test_parts_of_another_layout_are_refused() -> None:
    weight = make_weight(64, 24, WeightScheme(3, 8, dtype="trellis"))
    integers = QuantizedWeight(WeightScheme(3, 8), torch.randint(0, 8, (64, 24)).to(torch.uint8), weight.scales)
    for one, other in ((weight, integers), (integers, weight)):
        with pytest.raises(CheckpointError, match="weight_packed"):
            FORMAT.unpack(FORMAT.pack(one), other.scheme)
    with pytest.raises(CheckpointError, match="weight_packed is"):
        FORMAT.unpack(FORMAT.pack(weight), replace(weight.scheme, bits=2))


def configuration(layout: str = "trellis", **changes: Any) -> dict[str, Any]:
    config = FORMAT.config_of(QuantSpec("gptq", USUAL))
    group = config["config_groups"]["group_0"]
    group["format"] = config["format"] = layout
    group["weights"] |= changes
    return config


@pytest.mark.parametrize(("config", "words"), [
    (configuration(num_bits=5), "trellis weights have 2 or 3 or 4 bits"),
    (configuration(num_bits=8), "trellis weights have 2 or 3 or 4 bits"),
    (configuration(symmetric=False), "no zero points"), (configuration(group_size=12), "group size"),
    (configuration(type="int"), "'trellis' does not hold 2 bit g64 symmetric"),
    (configuration("pack-quantized"), "'pack-quantized' does not hold 2 bit g64 trellis"),
    (configuration("mxfp4-pack-quantized"), "does not hold"), (configuration(type="spline"), "type 'spline'"),
    (configuration(type="float", num_bits=8), "'trellis' does not hold fp8"),
])  # fmt: skip
def test_configurations_that_contradict_themselves_are_refused(config: dict[str, Any], words: str) -> None:
    FORMAT.spec_of(configuration(), MODULES)
    with pytest.raises(CheckpointError, match=words) as caught:
        FORMAT.spec_of(config, MODULES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("changes", "group", "rows"), [
    ({"strategy": "block", "block_structure": [64, 8], "group_size": None}, 8, 64),
    ({"strategy": "tensor", "group_size": None}, -1, -1),
])  # fmt: skip
def test_scales_that_outputs_share_are_read_and_not_written(changes: dict[str, Any], group: int, rows: int) -> None:
    spec = FORMAT.spec_of(configuration(**changes), MODULES)
    assert spec.weights == WeightScheme(2, group, dtype="trellis", rows=rows)
    packed, scales = make_streams(100, 24, 2), torch.rand(1 if rows == -1 else 2, spec.weights.groups(24))
    size = torch.tensor([100, 24])
    parts = {"weight_packed": packed.streams, "weight_shape": size, "weight_scale": scales.view(-1)[:1]}
    found = FORMAT.unpack(parts if rows == -1 else parts | {"weight_scale": scales}, spec.weights)
    spread = scales.repeat_interleave(100 if rows == -1 else 64, 0)[:100].repeat_interleave(24 if group == -1 else 8, 1)
    assert torch.equal(found.dequantize(), (codes_of(packed).float() - 30) * spread)
    with pytest.raises(UsageError, match="cannot say"):
        FORMAT.config_of(spec)


def test_other_loaders_refuse_it_and_say_why() -> None:
    shapes = {"model.layers.0.mlp.up_proj": (1024, 512)}
    mixed = QuantSpec("gptq", WeightScheme(4, 64), overrides=dict.fromkeys(shapes, USUAL))
    for spec in (QuantSpec("gptq", USUAL), mixed):
        found = {verdict.loader: verdict for verdict in verdicts(spec, shapes, format=FORMAT)}
        assert list(found) == list(LOADERS) and found["qserve"].accepts
        for loader in ("vllm", "sglang", "transformers"):
            assert not found[loader].accepts and "\n" not in found[loader].reason
            assert found[loader].reason == "model.layers.0.mlp.up_proj: trellis codes are a layout of qserve's own"


@pytest.fixture(scope="module")
def stored(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> HFDirectory:
    out = tmp_path_factory.mktemp("trellis") / "model"
    job = QuantizeJob(scheme="trellis", bits=2, group_size=32, method="rtn", calibration=None)
    pipeline.run(open_model(tiny_model), out, job)
    return HFDirectory(out)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != FORMAT.name])
def test_no_other_format_holds_it(stored: HFDirectory, tmp_path: Path, format: str) -> None:
    with pytest.raises(UsageError, match="2 bit g32 trellis") as caught:
        convert(stored, tmp_path / "out.gguf", format)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_it_is_read_from_disk_and_converted_to_floats(stored: HFDirectory, tmp_path: Path) -> None:
    stored.verify()
    convert(stored, tmp_path / "out", "hf")
    dense = HFDirectory(tmp_path / "out")
    for module in stored.linears():
        weight = stored.linear(module)
        assert isinstance(weight.stored, PackedTrellis) and weight.scheme == WeightScheme(2, 32, dtype="trellis")
        assert torch.equal(weight.codes, codes_of(weight.stored)) and weight.stored.shape == stored.shape(module)
        assert torch.equal(dense.tensor(f"{module}.weight"), weight.dequantize().to(dense.dtype()))
