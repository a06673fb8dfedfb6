"""Expected memory and time of a quantization, before it starts.

Knows sizes, this machine's free memory and its speed; does not know weights.
"""

from __future__ import annotations

import resource
import sys
import time

import psutil
import torch

from qserve.calibration.skeleton import Skeleton
from qserve.checkpoint.errors import CapacityError
from qserve.checkpoint.spec import QuantSpec
from qserve.quantize.job import Forecast, QuantizeJob
from qserve.runtime.memory import available_memory

_SHARD_BYTES = 2 << 30
# Measured on a 135M model: what attention and norms add to the products of calibration, and how many
# multiplications searching the scales of one weight and rounding it is worth.
_OVERHEAD = 1.2
_ROUNDING = 6000
# Bytes per squared input while a Hessian is inverted: copies in float32 and float64, a factor, a solution. Measured.
_HESSIAN_BYTES = 62
# What a forward allocates besides; the forecast for 24,576 tokens of that model is a fifth above its measured peak.
_TEMPORARIES = 1.3
# Modules that share an input share its Hessian: 7 linears of a usual block have 4 inputs, and only the upper
# triangle is computed, by blocks.
_HESSIAN_SHARE = 0.45


def forecast(job: QuantizeJob, skeleton: Skeleton, spec: QuantSpec) -> Forecast:
    """Peak memory counts what lives at once: this process as it is, one block in float32 and its replacement,
    every linear's output and four hidden states for all tokens, the matrices of the widest input's Hessian, and
    the shard being gathered; not pages of the model's files, which the system takes back when it needs them. Time
    is the products to compute, at the speed measured here."""
    shapes = skeleton.shapes
    blocks = len(skeleton.blocks)
    weights = sum(out * inp for out, inp in shapes.values())
    outputs = sum(out for out, _ in shapes.values()) // blocks
    squares = sum(inp * inp for _, inp in shapes.values())
    widest = max(inp for _, inp in shapes.values())

    quantized_bits = sum(
        scheme.storage_bits(out, inp)
        for module, (out, inp) in shapes.items()
        if (scheme := spec.scheme_of(module)) is not None
    )
    kept = skeleton.source.parameters() - sum(
        out * inp for module, (out, inp) in shapes.items() if spec.scheme_of(module) is not None
    )
    checkpoint_bytes = quantized_bits // 8 + 2 * kept

    activations = int(_TEMPORARIES * 4 * job.tokens * (outputs + 4 * skeleton.hidden_size))
    stem = skeleton.embedding_bytes() + 4 * job.tokens * skeleton.hidden_size if job.tokens else 0
    block = 2 * skeleton.block_bytes() + activations + (_HESSIAN_BYTES * widest * widest if job.method == "gptq" else 0)
    copying = 2 * skeleton.embedding_bytes()
    peak = psutil.Process().memory_info().rss + max(stem, block, copying) + min(checkpoint_bytes, _SHARD_BYTES)

    products = job.tokens * (weights + _HESSIAN_SHARE * squares)
    seconds = (_OVERHEAD * products + _ROUNDING * weights) / multiplications_per_second()
    return Forecast(peak, seconds, checkpoint_bytes)


def require_memory(expected: Forecast, job: QuantizeJob) -> None:
    """Raise ``CapacityError`` where the forecast exceeds the limit given, or what this process may still get."""
    used = psutil.Process().memory_info().rss
    limit = job.max_memory if job.max_memory is not None else used + available_memory()
    if expected.peak_bytes > limit:
        flag = "lower --samples or --sequence-length" if job.tokens else "free some memory"
        raise CapacityError(
            f"about {expected.peak_bytes / 2**20:,.0f} MiB are needed and {limit / 2**20:,.0f} MiB are there "
            f"({job.samples} x {job.sequence_length} tokens); {flag}"
        )


def multiplications_per_second() -> float:
    """Measured speed of float32 matrix products: multiply-adds per second."""
    left, right = torch.ones(2048, 1024), torch.ones(1024, 1024)
    left @ right  # the first one starts threads
    start = time.perf_counter()
    left @ right
    return left.shape[0] * right.numel() / (time.perf_counter() - start)


def peak_bytes() -> int:
    """The most memory this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
