"""qserve: ``qserve_engine.py MODEL THREADS KERNELS``."""

import sys

from turns import take

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams

engine = Engine(sys.argv[1], EngineConfig(threads=int(sys.argv[2]), kernels=sys.argv[3], kv_cache_memory=1 << 30))


def run(prompts: list[list[int]], output: int) -> None:
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    made = 0
    for result in engine.generate(list(prompts), [params] * len(prompts)):
        made += len(result.token_ids)
    assert made == output * len(prompts), made


take("qserve", run)
