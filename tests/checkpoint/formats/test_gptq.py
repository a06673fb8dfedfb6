from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import FORMATS, format_of
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, KVScheme, QuantSpec, WeightScheme

BITS = (2, 3, 4, 8)
V1, V2 = FORMATS["gptq"], FORMATS["gptq_v2"]


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    version=st.sampled_from([V1, V2]),
    out=st.integers(1, 3).map(lambda n: 32 * n),
    inp=st.integers(1, 4).map(lambda n: 32 * n),
    group=st.sampled_from([-1, 8, 16, 32, 48, 64]),
    symmetric=st.booleans(),
    shuffled=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_pack_and_unpack_are_inverses(
    random_weight, assert_same, bits, version, out, inp, group, symmetric, shuffled, bias, seed
) -> None:
    weight = random_weight(
        WeightScheme(bits, group, symmetric),
        out,
        inp,
        seed,
        shuffled=shuffled,
        bias=bias,
        lowest_zero=1 if version is V1 else 0,
    )
    parts = version.pack(weight)
    again = version.unpack(parts, weight.scheme)
    trivial = torch.equal(weight.group_of_input(), torch.arange(inp) // weight.scheme.group_width(inp))
    expected = QuantizedWeight(
        weight.scheme,
        weight.codes,
        weight.scales,
        weight.zeros,
        None if trivial else weight.g_idx,
        weight.bias,
    )
    assert_same(again, expected)
    repacked = version.pack(again)
    assert parts.keys() == repacked.keys()
    assert all(
        torch.equal(parts[name], repacked[name]) and parts[name].dtype == repacked[name].dtype
        for name in parts
    )


def test_layout_of_the_parts(random_weight) -> None:
    weight = random_weight(WeightScheme(4, 32, False), 24, 64, lowest_zero=1)
    parts = V1.pack(weight)
    shapes = {name: (tuple(part.shape), part.dtype) for name, part in parts.items()}
    assert shapes == {
        "qweight": ((8, 24), torch.int32),
        "qzeros": ((2, 3), torch.int32),
        "scales": ((2, 24), torch.float16),
        "g_idx": ((64,), torch.int32),
    }
    for r in range(8):
        for j in range(8):
            assert torch.equal(
                (parts["qweight"][r] >> (4 * j)) & 15, weight.codes[:, 8 * r + j].to(torch.int32)
            )
    for c in range(3):
        for j in range(8):
            stored = (parts["qzeros"][:, c] >> (4 * j)) & 15
            assert torch.equal(stored, weight.zeros[8 * c + j].to(torch.int32) - 1)
    assert parts["g_idx"].tolist() == [0] * 32 + [1] * 32


def test_symmetric_zero_points(random_weight) -> None:
    weight = random_weight(WeightScheme(4, 32), 8, 32)
    assert V1.pack(weight)["qzeros"].tolist() == [[0x77777777]]
    assert V2.pack(weight)["qzeros"].tolist() == [[0x88888888 - (1 << 32)]]


def test_last_group_may_be_short(random_weight) -> None:
    weight = random_weight(WeightScheme(4, 16), 8, 40)
    assert weight.scales.shape == (8, 3)
    assert torch.equal(V1.unpack(V1.pack(weight), weight.scheme).dequantize(), weight.dequantize())


def test_version_1_refuses_a_zero_point_of_0(random_weight, assert_same) -> None:
    weight = random_weight(WeightScheme(4, 32, False), 8, 32, lowest_zero=1)
    weight.zeros[3, 0] = 0
    with pytest.raises(CheckpointError, match="gptq_v2"):
        V1.pack(weight)
    assert_same(V2.unpack(V2.pack(weight), weight.scheme), weight)


def test_sizes_that_do_not_fill_words_are_refused(random_weight) -> None:
    with pytest.raises(CheckpointError, match="of 8 each"):
        V1.pack(random_weight(WeightScheme(4, 32), 12, 32))
    with pytest.raises(CheckpointError, match="of 32 each"):
        V1.pack(random_weight(WeightScheme(3, 16), 32, 48))


def test_a_scale_beyond_float16_is_refused(random_weight) -> None:
    weight = random_weight(WeightScheme(4, 32), 8, 32)
    weight.scales[0, 0] = 1e6
    with pytest.raises(CheckpointError, match="float16"):
        V1.pack(weight)


def test_nan_scales_are_refused_on_reading(random_weight) -> None:
    parts = V1.pack(random_weight(WeightScheme(4, 32), 8, 32))
    parts["scales"][0, 3] = float("nan")
    with pytest.raises(CheckpointError, match="NaN"):
        V1.unpack(parts, WeightScheme(4, 32))


def test_wrong_version_of_a_symmetric_weight_is_noticed(random_weight) -> None:
    parts = V2.pack(random_weight(WeightScheme(4, 32), 8, 32))
    with pytest.raises(CheckpointError, match="checkpoint_format"):
        V1.unpack(parts, WeightScheme(4, 32))


@pytest.mark.parametrize(
    "part, change",
    [
        ("qweight", None),
        ("scales", None),
        ("qzeros", None),
        ("qweight", lambda t: t.to(torch.int64)),
        ("qweight", lambda t: t[:-1]),
        ("scales", lambda t: t[:, :-1]),
        ("qzeros", lambda t: torch.cat([t, t])),
        ("g_idx", lambda t: t[:-1]),
        ("g_idx", lambda t: t + 7),
    ],
)
def test_parts_that_contradict_each_other_are_refused(part, change, random_weight) -> None:
    parts = V1.pack(random_weight(WeightScheme(4, 32, False), 16, 64, lowest_zero=1))
    if change is None:
        del parts[part]
    else:
        parts[part] = change(parts[part])
    with pytest.raises(CheckpointError):
        V1.unpack(parts, WeightScheme(4, 32, symmetric=False))


MODULES = [
    f"model.layers.{i}.{leaf}"
    for i in range(12)
    for leaf in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
] + ["lm_head"]


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    group=st.sampled_from([-1, 32, 128]),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    method=st.sampled_from(["rtn", "gptq"]),
    head=st.booleans(),
    overrides=st.dictionaries(
        st.sampled_from(MODULES[:-1]),
        st.sampled_from([WeightScheme(4, 96), WeightScheme(8, 16), WeightScheme(2, 64, False)]),
        max_size=12,
    ),
    ignored=st.sets(st.sampled_from(MODULES[:-1]), max_size=6),
)
def test_spec_survives_its_json(bits, group, symmetric, act_order, method, head, overrides, ignored) -> None:
    overrides = {module: scheme for module, scheme in overrides.items() if module not in ignored}
    spec = QuantSpec(
        method,
        WeightScheme(bits, group, symmetric),
        act_order=act_order,
        overrides=overrides,
        ignored=(*(() if head else ("lm_head",)), *sorted(ignored)),
    )
    again = V1.spec_of(V1.config_of(spec), MODULES)
    assert set(again.ignored) == set(spec.ignored)
    assert (
        QuantSpec(
            again.method,
            again.weights,
            act_order=again.act_order,
            overrides=again.overrides,
            ignored=spec.ignored,
        )
        == spec
    )


def test_fallback_of_every_layer_is_a_few_patterns_that_fused_loaders_find() -> None:
    own = WeightScheme(4, 64)
    spec = QuantSpec(
        "gptq",
        WeightScheme(4, 128),
        overrides={module: own for module in MODULES[:-1] if "down_proj" not in module},
    )
    dynamic = V1.config_of(spec)["dynamic"]
    assert len(dynamic) == 3
    fused = V1.spec_of(
        V1.config_of(spec),
        [
            "model.layers.11.self_attn.qkv_proj",
            "model.layers.0.mlp.gate_up_proj",
            "model.layers.12.self_attn.qkv_proj",
            "xmodel.layers.1.mlp.up_proj",
        ],
    )
    assert dict(fused.overrides) == {
        "model.layers.11.self_attn.qkv_proj": own,
        "model.layers.0.mlp.gate_up_proj": own,
    }


def test_dynamic_rules_of_other_writers() -> None:
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": True,
        "dynamic": {
            r"-:.*\.o_proj": {},
            r".*\.0\..*q_proj": {"bits": 8},
            r"+:.*q_proj": {"group_size": 32, "sym": False},
        },
    }
    spec = V1.spec_of(config, ["m.0.q_proj", "m.1.q_proj", "m.1.o_proj", "m.1.k_proj"])
    assert dict(spec.overrides) == {
        "m.0.q_proj": WeightScheme(8, 128),
        "m.1.q_proj": WeightScheme(4, 32, False),
    }
    assert spec.ignored == ("lm_head", "m.1.o_proj")
    assert spec.act_order and spec.method == "gptq"


@pytest.mark.parametrize(
    "config, words",
    [
        ({"quant_method": ["awq"], "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "marlin"),
        ({"quant_method": "gptq", "bits": 5}, "bits"),
        ({"quant_method": "gptq", "bits": "4"}, "bits"),
        ({"quant_method": "gptq"}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 12}, "group size"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, "pattern"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": []}, "dynamic"),
    ],
)
def test_configurations_we_cannot_read_are_refused_by_name(config, words) -> None:
    with pytest.raises(CheckpointError, match=words):
        format_of(config).spec_of(config, MODULES)


def test_what_the_format_cannot_say_is_refused() -> None:
    with pytest.raises(UsageError):
        V1.config_of(QuantSpec("rtn", WeightScheme(8, -1), activations=ActivationScheme("int8")))
    with pytest.raises(UsageError):
        V1.config_of(QuantSpec("rtn", WeightScheme(8, -1), kv_cache=KVScheme("fp8")))
