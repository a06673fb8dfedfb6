"""llama.cpp, all sequences in one batch: ``llama_cpp_batch.py FILE.gguf THREADS``."""

import sys

import llama_cpp
import numpy
from turns import take

BATCH = 512
llama_cpp.llama_backend_init()
settings = llama_cpp.llama_model_default_params()
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), settings)
size = llama_cpp.llama_context_default_params()
size.n_ctx = 64 * 640  # every sequence has its own part
size.n_batch = size.n_ubatch = BATCH
size.n_seq_max = 64
size.n_threads = size.n_threads_batch = int(sys.argv[2])
context = llama_cpp.llama_init_from_model(model, size)
vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
batch = llama_cpp.llama_batch_init(BATCH, 0, 1)


def decode(tokens: list[tuple[int, int, int, bool]]) -> dict[int, int]:
    """Run (sequence, position, token, wanted) and give the greedy token of each sequence that wants one."""
    found = {}
    for start in range(0, len(tokens), BATCH):
        part = tokens[start : start + BATCH]
        batch.n_tokens = len(part)
        for i, (sequence, position, token, wanted) in enumerate(part):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        assert llama_cpp.llama_decode(context, batch) == 0
        for i, (sequence, _, _, wanted) in enumerate(part):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(context, i)
                found[sequence] = int(numpy.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax())
    return found


def run(prompts: list[list[int]], output: int) -> None:
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    length = len(prompts[0])
    last = decode(
        [(s, p, token, p == length - 1) for s, prompt in enumerate(prompts) for p, token in enumerate(prompt)]
    )
    for step in range(output - 1):
        last = decode([(s, length + step, token, True) for s, token in last.items()])


take("llama.cpp", run)
