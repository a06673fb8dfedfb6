"""How a contestant is asked: a line of JSON in, ``[requests, prompt, output]``, and out the seconds it took, those of a
clock and those of its processors.

Standard library only: each contestant runs in an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Run = Callable[[list[list[int]], int], None]
"""Takes prompts of token ids and makes exactly so many tokens for each, greedily, whatever they are."""


def take(name: str, run: Run) -> None:
    """Answer requests until the input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        requests, prompt, output, seed = json.loads(line)
        # Different prompts each time, so that no prefix cache helps; the same ones for every contestant.
        prompts = [[1000 + (seed * 7919 + i * 613 + j * 31) % 3000 for j in range(prompt)] for i in range(requests)]
        begin, used = time.perf_counter(), time.process_time()
        run(prompts, output)
        took = {"seconds": time.perf_counter() - begin, "processor": time.process_time() - used}
        print(json.dumps(took), file=answers, flush=True)
