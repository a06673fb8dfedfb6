"""compressed-tensors decompresses the embeddings and output heads that we write as we read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qserve.checkpoint.source import open_model
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob

pytestmark = pytest.mark.interop

BITS = [(6, 0), (6, 6), (6, 8), (8, 0), (8, 4), (0, 6), (5, 5), (5, 8)]


@pytest.fixture(scope="module")
def decompressed(judge, tiny_model: Path, tmp_path_factory) -> dict[tuple[int, int], Path]:
    """4-bit checkpoints by the bits of their embedding and head, of a model whose rows of 72 values of 5 or 6 bits
    end within a word."""
    root = tmp_path_factory.mktemp("outer")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=331, hidden_size=72, head_dim=16, intermediate_size=144, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "dense")
    open_model(tiny_model).save_tokenizer(root / "dense")
    found = {}
    for embedding, head in BITS:
        job = QuantizeJob(
            method="rtn", calibration=None, format="compressed-tensors", embedding_bits=embedding, head_bits=head
        )
        found[embedding, head] = root / f"{embedding}-{head}"
        pipeline.run(open_model(root / "dense"), found[embedding, head], job)
    judge("compressed-tensors", "decompress.py", [(path,) for path in found.values()])
    return found


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_compressed_tensors_decompresses_embeddings_and_heads(bits, decompressed, answers) -> None:
    theirs, source = answers(decompressed[bits]), open_model(decompressed[bits])
    assert set(theirs) == {f"{module}.weight" for module in source.linears()}
    assert ("model.embed_tokens" in source.linears(), "lm_head" in source.linears()) == tuple(map(bool, bits))
    for module in source.linears():
        assert torch.equal(theirs[f"{module}.weight"], source.linear(module).dequantize()), module
