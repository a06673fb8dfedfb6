from __future__ import annotations

import pytest

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import FORMATS, default_format, format_named, format_of
from qserve.checkpoint.gguf_schemes import GGUF_SCHEMES
from qserve.checkpoint.spec import ActivationScheme, KVScheme, QuantSpec, WeightScheme


def test_names() -> None:
    assert list(FORMATS) == ["gptq", "gptq_v2", "awq", "compressed-tensors", "fp8", "gguf", "mxfp4",
                             "bitsandbytes", "hqq", "modelopt", "quark"]
    assert all(format_named(name).name == name for name in FORMATS)
    with pytest.raises(CheckpointError, match="SqueezeLLM is not supported: its files are pickles"):
        format_of({"quant_method": "squeezellm"})
    with pytest.raises(UsageError, match="known: gptq, gptq_v2, awq"):
        format_named("exl3")
    for name, format in FORMATS.items():
        assert set(format.marks) <= set(format.parts), name


def test_what_a_format_writes_names_it() -> None:
    specs = {
        "gptq": QuantSpec("gptq", WeightScheme(4)),
        "gptq_v2": QuantSpec("gptq", WeightScheme(4)),
        "awq": QuantSpec("awq", WeightScheme(4, 64, False)),
        "compressed-tensors": QuantSpec("rtn", WeightScheme(6)),
        "fp8": QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8", rows=-1), ActivationScheme("fp8")),
        "gguf": QuantSpec("gptq", GGUF_SCHEMES["Q4_K"], overrides={"m.x": WeightScheme(8, 32)}),
    }
    for name, spec in specs.items():
        assert format_of(FORMATS[name].config_of(spec)).name == name
    for name in ("mxfp4", "bitsandbytes", "hqq", "modelopt", "quark"):  # read only
        assert format_of({"quant_method": name}).name == name


@pytest.mark.parametrize(
    "config, words",
    [
        ({"quant_method": "exl3"}, "reads gptq, awq, compressed-tensors, fp8"),
        ({"quant_method": "gptq_v2"}, "gptq_v2"),
        ({"quant_method": None}, "None"),
        ({"quant_method": {}}, "not supported"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "checkpoint_format": ["gptq"]}, "not supported"),
    ],
)
def test_unknown_methods(config, words) -> None:
    with pytest.raises(CheckpointError, match=words):
        format_of(config)


@pytest.mark.parametrize(
    "spec, name",
    [
        *((QuantSpec("gptq", WeightScheme(bits, 64)), "gptq") for bits in (2, 3, 4, 8)),
        (QuantSpec("gptq", WeightScheme(4, 64), act_order=True), "gptq"),
        (QuantSpec("gptq", WeightScheme(6, 64)), "compressed-tensors"),
        (QuantSpec("gptq", WeightScheme(4, 64, False)), "compressed-tensors"),
        (QuantSpec("gptq", WeightScheme(4, 64, False), act_order=True), "gptq_v2"),
        (QuantSpec("mixed", WeightScheme(4, 64), overrides={"m.x": WeightScheme(6, 64)}), "compressed-tensors"),
        (QuantSpec("mixed", WeightScheme(4, 64), overrides={"m.x": WeightScheme(3, 64)}), "gptq"),
        (QuantSpec("mixed", WeightScheme(4), overrides={"model.embed_tokens": WeightScheme(8)}), "compressed-tensors"),
        (QuantSpec("rtn", WeightScheme(4), kv_cache=KVScheme("fp8")), "compressed-tensors"),
        (QuantSpec("smoothquant", WeightScheme(8, -1), ActivationScheme("int8")), "compressed-tensors"),
        (QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8"), ActivationScheme("fp8")), "compressed-tensors"),
        (QuantSpec("gptq", GGUF_SCHEMES["Q6_K"]), "gguf"),
        (QuantSpec("gptq", WeightScheme(8, 32), overrides={"m.x": GGUF_SCHEMES["Q5_1"]}), "gguf"),
    ],
)
def test_default(spec, name) -> None:
    format = default_format(spec)
    assert format.name == name
    format.config_of(spec)
