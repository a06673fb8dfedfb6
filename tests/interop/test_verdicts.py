"""What we say of transformers and the compressed-tensors checkpoints that we write, and what the real one does with
each: loads it as it is, only where it is told to dequantize at once, or not at all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qserve.checkpoint.formats import format_named
from qserve.checkpoint.loaders import verdicts
from qserve.checkpoint.source import open_model
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme
from qserve.evals.transformers_scorer import TransformersScorer
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob

pytestmark = pytest.mark.interop

TOKENS = [1, 5, 90, 33, 7, 7, 64, 2, 11, 50]  # those of the judges
TEXT = "calibrated"  # stands for a file of text
SIZES: dict[str, Any] = {
    "vocab_size": 331, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "odd": ("llama", {"hidden_size": 100, "head_dim": 16, "intermediate_size": 132, "tie_word_embeddings": True}),
    "biases": ("qwen2", {"hidden_size": 192}),
    # Every token goes to all experts: a router's choice would make large differences of small ones.
    "projections": ("opt", {"ffn_dim": 256, "word_embed_proj_dim": 64, "do_layer_norm_before": False}),
    "experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4}),
}
ASYM: dict[str, Any] = {"symmetric": False}
CALIBRATED: dict[str, Any] = {"calibration": TEXT, "samples": 4, "sequence_length": 32}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{bits} bits, {'g32' if size > 0 else 'channel'}, {'symmetric' if symmetric else 'asymmetric'}":
        ("tied", {"bits": bits, "group_size": size, "symmetric": symmetric})
        for bits in (2, 3, 4, 5, 6, 8) for size in (32, -1) for symmetric in (True, False)
    },
    **{scheme: ("tied", {"scheme": scheme}) for scheme in ("w8a8", "fp8", "fp8-block", "fp8-tensor")},
    "fp8-static": ("tied", {"scheme": "fp8-static", **CALIBRATED}),
    **{scheme: ("tied", {"scheme": scheme}) for scheme in ("nvfp4a16", "mxfp4a16", "mxfp8")},
    "nvfp4": ("tied", {"scheme": "nvfp4", **CALIBRATED}),
    "experts, mxfp8": ("experts", {"scheme": "mxfp8"}),
    "experts, nvfp4a16": ("experts", {"scheme": "nvfp4a16"}),
    "experts, nvfp4": ("experts", {"scheme": "nvfp4", **CALIBRATED}),
    "mixed": ("tied", {"target_bits": 5.0, **CALIBRATED}),
    "mixed asymmetric": ("tied", {"target_bits": 5.0, **ASYM, **CALIBRATED}),
    "mixed fp8": ("tied", {"scheme": "fp8", "target_bits": 12.0, **CALIBRATED}),
    "mixed w8a8": ("tied", {"scheme": "w8a8", "target_bits": 12.0, **CALIBRATED}),
    **{f"head {bits}, {model}": (model, {"head_bits": bits}) for bits in (4, 5, 6, 8) for model in ("tied", "untied")},
    "head 8, w8a8": ("tied", {"scheme": "w8a8", "head_bits": 8}),
    "head 8, asymmetric": ("tied", {"head_bits": 8, **ASYM}),
    **{f"embedding {bits}, {model}": (model, {"embedding_bits": bits})
       for bits in (5, 6, 8) for model in ("tied", "untied")},
    "embedding 6, fp8": ("tied", {"scheme": "fp8", "embedding_bits": 6}),
    "embedding 6, head 8": ("tied", {"embedding_bits": 6, "head_bits": 8}),
    "embedding 6, asymmetric": ("untied", {"embedding_bits": 6, **ASYM}),
    **{f"embedding as linears, {model}": (model, {"bits": 8, "group_size": 64, "embedding_bits": 8})
       for model in ("tied", "untied")},
    "embedding and head as linears": ("tied", {"bits": 6, "group_size": 64, "embedding_bits": 6, "head_bits": 6}),
    "embedding as linears, w8a8": ("odd", {"scheme": "w8a8", "embedding_bits": 8}),
    **{f"KV {dtype} per {shared}": ("tied", {"kv_cache": dtype, "kv_granularity": shared, **CALIBRATED})
       for dtype in ("int8", "fp8") for shared in ("tensor", "head")},
    "KV fp8, asymmetric": ("tied", {"kv_cache": "fp8", **ASYM, **CALIBRATED}),
    "KV fp8, fp8": ("tied", {"scheme": "fp8", "kv_cache": "fp8", **CALIBRATED}),
    "odd sizes": ("odd", {"bits": 6, "group_size": -1}),
    "odd sizes, asymmetric": ("odd", {"bits": 6, "group_size": -1, **ASYM}),
    "smaller groups": ("biases", {"group_size": 128}),
    "smaller groups, asymmetric": ("biases", {"group_size": 128, **ASYM}),
    "linears outside the blocks": ("projections", {}),
    "experts": ("experts", {}),
    "experts, 3 bits per channel": ("experts", {"bits": 3, "group_size": -1}),
    "experts, asymmetric": ("experts", ASYM),
    "experts, w8a8": ("experts", {"scheme": "w8a8"}),
    "experts, fp8": ("experts", {"scheme": "fp8"}),
    "experts, fp8-static": ("experts", {"scheme": "fp8-static", **CALIBRATED}),
    "experts, fp8-block": ("experts", {"scheme": "fp8-block"}),
    "experts, mixed": ("experts", {"target_bits": 5.0, **CALIBRATED}),
    "experts, mixed among themselves": ("experts", {"target_bits": 6.2, **CALIBRATED}),
    "experts, mixed fp8": ("experts", {"scheme": "fp8", "target_bits": 10.0, **CALIBRATED}),
    "experts, those of a block in 16 bits": ("experts", {"scheme": "fp8", "target_bits": 13.5, **CALIBRATED}),
    "experts, head 8": ("experts", {"head_bits": 8}),
    "experts, embedding 8": ("experts", {"embedding_bits": 8}),
    "experts, embedding as linears": ("experts", {"bits": 8, "group_size": 64, "embedding_bits": 8}),
    "experts, KV fp8": ("experts", {"kv_cache": "fp8", **CALIBRATED}),
}  # fmt: skip
INT8, FP8 = ActivationScheme("int8"), ActivationScheme("fp8")
SPECS = {  # that no option of ours makes, but a conversion or the Python API may write
    "4 bits, int8 inputs": QuantSpec("rtn", WeightScheme(4, 32), INT8),
    "4 bits asymmetric, int8 inputs": QuantSpec("rtn", WeightScheme(4, 32, False), INT8),
    "8 bits asymmetric, int8 inputs": QuantSpec("rtn", WeightScheme(8, -1, False), INT8),
    "8 bits, int8 inputs in groups": QuantSpec(
        "rtn", WeightScheme(8, 32), ActivationScheme("int8", "group", group_size=32)
    ),
    "int8 per tensor, static": QuantSpec(
        "rtn", WeightScheme(8, -1, rows=-1), ActivationScheme("int8", "tensor", dynamic=False)
    ),
    "fp8 weights": QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8")),
    "fp8 weights per tensor": QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8", rows=-1)),
    "fp8 blocks of 32": QuantSpec(
        "rtn", WeightScheme(8, 32, dtype="fp8", rows=32), ActivationScheme("fp8", "group", group_size=32)
    ),
    "4 bits, fp8 inputs": QuantSpec("rtn", WeightScheme(4, 32), FP8),
    "some inputs": QuantSpec("rtn", WeightScheme(4, 32), INT8, float_inputs=("model.layers.0.mlp.down_proj",)),
    "some inputs, asymmetric": QuantSpec(
        "rtn", WeightScheme(4, 32, False), INT8, float_inputs=("model.layers.0.mlp.down_proj",)
    ),
    "some kept, asymmetric": QuantSpec(
        "rtn", WeightScheme(4, 32, False), ignored=("lm_head", "model.layers.0.mlp.up_proj")
    ),
}


@pytest.fixture(scope="module")
def dense(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models with a tokenizer, in float16."""
    root = tmp_path_factory.mktemp("dense")
    for name, (family, sizes) in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **sizes}))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
        model.to(torch.float16).save_pretrained(root / name)
        open_model(tiny_model).save_tokenizer(root / name)
    return {name: root / name for name in MODELS}


@pytest.fixture(scope="module")
def loaded(judge, dense, packed_llama, our_logits, tmp_path_factory) -> dict[str, tuple[str, Path, Tensor]]:
    """What we say of each checkpoint, where it is, and our log-probabilities [tokens, vocabulary]; transformers has
    tried to load it."""
    root = tmp_path_factory.mktemp("loaded")
    (root / "text.txt").write_text("hello world, the lazy dog and the quick brown fox: user system. " * 40)
    common: dict[str, Any] = {"method": "rtn", "calibration": None, "format": "compressed-tensors", "group_size": 32}
    found = {}
    for kind, (model, options) in JOBS.items():
        job = {**common, **options}
        if job["calibration"] is not None:
            job["calibration"] = str(root / "text.txt")
        report = pipeline.run(open_model(dense[model]), root / kind, QuantizeJob(**job))
        said = next(verdict for verdict in report.verdicts if verdict.loader == "transformers")
        ours = torch.cat([rows for _, rows in TransformersScorer(open_model(root / kind)).score(TOKENS)])
        found[kind] = (str(said), root / kind, ours)
    for kind, spec in SPECS.items():
        source = open_model(packed_llama(root / kind, "compressed-tensors", spec))
        shapes = {module: source.shape(module) for module in source.linears()}
        (said,) = verdicts(spec, shapes, ["transformers"], format=format_named("compressed-tensors"))
        found[kind] = (str(said), root / kind, our_logits(source)[0].log_softmax(-1))
    judge("compressed-tensors", "transformers_loads.py", [(path,) for _, path, _ in found.values()])
    return found


@pytest.mark.parametrize("kind", [*JOBS, *SPECS])
def test_transformers_does_what_we_say(kind, loaded) -> None:
    said, path, ours = loaded[kind]
    promised = "nothing" if "refuses" in said else "dequantize" if "dequantize=True" in said else "plain"
    found = load_file(path / "out.safetensors")
    errors = {way: float((logits[0].log_softmax(-1) - ours).norm() / ours.norm()) for way, logits in found.items()}
    spec = open_model(path).spec
    # What rounds inputs or keys does so in steps of its own, and told to dequantize it rounds none. Weights that are
    # read wrongly are off by a quarter and more.
    limit = 2e-3 if spec.activations is None and spec.kv_cache is None else 0.05
    right = [way for way in ("plain", "dequantize") if errors.get(way, math.inf) < limit]
    assert promised == (right[0] if right else "nothing"), (said, errors)
