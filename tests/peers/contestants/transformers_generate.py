"""transformers, a static batch in one dtype: ``transformers_generate.py DENSE_MODEL THREADS DTYPE``."""

import sys

import torch
from transformers import AutoModelForCausalLM
from turns import take

torch.set_num_threads(int(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[3])).eval()


def run(prompts: list[list[int]], output: int) -> None:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=output,
            max_new_tokens=output,
            pad_token_id=0,
        )
    assert made.shape[1] == ids.shape[1] + output


take("transformers", run)
