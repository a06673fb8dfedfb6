"""llama.cpp on a GGUF file: ``llama_cpp_perplexity.py MODEL.gguf WINDOWS.npy PROMPT.npy COUNT``, as JSON: the mean
negative log-likelihood of all but the first token of each window, and COUNT greedy tokens after the prompt."""

from __future__ import annotations

import json
import sys

import llama_cpp
import numpy as np

path, windows_path, prompt_path, count = sys.argv[1:]
windows, prompt = np.load(windows_path), np.load(prompt_path)
model = llama_cpp.Llama(path, n_ctx=windows.shape[1], logits_all=True, verbose=False, n_threads=2, n_threads_batch=2)
losses = []
for window in windows:
    model.reset()
    model.eval(window.tolist())
    logits = np.array(model.scores[: len(window) - 1], np.float64)
    logits -= logits.max(1, keepdims=True)
    picked = logits[np.arange(len(window) - 1), window[1:]]
    losses.append(float((np.log(np.exp(logits).sum(1)) - picked).mean()))
model.reset()
answer: list[int] = []
for token in model.generate(prompt.tolist(), temp=0.0, top_k=1, repeat_penalty=1.0):
    answer.append(int(token))
    if len(answer) == int(count):
        break
print(json.dumps({"loss": float(np.mean(losses)), "answer": answer}))
