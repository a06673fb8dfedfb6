"""gguf-py, the reference of the container: we read what it dequantizes with the same result, or refuse it by name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from qserve.checkpoint.gguf import BLOCKS, GGUFFile

pytestmark = pytest.mark.interop

SIZE, ROWS = 256, 96
# Where the blocks hold floats, which random bytes would make infinite: (offset, how many), float16.
FLOATS = {
    Kind.Q4_0: [(0, 1)], Kind.Q4_1: [(0, 2)], Kind.Q5_0: [(0, 1)], Kind.Q5_1: [(0, 2)], Kind.Q8_0: [(0, 1)],
    Kind.Q2_K: [(80, 2)], Kind.Q3_K: [(108, 1)], Kind.Q4_K: [(0, 2)], Kind.Q5_K: [(0, 2)], Kind.Q6_K: [(208, 1)],
    Kind.IQ4_NL: [(0, 1)], Kind.IQ4_XS: [(0, 1)], Kind.IQ2_XXS: [(0, 1)], Kind.IQ2_XS: [(0, 1)], Kind.IQ2_S: [(0, 1)],
    Kind.IQ3_XXS: [(0, 1)], Kind.IQ3_S: [(0, 1)], Kind.IQ1_S: [(0, 1)], Kind.TQ1_0: [(52, 1)], Kind.TQ2_0: [(64, 1)],
}
SCALES = {Kind.MXFP4: 0}
"""The byte of a block that holds an exponent of two."""


def random_blocks(kind: Kind) -> np.ndarray:
    """uint8 [ROWS, bytes of SIZE elements]: any bytes, with sensible floats where floats are."""
    per_block, nbytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    blocks = rng.integers(0, 256, (ROWS * SIZE // per_block, nbytes), dtype=np.uint8)
    for offset, count in FLOATS.get(kind, []):
        values = (rng.standard_normal((len(blocks), count)) * 0.01).astype(np.float16)
        blocks[:, offset : offset + 2 * count] = values.view(np.uint8)
    if kind in SCALES:
        blocks[:, SCALES[kind]] = rng.integers(118, 124, len(blocks))
    return blocks.reshape(ROWS, -1)


def save(path: Path, kind: Kind, embedding: np.ndarray) -> Path:
    """A llama of one layer; its embedding is ``embedding``, its other tensors zeros in float32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(SIZE)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=kind)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((SIZE, SIZE), np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(SIZE, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [*FLOATS, *SCALES], ids=lambda kind: kind.name)
def test_every_block_type(kind, tmp_path) -> None:
    blocks = random_blocks(kind)
    path = save(tmp_path / "m.gguf", kind, blocks)
    expected = torch.from_numpy(dequantize(blocks, kind))
    assert kind in BLOCKS and torch.equal(GGUFFile(path).tensor("model.embed_tokens.weight"), expected)
    # More values than sixteen codes of one scale. MXFP4's scales are powers of two, and its products coincide.
    assert expected.isfinite().all() and expected.unique().numel() > 20
