"""Models with gated delta nets, quantized end to end and served by the native decoder as transformers computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qserve.checkpoint.hf import HFDirectory
from qserve.evals.transformers_scorer import TransformersScorer
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from tests.runtime.test_delta_net import save_hybrid, tokens_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("qwen3_5", {"kv_cache": "int8", "kv_granularity": "head"}),
        ("qwen3_5", {"method": "awq", "symmetric": False}),
        ("qwen3_next", {"target_bits": 6.0}),
        ("qwen3_5_moe", {"method": "rtn", "calibration": None, "bits": 8}),
    ],
    ids=str,
)
def test_what_is_quantized_is_served(
    case: str, options: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    save_hybrid(tiny_model, model, case)
    text = tmp_path / "calibration.txt"
    text.write_text("".join(f"{n} bottles, {n * n} crates and a half; who counts them all? " for n in range(40)))
    usual = {"group_size": 16, "samples": 4, "sequence_length": 32, "calibration": str(text)}
    job = QuantizeJob(**{**usual, **options})
    report = pipeline.run(HFDirectory(model), out, job)
    read = HFDirectory(out)
    dense = {name.rpartition("linear_attn.")[2] for name in read.names() if ".0.linear_attn." in name}
    assert {"A_log", "dt_bias", "conv1d.weight", "norm.weight"} <= dense
    packed = {layer.module for layer in report.layers}
    assert any("linear_attn.out_proj" in module for module in packed) and packed == set(read.linears())
    tokens = tokens_of(1, 60)
    measured = torch.cat([rows for _, rows in TransformersScorer(read).score(tokens)])
    for kernels, divergence in (("reference", 1e-5), ("native", 1e-2)):  # C rounds the inputs of integer products
        engine = Engine(read, EngineConfig(kv_cache_memory=1 << 18, threads=1, max_num_seqs=4, kernels=kernels))
        served = torch.cat([rows for _, rows in engine.score(tokens)])
        assert float((measured.exp() * (measured - served)).sum(-1).mean()) < divergence
