"""``python -m tests.lora_cost CHECKPOINT [KERNELS]``: what adapters cost a step in which all requests decode.

Two engines take turns, one without adapters and one with adapters of rank 16 on all linears; the median of the ratios
of neighbouring steps counts. The last column is what reading the adapters once takes at the memory's rate.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from qserve.checkpoint.source import open_model
from qserve.kernels import peaks
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams
from tests.adapters import write_adapter

CONTEXT, STEPS, RANK = 64, 60, 16


def begin(engine: Engine, adapters: list[str | None]) -> None:
    """Bring one request for each of ``adapters`` to its first decode."""
    params = SamplingParams(max_tokens=STEPS + 100, temperature=0.0, ignore_eos=True)
    for number, adapter in enumerate(adapters):
        prompt = [(7 * number + 31 * i) % 1000 + 10 for i in range(CONTEXT)]
        engine.submit(str(number), prompt, params, adapter=adapter)
    while any(not request.is_decoding for request in (*engine.scheduler.running(), *engine.scheduler.waiting())):
        engine.step()


def seconds(engine: Engine) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def main(model: str, kernels: str = "native") -> None:
    source = open_model(model)
    config = EngineConfig(kernels=kernels, max_model_len=512, max_num_seqs=64, max_loras=64, kv_cache_memory=1 << 30)
    plain, adapted = Engine(source, config), None
    with tempfile.TemporaryDirectory() as folder:
        adapted = Engine(source, EngineConfig(**{**config.__dict__, "enable_lora": True}))
        assert adapted.adapters._layers is not None
        shapes = adapted.adapters._layers.shapes
        path = str(write_adapter(Path(folder), shapes, r=RANK, size=0.01, dtype=torch.bfloat16))
        names = [f"a{number}" for number in range(64)]
        for name in names:  # each has memory of its own
            adapted.adapters.add(name, path, laid_out := adapted.adapters.read(path))
    rate = peaks.measure().bytes
    print(f"{kernels}, {rate / 1e9:.1f} GB/s from memory, {laid_out.nbytes / 1e6:.1f} MB an adapter")
    print("| requests | adapters | step without | with | cost | to read them |\n|---|---|---|---|---|---|")
    for requests in (8, 64):
        cases: list[tuple[str, list[str | None]]] = [
            ("none in use", [None] * requests), ("one", ["a0"] * requests), (f"{requests}", list(names[:requests])),
        ]  # fmt: skip
        for case, adapters in cases:
            begin(plain, [None] * requests)
            begin(adapted, adapters)
            pairs = [(seconds(plain), seconds(adapted)) for _ in range(STEPS)]
            cost = median(b / a for a, b in pairs) - 1
            before, after = (1e3 * median(each) for each in zip(*pairs))
            read = 1e3 * len({name for name in adapters if name}) * laid_out.nbytes / rate
            times = " | ".join(f"{time:.2f} ms" for time in (before, after))
            print(f"| {requests} | {case} | {times} | {cost:+.1%} | {read:.2f} ms |", flush=True)
            plain.abort_all()
            adapted.abort_all()


if __name__ == "__main__":
    main(*sys.argv[1:])
