"""llama.cpp on GGUF files of every family that is written: ``python tests/peers/gguf_families.py ENVIRONMENTS``.

Small random models, in float: the greatest difference of a logit from plain transformers' over 24 tokens. Sizes differ
from those of the tests where llama.cpp takes for granted what all published models have. ENVIRONMENTS come from
``python tests/environments.py peers DIR llama-cpp``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qserve.checkpoint.convert import convert
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.hf import HFDirectory
from tests.checkpoint.test_gguf_families import CASES, random_model
from tests.checkpoint.test_gguf_writer import save_tokenizer

SCRIPT = Path(__file__).absolute().parent / "contestants" / "llama_cpp_logits.py"
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "exaone4": {
        "head_dim": 16, "num_hidden_layers": 64, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
    },
    "glm": {"head_dim": 16}, "dots1": {"num_key_value_heads": 4, "head_dim": 16},
    "olmoe": {"num_key_value_heads": 4}, "falcon-new": {"bias": False}, "starcoder2-no-biases": {"use_bias": True},
    "qwen3_5": {"linear_key_head_dim": 32, "num_hidden_layers": 8}, "qwen3_5-pairs": {"linear_key_head_dim": 32},
    "qwen3_5_moe": {"linear_key_head_dim": 32}, "qwen3_next": {"linear_key_head_dim": 32},
    "qwen3_next-older": {"linear_key_head_dim": 32}, "cohere-qk-norm": {"use_qk_norm": False},
    "mistral": {"sliding_window": 64}, "phi3": {"sliding_window": 64},
    "phi3-long": {"sliding_window": 64, "max_position_embeddings": 2048, "original_max_position_embeddings": 512},
}  # fmt: skip


def main() -> None:
    python = Path(sys.argv[1]).absolute() / "llama-cpp" / "bin" / "python"
    tokens = torch.randint(0, 90, (24,), generator=torch.Generator().manual_seed(7))
    for case, (kind, _, changes, _) in CASES.items():
        with tempfile.TemporaryDirectory() as work:
            model, _ = random_model(kind, {**changes, **AS_PUBLISHED.get(case, {})}, Path(work))
            save_tokenizer(Path(work))
            file, said = Path(work) / "m.gguf", Path(work) / "logits.npy"
            np.save(Path(work) / "tokens.npy", tokens.numpy())
            try:
                convert(HFDirectory(work), file, "gguf")
            except UsageError as error:
                print(f"{case:24} not written: {error}")
                continue
            command = [str(python), str(SCRIPT), str(file), str(Path(work) / "tokens.npy"), str(said)]
            if subprocess.run(command, capture_output=True).returncode:
                print(f"{case:24} not loaded")
                continue
            with torch.inference_mode():
                wanted = model(tokens[None]).logits[0].float().numpy()
            found = np.load(said)
            print(f"{case:24} {np.abs(found - wanted).max():.4f} of {np.abs(wanted).max():.2f}", flush=True)


if __name__ == "__main__":
    main()
