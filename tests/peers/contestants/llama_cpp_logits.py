"""llama.cpp's logits of some tokens: ``llama_cpp_logits.py MODEL.gguf TOKENS.npy OUT.npy``, with keys and values in
float32."""

from __future__ import annotations

import sys

import llama_cpp
import numpy as np

path, tokens_path, out = sys.argv[1:]
tokens = np.load(tokens_path).tolist()
model = llama_cpp.Llama(path, n_ctx=32, logits_all=True, verbose=False, n_threads=2, type_k=0, type_v=0)
model.eval(tokens)
np.save(out, np.array(model.scores[: len(tokens)]))
