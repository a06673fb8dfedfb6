"""The end of a model run by itself, against the whole model."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
)

from qserve.calibration.head import head
from qserve.calibration.skeleton import Skeleton
from qserve.checkpoint.hf import HFDirectory

SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
CONFIGS = {
    "tied": LlamaConfig(intermediate_size=48, tie_word_embeddings=True, **SIZES),
    "untied": LlamaConfig(intermediate_size=48, tie_word_embeddings=False, **SIZES),
    "positions and projections": OPTConfig(ffn_dim=48, word_embed_proj_dim=16, **SIZES),
    "scaled": CohereConfig(intermediate_size=48, logit_scale=0.25, **SIZES),
    "capped": Gemma2Config(
        intermediate_size=48, num_key_value_heads=1, head_dim=16, final_logit_softcapping=2.0, **SIZES
    ),
    "named otherwise": GPTNeoXConfig(intermediate_size=48, **SIZES),
    "biased": PhiConfig(intermediate_size=48, **SIZES),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_continues_as_the_model_does(kind, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.tie_weights()
    model.save_pretrained(tmp_path / "model")
    skeleton = Skeleton(HFDirectory(tmp_path / "model"))
    last = []
    model.get_submodule(skeleton.blocks[-1]).register_forward_hook(
        lambda module, args, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    tokens = torch.randint(0, 50, (1, 9))
    with torch.no_grad():
        expected = model(tokens).logits.log_softmax(-1)
        with head(skeleton) as (layers, log_probabilities):
            assert torch.allclose(log_probabilities(last[0]), expected, atol=1e-5)
            (layer,) = layers.values()
            assert torch.equal(layer.weight, model.get_output_embeddings().weight)
    assert skeleton.model.get_output_embeddings().weight.is_meta
