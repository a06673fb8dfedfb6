"""Time to the first token of prompts that share a beginning, with and without the prefix cache.

    python -m qserve.evals.bench.prefix MODEL [--tokens 2048] [--own 64] [--rounds 5]

The engines take turns with the same prompts: ``tokens`` that all share, and ``own`` tokens of each. Two prompts before
them put the beginning in the cache.
"""

from __future__ import annotations

import argparse
from random import Random
from statistics import median

from qserve.evals.bench.offload import first_token
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine


def measure(model: str, tokens: int, own: int, rounds: int) -> tuple[list[float], list[float], int]:
    """Seconds computed, seconds with the cache, and how many tokens of a prompt were found. Tokens are compared."""
    config = {"max_model_len": tokens + own + 1, "max_num_seqs": 4}
    cold, warm = (Engine(model, EngineConfig(**config, enable_prefix_caching=on)) for on in (False, True))  # type: ignore[arg-type]
    random, found = Random(0), 0
    shared = [random.randrange(3, cold.vocab_size) for _ in range(tokens)]
    computed: list[float] = []
    cached: list[float] = []
    for _ in range(2 + rounds):
        prompt = [*shared, *(random.randrange(3, cold.vocab_size) for _ in range(own))]
        (seconds, token, _), (less, same, found) = first_token(cold, prompt), first_token(warm, prompt)
        assert token == same
        computed.append(seconds)
        cached.append(less)
    return computed[2:], cached[2:], found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m qserve.evals.bench.prefix", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--own", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    computed, cached, found = measure(asked.model, asked.tokens, asked.own, asked.rounds)
    print(f"{asked.tokens} tokens shared, {found} found: first token in {median(computed) * 1e3:.1f} ms computed, "
          f"{median(cached) * 1e3:.1f} ms with the cache, {median(computed) / median(cached):.1f} times sooner")


if __name__ == "__main__":
    main()
