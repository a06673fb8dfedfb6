"""One tiny random model of each family, as transformers saves it, with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from qserve.calibration import visit

COMMON: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
                          "vocab_size": 258, "hidden_size": 32, "bos_token_id": 256, "eos_token_id": 257,
                          "pad_token_id": None}  # fmt: skip
GROUPED: dict[str, Any] = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 64}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 8},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "gemma": {**GROUPED, "head_dim": 16},
    "gemma2": {**GROUPED, "head_dim": 16, "sliding_window": 8},
    "gemma3_text": {**GROUPED, "head_dim": 16, "sliding_window": 8,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "phi": GROUPED,
    "phi3": GROUPED,
    "opt": {**COMMON, "ffn_dim": 64, "word_embed_proj_dim": 16},
    "gpt_neox": {**COMMON, "intermediate_size": 64},
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen2_moe": {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**GROUPED, **EXPERTS, "head_dim": 16},
    "qwen3_next": {**GROUPED, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "qwen3_5_text": {**GROUPED, **DELTA},
    "gpt2": {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "falcon": {**COMMON, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 64},
    "starcoder2": {**GROUPED, "use_bias": True},
    "cohere": GROUPED,
    "olmo2": GROUPED,
    "olmoe": {**GROUPED, **EXPERTS},
    "glm4_moe": {**GROUPED, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8},
}  # fmt: skip


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """The products of a walk in float32 on every processor, so that they can be compared."""
    monkeypatch.setattr(visit, "fast_products", nullcontext)



def save(family: str, path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # fresh models are near-linear, their biases and routers zero
            spread = 0.3 if parameter.dim() == 1 else 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter), alpha=spread)
    model.save_pretrained(path)
    words = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=words | {"<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> a directory, made once and not to be written to."""
    made: dict[str, Path] = {}

    def saved_model(family: str) -> Path:
        if family not in made:
            made[family] = save(family, tmp_path_factory.mktemp("families") / family)
        return made[family]

    return saved_model


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokens() -> torch.Tensor:
    """int64 [3, 24]."""
    return torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def calibration_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A short text file, which is read faster than the built-in text."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("".join(f"{n} bottles, {n * n} crates and a half; who counts them all? " for n in range(40)))
    return str(path)
