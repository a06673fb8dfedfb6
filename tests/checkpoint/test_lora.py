"""``read_adapter``: what PEFT writes is read as PEFT reads it, and what is not served is refused in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.lora import CONFIG, WEIGHTS, read_adapter
from tests.adapters import write_adapter

Q, K, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.11.self_attn.k_proj", "model.layers.0.mlp.down_proj"
SHAPES = {Q: (48, 32), K: (16, 32), DOWN: (32, 80)}


def test_scales_and_matrices(tmp_path: Path) -> None:
    path = write_adapter(
        tmp_path, SHAPES, dtype=torch.bfloat16, ranks={K: 4}, rank_pattern={"layers.11.self_attn.k_proj": 4},
        alpha_pattern={r"layers\.\d+\.mlp.down_proj": 2, "k_proj": 32, "11.self_attn.k_proj": 1},
    )  # fmt: skip
    stored = load_file(path / WEIGHTS)
    adapter = read_adapter(path, SHAPES, max_rank=8)
    assert adapter.modules.keys() == SHAPES.keys() and adapter.rank == 8 and not adapter.transposed
    assert {name: weight.scale for name, weight in adapter.modules.items()} == {Q: 2.0, K: 8.0, DOWN: 0.25}
    for module, weight in adapter.modules.items():
        a, b = (stored[f"base_model.model.{module}.lora_{matrix}.weight"] for matrix in "AB")
        assert weight.a.dtype == torch.bfloat16 and torch.equal(weight.a, a) and torch.equal(weight.b, b)
        torch.testing.assert_close(weight.delta(), weight.scale * b.float() @ a.float())


def test_rank_stabilized_scales(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, SHAPES, ranks={K: 4}, rank_pattern={"k_proj": 4}, use_rslora=True)
    scales = {name: weight.scale for name, weight in read_adapter(path, SHAPES, max_rank=8).modules.items()}
    assert scales == {Q: 16 / math.sqrt(8), K: 8.0, DOWN: 16 / math.sqrt(8)}


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    def sha256(folder: str, **how: Any) -> str:
        return read_adapter(write_adapter(tmp_path / folder, SHAPES, **how), SHAPES, max_rank=8).sha256

    assert len({sha256("a"), sha256("b"), sha256("c", seed=1), sha256("d", lora_alpha=8)}) == 3


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"use_dora": True}, "use_dora True, which is not served"),
        ({"lora_bias": True}, "lora_bias True"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA is served"),
        ({"r": "8"}, "r must be a positive number, not '8'"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a positive number"),
        ({"rank_pattern": {"(": 4}}, "no simple regular expression"),
        ({"rank_pattern": {r"(\w+\.?)+!": 4}}, "no simple regular expression"),  # seconds for each linear
        ({"alpha_pattern": {".*.*.*!": 4}}, "no simple regular expression"),
        ({"alpha_pattern": {f".*{i}": 4 for i in range(17)}}, "over 16 patterns that repeat"),
        ({"rank_pattern": {"q_proj": 4}}, r"q_proj has matrices \[8, 32\] and \[48, 8\]; for rank 4 this model takes"),
        ({"r": 9}, "has rank 9, the limit is 8; raise --max-lora-rank"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, config: dict[str, Any], line: str) -> None:
    write_adapter(tmp_path, SHAPES)
    content = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(content | config))
    with pytest.raises(CheckpointError, match=line) as caught:
        read_adapter(tmp_path, SHAPES, max_rank=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"base_model.model.lm_head.lora_embedding_A": torch.zeros(8, 4)}, "lora_embedding_A"),
        ({f"base_model.model.{Q}.lora_magnitude_vector.weight": torch.zeros(48)}, "lora_magnitude_vector"),
        ({f"base_model.model.{Q}.base_layer.bias": torch.zeros(48)}, "base_layer.bias"),
        ({f"base_model.model.{Q}.lora_A.weight": torch.zeros(8, 33)}, r"matrices \[8, 33\]"),
        ({f"base_model.model.{Q}.lora_A.weight": torch.zeros(8, 32, dtype=torch.int8)}, "stored as I8"),
        ({f"base_model.model.{Q}.lora_B.weight": torch.full((48, 8), math.nan)}, "not finite"),
        ({f"base_model.model.{Q}.lora_A.default.weight": torch.zeros(8, 32)}, "twice"),
        ({"base_model.model.model.layers.99.x.lora_A.weight": torch.zeros(8, 32)}, "only lora_A"),
        ({f"base_model.model.model.layers.99.x.lora_{m}.weight": torch.zeros(8, 8) for m in "AB"}, "no linear of this"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, change: dict[str, torch.Tensor], line: str) -> None:
    write_adapter(tmp_path, SHAPES)
    save_file(load_file(tmp_path / WEIGHTS) | change, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=line):
        read_adapter(tmp_path, SHAPES, max_rank=8)


def test_files_that_are_no_adapter(tmp_path: Path) -> None:
    def line() -> str:
        with pytest.raises(CheckpointError) as caught:
            read_adapter(tmp_path / "adapter", SHAPES, max_rank=8)
        return str(caught.value)

    assert "is no directory" in line()
    path = write_adapter(tmp_path / "adapter", SHAPES)
    weights = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(weights[:-1])
    assert "is truncated" in line()
    (path / WEIGHTS).unlink()
    assert "lacks adapter_model.safetensors" in line()
    (path / "adapter_model.bin").write_bytes(b"\x80")
    assert "is pickled, which can run code" in line()
    for content, why in ((b"{", "not valid JSON"), (b"[]", "a JSON object"), (b" " * (1 << 20) + b"{}", "more than")):
        (path / CONFIG).write_bytes(content)
        assert why in line()
    (path / CONFIG).unlink()
    assert "adapter_config.json is missing" in line()
