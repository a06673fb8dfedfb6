"""A needle in a haystack: is a sentence far back in the context still found, with a rounded KV cache?

A sentence with a number stands at some depth of an ordinary text; at the end the number is asked for. Small models find
it only sometimes, so the share of exact answers says little. So the log-probability that they give the number is
measured too, with the sentence in the text and without it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qserve.checkpoint.errors import DataError, UsageError
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.tokenizer import leading_tokens, plain_tokens
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.rope import context_limit

_PLACES = ("Oslo", "Lima", "Cairo", "Paris", "Delhi", "Quito", "Accra", "Tokyo")


@dataclass(frozen=True)
class Haystack:
    """lengths in tokens, question and answer included; depths 0 (at the beginning) to 1; needles for each cell."""

    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needles: int = 2

    def __post_init__(self) -> None:
        if min(self.lengths) < 64:
            raise UsageError("--needle-lengths must be at least 64 tokens each")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise UsageError("--needle-depths must be 0 to 100 percent")
        if not 1 <= self.needles <= len(_PLACES):
            raise UsageError(f"--needle-samples must be 1..{len(_PLACES)}")


@dataclass(frozen=True)
class Found:
    """One needle in one cell with one KV cache: the log-probability of the answer (nats, all its tokens), the same
    where the text does not contain it, and whether greedy decoding gives exactly the answer."""

    kv_cache_dtype: str
    length: int
    depth: float
    needle: int
    loglikelihood: float
    without: float
    exact: bool

    @property
    def gain(self) -> float:
        """How much the sentence helped, in nats."""
        return self.loglikelihood - self.without


def search(
    source: ModelSource, text: Sequence[int], haystack: Haystack, kv_cache_dtypes: Sequence[str],
    progress: Callable[[int, int], None] | None = None, *, kernels: str = "auto", threads: int | None = None,
) -> list[Found]:  # fmt: skip
    """Ask for every needle with every KV cache, one engine after the other. All caches see the same texts.

    Raises ``DataError`` where ``text`` is shorter than the longest haystack, ``UsageError`` where the model's context
    is shorter or there are no scales for a cache, and ``CapacityError`` where the memory is too small.
    """
    longest = max(haystack.lengths)
    if len(text) < longest:
        raise DataError(f"a haystack of {longest:,} tokens needs as much text, and there are {len(text):,}; give more")
    context = context_limit(decoder_config(source.config, source.name))
    if longest >= context:  # the engine adds a token to the prompt that it scores
        raise UsageError(f"--needle-lengths {longest} must be below the context of {source.name}, {context} tokens")
    configs = [
        EngineConfig(max_model_len=longest + 1, max_num_seqs=64, kv_cache_dtype=dtype, kernels=kernels, threads=threads)
        for dtype in kv_cache_dtypes
    ]
    calibrated = source.spec is not None and source.spec.kv_cache is not None
    if "int8" in kv_cache_dtypes and not calibrated:  # now, not after the first cache
        raise UsageError(
            f"{source.name} has no scales for an int8 KV cache: quantize it with --kv-cache int8, or leave int8 out of "
            "--kv-cache-dtypes"
        )
    total = len(kv_cache_dtypes) * len(haystack.lengths) * haystack.needles * (1 + len(haystack.depths))
    done = 0

    def tell() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    found = []
    for dtype, config in zip(kv_cache_dtypes, configs):
        engine = Engine(source, config)
        for length in haystack.lengths:
            for needle in range(haystack.needles):
                without, _ = _ask(engine, text, length, needle, None)
                tell()
                for depth in haystack.depths:
                    value, exact = _ask(engine, text, length, needle, depth)
                    found.append(Found(dtype, length, depth, needle, value, without, exact))
                    tell()
        del engine  # its cache makes room for the next
    return found


def _ask(engine: Engine, text: Sequence[int], length: int, needle: int, depth: float | None) -> tuple[float, bool]:
    """Log-probability of the answer, and whether each of its tokens is the likeliest, as greedy decoding would choose.
    """
    place, number = _PLACES[needle], random.Random(f"needle {needle}").randrange(10_000, 100_000)
    begin, answer = f"The secret number of {place} is", f" {number}"

    leading = leading_tokens(engine.tokenizer)
    question = plain_tokens(engine.tokenizer, f"\n\n{begin}")
    end = plain_tokens(engine.tokenizer, f"\n\n{begin}{answer}")
    sentence = [] if depth is None else plain_tokens(engine.tokenizer, f" {begin}{answer}. ")
    hay = list(text[: length - len(leading) - len(sentence) - len(end)])
    at = 0 if depth is None else round(depth * len(hay))
    tokens = [*leading, *hay[:at], *sentence, *hay[at:], *end]
    start = length - len(end) + len(question)
    total, exact, ids = 0.0, True, torch.tensor(tokens)
    for position, rows in engine.score(tokens):
        low, high = max(start, position + 1), min(len(tokens), position + 1 + len(rows))
        if low < high:
            chosen, target = rows[low - position - 1 : high - position - 1], ids[low:high]
            total += float(chosen.gather(1, target[:, None]).double().sum())
            exact = exact and bool((chosen.argmax(-1) == target).all())
    return total, exact
