"""How fast a whole model steps on this GPU: random weights in the shapes of Llama 3, so nothing is downloaded.

``python whole_model.py OUT.json [--tiny]``. Every line is one model, precision and batch: the median time of a decode
step (graph replays, and the copies before and after them) or of a prefill, its tokens per second, and the share of the
roofline: bytes over the copy bandwidth or operations over the rate of a large product, both measured first. All layers
read weights of the same content from memory of their own. ``--tiny`` goes through Triton's interpreter on the CPU and
proves that the program runs, nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from qserve.checkpoint.errors import QServeError
from qserve.checkpoint.packed import PackedWeight
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme
from qserve.kernels import registry
from qserve.kernels.ops import Step
from qserve.runtime.models.config import DecoderConfig, decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits

TINY = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
W4, FP8 = WeightScheme(4, 128), WeightScheme(8, -1, dtype="fp8")
PRECISIONS: dict[str, tuple[QuantSpec | None, torch.dtype]] = {
    "bf16": (None, torch.float16),
    "w4a16": (QuantSpec("rtn", W4), torch.float16),
    "fp8": (QuantSpec("rtn", FP8, ActivationScheme("fp8")), torch.float16),
    "fp8+fp8kv": (QuantSpec("rtn", FP8, ActivationScheme("fp8")), torch.float8_e4m3fn),
}
"""Weights and inputs, and the KV cache."""


class RandomModel:
    """What a decoder asks of a model. Tensors of one shape have one content."""

    name = "random"

    def __init__(self, shape: dict[str, Any], spec: QuantSpec | None) -> None:
        self.config, self.spec = shape, spec
        hidden, inner = shape["hidden_size"], shape["intermediate_size"]
        kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
        self._shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        self._rest = {"embed_tokens": (shape["vocab_size"], hidden), "lm_head": (shape["vocab_size"], hidden)}

    def linears(self) -> list[str]:
        if self.spec is None:
            return []
        layers = range(self.config["num_hidden_layers"])
        return [f"model.layers.{i}.{module}" for i in layers for module in self._shapes]

    def has(self, name: str) -> bool:
        return name.endswith(".weight")

    def tensor(self, name: str) -> torch.Tensor:
        module = name.removesuffix(".weight")
        if "norm" in module:
            return torch.ones(self.config["hidden_size"])
        last = ".".join(module.split(".")[-2:])
        return _dense(self._shapes.get(last) or self._rest[module.split(".")[-1]])

    def linear(self, module: str) -> PackedWeight:
        assert self.spec is not None
        shape = self._shapes[".".join(module.split(".")[-2:])]
        return _packed(shape, self.spec.weights, self.spec.activations)


@cache
def _dense(shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)


@cache
def _packed(shape: tuple[int, ...], scheme: WeightScheme, activations: ActivationScheme | None) -> PackedWeight:
    generator = torch.Generator().manual_seed(0)
    if scheme.dtype == "fp8":
        codes = (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        return PackedWeight(scheme, codes.view(torch.uint8), torch.full((shape[0], 1), 2e-4), activations=activations)
    codes = torch.randint(0, scheme.max_code + 1, shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand(shape[0], scheme.groups(shape[1]), generator=generator) * 0.008 + 0.001
    return PackedWeight(scheme, codes, scales, activations=activations)


@dataclass(frozen=True)
class Ceilings:
    """Bytes and operations per second that this machine reaches."""

    bandwidth: float
    rate: float


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Any, repeats: int) -> float:
    """Median seconds, after two runs that compile and capture."""
    times = []
    for index in range(repeats + 2):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        if index >= 2:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def ceilings(device: torch.device, size: int) -> Ceilings:
    source = torch.empty(size << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    n = 8192 if device.type == "cuda" else 256
    a = torch.randn(n, n, device=device).to(torch.bfloat16)
    copied, multiplied = timed(lambda: target.copy_(source), 5), timed(lambda: a @ a, 5)
    return Ceilings(2 * source.numel() / copied, 2 * n**3 / multiplied)


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


def floor(config: DecoderConfig, spec: QuantSpec | None, kv_bytes: int, step: Step, context: int, limits: Ceilings,
          logits: int) -> float:  # fmt: skip
    """Seconds below which no step can be: every weight and every key once, every product once."""
    hidden, inner = config.hidden_size, config.intermediate_size
    linears = config.num_hidden_layers * hidden * (2 * config.q_size + 2 * config.kv_size + 3 * inner)
    head = hidden * config.vocab_size
    bits = 16.0 if spec is None else spec.weights.storage_bits(hidden, inner) / (hidden * inner)
    sequences, tokens = len(step.seq_start) - 1, len(step.token_ids)
    moved = linears * bits / 8 + head * 2 + sequences * context * config.kv_bytes_per_token(kv_bytes)
    seen = context if tokens == sequences else context / 2
    scores = 4 * config.num_hidden_layers * config.q_size * tokens * seen
    rate = limits.rate * (2 if spec is not None and spec.activations is not None else 1)
    return max(moved / limits.bandwidth, (2 * linears * tokens + 2 * head * logits) / rate + scores / limits.rate)


def measure(name: str, shape: dict[str, Any], precision: str, tiny: bool, limits: Ceilings) -> list[dict[str, Any]]:
    spec, kv_dtype = PRECISIONS[precision]
    config = decoder_config(shape, name)
    context, prompt, batches = (40, 24, [1, 2]) if tiny else (1024, 2048, [1, 8, 32, 128])
    executor = registry.make("triton", activations=torch.bfloat16)
    blocks = batches[-1] * -(-context // 16) + 8
    sizes = DecoderLimits(max(prompt, batches[-1]), batches[-1], max(context, prompt) + 16, blocks)
    decoder = Decoder(RandomModel(shape, spec), config, executor, sizes, kv_dtype=kv_dtype)  # type: ignore[arg-type]
    decoder.kv.view(torch.uint8).zero_()  # what was never written may be NaN

    def line(kind: str, step: Step, seen: int, rows: int) -> dict[str, Any]:
        last = (step.seq_start[1:] - 1).contiguous()

        def run() -> None:
            decoder.run(step)
            decoder.head(step, last)
            decoder.greedy[:rows].cpu()

        seconds = timed(run, 1 if tiny else 10)
        bound = floor(config, spec, kv_dtype.itemsize, step, seen, limits, rows)
        assert (decoder.greedy[:rows] >= 0).all(), "a NaN"
        return {
            "model": name, "precision": precision, "kind": kind, "batch": rows, "context": seen, "seconds": seconds,
            "tokens_per_second": len(step.token_ids) / seconds, "share_of_roofline": bound / seconds,
        }  # fmt: skip

    found = [line("prefill", step_of(0, prompt, 1, blocks), prompt, 1)]
    return found + [line("decode", step_of(context - 1, 1, size, blocks), context, size) for size in batches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--models", default="llama-3-8b,llama-3-70b")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    asked = parser.parse_args()
    device = registry.make("triton").placement.device
    limits = ceilings(device, 1 if asked.tiny else 2048)
    shapes = tomllib.loads((files("qserve.evals.planner") / "data/shapes.toml").read_text())
    models = {"tiny": TINY} if asked.tiny else {name: shapes[name] for name in asked.models.split(",")}
    results: list[dict[str, Any]] = []
    for name, shape in models.items():
        for precision in asked.precisions.split(","):
            shape = {key: value for key, value in shape.items() if key != "source"}
            try:
                results += measure(name, shape, precision, asked.tiny, limits)
            except (torch.OutOfMemoryError, QServeError) as error:
                results.append({"model": name, "precision": precision, "skipped": str(error).splitlines()[0]})
            if device.type == "cuda":
                torch.cuda.empty_cache()
    found = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "Triton's interpreter",
        "torch": torch.__version__, "bandwidth": limits.bandwidth, "rate": limits.rate, "results": results,
    }  # fmt: skip
    asked.out.write_text(json.dumps(found, indent=1))
    print(f"{found['device']}: copies {limits.bandwidth / 1e9:.0f} GB/s, products {limits.rate / 1e12:.1f} TFLOP/s")
    for row in results:
        if "skipped" in row:
            print(f"{row['model']:<12} {row['precision']:<10} skipped: {row['skipped']}")
        else:
            print(
                f"{row['model']:<12} {row['precision']:<10} {row['kind']:<8} x{row['batch']:<4} "
                f"{row['tokens_per_second']:>10.1f} tok/s  {row['share_of_roofline']:>6.1%} of the roofline"
            )


if __name__ == "__main__":
    main()
