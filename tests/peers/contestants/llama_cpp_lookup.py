"""llama.cpp with prompt lookup: ``llama_cpp_lookup.py FILE.gguf THREADS DRAFT``, 0 without."""

import sys

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from turns import answer

draft, threads = int(sys.argv[3]), int(sys.argv[2])
llama = llama_cpp.Llama(
    sys.argv[1], n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False,
    draft_model=LlamaPromptLookupDecoding(num_pred_tokens=draft) if draft else None,
)  # fmt: skip


def run(prompt: list[int], most: int) -> list[int]:
    llama.reset()
    made: list[int] = []
    for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
        made.append(token)
        if len(made) == most or token == llama.token_eos():
            break
    return made


answer("llama.cpp", run)
