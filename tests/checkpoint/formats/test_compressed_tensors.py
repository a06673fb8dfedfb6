from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import COMPRESSED_TENSORS as FORMAT
from qserve.checkpoint.grid import INTEGERS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import (
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_INPUTS,
    ActivationScheme,
    KVScheme,
    QuantSpec,
    WeightScheme,
)
from qserve.quantize import fp4, fp8

INT8 = ActivationScheme("int8")
FP8 = ActivationScheme("fp8")
STATIC = ActivationScheme("fp8", "tensor", dynamic=False)
BLOCK = WeightScheme(8, 128, dtype="fp8", rows=128)
LEAVES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
MODULES = [f"model.layers.{i}.{leaf}" for i in range(3) for leaf in LEAVES]


@settings(max_examples=80, deadline=None)
@given(
    bits=st.sampled_from(INTEGERS.bits),
    symmetric=st.booleans(),
    out=st.integers(1, 70),
    group=st.sampled_from([-1, 8, 24, 32]),
    groups=st.integers(1, 3),
    bias=st.booleans(),
    activations=st.sampled_from([None, INT8]),
    seed=st.integers(0, 10**6),
)
def test_integers_survive_at_any_size(
    random_weight, assert_same, bits, symmetric, out, group, groups, bias, activations, seed
) -> None:
    inp = groups * 13 if group == -1 else groups * group
    weight = random_weight(WeightScheme(bits, group, symmetric), out, inp, seed, bias=bias, activations=activations)
    parts = FORMAT.pack(weight)
    assert_same(FORMAT.unpack(parts, weight.scheme, activations), weight)
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    assert FORMAT.shape(weight.scheme, shapes, parts.__getitem__) == (out, inp)
    assert ("weight_packed" in parts) == (activations is None or bits != 8)


@pytest.mark.parametrize(
    "scheme, activations, scale",
    [
        (WeightScheme(8, -1, dtype="fp8"), FP8, (300, 1)),
        (WeightScheme(8, -1, dtype="fp8"), None, (300, 1)),
        (WeightScheme(8, -1, dtype="fp8", rows=-1), STATIC, (1,)),
        (BLOCK, ActivationScheme("fp8", "group", group_size=128), (3, 2)),
        (WeightScheme(8, -1, rows=-1), INT8, (1,)),
    ],
)
def test_numbers_and_scales_per_channel_tensor_and_block(
    random_weight, assert_same, scheme, activations, scale
) -> None:
    weight = random_weight(scheme, 300, 256, activations=activations)
    parts = FORMAT.pack(weight)
    assert tuple(parts["weight_scale"].shape) == scale
    assert parts["weight"].dtype == (torch.float8_e4m3fn if scheme.dtype == "fp8" else torch.int8)
    assert ("input_scale" in parts) == (activations is STATIC)
    stored = parts["weight"].to(torch.float32)
    assert torch.equal(stored * weight.scales[:, weight.group_of_input()], weight.dequantize())
    assert_same(FORMAT.unpack(parts, scheme, activations), weight)


def test_words_by_hand() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9], [15, 0, 0, 0, 0, 0, 0, 8, 1]], dtype=torch.uint8)
    zeros = torch.tensor([[3], [12]], dtype=torch.uint8)
    weight = QuantizedWeight(WeightScheme(4, -1, False), codes, torch.tensor([[0.5], [0.25]]), zeros)
    parts = FORMAT.pack(weight)
    assert parts["weight_packed"].tolist() == [[0x87654321 - (1 << 32), 9], [0x8000000F - (1 << 32), 1]]
    assert parts["weight_zero_point"].tolist() == [[0xC3]]
    assert parts["weight_shape"].tolist() == [2, 9] and parts["weight_shape"].dtype == torch.int64
    assert parts["weight_scale"].tolist() == [[0.5], [0.25]]


def test_three_and_six_bits_cross_words() -> None:
    codes = (torch.arange(33, dtype=torch.uint8) % 8)[None]
    parts = FORMAT.pack(QuantizedWeight(WeightScheme(3, -1), codes, torch.ones(1, 1)))
    number = sum(int(code) << (3 * i) for i, code in enumerate(codes[0]))
    assert [word & 0xFFFFFFFF for word in parts["weight_packed"][0].tolist()] == [
        (number >> (32 * i)) & 0xFFFFFFFF for i in range(4)
    ]
    assert FORMAT.pack(QuantizedWeight(WeightScheme(6, -1), codes, torch.ones(1, 1)))["weight_packed"].shape == (1, 7)


def test_signed_bytes_by_hand() -> None:
    codes = torch.tensor([[0, 127, 128, 255]], dtype=torch.uint8)
    parts = FORMAT.pack(QuantizedWeight(WeightScheme(8, -1), codes, torch.ones(1, 1), activations=INT8))
    assert parts["weight"].tolist() == [[-128, -1, 0, 127]]


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4_spec(size: int, format: str, **more: object) -> QuantSpec:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group" if size == 16 else "group", "symmetric": True,
               "group_size": size, "dynamic": False, **more}  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return FORMAT.spec_of({"format": format, "config_groups": {"group_0": group}}, MODULES)


def test_four_bit_floats_are_read() -> None:
    """Every byte of codes, under many scales, by the formula of the format."""
    packed = torch.arange(256, dtype=torch.uint8).expand(7, 256)
    numbers = FP4[torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()]
    powers = torch.randint(0, 255, (7, 16), dtype=torch.uint8)
    scheme = fp4_spec(32, "mxfp4-pack-quantized").weights
    assert scheme == WeightScheme(4, 32, dtype="fp4")
    got = FORMAT.unpack({"weight_packed": packed, "weight_scale": powers}, scheme)
    want = numbers.double() * torch.exp2(powers.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(got.dequantize(), want.float())
    assert FORMAT.shape(scheme, {"weight_packed": (7, 256), "weight_scale": (7, 16)}, lambda part: powers) == (7, 512)

    scales, whole = torch.randint(0, 127, (7, 32), dtype=torch.uint8).view(torch.float8_e4m3fn), torch.tensor([37.3])
    scheme = fp4_spec(16, "nvfp4-pack-quantized").weights
    assert scheme == WeightScheme(4, 16, dtype="fp4")
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}
    got = FORMAT.unpack(parts, scheme)
    assert torch.equal(got.dequantize(), numbers * (scales.float() / whole).repeat_interleave(16, 1))
    with pytest.raises(CheckpointError, match="a scale is NaN"):
        FORMAT.unpack({**parts, "weight_scale": torch.full_like(scales, torch.nan)}, scheme)
    with pytest.raises(UsageError, match="fp4 g64 weights are not written as compressed-tensors"):
        FORMAT.config_of(QuantSpec("rtn", WeightScheme(4, 64, dtype="fp4")))


def test_mxfp8_is_written_as_it_is_read(assert_same) -> None:
    inputs = ActivationScheme("fp8", "group", group_size=32)
    weight = replace(fp8.nearest(torch.randn(7, 96), torch.ones(96), MXFP8), activations=inputs)
    parts, config = FORMAT.pack(weight), FORMAT.config_of(QuantSpec("rtn", MXFP8, inputs))
    assert config["format"] == "mxfp8-quantized" and parts["weight_scale"].dtype == torch.uint8
    spec = FORMAT.spec_of(config, MODULES)
    assert (spec.weights, spec.activations) == (MXFP8, inputs)
    assert_same(FORMAT.unpack(parts, MXFP8, inputs), weight)
    with pytest.raises(CheckpointError, match="no power of two"):
        FORMAT.pack(replace(weight, scales=weight.scales * 1.5))
    config["config_groups"]["group_0"]["weights"]["group_size"] = 64
    with pytest.raises(CheckpointError, match="format 'mxfp8-quantized' does not hold fp8 g64"):
        FORMAT.spec_of(config, MODULES)


def test_inputs_in_four_bits_are_those_of_nvfp4(assert_same) -> None:
    inputs = NVFP4_INPUTS
    weight = fp4.nearest(torch.randn(8, 32), torch.ones(32), NVFP4)
    weight = replace(weight, activations=inputs, input_scale=1 / 1234.5)
    parts = FORMAT.pack(weight)
    assert float(parts["input_global_scale"]) == pytest.approx(1234.5) and "input_scale" not in parts
    spec = QuantSpec("rtn", NVFP4, inputs)
    assert FORMAT.spec_of(FORMAT.config_of(spec), MODULES).activations == inputs
    read = FORMAT.unpack(parts, NVFP4, inputs)
    assert_same(read, weight)
    assert torch.equal(FORMAT.pack(read)["input_global_scale"], parts["input_global_scale"])
    for broken in (0.0, -3.0, torch.nan):
        with pytest.raises(CheckpointError, match="input_global_scale"):
            FORMAT.unpack({**parts, "input_global_scale": torch.tensor([broken])}, NVFP4, inputs)
    config = FORMAT.config_of(spec)
    group = config["config_groups"]["group_0"]
    others = {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
              "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
              "format": "float-quantized"}  # fmt: skip
    mixed = FORMAT.spec_of({**config, "config_groups": {"a": group, "b": others}}, MODULES)
    assert mixed.activations == FP8 and mixed.activations_of(MODULES[0]) is None  # beside 8 bits they stay finer
    assert mixed.activations_of(MODULES[2]) == FP8
    group["input_activations"] |= {"strategy": "group", "group_size": 32, "dynamic": True}
    assert FORMAT.spec_of(config, MODULES).activations is None  # as those of MXFP4 do


@pytest.mark.parametrize("scheme", [MXFP4, NVFP4], ids=["MXFP4", "NVFP4"])
def test_four_bit_floats_are_written_as_they_are_read(scheme: WeightScheme, assert_same) -> None:
    weight = fp4.nearest(torch.randn(7, 64) * torch.logspace(-3, 1, 7)[:, None], torch.ones(64), scheme)
    parts = FORMAT.pack(weight)
    config = FORMAT.config_of(QuantSpec("rtn", scheme))
    assert FORMAT.spec_of(config, MODULES).weights == scheme
    read = FORMAT.unpack(parts, scheme)
    assert_same(read, weight)
    assert read.global_scale == weight.global_scale and (read.global_scale is None) == (scheme == MXFP4)
    stored = parts["weight_scale"]
    assert stored.dtype == (torch.uint8 if scheme == MXFP4 else torch.float8_e4m3fn)
    assert FORMAT.shape(scheme, {name: tuple(part.shape) for name, part in parts.items()}, parts.__getitem__) == (7, 64)
    with pytest.raises(CheckpointError, match="a scale is no"):
        FORMAT.pack(replace(weight, scales=weight.scales * 1.01))
    if scheme == NVFP4:
        with pytest.raises(CheckpointError, match="where the global scale of a weight is known"):
            FORMAT.pack(replace(weight, global_scale=None))


def test_four_bit_floats_of_another_layout_are_refused() -> None:
    for size, format in ((16, "mxfp4-pack-quantized"), (32, "nvfp4-pack-quantized"), (32, "pack-quantized")):
        with pytest.raises(CheckpointError, match=f"format '{format}' does not hold fp4 g{size}"):
            fp4_spec(size, format)
    with pytest.raises(CheckpointError, match="does not hold 4 bit g32"):
        fp4_spec(32, "mxfp4-pack-quantized", type="int")


def test_scales_keep_their_value(random_weight, assert_same) -> None:
    weight = random_weight(WeightScheme(4, 32), 8, 64)
    for scales, dtype in (
        (weight.scales, torch.float16),
        (torch.full_like(weight.scales, 2.0**100), torch.bfloat16),
        (weight.scales + 1e-7, torch.float32),
    ):
        changed = QuantizedWeight(weight.scheme, weight.codes, scales)
        parts = FORMAT.pack(changed)
        assert parts["weight_scale"].dtype == dtype
        assert_same(FORMAT.unpack(parts, weight.scheme), changed)


def test_reordered_groups_are_read_and_not_written(random_weight, assert_same) -> None:
    weight = random_weight(WeightScheme(4, 32), 8, 96, shuffled=True)
    with pytest.raises(CheckpointError, match="gptq"):
        FORMAT.pack(weight)
    parts = FORMAT.pack(QuantizedWeight(weight.scheme, weight.codes, weight.scales))
    assert_same(FORMAT.unpack(parts | {"weight_g_idx": weight.g_idx}, weight.scheme), weight)
    in_order = torch.arange(96, dtype=torch.int32) // 32
    assert FORMAT.unpack(parts | {"weight_g_idx": in_order}, weight.scheme).g_idx is None


@pytest.mark.parametrize(
    "part, change, words",
    [
        ("weight_scale", None, "weight_scale is missing"),
        ("weight_packed", None, "weight is missing"),
        ("weight_shape", None, "weight_shape is missing"),
        ("weight_zero_point", None, "weight_zero_point is missing"),
        ("weight_packed", lambda t: t.to(torch.int64), "int32"),
        ("weight_packed", lambda t: t[:, :-1], "weight_packed is"),
        ("weight_packed", lambda t: t[:-1], "weight_shape"),
        ("weight_shape", lambda t: t * 0, "weight_shape"),
        ("weight_shape", lambda t: t[:1], "weight_shape"),
        ("weight_zero_point", lambda t: torch.cat([t, t]), "weight_zero_point is"),
        ("weight_scale", lambda t: t[:, :-1], "the scale is"),
        ("weight_scale", lambda t: t * float("nan"), "NaN"),
        ("weight_scale", lambda t: t.to(torch.int32), "expected floats"),
        ("bias", lambda t: t[:-1], "bias"),
        ("weight_g_idx", lambda t: t + 9, "g_idx"),
    ],
)
def test_damaged_parts_are_refused_in_one_line(random_weight, part, change, words) -> None:
    weight = random_weight(WeightScheme(4, 32, False), 20, 96, bias=True)
    parts = FORMAT.pack(weight) | {"weight_g_idx": weight.group_of_input().to(torch.int32)}
    if change is None:
        del parts[part]
    else:
        parts[part] = change(parts[part])
    with pytest.raises(CheckpointError, match=words) as caught:
        FORMAT.unpack(parts, weight.scheme)
    assert "\n" not in str(caught.value)


def test_bytes_of_another_kind_are_refused(random_weight) -> None:
    scheme = WeightScheme(8, -1, dtype="fp8")
    parts = FORMAT.pack(random_weight(scheme, 8, 16, activations=FP8))
    with pytest.raises(CheckpointError, match="int8"):
        FORMAT.unpack(parts, WeightScheme(8, -1), INT8)
    with pytest.raises(CheckpointError, match="NaN"):
        FORMAT.unpack(parts | {"weight": torch.full((8, 16), float("nan")).to(torch.float8_e4m3fn)}, scheme, FP8)
    with pytest.raises(CheckpointError, match="4 bits"):
        FORMAT.unpack({"weight": torch.full((8, 16), 9, dtype=torch.int8), "weight_scale": torch.ones(8, 1)},
                      WeightScheme(4, -1))
    with pytest.raises(CheckpointError, match="input_scale is missing"):
        FORMAT.unpack(parts, scheme, STATIC)
    with pytest.raises(CheckpointError, match="expected one float"):
        FORMAT.unpack(parts | {"input_scale": torch.ones(2)}, scheme, STATIC)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from([
        (WeightScheme(4, 64), None), (WeightScheme(3, -1, False), None), (WeightScheme(8, -1), INT8),
        (WeightScheme(8, -1, dtype="fp8"), FP8), (WeightScheme(8, -1, dtype="fp8", rows=-1), STATIC),
        (BLOCK, ActivationScheme("fp8", "group", group_size=128)),
        (WeightScheme(8, 64), ActivationScheme("int8", "group", group_size=64)),
    ]),
    kv_cache=st.sampled_from([None, KVScheme("fp8"), KVScheme("int8", "head"), KVScheme("fp8", "head")]),
    overrides=st.dictionaries(
        st.sampled_from(["lm_head", *MODULES]),
        st.sampled_from([WeightScheme(6, -1), WeightScheme(4, 32)]), max_size=5,
    ),
    embedding=st.sampled_from([None, WeightScheme(8, -1), WeightScheme(6, 64)]),
    ignored=st.sets(st.sampled_from(MODULES), max_size=4),
    keep=st.sets(st.sampled_from(MODULES), max_size=4),
)  # fmt: skip
def test_spec_survives_its_json(kind, kv_cache, overrides, embedding, ignored, keep) -> None:
    weights, activations = kind
    if activations is not None and activations.dtype == "fp8":
        overrides = {}
    overrides = {module: scheme for module, scheme in overrides.items() if module not in ignored}
    keep = keep - ignored if activations is not None else set()
    names = ["lm_head", *MODULES]
    if embedding is not None:
        names.append("model.embed_tokens")
        overrides["model.embed_tokens"] = embedding
        keep = keep | {"model.embed_tokens"} if activations is not None else keep
    if "lm_head" not in overrides:
        ignored = ignored | {"lm_head"}
    spec = QuantSpec("mixed", weights, activations, kv_cache, overrides=overrides,
                     ignored=tuple(n for n in names if n in ignored), float_inputs=tuple(n for n in names if n in keep))
    config = FORMAT.config_of(spec)
    assert FORMAT.spec_of(config, names) == spec
    assert (config["format"] == "mixed-precision") == (len({g["format"] for g in config["config_groups"].values()}) > 1)


def test_layouts_are_named_per_group() -> None:
    spec = QuantSpec("smoothquant", WeightScheme(8, -1), INT8, overrides={"model.embed_tokens": WeightScheme(8, -1)},
                     float_inputs=("model.embed_tokens", "lm_head"), ignored=("x",))
    config = FORMAT.config_of(spec)
    assert config["format"] == "mixed-precision" and config["quantization_status"] == "compressed"
    first, second = config["config_groups"].values()
    assert first["targets"] == ["Linear"] and first["format"] == "int-quantized"
    assert first["input_activations"] == {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token",
                                          "group_size": None, "dynamic": True}
    assert second["targets"] == ["model.embed_tokens", "lm_head"] and second["format"] == "pack-quantized"
    assert config["ignore"] == ["x"] and config["kv_cache_scheme"] is None


def groups(**changes) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}} | changes


def test_configurations_of_other_writers() -> None:
    weights = groups()["config_groups"]["group_0"]["weights"]
    config = groups(
        ignore=["lm_head", "re:.*router$"],
        config_groups={
            "a": {"targets": ["Linear"], "weights": weights | {"actorder": "static", "observer": "minmax"}},
            "b": {"targets": ["re:.*down_proj"], "weights": weights | {"group_size": 32, "actorder": "weight"}},
            "c": {"targets": ["model.layers.0.mlp.down_proj"], "weights": weights | {"num_bits": 8}},
            "d": {"targets": ["Embedding"], "weights": weights | {"strategy": "channel", "group_size": None}},
        },
    )
    names = [*MODULES, "model.embed_tokens", "model.layers.0.router"]
    spec = FORMAT.spec_of(config, names)
    assert spec.weights == WeightScheme(4, 64) and not spec.act_order and spec.method == "unknown"
    assert spec.ignored == ("lm_head", "model.layers.0.router")
    assert dict(spec.overrides) == {
        "model.layers.0.mlp.down_proj": WeightScheme(8, 64),
        "model.layers.1.mlp.down_proj": WeightScheme(4, 32),
        "model.layers.2.mlp.down_proj": WeightScheme(4, 32),
        "model.embed_tokens": WeightScheme(4, -1),
    }
    assert FORMAT.spec_of(groups(), ["model.embed_tokens"]).overrides == {}
    listed = groups(config_groups={"a": {"targets": [MODULES[0]], "weights": weights | {"actorder": "group"}}})
    spec = FORMAT.spec_of(listed, MODULES)
    assert spec.ignored == ("lm_head", *MODULES[1:]) and spec.act_order
    block = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": "128x64"}
    config = groups(format="float-quantized", config_groups={"a": {"targets": ["Linear"], "weights": block}})
    assert FORMAT.spec_of(config).weights == WeightScheme(8, 64, dtype="fp8", rows=128)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"format": "marlin-24"}, "marlin-24"),
        ({"format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"format": None}, "None"),
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": {"a": 3}}, "a must be"),
        ({"config_groups": {"a": ["Linear"]}}, "a must be"),
        ({"ignore": "lm_head"}, "ignore"),
        ({"ignore": ["re:("]}, "pattern"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ({"transform_config": {"a": {}}}, "transform_config"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float", "strategy": "tensor"}}, "kv_cache_scheme"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True}}, "kv_cache"),
        ({"kv_cache_scheme": [1]}, "kv_cache_scheme"),
        ({"weights": {"num_bits": 7}}, "bits must be"),
        ({"weights": {"num_bits": "4"}}, "bits is '4'"),
        ({"weights": {"type": "float"}}, "does not hold fp4"),
        ({"weights": {"type": "complex"}}, "complex"),
        ({"weights": {"strategy": "tensor_group"}}, "tensor_group"),
        ({"weights": {"strategy": "block"}}, "block_structure"),
        ({"weights": {"strategy": "tensor", "symmetric": False}}, "zero points"),
        ({"weights": {"group_size": 12}}, "group size"),
        ({"weights": {"group_size": None}}, "group_size is None"),
        ({"weights": {"symmetric": 1}}, "symmetric"),
        ({"weights": {"actorder": "random"}}, "actorder"),
        ({"input_activations": {"num_bits": 4}}, "8 bits"),
        ({"input_activations": {"num_bits": 8, "symmetric": False}}, "asymmetric"),
        ({"input_activations": {"num_bits": 8, "strategy": "token"}}, "static"),
        ({"input_activations": {"num_bits": 8, "strategy": "attn_head"}}, "attn_head"),
        ({"input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": "local"}}, "tensor"),
        ({"input_activations": {"num_bits": 8, "strategy": "group", "dynamic": True}}, "group_size"),
        ({"output_activations": {"num_bits": 8}}, "outputs"),
        ({"targets": "Linear"}, "targets"),
    ],
)
def test_configurations_we_cannot_read_are_refused_by_name(change, words) -> None:
    config = groups()
    group = config["config_groups"]["group_0"]
    if "weights" in change:
        group["weights"] |= change["weights"]
    elif set(change) <= {"input_activations", "output_activations", "targets"}:
        group |= change
    else:
        config |= change
    with pytest.raises(CheckpointError, match=words) as caught:
        FORMAT.spec_of(config, MODULES)
    assert "\n" not in str(caught.value)


def test_two_ways_to_round_inputs_are_refused() -> None:
    weights = groups()["config_groups"]["group_0"]["weights"]
    token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    config = groups(config_groups={
        "a": {"targets": ["Linear"], "weights": weights, "input_activations": token},
        "b": {"targets": ["lm_head"], "weights": weights, "input_activations": token | {"type": "float"}},
    })
    with pytest.raises(CheckpointError, match="one scheme for all"):
        FORMAT.spec_of(config, MODULES)


def test_limits_name_the_module() -> None:
    def limit(spec: QuantSpec, module: str, out: int, inp: int) -> str | None:
        return FORMAT.limit(spec, {module: spec.scheme_of(module)}, {module: (out, inp)})

    assert limit(QuantSpec("rtn", WeightScheme(3, -1, False)), "m.x", 7, 11) is None
    assert "m.x [8, 40]" in limit(QuantSpec("rtn", WeightScheme(4, 16)), "m.x", 8, 40)
    assert "gptq" in limit(QuantSpec("gptq", WeightScheme(4, 16), act_order=True), "m.x", 8, 32)
    assert "m.x" in limit(QuantSpec("rtn", WeightScheme(4, 16, rows=-1)), "m.x", 8, 32)
    assert "m.x" in limit(QuantSpec("rtn", WeightScheme(4, 16, False, rows=8)), "m.x", 8, 32)
    assert "token" in limit(QuantSpec("rtn", WeightScheme(8, -1), INT8), "model.embed_tokens", 8, 32)
    for scheme, activations in ((WeightScheme(8, -1), FP8), (WeightScheme(8, -1, dtype="fp8"), INT8)):
        assert "no layout" in limit(QuantSpec("rtn", scheme, activations), "m.x", 8, 32)
        with pytest.raises(UsageError, match="no layout"):
            FORMAT.config_of(QuantSpec("rtn", scheme, activations))
    with pytest.raises(UsageError, match="order of the input"):
        FORMAT.config_of(QuantSpec("gptq", WeightScheme(4, 16), act_order=True))
