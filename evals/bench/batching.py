"""Static against continuous batching on our engine: in steps, in seconds, and in cache use.

Static batching is how batches were served before (Yu et al., "Orca", OSDI 2022). The next batch starts when all of the
last has ended, and rows that have ended are computed on until the longest ends. The engine never does that; here
requests make it do so by going on to the longest output of their batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from qserve.checkpoint.errors import UsageError
from qserve.evals.lengths import MAX_TOKENS, Lengths
from qserve.evals.report import Metric, Plot, Report, Section, Series
from qserve.evals.simulator.recorder import recording
from qserve.kernels.ops import BLOCK_SIZE
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.step_plan import StepPlan

Update = Callable[[int, int], None]

STATIC_BATCHES = 4


@dataclass
class Batching:
    """The steps and time of one way of batching. Only tokens that were asked for count.

    Positions of the cache are summed over the steps. ``written`` hold a wanted token; ``paged`` are in held blocks.
    ``contiguous`` would be held by unpaged caches with room for the longest request of this load, ``whole_context`` by
    unpaged caches with room for the context, where the load is not known.
    """

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    written: int = 0
    paged: int = 0
    contiguous: int = 0
    whole_context: int = 0

    def __add__(self, other: Batching) -> Batching:
        ours, theirs = asdict(self), asdict(other)
        return Batching(**{name: value + theirs[name] for name, value in ours.items()})

    @property
    def per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Comparison:
    """``lengths``: those of the outputs, in the order of the requests."""

    batch: int
    context: int
    prompt: int
    lengths: tuple[int, ...]
    static: Batching
    continuous: Batching

    @property
    def bound(self) -> float:
        """The most that an always full batch gains, in steps: the longest output over the mean."""
        return max(self.lengths) * len(self.lengths) / sum(self.lengths)

    @property
    def gain_in_steps(self) -> float:
        return self.continuous.per_step / self.static.per_step

    @property
    def gain_in_time(self) -> float:
        return self.continuous.per_second / self.static.per_second


def lengths_of(output: Lengths, requests: int, batch: int, seed: int) -> tuple[int, ...]:
    """For a mix, equally many of each length in every batch, in random order; otherwise drawn."""
    draw = random.Random(seed)
    if not output.mix:
        return tuple(output.draw(draw, MAX_TOKENS) for _ in range(requests))
    found: list[int] = []
    for start in range(0, requests, batch):
        part = [output.mix[index % len(output.mix)] for index in range(start, min(start + batch, requests))]
        draw.shuffle(part)
        found += part
    return tuple(found)


def compare(
    engine: Engine, text: Sequence[int], prompt: int, lengths: Sequence[int], update: Update = lambda done, total: None
) -> Comparison:
    """Serve the requests both ways. Static batches are alike, so only some are served: half of them before the rest and
    half after, so that a machine that gets slower favours neither way.

    ``text``: tokens to cut prompts from. The batch is as large as the engine allows.
    """
    batch = engine.config.max_num_seqs
    if prompt + max(lengths) > engine.max_model_len:
        raise UsageError(f"prompts of {prompt} and outputs of {max(lengths)} tokens exceed the context")
    if len(text) < prompt:
        raise UsageError(f"--prompt {prompt} needs more text than the {len(text)} tokens there are")
    draw = random.Random(0)
    starts = [draw.randrange(len(text) - prompt + 1) for _ in lengths]
    prompts = [list(text[start : start + prompt]) for start in starts]
    batches = [slice(start, start + batch) for start in range(0, len(lengths), batch)][:STATIC_BATCHES]
    half, total = (len(batches) + 1) // 2, len(lengths) + min(len(lengths), len(batches) * batch)
    done = 0

    def one(part: slice, floor: int) -> Batching:
        nonlocal done
        found = _serve(engine, prompts[part], lengths[part], floor)
        done += found.requests
        update(done, total)
        return found

    static = sum((one(part, max(lengths[part])) for part in batches[:half]), Batching())
    continuous = one(slice(0, len(lengths)), 0)
    static = sum((one(part, max(lengths[part])) for part in batches[half:]), static)
    return Comparison(batch, engine.max_model_len, prompt, tuple(lengths), static, continuous)


def _serve(engine: Engine, prompts: Sequence[list[int]], lengths: Sequence[int], floor: int) -> Batching:
    """Serve until all have ended; no request ends before ``floor`` tokens."""
    found = Batching(len(lengths), sum(lengths))
    longest = len(prompts[0]) + max(lengths)
    wanted = [len(prompt) + length for prompt, length in zip(prompts, lengths)]
    begin = time.perf_counter()
    salt = f"{begin}"  # nothing is shared with an earlier run
    for index, (prompt, length) in enumerate(zip(prompts, lengths)):
        params = SamplingParams(max_tokens=max(length, floor), temperature=0.0, ignore_eos=True)
        engine.submit(str(index), prompt, params, cache_salt=f"{salt} {index}")
    with recording(engine) as recorder:
        while engine.has_work():
            engine.step()
            if plan := recorder.take():
                _count(found, plan, wanted, longest)
                found.whole_context += len(plan.sequences) * engine.max_model_len
    found.seconds = time.perf_counter() - begin
    return found


def _count(found: Batching, plan: StepPlan, wanted: Sequence[int], longest: int) -> None:
    found.steps += 1
    for sequence in plan.sequences:
        index = int(sequence.request_id.partition("#")[0])
        found.written += min(sequence.start + len(sequence.token_ids), wanted[index])
        found.paged += len(sequence.block_tables[0]) * BLOCK_SIZE
        found.contiguous += longest


def batching_report(found: Comparison, title: str, command: str) -> Report:
    """Both ways side by side, and what each kind of cache wastes under continuous batching."""
    static, continuous = found.static, found.continuous
    rows = [
        (
            way, f"{it.requests:,}", f"{it.tokens:,}", f"{it.steps:,}", f"{it.per_step / found.batch:.1%}",
            f"{it.seconds:.1f} s", f"{it.per_second:.1f}",
        )
        for way, it in (("static", static), ("continuous", continuous))
    ]  # fmt: skip
    rows.append(("gain", "", "", "", f"{found.gain_in_steps:.2f}x", "", f"{found.gain_in_time:.2f}x"))
    # In steps, not time: steps of a static batch attend to more positions, including those of ended requests.
    rows.append(("bound, longest over mean", "", "", "", f"{found.bound:.2f}x", "", ""))
    caches = (
        ("in blocks", continuous.paged),
        ("in one piece, for the longest request", continuous.contiguous),
        (f"in one piece, for the context of {found.context:,} tokens", continuous.whole_context),
    )
    waste = tuple(
        (name, f"{1 - continuous.written / held:.1%}", f"{held / continuous.paged:.1f}x") for name, held in caches
    )
    mix = Section(
        f"{len(found.lengths):,} requests on {found.batch} slots: prompts of {found.prompt}, outputs of "
        f"{min(found.lengths)} to {max(found.lengths)}, mean {sum(found.lengths) / len(found.lengths):.0f} tokens",
        ("batching", "requests", "output", "steps", "slots in use", "time", "output tok/s"),
        tuple(rows),
    )
    memory = Section("KV cache, continuous batching", ("allocated", "holds nothing", "memory, over blocks"), waste)
    metrics = (
        Metric("gain_in_steps", found.gain_in_steps, "x", "higher"),
        Metric("gain_in_time", found.gain_in_time, "x", "higher"),
        Metric("output_continuous", continuous.per_second, "tok/s", "higher"),
        Metric("output_static", static.per_second, "tok/s", "higher"),
        Metric("kv_waste_paged", 1 - continuous.written / continuous.paged, "", "lower"),
        Metric("kv_waste_contiguous", 1 - continuous.written / continuous.contiguous, "", "lower"),
    )
    bars = Plot(
        "Throughput", "Output tokens that were asked for, per second.", "", "tokens per second",
        (Series("static", (0.0,), (static.per_second,)), Series("continuous", (0.0,), (continuous.per_second,))),
        kind="bar", ticks=("",),
    )  # fmt: skip
    data = {
        "batch": found.batch,
        "prompt": found.prompt,
        "outputs": found.lengths,
        "static": asdict(static),
        "continuous": asdict(continuous),
        "bound": found.bound,
    }
    return Report("batching", title, command, data, (mix, memory), metrics=metrics, plots=(bars,))
