from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.spec import ActivationScheme, KVScheme, QuantSpec, WeightScheme

FORMAT = FORMATS["fp8"]
TENSOR = WeightScheme(8, -1, dtype="fp8", rows=-1)
BLOCK = WeightScheme(8, 128, dtype="fp8", rows=128)
TOKEN = ActivationScheme("fp8")
STATIC = ActivationScheme("fp8", "tensor", dynamic=False)
GROUP = ActivationScheme("fp8", "group", group_size=128)
KINDS = [(TENSOR, TOKEN), (TENSOR, STATIC), (BLOCK, GROUP)]
MODULES = [f"model.layers.{i}.mlp.{leaf}" for i in range(11) for leaf in ("gate", "gate_proj")]


@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(KINDS), out=st.integers(1, 300), inp=st.integers(1, 300), bias=st.booleans())
def test_pack_and_unpack_are_inverses(random_weight, assert_same, kind, out, inp, bias) -> None:
    weight = random_weight(kind[0], out, inp, activations=kind[1], bias=bias)
    parts = FORMAT.pack(weight)
    assert_same(FORMAT.unpack(parts, *kind), weight)
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    assert FORMAT.shape(kind[0], shapes, parts.__getitem__) == (out, inp)


def test_layout_of_the_parts(random_weight) -> None:
    block = FORMAT.pack(random_weight(BLOCK, 300, 200, activations=GROUP))
    assert {name: (tuple(part.shape), part.dtype) for name, part in block.items()} == {
        "weight": ((300, 200), torch.float8_e4m3fn),
        "weight_scale_inv": ((3, 2), torch.float32),
    }
    tensor = FORMAT.pack(random_weight(TENSOR, 30, 20, activations=STATIC))
    assert {name: (tuple(part.shape), part.dtype) for name, part in tensor.items()} == {
        "weight": ((30, 20), torch.float8_e4m3fn),
        "weight_scale": ((1,), torch.float32),
        "input_scale": ((1,), torch.float32),
    }


def test_the_names_of_transformers_are_read(random_weight, assert_same) -> None:
    weight = random_weight(TENSOR, 30, 20, activations=STATIC)
    parts = FORMAT.pack(weight)
    renamed = {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"].reshape(()),
               "activation_scale": parts["input_scale"].reshape(())}
    assert_same(FORMAT.unpack(renamed, TENSOR, STATIC), weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ignored", [("lm_head",), (), ("lm_head", *MODULES[::2])])
def test_spec_survives_its_json(kind, ignored) -> None:
    spec = QuantSpec("rtn", *kind, ignored=ignored)
    config = FORMAT.config_of(spec)
    assert config["modules_to_not_convert"] == config["ignored_layers"] == list(ignored)
    again = FORMAT.spec_of(config, MODULES)
    # A list that is empty reads as no list: readers then keep the output layer.
    assert again == (spec if ignored else QuantSpec("rtn", *kind))


def test_parents_and_endings_are_skipped_and_neighbours_are_not() -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    spec = FORMAT.spec_of(config | {"modules_to_not_convert": ["mlp.gate", "model.layers.1"]}, MODULES)
    assert set(spec.ignored) == {m for m in MODULES if m.endswith("gate") or ".layers.1." in m}
    assert spec.weights == BLOCK and spec.activations == GROUP


@pytest.mark.parametrize(
    "change, words",
    [
        ({"fmt": "e5m2"}, "e5m2"), ({"scale_fmt": "ue8m0"}, "ue8m0"), ({"activation_scheme": "x"}, "activation_scheme"),
        ({"weight_block_size": [128]}, "weight_block_size"), ({"weight_block_size": [128, 3]}, "group size"),
        ({"weight_block_size": ["a", 128]}, "rows"),
        ({"activation_scheme": "static", "weight_block_size": [8, 8]}, "static"),
        ({"ignored_layers": 3}, "ignored_layers"),
    ],
)  # fmt: skip
def test_configurations_we_cannot_read_are_refused(change, words) -> None:
    with pytest.raises(CheckpointError, match=words):
        FORMAT.spec_of({"quant_method": "fp8", "activation_scheme": "dynamic"} | change)


@pytest.mark.parametrize(
    "part, change",
    [
        ("weight", None), ("weight_scale", None), ("input_scale", None), ("weight", lambda t: t.to(torch.float16)),
        ("weight_scale", lambda t: t.repeat(2)), ("weight_scale", lambda t: t * float("inf")),
        ("input_scale", lambda t: -t), ("input_scale", lambda t: t.repeat(2)), ("bias", lambda t: t[1:]),
    ],
)  # fmt: skip
def test_damaged_parts_are_refused(random_weight, part, change) -> None:
    parts = FORMAT.pack(random_weight(TENSOR, 30, 20, activations=STATIC, bias=True))
    if change is None:
        del parts[part]
    else:
        parts[part] = change(parts[part])
    with pytest.raises(CheckpointError) as caught:
        FORMAT.unpack(parts, TENSOR, STATIC)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec("rtn", WeightScheme(8, -1), ActivationScheme("int8")),
        QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8"), TOKEN),
        QuantSpec("rtn", TENSOR),
        QuantSpec("rtn", TENSOR, GROUP),
        QuantSpec("rtn", TENSOR, ActivationScheme("fp8", "tensor")),
        QuantSpec("rtn", BLOCK, TOKEN),
        QuantSpec("rtn", TENSOR, TOKEN, kv_cache=KVScheme("fp8")),
        QuantSpec("rtn", TENSOR, TOKEN, float_inputs=("m.x",)),
        QuantSpec("rtn", TENSOR, TOKEN, overrides={"m.x": BLOCK}),
    ],
)
def test_what_the_format_cannot_say_is_refused(spec) -> None:
    assert FORMAT.limit(spec, {"m.x": spec.scheme_of("m.x")}, {"m.x": (128, 128)})
    with pytest.raises(UsageError, match="choose another --format"):
        FORMAT.config_of(spec)
