"""How fast the engine serves: prefill and decode rates at fixed concurrency, compared with transformers.

A closed batch: n requests of one prompt length start together and produce one output length.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from qserve.calibration.text import load_text
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.source import ModelSource
from qserve.evals.gate import GateReport
from qserve.evals.report import Metric, Plot, Report, Section, Series
from qserve.kernels.threads import default_threads, torch_threads
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams

Note = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """Tokens of each prompt and of each output."""

    prompt: int = 64
    output: int = 64


@dataclass(frozen=True)
class Speed:
    """Medians over repeats, in tokens per second.

    prefill   prompt tokens of all requests over the time until the last has its first token
    decode    output tokens after the first, over the time after every request has its first
    output    all output tokens over the whole time: what a user of the batch sees
    """

    concurrency: int
    prefill: float
    decode: float
    output: float
    ttft: float
    repeats: int


def prompts_of(engine_tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """``count`` different prompts of ``length`` tokens cut from a text."""
    stride = max(1, (len(engine_tokens) - length) // max(count, 1))
    return [list(engine_tokens[i * stride : i * stride + length]) for i in range(count)]


def text_tokens(source: ModelSource) -> list[int]:
    """Tokens for prompts: ordinary English, so that the work per token is ordinary too."""
    return load_text("builtin", "calibrate").tokens(source.tokenizer())


def measure(engine: Engine, tokens: Sequence[int], concurrency: int, load: Load, repeats: int = 3) -> Speed:
    """Run the batch ``repeats`` times. Every repeat has prompts of its own, so that the prefix cache does not help."""
    runs = [_run(engine, tokens, concurrency, load, repeat, repeats) for repeat in range(repeats)]
    prefill, decode, output, ttft = (statistics.median(values) for values in zip(*runs))
    return Speed(concurrency, prefill, decode, output, ttft, repeats)


def _run(
    engine: Engine, tokens: Sequence[int], concurrency: int, load: Load, repeat: int, repeats: int
) -> tuple[float, float, float, float]:
    batch = prompts_of(tokens, concurrency * repeats, load.prompt)[repeat::repeats]
    params = SamplingParams(max_tokens=load.output, temperature=0.0, ignore_eos=True)
    started: set[str] = set()
    at_first = early = total = 0
    begin = time.perf_counter()
    all_started = begin
    salt = f"{repeat}-{begin}"  # nothing is shared with an earlier run
    for i, prompt in enumerate(batch):
        engine.submit(str(i), prompt, params, cache_salt=salt)
    while engine.has_work():
        for output in engine.step():
            total += len(output.token_ids)
            started.add(output.request_id)
        if len(started) == concurrency and all_started == begin:
            all_started = time.perf_counter()
            early, at_first = total, concurrency
    end = time.perf_counter()
    assert at_first == concurrency and total == concurrency * load.output
    first = all_started - begin
    decode = (total - early) / (end - all_started) if load.output > 1 else 0.0
    return concurrency * load.prompt / first, decode, total / (end - begin), first


class TransformersPeer:
    """The base model in plain transformers: ``generate``, greedy, one prompt at a time."""

    def __init__(self, source: ModelSource, dtype: torch.dtype, threads: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        plain = {k: v for k, v in source.config.items() if k not in ("model_type", "quantization_config")}
        config = AutoConfig.for_model(source.config["model_type"], **plain)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)
        self.model.to_empty(device="cpu")
        for module in self.model.modules():  # buffers that are computed, not stored
            if hasattr(module, "inv_freq"):
                module.__init__(config)  # type: ignore[misc]
        state = {name: source.tensor(name) for name in source.names()}
        self.model.load_state_dict(state, strict=False, assign=True)
        self.model.tie_weights()
        self.model.to(dtype).eval()
        self.dtype = dtype
        self.threads = threads

    def measure(self, tokens: Sequence[int], load: Load, repeats: int = 3) -> Speed:
        runs = []
        with torch_threads(self.threads):
            for prompt in prompts_of(tokens, repeats + 1, load.prompt):
                ids = torch.tensor([prompt])
                first = self._generate(ids, 1)
                whole = self._generate(ids, load.output)
                decode = (load.output - 1) / max(whole - first, 1e-9)
                runs.append((load.prompt / first, decode, load.output / whole, first))
        prefill, decode, output, ttft = (statistics.median(values) for values in zip(*runs[1:]))  # the first warms up
        return Speed(1, prefill, decode, output, ttft, repeats)

    def _generate(self, ids: torch.Tensor, count: int) -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        return time.perf_counter() - begin


def fastest_transformers(
    source: ModelSource, tokens: Sequence[int], load: Load, threads: int | None, note: Note
) -> tuple[Speed, str]:
    """The faster of float32 and bfloat16 on this machine: (speed, dtype)."""
    found: list[tuple[Speed, str]] = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        note(f"transformers generate, {name}")
        peer = TransformersPeer(source, dtype, threads or default_threads())
        found.append((peer.measure(tokens, load), name))
        del peer
        gc.collect()
    return max(found, key=lambda pair: pair[0].output)


def ratio_gates(text: str) -> dict[int, float]:
    """``1=3,16=8``: concurrency -> least output rate over the peer's. Raises ``UsageError``."""
    gates = {}
    for part in text.split(","):
        level, _, limit = part.partition("=")
        try:
            gates[int(level)] = float(limit)
            if not 0 < gates[int(level)] < float("inf"):
                raise ValueError
        except ValueError:
            raise UsageError(f"--min-ratio must be like 1=3,16=8, not {text!r}") from None
    return gates


def report(
    engine: Engine,
    speeds: Sequence[Speed],
    load: Load,
    peer: tuple[Speed, str] | None,
    gates: dict[int, float],
    command: str,
) -> Report:
    """Our rates by concurrency, the peer's one at a time, and the ratios of the output rates."""
    header = ["requests", "prefill tok/s", "decode tok/s", "output tok/s", "time to first token"]
    rows = [[f"{s.concurrency}", *_cells(s)] for s in speeds]
    data: dict[str, object] = {"load": asdict(load), "speeds": [asdict(s) for s in speeds]}
    judged = []
    if peer is not None:
        other, dtype = peer
        header.append("output, ratio")
        for row, s in zip(rows, speeds):
            row.append(f"{s.output / other.output:.1f}x")
        rows.append([f"transformers generate, {dtype}, one at a time", *_cells(other), "1"])
        data["peer"] = {"name": "transformers.generate", "dtype": dtype, **asdict(other)}
        data["ratios"] = {s.concurrency: s.output / other.output for s in speeds}
        for s in speeds:
            if s.concurrency in gates:
                value, limit = s.output / other.output, gates[s.concurrency]
                judged.append(
                    GateReport(
                        f"output rate at {s.concurrency} over transformers", value, limit, "at_least",
                        value >= limit, s.repeats, engine.kernels, other.output,
                    )
                )  # fmt: skip
    title = f"prompts of {load.prompt} and outputs of {load.output} tokens; {engine.kernels} kernels"
    section = Section(title, tuple(header), tuple(map(tuple, rows)))
    metrics = [Metric(f"output_rate/{s.concurrency}", s.output, "tok/s", "higher") for s in speeds]
    metrics += [Metric(f"ttft/{s.concurrency}", s.ttft, "s", "lower") for s in speeds]
    return Report(
        "throughput", f"Throughput of {engine.model_name}", command, data, (section,), tuple(judged),
        metrics=tuple(metrics), plots=(_plot(speeds, peer),),
    )  # fmt: skip


def _plot(speeds: Sequence[Speed], peer: tuple[Speed, str] | None) -> Plot:
    levels = tuple(map(float, range(len(speeds))))
    output, decode = tuple(s.output for s in speeds), tuple(s.decode for s in speeds)
    series = [Series("output", levels, output), Series("decode", levels, decode)]
    if peer is not None:
        series.append(Series("transformers, one at a time", levels, (peer[0].output,) * len(speeds)))
    caption = "Tokens per second of all requests together; medians of the repeats."
    ticks = tuple(str(s.concurrency) for s in speeds)
    return Plot("Rates by concurrency", caption, "requests at once", "tok/s", tuple(series), "bar", ticks)


def _cells(speed: Speed) -> list[str]:
    return [f"{speed.prefill:.0f}", f"{speed.decode:.1f}", f"{speed.output:.1f}", f"{speed.ttft * 1000:.0f} ms"]
