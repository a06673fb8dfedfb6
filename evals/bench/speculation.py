"""Answers with and without drafts, in turns on one engine: how much faster, and whether they are the same."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from qserve.checkpoint.errors import QServeError
from qserve.evals.report import Metric, Report, Section
from qserve.runtime.drafter import Drafter
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams

GRAM = 32
Asked = tuple[list[int], SamplingParams]
Answers = list[list[int]]


@dataclass(frozen=True)
class Comparison:
    """``plain`` and ``drafted``: output tokens per second, prompts included. ``ratio`` of both, the mean of the pairs,
    with its normal 95 % interval.

    Attributes:
        accepted: share of the drafted tokens that were right.
        drafted_per_step: drafted tokens of a step.
        saved: share of the steps that were not needed.
        repeated: share of the answers' n-grams of 32 tokens that came earlier in the answer and not in the prompt: what
            a drafter gains because a model loops.
    """

    concurrency: int
    pairs: int
    requests: int
    output: int
    plain: float
    drafted: float
    ratio: float
    low: float
    high: float
    accepted: float
    drafted_per_step: float
    saved: float
    repeated: float


def prompt_tokens(engine: Engine, text: str) -> list[int]:
    """The tokens of a question: in the model's chat template, where it has one."""
    tokenizer = engine.tokenizer
    if not tokenizer.chat_template:
        return engine.encode(text)
    messages = [{"role": "user", "content": text}]
    shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(shown, add_special_tokens=False)["input_ids"])


def compare(
    engine: Engine, drafter: Drafter, asked: Sequence[Asked], concurrency: int, pairs: int,
    update: Callable[[int, int], None],
) -> Comparison:  # fmt: skip
    """Answer all of ``asked`` ``pairs`` times without and with ``drafter``, so many at once, after one pair that does
    not count. Raises ``QServeError`` where an answer differs."""
    times: dict[bool, list[float]] = {False: [], True: []}
    steps = {False: 0, True: 0}
    before, answers = engine.stats(), Answers()
    for pair in range(pairs + 1):
        if pair == 1:
            before, steps = engine.stats(), {False: 0, True: 0}
        for drafts in (False, True) if pair % 2 else (True, False):
            engine.drafter = drafter if drafts else None
            seconds, found, count = _run(engine, asked, concurrency, f"{pair} {drafts} {time.perf_counter()}")
            if answers and found != answers:
                raise QServeError("answers with and without drafts differ, which is a defect of qserve: report it")
            answers = found
            steps[drafts] += count
            times[drafts].append(seconds)
        update(pair, pairs + 1)
    after, output = engine.stats(), sum(map(len, answers))
    ratios = [plain / drafted for plain, drafted in zip(times[False][1:], times[True][1:])]
    ratio = math.fsum(ratios) / pairs
    spread = math.sqrt(math.fsum((each - ratio) ** 2 for each in ratios) / max(1, pairs - 1))
    error = 1.96 * spread / math.sqrt(pairs)
    tokens = after.num_draft_tokens - before.num_draft_tokens
    plain, drafted = (output * pairs / math.fsum(times[drafts][1:]) for drafts in (False, True))
    return Comparison(
        concurrency, pairs, len(asked), output, plain, drafted, ratio, ratio - error, ratio + error,
        (after.num_accepted_tokens - before.num_accepted_tokens) / max(1, tokens), tokens / steps[True],
        1 - steps[True] / steps[False], repeated([prompt for prompt, _ in asked], answers),
    )  # fmt: skip


def repeated(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
    """See ``Comparison``; 0 where no answer has 32 tokens."""
    again = total = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        known, seen = set(_grams(prompt)), set[tuple[int, ...]]()
        for gram in _grams(answer):
            total += 1
            again += gram in seen and gram not in known
            seen.add(gram)
    return again / max(1, total)


def _grams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + GRAM]) for start in range(len(tokens) - GRAM + 1)]


def _run(engine: Engine, asked: Sequence[Asked], concurrency: int, salt: str) -> tuple[float, Answers, int]:
    """Seconds, answers and steps. With a ``salt`` of its own, a run finds no prefix or answer of another."""
    answers: Answers = [[] for _ in asked]
    todo, running, steps = list(enumerate(asked))[::-1], 0, 0
    gc.collect()
    begin = time.perf_counter()
    while todo or running:
        while todo and running < concurrency:
            index, (prompt, params) = todo.pop()
            engine.submit(str(index), prompt, params, cache_salt=salt)
            running += 1
        steps += 1
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
            running -= output.finish_reason is not None
    return time.perf_counter() - begin, answers, steps


def report(model: str, found: Sequence[Comparison], asked: str, settings: dict[str, object], command: str) -> Report:
    header = ("requests at once", "without, tok/s", "with, tok/s", "ratio", "95 %", "drafted per step", "accepted",
              "steps saved", "repeated 32-grams")  # fmt: skip
    rows = tuple(
        (f"{each.concurrency}", f"{each.plain:.1f}", f"{each.drafted:.1f}", f"{each.ratio:.2f}",
         f"{each.low:.2f} to {each.high:.2f}", f"{each.drafted_per_step:.1f}", f"{each.accepted:.0%}",
         f"{each.saved:.0%}", f"{each.repeated:.0%}")
        for each in found
    )  # fmt: skip
    metrics = []
    for each in found:
        metrics += [
            Metric(f"speculation_ratio/{each.concurrency}", each.ratio, "", "higher", each.low, each.high),
            Metric(f"output_rate/{each.concurrency}", each.drafted, "tok/s", "higher"),
        ]
    data = {"asked": asked, "speculative_config": settings, "levels": [asdict(each) for each in found]}
    return Report(
        "speculation", f"Drafts on {model}", command, data,
        (Section(f"With and without drafts: {asked}", header, rows),), metrics=tuple(metrics),
    )  # fmt: skip
