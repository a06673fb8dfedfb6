"""Time to the first token of a long prompt whose beginning is computed, in memory, or on disk.

    python -m qserve.evals.bench.offload MODEL [--tokens 4096] [--rounds 5] [--directory DIR]

They take turns. The KV cache has room for one prompt, so a prompt that nobody has seen evicts the known one to memory.
For the disk the engine is started again. It reads the blobs first from the disk itself (the system is told to drop them
from its memory), then, after another start, from the system's memory.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

from qserve.kernels.ops import BLOCK_SIZE
from qserve.runtime.cache import blocks_needed
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams

_WAYS = ("computed", "in memory", "on disk", "on disk, in the system's memory")


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int, int]:
    """Seconds to the first token, the token, and the prompt tokens that were not computed."""
    began = time.perf_counter()
    engine.submit("prompt", prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    while engine.has_work():
        for output in engine.step():
            seconds = time.perf_counter() - began
            token, cached = output.token_ids[0], output.cached_tokens
    return seconds, token, cached


def measure(model: str, tokens: int, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Seconds for each of ``_WAYS``. Raises ``RuntimeError`` where a block did not come back, or not as it was."""
    block_bytes = _block_bytes(model)
    blocks = blocks_needed(tokens + BLOCK_SIZE, BLOCK_SIZE, (0,)) + 8
    config = EngineConfig(
        max_model_len=tokens + BLOCK_SIZE, max_num_seqs=1, kv_cache_memory=blocks * block_bytes,
        kv_offload_memory=4 * blocks * block_bytes, kv_offload_dir=str(directory),
        kv_offload_dir_size=(rounds + 2) * 4 * blocks * block_bytes,
    )  # fmt: skip
    random, found = Random(0), {way: list[float]() for way in _WAYS}
    engine = Engine(model, config)

    def fresh(count: int) -> list[int]:
        return [random.randrange(engine.vocab_size) for _ in range(count)] + [1]

    known = fresh(tokens)
    _, want, _ = first_token(engine, known)
    for number in range(rounds + 1):
        times = [first_token(engine, fresh(tokens))[0]]
        for way in _WAYS[1:]:
            if way != "in memory":
                engine.close()
                if way == "on disk":
                    _drop_pages(directory)
                engine = Engine(model, config)
                first_token(engine, fresh(BLOCK_SIZE))  # touches what every step does
            seconds, token, cached = first_token(engine, known)
            if token != want or cached != tokens // BLOCK_SIZE * BLOCK_SIZE:
                raise RuntimeError(f"{way}: {cached} tokens came back and token {token} of {want} was next")
            times.append(seconds)
        if number:  # the first round touches memory for the first time
            for way, seconds in zip(_WAYS, times):
                found[way].append(seconds)
    engine.close()
    return found


def _block_bytes(model: str) -> int:
    memory = Engine(model, EngineConfig(max_model_len=BLOCK_SIZE, max_num_seqs=1)).memory
    return memory.kv_cache // memory.num_blocks


def _drop_pages(directory: Path) -> None:
    for path in directory.glob("*/[0-9]*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        found = measure(args.model, args.tokens, args.rounds, Path(directory))
    print(f"first token behind {args.tokens} tokens, medians of {args.rounds} rounds")
    computed = found["computed"]
    for way, seconds in found.items():
        ratios = sorted(base / each for base, each in zip(computed, seconds))
        print(f"{way:32} {median(seconds) * 1e3:8.1f} ms {median(ratios):7.1f}x  [{ratios[0]:.1f}, {ratios[-1]:.1f}]")


if __name__ == "__main__":
    main()
