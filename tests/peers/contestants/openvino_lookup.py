"""OpenVINO GenAI with prompt lookup: ``openvino_lookup.py MODEL THREADS DRAFT``, 0 without."""

import sys

import numpy
import openvino
import openvino_genai
from turns import answer

draft = int(sys.argv[3])
scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = 1  # GB
scheduler.enable_prefix_caching = False
lookup = {"prompt_lookup": True} if draft else {}
pipeline = openvino_genai.LLMPipeline(
    sys.argv[1], "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=int(sys.argv[2]), **lookup
)


def run(prompt: list[int], most: int) -> list[int]:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = most
    config.do_sample = False
    config.eos_token_id = pipeline.get_tokenizer().get_eos_token_id()
    config.set_eos_token_id(config.eos_token_id)
    if draft:
        config.num_assistant_tokens, config.max_ngram_size = draft, 3
    made = pipeline.generate(openvino.Tensor(numpy.array([prompt])), config)
    return list(made.tokens[0])


answer("openvino-genai", run)
