from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, KVScheme, QuantSpec, WeightScheme

FORMAT = FORMATS["awq"]
ASYM = WeightScheme(4, 32, False)
MODULES = [f"model.layers.{i}.mlp.{leaf}" for i in range(12) for leaf in ("up_proj", "down_proj")]


@settings(max_examples=40, deadline=None)
@given(
    out=st.integers(1, 9).map(lambda n: 8 * n),
    group=st.sampled_from([-1, 8, 32, 64]),
    groups=st.integers(1, 3),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_pack_and_unpack_are_inverses(random_weight, assert_same, out, group, groups, bias, seed) -> None:
    inp = groups * 11 if group == -1 else groups * group
    weight = random_weight(WeightScheme(4, group, False), out, inp, seed, bias=bias)
    parts = FORMAT.pack(weight)
    assert_same(FORMAT.unpack(parts, weight.scheme), weight)
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    assert FORMAT.shape(weight.scheme, shapes, parts.__getitem__) == (out, inp)


def test_order_of_the_outputs_by_hand() -> None:
    codes = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 8)  # output o has the code o
    zeros = torch.arange(8, 16, dtype=torch.uint8)[:, None]
    parts = FORMAT.pack(QuantizedWeight(WeightScheme(4, 8, False), codes, torch.ones(8, 1), zeros))
    assert parts["qweight"].tolist() == [[0x75316420]] * 8
    assert parts["qzeros"].tolist() == [[0xFDB9ECA8 - (1 << 32)]]
    assert parts["scales"].shape == (1, 8) and parts["scales"].dtype == torch.float16


def test_layout_of_the_parts(random_weight) -> None:
    weight = random_weight(ASYM, 24, 96)
    parts = FORMAT.pack(weight)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        "qweight": (96, 3), "qzeros": (3, 3), "scales": (3, 24)
    }  # fmt: skip
    for c in range(3):
        for i, j in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            assert torch.equal((parts["qweight"][:, c] >> (4 * i)) & 15, weight.codes[8 * c + j].to(torch.int32))


def test_a_symmetric_weight_has_zero_points_of_8(random_weight) -> None:
    weight = random_weight(WeightScheme(4, 32), 8, 32)
    parts = FORMAT.pack(weight)
    assert parts["qzeros"].tolist() == [[0x88888888 - (1 << 32)]]
    assert torch.equal(FORMAT.unpack(parts, ASYM).dequantize(), weight.dequantize())


def test_what_the_format_cannot_hold_is_refused(random_weight) -> None:
    for weight, words in (
        (random_weight(WeightScheme(8, 32), 8, 32), "4-bit"),
        (random_weight(WeightScheme(4, 32, rows=8), 8, 32), "4-bit"),
        (random_weight(ASYM, 12, 32), "words of 8"),
        (random_weight(ASYM, 8, 40), "groups of 32"),
        (random_weight(ASYM, 8, 64, shuffled=True), "out of order"),
        (random_weight(ASYM, 8, 64, activations=ActivationScheme("int8")), "rounded inputs"),
    ):
        with pytest.raises(CheckpointError, match=words):
            FORMAT.pack(weight)
    weight = random_weight(ASYM, 8, 32)
    weight.scales[0, 0] = 1e6
    with pytest.raises(CheckpointError, match="float16"):
        FORMAT.pack(weight)


@pytest.mark.parametrize(
    "part, change",
    [
        ("qweight", None), ("qzeros", None), ("scales", None),
        ("qweight", lambda t: t.to(torch.int64)), ("qweight", lambda t: t[:, :-1]), ("qweight", lambda t: t[:-32]),
        ("qzeros", lambda t: t[:-1]), ("scales", lambda t: t * float("nan")), ("bias", lambda t: t[1:]),
    ],
)  # fmt: skip
def test_damaged_parts_are_refused(random_weight, part, change) -> None:
    parts = FORMAT.pack(random_weight(ASYM, 16, 96, bias=True))
    if change is None:
        del parts[part]
    else:
        parts[part] = change(parts[part])
    with pytest.raises(CheckpointError) as caught:
        FORMAT.unpack(parts, ASYM)
    assert "\n" not in str(caught.value)


@settings(max_examples=30, deadline=None)
@given(ignored=st.sets(st.sampled_from(MODULES), max_size=6), group=st.sampled_from([-1, 64, 128]))
def test_spec_survives_its_json(ignored, group) -> None:
    spec = QuantSpec("awq+gptq", WeightScheme(4, group, False),
                     ignored=("lm_head", *(module for module in MODULES if module in ignored)))
    assert FORMAT.spec_of(FORMAT.config_of(spec), MODULES) == spec


def test_parts_of_names_are_skipped() -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
    spec = FORMAT.spec_of(config | {"modules_to_not_convert": ["layers.3.", "up_proj"]}, MODULES[:8])
    assert spec.ignored == ("lm_head", *(m for m in MODULES[:8] if "up_proj" in m or ".3." in m))
    assert FORMAT.spec_of(config, MODULES).ignored == ("lm_head",)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": "gemv"}, "gemv"), ({"bits": 8}, "bits"), ({"bits": None}, "bits"),
        ({"group_size": "x"}, "group_size"),
        ({"group_size": 12}, "group size"), ({"zero_point": False}, "zero points"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
    ],
)  # fmt: skip
def test_configurations_we_cannot_read_are_refused(change, words) -> None:
    with pytest.raises(CheckpointError, match=words):
        FORMAT.spec_of({"quant_method": "awq", "bits": 4, "group_size": 128} | change)


def test_limits() -> None:
    def limit(spec: QuantSpec, module: str = "m.x", shape: tuple[int, int] = (16, 64)) -> str | None:
        return FORMAT.limit(spec, {module: spec.scheme_of(module)}, {module: shape})

    assert limit(QuantSpec("awq", ASYM)) is None and limit(QuantSpec("awq", WeightScheme(4, 32))) is None
    assert "m.x" in limit(QuantSpec("awq", ASYM), shape=(12, 64))
    assert "m.x" in limit(QuantSpec("awq", ASYM), shape=(16, 72))
    assert "4-bit" in limit(QuantSpec("awq", WeightScheme(3, 32)))
    assert "one group size" in limit(QuantSpec("awq", ASYM, overrides={"m.x": WeightScheme(4, 16, False)}))
    assert "output layer" in limit(QuantSpec("awq", ASYM, ignored=()), "lm_head")
    for spec in (
        QuantSpec("awq", ASYM, overrides={"m.x": WeightScheme(4, 16, False)}),
        QuantSpec("awq", WeightScheme(8, 32)),
        QuantSpec("awq", ASYM, ActivationScheme("int8")),
        QuantSpec("awq", ASYM, kv_cache=KVScheme("fp8")),
        QuantSpec("awq", ASYM, act_order=True),
        QuantSpec("awq", ASYM, ignored=()),
    ):
        with pytest.raises(UsageError):
            FORMAT.config_of(spec)
