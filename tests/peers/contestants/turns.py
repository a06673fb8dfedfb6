"""How a contestant is asked: a line of JSON in, and out the seconds it took, those of a clock and those of its
processors. ``take`` is asked ``[requests, prompt, output, seed]``, ``answer`` ``[prompts, most]``.

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
Answer = Callable[[list[int], int], list[int]]
"""Takes a prompt of token ids and gives the answer: at most so many tokens, greedily, the end of it included."""


def _serve(name: str, respond: Callable[[object], dict[str, object]]) -> None:
    """Answer lines until the input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        begin, used = time.perf_counter(), time.process_time()
        found = respond(asked)
        took = {"seconds": time.perf_counter() - begin, "processor": time.process_time() - used}
        print(json.dumps(took | found), file=answers, flush=True)


def take(name: str, run: Run) -> None:
    """Let ``run`` make as many tokens as it is asked for."""

    def respond(asked: object) -> dict[str, object]:
        requests, prompt, output, seed = asked  # type: ignore[misc]
        # Different prompts each time, so that no prefix cache helps; the same ones for every contestant.
        run([[1000 + (seed * 7919 + i * 613 + j * 31) % 3000 for j in range(prompt)] for i in range(requests)], output)
        return {}

    _serve(name, respond)


def answer(name: str, run: Answer) -> None:
    """Let ``run`` answer prompts, one after the other. The tokens that it made are counted."""

    def respond(asked: object) -> dict[str, object]:
        prompts, most = asked  # type: ignore[misc]
        return {"tokens": sum(len(run(ids, most)) for ids in prompts)}

    _serve(name, respond)
