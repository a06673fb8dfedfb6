"""OpenVINO GenAI with continuous batching: ``openvino_batching.py MODEL THREADS``."""

import sys

import numpy
import openvino
import openvino_genai
from turns import take

scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = 1  # GB
scheduler.max_num_seqs = 64
scheduler.max_num_batched_tokens = 512
scheduler.enable_prefix_caching = False
pipeline = openvino_genai.ContinuousBatchingPipeline(
    sys.argv[1], scheduler, "CPU", {"INFERENCE_NUM_THREADS": int(sys.argv[2])}
)


def run(prompts: list[list[int]], output: int) -> None:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = output
    config.ignore_eos = True
    config.do_sample = False
    made = pipeline.generate([openvino.Tensor(numpy.array([ids])) for ids in prompts], [config] * len(prompts))
    assert all(len(result.m_generation_ids[0]) == output for result in made)


take("openvino-genai", run)
