"""qserve that drafts what came before: ``qserve_lookup.py MODEL THREADS METHOD``, ``none`` without."""

import sys

from turns import answer

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.speculative_config import SpeculativeConfig

drafts = None if sys.argv[3] == "none" else SpeculativeConfig(method=sys.argv[3])
config = EngineConfig(
    threads=int(sys.argv[2]), kv_cache_memory=1 << 30, speculative_config=drafts, enable_prefix_caching=False
)
engine = Engine(sys.argv[1], config)


def run(prompt: list[int], most: int) -> list[int]:
    made: list[int] = []
    for result in engine.generate([prompt], [SamplingParams(max_tokens=most, temperature=0.0)]):
        made += result.token_ids
    return made


answer("qserve", run)
