"""What llama.cpp's KV caches cost: ``PYTHON tests/peers/kv_caches.py MODEL.gguf TEXT TOKENS WINDOW``.

It prints the mean KL divergence from llama.cpp's own f16 cache, over windows that begin with BOS. PYTHON is that of its
environment (``tests/environments.py peers``), which has no qserve.
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp
import numpy as np

CACHES = {"q8_0": 8, "q5_1": 7, "q4_1": 3, "q4_0": 2}
F16 = 1


def log_probabilities(model: llama_cpp.Llama, window: list[int]) -> np.ndarray:
    """float64 [tokens, vocab]."""
    model.reset()
    model.eval(window)
    logits = np.array(model.scores[: len(window)], dtype=np.float64)
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def main() -> None:
    path, text, tokens, window = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

    def load(kind: int) -> llama_cpp.Llama:
        return llama_cpp.Llama(
            path, n_ctx=window, n_batch=window, logits_all=True, verbose=False, n_threads=2, type_k=kind, type_v=kind,
            flash_attn=True,
        )  # fmt: skip

    base = load(F16)
    ids = base.tokenize(text.read_bytes()[: 20 * tokens], add_bos=False)
    starts = range(0, tokens // window * (window - 1), window - 1)
    windows = [[base.token_bos(), *ids[start : start + window - 1]] for start in starts]
    wanted = [log_probabilities(base, each) for each in windows]
    for name, kind in CACHES.items():
        model = load(kind)
        found = [log_probabilities(model, each) for each in windows]
        divergence = [(np.exp(p) * (p - q)).sum(1)[:-1].mean() for p, q in zip(wanted, found)]
        print(f"{name}: KL {np.mean(divergence):.4f}")


if __name__ == "__main__":
    main()
