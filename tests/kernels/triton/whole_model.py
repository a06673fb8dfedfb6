"""How fast a whole model steps on this GPU: random weights in the shapes of Llama 3, so nothing is downloaded.

``python whole_model.py OUT.json [--limit SECONDS] [--tiny]``. Every line is one model, precision and batch: the median
time of a decode step (graph replays, and the copies before and after them) or of a prefill, its tokens per second, the
share of the roofline (bytes over the rate of a copy or operations over that of a large product, both measured first),
and how it compares with transformers, whose static batches run last for each model. With 4-bit weights decodes are also
measured where all requests have one LoRA adapter of rank 16 of all linears, and where each has its own. All layers read
weights of the same content from memory of their own. What does not fit the memory is said to be so, and OUT is written
after every model and precision. ``--profile`` prints besides which kernels a step consists of, and what each takes.
``--tiny`` goes through Triton's interpreter on the CPU and proves that it runs, nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from qserve.checkpoint.errors import QServeError
from qserve.evals.bench.gpu.kernels import peaks
from qserve.evals.bench.roofline import Roof
from qserve.kernels import registry
from qserve.kernels.executor import Step
from qserve.kernels.triton.tuning.stopwatch import Stopwatch
from qserve.runtime.models.config import DecoderConfig, decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from qserve.runtime.models.lora_layers import LoraLayers
from tests.adapters import random_adapter
from tests.kernels.triton import static_batching
from tests.kernels.triton.bounds import floor, lacking, weight_bytes
from tests.kernels.triton.random_model import PRECISIONS, RandomModel, forget, shape_of


@dataclass(frozen=True)
class Work:
    """Tokens of a sequence that decodes; requests that decode at once; prompts of one step, how many and of how many
    tokens; how often; tokens that the peer writes; whether the kernels of a step are listed."""

    context: int = 1024
    batches: tuple[int, ...] = (1, 8, 32, 128)
    prompts: tuple[tuple[int, int], ...] = ((1, 2048), (4, 2048), (1, 8192), (1, 32768))
    repeats: int = 10
    output: int = 32
    profile: bool = False


TINY = Work(20, (1, 2), ((2, 12),), 1, 4)
RANK, MOST_ADAPTERS = 16, 32


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Any, repeats: int) -> float:
    """Median seconds, after two runs that compile and capture; of three at least, and of no more than two seconds."""
    times: list[float] = []
    for _ in range(2):
        run()
    while len(times) < repeats and (len(times) < 3 or sum(times) < 2.0):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def kernels_of(run: Any) -> list[str]:
    """The kernels of one ``run``, the longest first: milliseconds of all its launches, how many, and the name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        synchronize()
    found = sorted(profile.key_averages(), key=lambda each: -each.device_time_total)
    return [f"    {each.device_time_total / 1e3:8.3f} ms  {each.count:5} x  {each.key[:90]}" for each in found[:14]]


def step_of(start: int, count: int, sequences: int, blocks: int) -> Step:
    """``sequences`` of ``count`` tokens from position ``start`` on, each in blocks of its own."""
    width = -(-(start + count) // 16)
    tables = (torch.arange(sequences * width, dtype=torch.int32) % blocks).view(sequences, width)
    positions = torch.arange(start, start + count, dtype=torch.int32)
    slots = tables[:, positions.long() // 16] * 16 + positions % 16
    return Step(
        token_ids=torch.randint(0, 90, (sequences * count,), dtype=torch.int32),
        positions=positions.repeat(sequences),
        slots=slots.reshape(-1).contiguous(),
        seq_start=torch.arange(0, sequences * count + 1, count, dtype=torch.int32),
        block_tables=tables,
        logit_rows=torch.empty(0, dtype=torch.int32),
    )


def row_bytes(config: DecoderConfig) -> int:
    """Of what a decoder holds for a token of a step."""
    wide = config.hidden_size + 2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size
    return 4 * config.hidden_size + 2 * wide


def measure(name: str, shape: dict[str, Any], precision: str, work: Work, roof: Roof) -> Iterator[dict[str, Any]]:
    """One line after another, of the batches whose keys and values fit beside the weights."""
    spec, kv_dtype = PRECISIONS[precision]
    config, about = decoder_config(shape, name), {"model": name, "precision": precision}
    executor = registry.make("triton", activations=torch.bfloat16)
    device, weights = executor.placement.device, weight_bytes(config, spec)
    token = config.kv_bytes_per_token(kv_dtype.itemsize)
    if (reason := lacking(device, weights + token * work.context)) is not None:
        yield {**about, "skipped": f"the weights do not fit: {reason}"}
        return
    prompts: list[tuple[int, int]] = []
    requests: list[tuple[int, int]] = []
    for found, cases, rows in (
        # A prompt has rows of inputs, too: of all that a layer has at once, in 16 bits, and those in 32.
        (prompts, work.prompts, row_bytes(config)), (requests, [(count, work.context) for count in work.batches], 0),
    ):  # fmt: skip
        for count, length in cases:
            needed = weights * 1.05 + count * ((length + 16) * token + length * rows)
            if (reason := lacking(device, needed)) is None:
                found.append((count, length))
            else:
                yield {**about, "skipped": f"{count} of {length} tokens do not fit: with the weights it {reason}"}
    fitting = [*prompts, *requests]
    if not fitting:
        return
    blocks = max(count * -(-length // 16) for count, length in fitting) + 8
    most = max(count for count, _ in fitting)
    tokens = max([most, *(count * length for count, length in prompts)])
    longest = max(length for _, length in fitting) + 16
    sizes = DecoderLimits(tokens, most, longest, blocks)
    adapts = precision == "w4a16" and weights < 16 << 30  # to lay out larger ones takes the time of a measurement
    lora = LoraLayers(min(most, MOST_ADAPTERS), RANK) if adapts else None
    decoder = Decoder(RandomModel(shape, spec, device), config, executor, sizes, kv_dtype=kv_dtype, lora=lora)
    if lora is not None:
        laid_out = lora.lay_out(random_adapter(lora.shapes, RANK, 0.001))
        for slot in range(lora.count):  # each gets memory of its own there
            lora.put(slot, laid_out)
    forget()
    registry.settle(executor)
    decoder.kv.view(torch.uint8).zero_()  # what was never written may be NaN

    def line(kind: str, step: Step, seen: int, rows: int) -> dict[str, Any]:
        last = (step.seq_start[1:] - 1).contiguous()

        def run() -> None:
            decoder.run(step)
            decoder.head(step, last)
            decoder.greedy[:rows].cpu()

        seconds = timed(run, work.repeats)
        if work.profile and device.type == "cuda":
            title = f"{name} {precision} {kind} x{rows} of {seen}: {seconds * 1e3:.3f} ms"
            print(title, *kernels_of(run), sep="\n", flush=True)
        tokens = len(step.token_ids)
        bound = floor(config, spec, kv_dtype.itemsize, rows, tokens, seen, roof)
        assert (decoder.greedy[:rows] >= 0).all(), "a NaN"
        return {
            **about, "kind": kind, "batch": rows, "context": seen, "seconds": seconds,
            "tokens_per_second": tokens / seconds, "share_of_roofline": bound / seconds,
        }  # fmt: skip

    for count, length in prompts:
        yield line("prefill", step_of(0, length, count, blocks), length, count)
    for count, length in requests:
        step = step_of(length - 1, 1, count, blocks)
        yield line("decode", step, length, count)
        for adapters in () if lora is None else sorted({1, min(count, lora.count)}):
            slots = torch.arange(count, dtype=torch.int32) % adapters
            yield line(f"decode, {adapters} LoRA", replace(step, adapters=slots), length, count)


def compared(results: list[dict[str, Any]]) -> None:
    """Put beside every line how many times as fast as transformers it is, where that was measured."""
    peers = {(row["model"], row["kind"], row["batch"], row["context"]): row["tokens_per_second"]
             for row in results if row["precision"] == static_batching.NAME and "kind" in row}  # fmt: skip
    for row in results:
        if "kind" in row and (peer := peers.get((row["model"], row["kind"], row["batch"], row["context"]))):
            row["against_transformers"] = row["tokens_per_second"] / peer


def text(row: dict[str, Any]) -> str:
    begin = f"{row['model']:<12} {row['precision']:<18}"
    if "skipped" in row:
        return f"{begin} skipped: {row['skipped']}"
    peer = f"  {row['against_transformers']:>6.2f}x transformers" if "against_transformers" in row else ""
    what = f"{row['kind']:<15} x{row['batch']:<4} of {row['context']:<6}"
    return (f"{begin} {what} {row['tokens_per_second']:>10.1f} tok/s"
            f"  {row['share_of_roofline']:>6.1%} of the roofline{peer}")  # fmt: skip


def main() -> int:
    """1 where something failed that is not a lack of time or memory."""
    failed = False
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--models", default="llama-3-8b,llama-3-70b")
    parser.add_argument("--precisions", default=",".join([*PRECISIONS, "transformers"]))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which nothing new is begun")
    asked = parser.parse_args()
    until = time.monotonic() + asked.limit
    work = replace(TINY if asked.tiny else Work(), profile=asked.profile)
    device = registry.make("triton").placement.device
    roof = peaks(Stopwatch(device), torch.bfloat16, *((1 << 20, 256) if asked.tiny else ()))
    results: list[dict[str, Any]] = []
    found = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "Triton's interpreter",
        "torch": torch.__version__, "bandwidth": roof.bytes, "rate": roof.operations, "results": results,
    }  # fmt: skip
    rates = f"copies {roof.bytes / 1e9:.0f} GB/s, products {(roof.operations or 0) / 1e12:.1f} TFLOP/s"
    print(f"{found['device']}: {rates}")
    for name in ["tiny"] if asked.tiny else asked.models.split(","):
        shape = shape_of(name)
        for precision in asked.precisions.split(","):
            label = static_batching.NAME if precision == "transformers" else precision
            begun = len(results)
            try:
                if time.monotonic() > until:
                    raise TimeoutError("no time was left")
                if precision == "transformers":
                    args = (device, roof, work.context, work.prompts, work.batches, work.output)
                    results.extend(static_batching.measure(name, shape, *args))
                else:
                    results.extend(measure(name, shape, precision, work, roof))
            except Exception as error:  # the others have their turn whatever became of this one
                failed = failed or not isinstance(error, TimeoutError | torch.OutOfMemoryError | QServeError)
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                results.append({"model": name, "precision": label, "skipped": reason})
            forget()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            compared(results)
            asked.out.write_text(json.dumps(found, indent=1))
            print("\n".join(text(row) for row in results[begun:]), flush=True)
    print("\n".join(text(row) for row in results if "against_transformers" in row))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
