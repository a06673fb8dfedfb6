from __future__ import annotations

import pytest

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.loaders import LOADERS, LoaderVerdict, verdicts
from qserve.checkpoint.spec import ActivationScheme, KVScheme, QuantSpec, WeightScheme

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


GPTQ = FORMATS["gptq"]


def accepted(spec: QuantSpec, shapes=SHAPES, format=GPTQ) -> dict[str, bool]:
    return {verdict.loader: verdict.accepts for verdict in verdicts(spec, shapes, format=format)}


def yes(*loaders: str) -> dict[str, bool]:
    return {loader: loader in loaders for loader in LOADERS}


EVERYWHERE = yes("qserve", "vllm", "sglang", "transformers")


def test_the_default_loads_everywhere() -> None:
    judged = verdicts(QuantSpec("gptq", WeightScheme(4, 64)), SHAPES, format=GPTQ)
    found = {verdict.loader: verdict for verdict in judged}
    assert list(found) == list(LOADERS) == ["qserve", "vllm", "sglang", "transformers"]
    assert all(verdict.accepts for verdict in found.values())
    assert "gptqmodel" in found["transformers"].reason
    assert "float16" in found["vllm"].reason and "--quantization gptq" in found["sglang"].reason
    assert not accepted_reasons(QuantSpec("gptq", WeightScheme(4, 64)), {"m.x": (64, 128)}, GPTQ)["vllm"]


def accepted_reasons(spec: QuantSpec, shapes, format) -> dict[str, str]:
    return {verdict.loader: verdict.reason for verdict in verdicts(spec, shapes, format=format)}


INT8, TOKEN = ActivationScheme("int8"), ActivationScheme("fp8")
STATIC, GROUP = ActivationScheme("fp8", "tensor", dynamic=False), ActivationScheme("fp8", "group", group_size=128)
BLOCK, CHANNEL = WeightScheme(8, 128, dtype="fp8", rows=128), WeightScheme(8, -1, dtype="fp8")
TENSOR = WeightScheme(8, -1, dtype="fp8", rows=-1)
ASYM = WeightScheme(4, 64, False)
WIDE = {"model.layers.0.mlp.up_proj": (1024, 512), "model.layers.0.mlp.down_proj": (512, 1024)}


@pytest.mark.parametrize(
    "spec, format, expected",
    [
        (QuantSpec("gptq", WeightScheme(8, -1)), "gptq", EVERYWHERE),
        (QuantSpec("gptq", WeightScheme(2, 64)), "gptq", yes("qserve", "transformers")),
        (QuantSpec("gptq", ASYM), "gptq_v2", yes("qserve", "transformers")),
        (QuantSpec("gptq", ASYM), "gptq", yes()),
        (QuantSpec("gptq", WeightScheme(4, 96)), "gptq", yes("qserve")),
        (QuantSpec("gptq", WeightScheme(4, 128)), "gptq", yes("qserve")),
        (QuantSpec("gptq", WeightScheme(6, 64)), "gptq", yes()),
        (QuantSpec("rtn", WeightScheme(8, -1), INT8), "gptq", yes()),
        (QuantSpec("awq", ASYM), "awq", EVERYWHERE),
        (QuantSpec("awq", WeightScheme(4, 128, False)), "awq", yes()),
        (QuantSpec("awq", WeightScheme(8, 64, False)), "awq", yes()),
        (QuantSpec("gptq", WeightScheme(4, 64)), "compressed-tensors", yes("qserve", "vllm", "transformers")),
        (QuantSpec("gptq", ASYM), "compressed-tensors", yes("qserve", "transformers")),
        (QuantSpec("gptq", WeightScheme(3, 64)), "compressed-tensors", yes("qserve", "transformers")),
        (QuantSpec("rtn", WeightScheme(8, -1), INT8), "compressed-tensors", EVERYWHERE),
        (QuantSpec("rtn", CHANNEL, TOKEN), "compressed-tensors", EVERYWHERE),
        (QuantSpec("rtn", CHANNEL), "compressed-tensors", EVERYWHERE),
        (QuantSpec("rtn", TENSOR, STATIC), "compressed-tensors", EVERYWHERE),
        (QuantSpec("rtn", CHANNEL, GROUP), "compressed-tensors", yes("qserve", "transformers")),
        (QuantSpec("rtn", BLOCK, GROUP), "compressed-tensors", yes()),
        (QuantSpec("rtn", TENSOR, STATIC), "fp8", yes("qserve", "vllm", "sglang")),
        (QuantSpec("rtn", BLOCK, GROUP), "fp8", yes("qserve")),
        (QuantSpec("rtn", CHANNEL, TOKEN), "fp8", yes()),
    ],
)
def test_limits(spec, format, expected) -> None:
    assert accepted(spec, format=FORMATS[format]) == expected


@pytest.mark.parametrize(
    "spec, format, expected",
    [
        (QuantSpec("gptq", ASYM), "compressed-tensors", EVERYWHERE),
        (QuantSpec("gptq", WeightScheme(8, 64, False)), "compressed-tensors", yes("qserve", "transformers")),
        (QuantSpec("rtn", BLOCK, GROUP), "compressed-tensors", EVERYWHERE),
        (QuantSpec("rtn", BLOCK, GROUP), "fp8", EVERYWHERE),
        (QuantSpec("rtn", WeightScheme(8, 64, dtype="fp8", rows=64), ActivationScheme("fp8", "group", group_size=64)),
         "fp8", yes("qserve", "transformers")),
        (QuantSpec("rtn", WeightScheme(4, 64), INT8), "compressed-tensors", yes("qserve", "transformers")),
        (QuantSpec("rtn", WeightScheme(8, -1), ActivationScheme("int8", "tensor")), "compressed-tensors",
         yes("qserve", "transformers")),
        (QuantSpec("gptq", WeightScheme(4, 64), kv_cache=KVScheme("fp8")), "compressed-tensors", EVERYWHERE),
        (QuantSpec("gptq", WeightScheme(4, 64), kv_cache=KVScheme("fp8", "head")), "compressed-tensors",
         yes("qserve", "vllm", "transformers")),
        (QuantSpec("gptq", WeightScheme(4, 64), kv_cache=KVScheme("int8")), "compressed-tensors",
         yes("qserve", "transformers")),
    ],
)
def test_limits_where_sizes_are_good(spec, format, expected) -> None:
    assert accepted(spec, WIDE, FORMATS[format]) == expected


def test_packed_embeddings_and_heads() -> None:
    compressed = FORMATS["compressed-tensors"]
    embedding = QuantSpec("rtn", WeightScheme(4, 64), overrides={"model.embed_tokens": WeightScheme(8, -1)})
    shapes = WIDE | {"model.embed_tokens": (1024, 512)}
    assert accepted(embedding, shapes, compressed) == yes("qserve")
    for loader in ("vllm", "transformers"):
        assert "embed_tokens" in accepted_reasons(embedding, shapes, compressed)[loader]
    assert accepted(embedding, shapes, GPTQ) == yes()
    head = QuantSpec("rtn", WeightScheme(4, 64), ignored=())
    assert accepted(head, WIDE | {"lm_head": (1024, 512)}, compressed) == yes("qserve", "transformers")


AT_ONCE = "CompressedTensorsConfig(dequantize=True)"


@pytest.mark.parametrize(
    ("spec", "modules", "accepts", "words"),
    [
        (QuantSpec("rtn", WeightScheme(4, 64)), {}, True, ""),
        (QuantSpec("rtn", WeightScheme(3, 64)), {}, True, "compressed-tensors from 0.18 on for 3 bits"),
        (QuantSpec("rtn", WeightScheme(5, 32)), {}, True, "compressed-tensors from 0.18 on for 5 bits"),
        (QuantSpec("rtn", WeightScheme(2, 64), overrides={"model.layers.0.mlp.up_proj": WeightScheme(6, 64),
                                                          "model.layers.0.mlp.down_proj": WeightScheme(3, 64)}),
         {}, True, "compressed-tensors from 0.18 on for 3 and 6 bits"),
        (QuantSpec("rtn", ASYM), {}, True, AT_ONCE),
        (QuantSpec("rtn", ASYM, kv_cache=KVScheme("fp8")), {}, True, "leaves out the scales of the KV cache"),
        (QuantSpec("rtn", WeightScheme(8, -1, False), INT8), {}, True, ""),
        (QuantSpec("rtn", ASYM, overrides={"model.layers.0.mlp.up_proj": WeightScheme(4, 32, False)}), {}, False,
         "up_proj: every module"),
        (QuantSpec("rtn", ASYM, overrides={"lm_head": WeightScheme(8)}, ignored=()), {"lm_head": (1024, 512)}, False,
         "lm_head: every module"),
        (QuantSpec("rtn", WeightScheme(8)), {"model.embed_tokens": (1024, 512)}, True, AT_ONCE),
        (QuantSpec("rtn", WeightScheme(8, -1), INT8, float_inputs=("model.embed_tokens",)),
         {"model.embed_tokens": (1024, 512)}, False, "an embedding is packed"),
        (QuantSpec("rtn", WeightScheme(4, 64)), {"m.experts.0.w1": (256, 512)}, True, ""),
        (QuantSpec("rtn", WeightScheme(4, 64), ignored=("lm_head", "m.experts.0.w1")), {"m.experts.0.w1": (256, 512)},
         True, ""),
        (QuantSpec("rtn", CHANNEL, TOKEN), {"m.experts.0.w1": (256, 512)}, True, ""),
        (QuantSpec("rtn", ASYM), {"m.experts.0.w1": (256, 512)}, False, "experts"),
        (QuantSpec("rtn", BLOCK, GROUP), {"m.experts.0.w1": (256, 512)}, False, "experts"),
        (QuantSpec("rtn", WeightScheme(8, -1), INT8), {"m.experts.0.w1": (256, 512)}, False, "experts"),
        (QuantSpec("rtn", WeightScheme(4, 64), overrides={"m.experts.0.w1": WeightScheme(8)}),
         {"m.experts.0.w1": (256, 512)}, False, "all experts"),
    ],
)  # fmt: skip
def test_what_transformers_reads_of_compressed_tensors(spec, modules, accepts, words) -> None:
    (found,) = verdicts(spec, WIDE | modules, ["transformers"], format=FORMATS["compressed-tensors"])
    assert found.accepts == accepts and words in found.reason
    assert (AT_ONCE in found.reason) == (words in (AT_ONCE, "leaves out the scales of the KV cache"))
    assert ("0.18" in found.reason) == ("0.18" in words)


def test_fallback_per_layer_needs_a_loader_that_reads_dynamic() -> None:
    spec = QuantSpec(
        "gptq",
        WeightScheme(4, 128),
        overrides={module: WeightScheme(4, 64) for module, (_, inp) in SHAPES.items() if inp % 128},
    )
    assert accepted(spec) == yes("qserve", "vllm", "sglang")


def test_fused_siblings_must_agree_for_vllm() -> None:
    module = "model.layers.1.self_attn.v_proj"
    for spec in (
        QuantSpec("gptq", WeightScheme(4, 64), overrides={module: WeightScheme(8, 64)}),
        QuantSpec("gptq", WeightScheme(4, 64), ignored=("lm_head", module)),
    ):
        (verdict,) = verdicts(spec, SHAPES, ["vllm"], format=GPTQ)
        assert not verdict.accepts and "qkv_proj" in verdict.reason and "v_proj" in verdict.reason


def test_sizes_that_do_not_fill_words() -> None:
    found = verdicts(QuantSpec("gptq", WeightScheme(4, -1)), {"m.x": (12, 64)}, format=GPTQ)
    assert not any(verdict.accepts for verdict in found) and "multiples of 8" in found[0].reason


def test_quantized_output_layer() -> None:
    spec = QuantSpec("gptq", WeightScheme(4, 64), ignored=())
    assert accepted(spec, SHAPES | {"lm_head": (49152, 576)}) == yes("qserve", "vllm", "sglang")


def test_unknown_loader() -> None:
    with pytest.raises(UsageError, match="known: qserve, vllm, sglang, transformers"):
        verdicts(QuantSpec("rtn", WeightScheme(4)), SHAPES, ["llamafile"], format=GPTQ)
    (found,) = verdicts(QuantSpec("rtn", WeightScheme(4)), SHAPES, ["qserve"], format=GPTQ)
    assert found == LoaderVerdict("qserve", True)
