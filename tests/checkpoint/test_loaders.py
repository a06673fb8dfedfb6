from __future__ import annotations

import pytest

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.loaders import LOADERS, LoaderVerdict, verdicts
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme

LEAVES = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}
SHAPES = {f"model.layers.{i}.{leaf}": shape for i in range(2) for leaf, shape in LEAVES.items()}


def accepted(spec: QuantSpec, shapes=SHAPES, **options) -> dict[str, bool]:
    return {verdict.loader: verdict.accepts for verdict in verdicts(spec, shapes, **options)}


def test_the_default_loads_everywhere() -> None:
    found = verdicts(QuantSpec("gptq", WeightScheme(4, 64)), SHAPES)
    assert [verdict.loader for verdict in found] == list(LOADERS) == ["qserve", "vllm", "transformers"]
    assert all(verdict.accepts for verdict in found)
    assert "gptqmodel" in found[2].reason


@pytest.mark.parametrize(
    "spec, version, expected",
    [
        (
            QuantSpec("gptq", WeightScheme(8, -1)),
            "gptq",
            {"qserve": True, "vllm": True, "transformers": True},
        ),
        (
            QuantSpec("gptq", WeightScheme(2, 64)),
            "gptq",
            {"qserve": True, "vllm": False, "transformers": True},
        ),
        (
            QuantSpec("gptq", WeightScheme(4, 64, False)),
            "gptq_v2",
            {"qserve": True, "vllm": False, "transformers": True},
        ),
        (
            QuantSpec("gptq", WeightScheme(4, 64, False)),
            "gptq",
            {"qserve": False, "vllm": False, "transformers": False},
        ),
        (
            QuantSpec("gptq", WeightScheme(4, 96)),
            "gptq",
            {"qserve": True, "vllm": False, "transformers": False},
        ),
        (
            QuantSpec("gptq", WeightScheme(4, 128)),
            "gptq",
            {"qserve": True, "vllm": False, "transformers": False},
        ),
        (
            QuantSpec("rtn", WeightScheme(8, -1), activations=ActivationScheme("int8")),
            "gptq",
            {"qserve": False, "vllm": False, "transformers": False},
        ),
    ],
)
def test_limits(spec, version, expected) -> None:
    assert accepted(spec, version=version) == expected


def test_fallback_per_layer_needs_a_loader_that_reads_dynamic() -> None:
    spec = QuantSpec(
        "gptq",
        WeightScheme(4, 128),
        overrides={module: WeightScheme(4, 64) for module, (_, inp) in SHAPES.items() if inp % 128},
    )
    assert accepted(spec) == {"qserve": True, "vllm": True, "transformers": False}


def test_fused_siblings_must_agree_for_vllm() -> None:
    module = "model.layers.1.self_attn.v_proj"
    for spec in (
        QuantSpec("gptq", WeightScheme(4, 64), overrides={module: WeightScheme(8, 64)}),
        QuantSpec("gptq", WeightScheme(4, 64), ignored=("lm_head", module)),
    ):
        (verdict,) = verdicts(spec, SHAPES, ["vllm"])
        assert not verdict.accepts and "qkv_proj" in verdict.reason and "v_proj" in verdict.reason


def test_sizes_that_do_not_fill_words() -> None:
    found = verdicts(QuantSpec("gptq", WeightScheme(4, -1)), {"m.x": (12, 64)})
    assert not any(verdict.accepts for verdict in found) and "multiples of 8" in found[0].reason


def test_quantized_output_layer() -> None:
    spec = QuantSpec("gptq", WeightScheme(4, 64), ignored=())
    assert accepted(spec, SHAPES | {"lm_head": (49152, 576)}) == {
        "qserve": True,
        "vllm": True,
        "transformers": False,
    }


def test_unknown_loader() -> None:
    with pytest.raises(UsageError, match="known: qserve, vllm, transformers"):
        verdicts(QuantSpec("rtn", WeightScheme(4)), SHAPES, ["llamafile"])
    assert verdicts(QuantSpec("rtn", WeightScheme(4)), SHAPES, ["qserve"]) == [LoaderVerdict("qserve", True)]
