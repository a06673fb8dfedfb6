"""Times configurations of the linear products on the GPU that is here and writes the best as data.

``python -m qserve.kernels.triton.tune``; ``--help`` says more. The caches hold none of a weight when its turn comes
(``Stopwatch``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import triton

from qserve.checkpoint.packed import PackedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import ops
from qserve.kernels.triton import eight_bit, target, weight_only
from qserve.kernels.triton.configs import Config, bucket_of, file_of
from qserve.kernels.triton.stopwatch import Stopwatch

SHAPES = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (28672, 4096), "8B down": (4096, 14336),
    "70B gate_up": (57344, 8192), "70B down": (8192, 28672), "70B qkv": (10240, 8192), "70B o": (8192, 8192),
}  # fmt: skip
"""(outputs, inputs) of Llama 3."""
SCHEMES: dict[str, tuple[WeightScheme, ActivationScheme | None]] = {
    "w4": (WeightScheme(4, 128), None),
    "w4a": (WeightScheme(4, 128, symmetric=False), None),
    "w8": (WeightScheme(8, 128), None),
    "int8": (WeightScheme(8, -1), ActivationScheme("int8")),
    "fp8": (WeightScheme(8, -1, dtype="fp8"), ActivationScheme("fp8")),
    "fp8-block": (WeightScheme(8, 128, dtype="fp8", rows=128), ActivationScheme("fp8", "group", group_size=128)),
}
ROWS = (1, 16, 32, 64, 128, 256, 2048)
Tuned = weight_only.WeightOnly | eight_bit.EightBit


def candidates(product: Tuned, rows: int, chosen: Config) -> list[Config]:
    """Configurations worth timing, the chosen one first."""
    swaps = (False, True) if isinstance(product, weight_only.WeightOnly) else (False,)
    tiles = [(16, n, w) for n, w in ((64, 4), (128, 4), (128, 8), (256, 8))] if rows <= 16 else []
    tiles += [(32, 64, 4), (32, 128, 4), (32, 128, 8)] if 16 < rows <= 64 else []
    tiles += [(64, 64, 4), (64, 128, 4), (64, 128, 8), (64, 256, 8)] if rows > 32 else []
    tiles += [(128, 128, 4), (128, 128, 8), (128, 256, 8)] if rows > 64 else []
    found = [chosen]
    for m, n, warps in tiles:
        for swap in swaps:
            if (swap and (rows <= 16 or n < 64)) or (len(swaps) == 2 and not swap and rows > 64):
                continue
            for stages in (2, 3, 4) if m >= 64 else (3, 4, 5):
                counts = {1} if rows > 128 else {chosen.splits, max(1, chosen.splits // 2), chosen.splits * 2}
                found += [Config(m, n, warps, stages, swap, count) for count in sorted(counts)]
    return found


def random_weight(scheme: WeightScheme, activations: ActivationScheme | None, n: int, k: int) -> PackedWeight:
    """Any weight of the scheme: what it holds does not change the time, but zeros would."""
    codes = torch.randint(0, min(scheme.max_code, 126) + 1, (n, k), dtype=torch.uint8)
    scales = torch.full((n, scheme.groups(k)), 2.0**-10)
    zeros = None if scheme.symmetric else torch.full((n, scheme.groups(k)), scheme.zero, dtype=torch.uint8)
    return PackedWeight(scheme, codes, scales, zeros, activations=activations)


def weight_bytes(product: Tuned) -> int:
    """Bytes that one product must read of its weight."""
    if isinstance(product, weight_only.WeightOnly):
        tensors = [product.planes.words, product.planes.scales, product.planes.zeros]
    else:
        tensors = [product.weight, product.scales]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def seconds(watch: Stopwatch, products: list[Tuned], rows: int, config: Config) -> float | None:
    """The time of a product with ``config``; None where the GPU has not what it needs."""
    for product in products:
        product.configure({bucket_of(rows): config})
    try:
        return watch.time([partial(product.run, rows) for product in products]).seconds
    except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError):
        return None


def tune(schemes: list[str], shapes: list[str], rows: list[int], limit: float, path: Path) -> None:
    """Time every candidate and write the best of each to ``path``, adding to what it holds; stop after ``limit`` s."""
    device, until = torch.device("cuda"), time.monotonic() + limit
    watch = Stopwatch(device)
    held = json.loads(path.read_text()) if path.exists() else {"entries": {}, "microseconds": {}}
    held |= {"gpu": target.target(device).name, "triton": triton.__version__, "torch": torch.__version__,
             "command": " ".join(["python -m qserve.kernels.triton.tune", *sys.argv[1:]])}  # fmt: skip
    for shape in shapes:
        n, k = SHAPES[shape]
        for name in schemes:
            weight = random_weight(*SCHEMES[name], n, k)
            x = torch.randn(max(rows), k, dtype=torch.bfloat16, device=device)
            out = torch.empty(max(rows), n, dtype=torch.bfloat16, device=device)
            kernel = weight_only.WeightOnly if weight.activations is None else eight_bit.EightBit
            first = kernel(ops.Linear(x, weight, out), device, False)
            products: list[Tuned] = [first]
            more = watch.copies(weight_bytes(first)) - 1
            products += [kernel(ops.Linear(x, weight, out), device, False) for _ in range(more)]
            for count in rows:
                chosen, best = first.configs[bucket_of(count)], (float("inf"), first.configs[bucket_of(count)])
                for config in candidates(first, count, chosen):
                    if time.monotonic() > until:
                        break
                    if first.padded_n % config.block_n:
                        continue
                    if (took := seconds(watch, products, count, config)) is not None:
                        best = min(best, (took, config), key=lambda pair: pair[0])
                if best[0] == float("inf"):
                    continue
                rate = weight_bytes(first) / best[0] / 1e12
                print(f"{shape:12} {name:9} rows {count:5}: {best[0] * 1e6:8.1f} us, {rate:.2f} TB/s of weights, "
                      f"{2 * n * k * count / best[0] / 1e12:6.1f} TFLOP/s, {best[1]}", flush=True)  # fmt: skip
                bucket = str(bucket_of(count))
                held["entries"].setdefault(first.key, {})[bucket] = asdict(best[1])
                held["microseconds"].setdefault(first.key, {})[bucket] = round(best[0] * 1e6, 2)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(held, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Time configurations of the linear products and write the best.")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=["w4", "fp8"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--limit", type=float, default=540, help="seconds")
    parser.add_argument("--out", type=Path, help="the file to write; beside this program by default")
    asked = parser.parse_args()
    if target.is_interpreted() or target.missing() is not None:
        print(f"tuning needs a GPU: {target.missing() or 'the kernels are interpreted (TRITON_INTERPRET)'}")
        return 1
    path = asked.out or file_of(target.target(torch.device("cuda")))
    tune(asked.schemes, asked.shapes, asked.rows, asked.limit, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
