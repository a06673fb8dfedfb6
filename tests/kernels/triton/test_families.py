"""Small random models of families other than Llama's on the Triton executor, in the interpreter: nothing is left to the
reference, and the logits are the reference's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qserve.checkpoint.hf import HFDirectory
from qserve.kernels import registry
from qserve.kernels.triton import target
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from tests.runtime import test_delta_net
from tests.runtime.models import test_decoder, test_latent, test_layer_norm_families, test_moe

pytestmark = pytest.mark.skipif(not target.is_interpreted(), reason="there is a GPU")
LIMITS = DecoderLimits(max_tokens=16, max_logits=16, max_positions=64, num_blocks=40, num_states=1)
DENSE = test_decoder.CASES | test_layer_norm_families.CASES
SLOW = pytest.mark.slow
FAMILIES = ["gemma2", *(pytest.param(case, marks=SLOW) for case in (
    "ministral3", "olmo3", "glm4", "cohere-qk-norm", "gpt2", "phi-odd",
))]  # fmt: skip
MIXTURES = [pytest.param(case, marks=SLOW) for case in ("qwen3_moe", "qwen2_moe", "glm4_moe", "minimax_m2")]

LATENT = ["youtu", pytest.param("deepseek_v3-halves", marks=SLOW)]
HYBRIDS = ["qwen3_5", *(pytest.param(case, marks=SLOW) for case in ("qwen3_next", "qwen3_5-biases", "qwen3_5_moe"))]


def logits(path: Path, kernels: str) -> torch.Tensor:
    source = HFDirectory(path)
    executor = registry.make(kernels)
    decoder = Decoder(source, decoder_config(source.config, "small"), executor, LIMITS, kv_dtype=torch.float32)
    assert not decoder.fallbacks
    tokens = torch.randint(0, 80, (15,), generator=torch.Generator().manual_seed(7)).tolist()
    return test_decoder.run_chunks(decoder, tokens, [13, 1, 1])


def check(path: Path) -> None:
    torch.testing.assert_close(logits(path, "triton"), logits(path, "reference"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", FAMILIES)
def test_dense_families(case: str, tmp_path: Path) -> None:
    test_decoder.save_random(*DENSE[case], tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("case", MIXTURES)
def test_mixtures(case: str, tmp_path: Path) -> None:
    test_moe.make(case).save_pretrained(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("case", LATENT)
def test_latent_attention(case: str, tmp_path: Path) -> None:
    test_latent.make(case, tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("case", HYBRIDS)
def test_hybrids(case: str, tiny_model: Path, tmp_path: Path) -> None:
    test_delta_net.save_hybrid(tiny_model, tmp_path, case)
    check(tmp_path)
