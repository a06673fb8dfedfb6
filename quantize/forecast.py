"""Expected memory and time of a quantization, before it starts."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from qserve.calibration.generated import writing_bytes
from qserve.calibration.output_gradients import PIECE
from qserve.calibration.products import fast_products
from qserve.calibration.skeleton import Skeleton
from qserve.calibration.text import SELF
from qserve.checkpoint.errors import CapacityError
from qserve.checkpoint.formats.format import Format
from qserve.checkpoint.grid import E4M3, TRELLIS
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.kernels.products import multiplied
from qserve.quantize import fitted, yaqa
from qserve.quantize.descent import turns
from qserve.quantize.distill import BATCH, JUDGED, STEPS, most_windows
from qserve.quantize.job import QuantizeJob
from qserve.quantize.mixed.sensitivity import EXCERPT
from qserve.quantize.mixed.units import Offered, of_experts, units
from qserve.quantize.schemes import Shapes
from qserve.quantize.signround import ITERATIONS
from qserve.runtime.gpu_memory import GpuMemory
from qserve.runtime.memory import available_memory

# The steps of learned rounding, each of two samples, as tokens of a forward.
_LEARNING_TOKENS = ITERATIONS * 2 * 512 * fitted.LEARNING_STEP.value
# A pass of the float model alone, relative to a pass that follows it, which includes one.
_FLOAT_PASS = 0.5
# Modules that share an input share its Hessian: 7 linears of a usual block have 4 inputs, and only the upper
# triangle is computed, by blocks.
_HESSIAN_SHARE = 0.4
# The same for the comparison with the float model's inputs, whose matrix has no second half to leave out.
_DRIFT_SHARE = 0.45
# Of a Hessian only the upper triangle is computed, by blocks.
_TRIANGLE = 0.6
# Partial forwards of a block whose samples go through in parts: attention input, output, MLP input, output, result.
_STAGES = 3.0
# Bytes per weight of the linear that is being rounded: its rows in order, their errors, codes twice, the result.
_ROUNDED_BYTES = 22
# The same for rounding to nearest without calibration: the weight, its codes as floats and as bytes, and the scales
# (and zero points) spread to one for each weight.
_NEAREST_BYTES, _ZERO_BYTES = 13, 4
# Code and buffers of libraries that are touched only when they compute: for a small model a tenth of all.
_LIBRARY_BYTES = 128 << 20
# The same of a GPU's libraries and of the context in which it computes.
_GPU_LIBRARY_BYTES = 2 << 30
# Bytes per squared input for a Hessian, its factor and the inversion: in float64, and in float32 for the widest, which
# take one more where the float model is followed.
_HESSIAN_BYTES, _WIDE_HESSIAN_BYTES, _WIDE = 22, 13, 8192
# Memory of a forward, relative to twice the outputs of its linears in the type of the products: first where workers
# pause at the widest of them, then in one piece, where samples go through in parts.
_WORKERS, _PIECE = 0.8, 1.3
# What the float model keeps for the workers, the inputs of its linears and its outputs, in units of the hidden states.
_FLOAT_STATES = 4
# Windows that give the statistics for mixed precision's sensitivities, where GPTQ rounds.
GATHERED = 32
# Seconds of measuring each speed. The best of many tries tells the speed even while other processes are busy.
_MEASURING = 0.4
# Part of the free memory that a job may plan with where the samples can go through in parts.
_SHARE = 0.8


@dataclass(frozen=True)
class Forecast:
    """Expected peak memory of the process (bytes), seconds until the checkpoint is written, and its size (bytes; the
    largest possible where mixed precision has yet to choose). Two choices keep the peak within the memory: how many
    samples go through a block together, and whether the best effort ends with the whole model in memory (``distills``).
    ``kept_bytes``: the most disk space, besides the checkpoint's own parts, for going on after a kill.
    ``device_bytes``: the peak of a GPU's memory, which those choices then fit."""

    peak_bytes: int
    seconds: float
    checkpoint_bytes: int
    samples_at_once: int
    distills: bool = False
    kept_bytes: int = 0
    device_bytes: int = 0


def forecast(
    job: QuantizeJob, skeleton: Skeleton, shapes: Shapes, spec: QuantSpec, format: Format, offered: Offered
) -> Forecast:
    """Peak memory is the sum of what lives at once: this process as it is, one block in float32, the memory for
    rounding its largest linear, and the activations of one forward. Time is the products to compute, at the speed
    measured here.

    The whole batch goes through a block together if it fits, else as many samples as fit. ``offered`` is what mixed
    precision has yet to choose from, empty where all is decided.
    """
    device, process = skeleton.device, psutil.Process().memory_info().rss
    rss, limit = _room(job, device)
    at_once = max(job.samples, 1)
    if job.offload:
        at_once = min(at_once, 8)
    while at_once > 1 and rss + _working_bytes(job, skeleton, at_once) > rss + _SHARE * (limit - rss):
        at_once //= 2
    peak = rss + _working_bytes(job, skeleton, at_once)
    distilling = rss + distillation_bytes(job, skeleton)
    distills = job.effort == "best" and distilling <= rss + _SHARE * (limit - rss)
    if distills:
        peak = max(peak, distilling)
    if job.mixed:
        compensating = _compensating_bytes(job, skeleton) if measures_compensated(job, skeleton) else 0
        peak = max(peak, rss + _choosing_bytes(job, skeleton) + compensating)

    weights = sum(out * inp for out, inp in shapes.linears.values())
    squares = sum(inp * inp for _, inp in shapes.linears.values()) if job.algorithm.hessian else 0
    forwards = (1.0 if at_once >= job.samples else _STAGES) * (2 if job.float_samples else 1)
    moments = _HESSIAN_SHARE + (_DRIFT_SHARE if job.float_samples else 0.0)
    products = job.tokens * (forwards * weights + moments * squares)
    if job.learns_rounding:
        products += _LEARNING_TOKENS * weights
    if job.algorithm.outputs:
        peak = max(peak, rss + _gradient_bytes(job, skeleton))
        # Two of the three products of a step that learns: no weight has a gradient.
        learned = 2 / 3 * fitted.LEARNING_STEP.value * skeleton.source.parameters()
        products += gradient_tokens(job) * (learned + _TRIANGLE * _outputs_bytes(skeleton) / 4)
    if distills:
        # A forward of the float model, then the steps.
        stepped = fitted.LEARNING_STEP.value * STEPS * BATCH * job.sequence_length
        products += (most_windows(job.hours) * job.sequence_length + stepped) * skeleton.source.parameters()
    rounded = weights
    if offered:
        products += _choosing_products(job, skeleton, offered)
        rounded += weights
    outputs = sum(out for out, _ in shapes.linears.values())
    speed = _speed(device)
    passes = fitted.PASSES.value * outputs / weights
    seconds = products * (fitted.OVERHEAD.value / speed.products + passes / speed.passes)
    seconds += (job.algorithm.cost * rounded + _compensating_products(job, shapes)) / speed.float32
    searched = [size for module, size in shapes.of(spec).items()
                if (scheme := spec.scheme_of(module)) is not None and scheme.scale_bits]  # fmt: skip
    seconds += fitted.SUPERBLOCK_SEARCH.value * sum(map(math.prod, searched)) / speed.float32
    if job.weights.grid is TRELLIS:
        seconds += fitted.TRELLIS.value * weights / speed.float32
    if device.type != "cpu":
        seconds += fitted.ON_A_GPU.value * weights
    if job.text == SELF:  # the model runs to write every second window
        peak = max(peak, rss + writing_bytes(skeleton.source, job.sequence_length))
        written = (job.samples + 1) // 2 * job.sequence_length
        seconds += fitted.WRITING.value * written * skeleton.source.parameters() / speed.products
    if distills and job.hours is not None:
        seconds = max(seconds, 3600 * job.hours)
    stored = _checkpoint_bytes(job, skeleton, shapes, spec, format, offered)
    kept = _tuning_bytes(shapes, spec, offered, job.hours) if distills else 0
    if job.mixed:
        kept = max(kept, _probe_bytes(skeleton) + _gathered_bytes(job, skeleton))
    kept *= 2  # the last, and the next one until that is safe
    if job.max_kl is not None:  # the parts of the attempt that passed, beside those of the one at hand
        kept = max(kept, 2 * stored)
    if device.type == "cpu":
        return Forecast(peak, seconds, stored, at_once, distills, kept)
    host = process + _GPU_LIBRARY_BYTES + _copying_bytes(skeleton) + skeleton.block_bytes() // 2
    return Forecast(host, seconds, stored, at_once, distills, kept, device_bytes=peak)


def _room(job: QuantizeJob, device: torch.device) -> tuple[int, int]:
    """Bytes that are taken already, and that the job may come to: of this process, or of the memory of a GPU."""
    if device.type != "cpu":
        return 0, _free_bytes(device)
    rss = psutil.Process().memory_info().rss
    return rss, rss + available_memory() if job.max_memory is None else job.max_memory


def _free_bytes(device: torch.device) -> int:
    return GpuMemory(device).free()


def _tuning_bytes(shapes: Shapes, spec: QuantSpec, offered: Offered, hours: float | None) -> int:
    """A multiplier with Adam's two moments for each scale, in float32, and with ``hours`` the best one; the most that
    ``offered`` allows."""
    choices = {module: schemes for unit, schemes in offered.items() for module in unit}
    most = 0
    for module, (out, inp) in shapes.linears.items():
        schemes = choices.get(module, (spec.scheme_of(module),))
        most += out * max(scheme.groups(inp) if scheme else 0 for scheme in schemes)
    return (12 if hours is None else 16) * most


def _checkpoint_bytes(
    job: QuantizeJob, skeleton: Skeleton, shapes: Shapes, spec: QuantSpec, format: Format, offered: Offered
) -> int:
    """The checkpoint's bytes in ``format``; the most that ``offered`` allows."""
    sizes = shapes.of(spec)

    def stored(module: str, scheme: WeightScheme | None) -> int:
        out, inp = sizes[module]
        return scheme.storage_bits(out, inp, symmetric_zeros=format.symmetric_zeros) if scheme else 16 * out * inp

    largest = {module: max(stored(module, each) for each in offered[unit]) for unit in offered for module in unit}
    open_bits = sum(largest.values())
    if job.target_bits is not None:
        open_bits = min(open_bits, int(job.target_bits * sum(math.prod(sizes[module]) for module in largest)))
    bits = open_bits + sum(stored(module, spec.scheme_of(module)) for module in sizes if module not in largest)
    own = sum(math.prod(size) for module, size in sizes.items() if module != "lm_head" or not shapes.tied)
    return bits // 8 + 2 * (skeleton.source.parameters() - own)


def _choosing_products(job: QuantizeJob, skeleton: Skeleton, offered: Offered) -> float:
    """The products of measuring sensitivities. For each rounded unit an excerpt goes through the model from the unit's
    block on (on average half of the blocks), and through the output layer. Where GPTQ rounds the units, more text goes
    through the float model. Where GPTQ also follows the float model, that text goes through the block again with each
    unit but the last, which nothing makes up for."""
    weights = sum(math.prod(size) for size in skeleton.shapes.values())
    tokens = min(job.samples, EXCERPT[0]) * min(job.sequence_length, EXCERPT[1])
    head: int = skeleton.model.get_input_embeddings().weight.numel()
    products = fitted.SMALL_BATCHES.value * tokens * ((1 + len(offered) / 2) * weights + (1 + len(offered)) * head)
    if measures_compensated(job, skeleton):
        squares = sum(inp * inp for _, inp in skeleton.shapes.values())
        again = len(offered) / len(skeleton.blocks) - 1 if job.float_samples else 0
        passes = max(again, _FLOAT_PASS)
        gathered = min(job.samples, GATHERED) * job.sequence_length
        products += passes * gathered * (2 * weights + _HESSIAN_SHARE * squares)
    return products


def _compensating_products(job: QuantizeJob, shapes: Shapes) -> float:
    """The products of GPTQ itself, in float32. With many inputs they are far more than those of calibration."""
    if not job.algorithm.compensates:
        return 0.0
    each = fitted.SWEEP.value + (fitted.FOLLOWING.value if job.float_samples else 0.0)
    turn = 0.0 if job.weights.grid in (E4M3, TRELLIS) else fitted.DESCENT.value
    more = yaqa.TURNS if job.algorithm.outputs else 0
    products = 0.0
    for unit in units(shapes.linears):
        sizes = [shapes.linears[module] for module in unit]
        inputs = [inp for _, inp in (sizes if of_experts(unit) else sizes[:1])]  # the others share theirs
        for out, inp in sizes:
            products += (each + turn * turns(inp)) * out * inp**2
            if more and yaqa.couples(out, inp):
                products += more * turn * out * inp**2 + (1 + more) * out**2 * inp
        products += fitted.INVERSE.value * sum(inp**3 for inp in inputs)
    return products


def _working_bytes(job: QuantizeJob, skeleton: Skeleton, at_once: int) -> int:
    """What the job needs on top of the process as it is."""
    blocks = len(skeleton.blocks)
    linears = skeleton.shapes.values()
    largest, widest = max(out * inp for out, inp in linears), max(inp for _, inp in linears)
    copying = _copying_bytes(skeleton)
    rounding = _ROUNDED_BYTES * largest
    if job.algorithm.hessian:
        wide = _WIDE_HESSIAN_BYTES + (1 if job.float_samples else 0)
        rounding += (_HESSIAN_BYTES if widest <= _WIDE else wide) * widest * widest
    if not job.tokens:
        nearest = _NEAREST_BYTES + (0 if job.symmetric else _ZERO_BYTES)
        block = nearest * largest + sum(out * inp for out, inp in linears) // blocks
        return _LIBRARY_BYTES + max(block, copying)
    tokens = at_once * job.sequence_length
    whole = at_once >= job.samples
    states = 4 * job.tokens * skeleton.hidden_size
    hidden = 0 if job.offload else states * (2 if job.float_samples else 1)
    forward = _forward_bytes(_WORKERS if whole else _PIECE, tokens, skeleton)
    if whole and job.float_samples:
        forward += _FLOAT_STATES * states
    # A weight is rounded while the whole batch waits in front of its layer, or after the last part went through.
    block = skeleton.block_bytes() + hidden + (forward + rounding if whole else max(forward, rounding))
    if job.algorithm.outputs:
        block += _outputs_bytes(skeleton)
    if job.learns_rounding:
        block += 2 * hidden + 6 * skeleton.block_bytes()
    return max(skeleton.embedding_bytes() + hidden, block, copying)


def _copying_bytes(skeleton: Skeleton) -> int:
    """The largest tensor outside the blocks as it is stored, plus its copy in float16 where it is converted."""
    source, sizes = skeleton.source, [0]
    for name in source.names():
        if name.removesuffix(".weight") not in skeleton.shapes:
            half = 2 * math.prod(source.shape(name))
            stored = source.nbytes(name)
            sizes.append(stored if stored == half or source.dtype() == torch.bfloat16 else stored + half)
    return max(sizes)


def distillation_bytes(job: QuantizeJob, skeleton: Skeleton) -> int:
    """What ``distill`` needs on top of the process as it is: each parameter, its gradient, its code, a copy in bfloat16
    and Adam's moments of its scale; the output layer's input for every token; and for one step's tokens the outputs of
    the layers with their gradients, and some vectors as long as the vocabulary."""
    tokens = BATCH * job.sequence_length
    outputs = sum(out + inp for out, inp in skeleton.shapes.values())
    vocabulary = int(skeleton.model.get_input_embeddings().weight.shape[0])
    weights = 13 * skeleton.source.parameters()
    targets = 4 * (most_windows(job.hours) + JUDGED) * job.sequence_length * skeleton.hidden_size
    return weights + targets + tokens * (6 * outputs + 20 * vocabulary)


def gradient_tokens(job: QuantizeJob) -> int:
    """Tokens whose gradients are gathered."""
    return min(job.samples, yaqa.SAMPLES) * job.sequence_length


def _outputs_bytes(skeleton: Skeleton) -> int:
    """The Hessians of outputs of all linears, which are kept from the start."""
    return 4 * sum(out * out for out, inp in skeleton.shapes.values() if yaqa.couples(out, inp))


def _gradient_bytes(job: QuantizeJob, skeleton: Skeleton) -> int:
    """What gathering gradients needs on top of the process as it is: each parameter with a copy in bfloat16, the
    Hessians, and for one window the outputs of the layers with their gradients, and logits of a part of it."""
    outputs = sum(out + inp for out, inp in skeleton.shapes.values())
    vocabulary = int(skeleton.model.get_input_embeddings().weight.shape[0])
    weights = 6 * skeleton.source.parameters() + _outputs_bytes(skeleton)
    return weights + job.sequence_length * 6 * outputs + 16 * PIECE * vocabulary


def measures_compensated(job: QuantizeJob, skeleton: Skeleton) -> bool:
    """Whether mixed precision can measure each linear with error compensation: GPTQ must round in the end, and the
    memory must suffice."""
    if not job.mixed or not job.algorithm.compensates:
        return False
    taken, limit = _room(job, skeleton.device)
    return _choosing_bytes(job, skeleton) + _compensating_bytes(job, skeleton) <= _SHARE * (limit - taken)


def _choosing_bytes(job: QuantizeJob, skeleton: Skeleton) -> int:
    """What measuring sensitivities needs on top of the process as it is: a block, and the hidden states of one more
    model for each unit."""
    return skeleton.block_bytes() + (0 if job.offload else _probe_bytes(skeleton))


def _probe_bytes(skeleton: Skeleton) -> int:
    return 4 * math.prod(EXCERPT) * skeleton.hidden_size * (1 + len(units(skeleton.shapes)))


def _gathered_bytes(job: QuantizeJob, skeleton: Skeleton) -> int:
    """The hidden states of the text that gives the statistics."""
    return 4 * min(job.samples, GATHERED) * job.sequence_length * skeleton.hidden_size


def _compensating_bytes(job: QuantizeJob, skeleton: Skeleton) -> int:
    """On top of ``_choosing_bytes``: the Hessian of each input of a block with its factor (counted as if no linears
    shared one), the inversion of the widest, and hidden states. Where the float model is followed, also a copy of the
    block and the activations inside it."""
    squares = [inp * inp for _, inp in skeleton.shapes.values()]
    factored = 8 * sum(squares) // len(skeleton.blocks) + _HESSIAN_BYTES * max(squares)
    tokens = min(job.samples, GATHERED) * job.sequence_length
    states = _gathered_bytes(job, skeleton)
    following = 0
    if job.float_samples:
        following = skeleton.block_bytes() + _forward_bytes(_WORKERS, tokens, skeleton) + _FLOAT_STATES * states
    return factored + (0 if job.offload else 2 * states) + following


def _forward_bytes(share: float, tokens: int, skeleton: Skeleton) -> int:
    """The memory of a forward of ``tokens``; ``share`` is ``_WORKERS`` or ``_PIECE``."""
    outputs = sum(out for out, _ in skeleton.shapes.values()) // len(skeleton.blocks)
    return int(share * 2 * multiplied().itemsize * tokens * (outputs + 4 * skeleton.hidden_size))


def require_memory(expected: Forecast, job: QuantizeJob, device: torch.device) -> None:
    """Raise ``CapacityError`` where the forecast exceeds the given limit, or the memory that this process can get, or
    that of the ``device``."""
    used = psutil.Process().memory_info().rss
    limit = job.max_memory if job.max_memory is not None else used + available_memory()
    if expected.device_bytes and expected.device_bytes > (free := _free_bytes(device)):
        needed = f"about {expected.device_bytes / 2**20:,.0f} MiB of the GPU's memory are needed"
        raise CapacityError(
            f"{needed} and {free / 2**20:,.0f} MiB are free; lower --samples or --sequence-length, or use --device cpu"
        )
    if expected.peak_bytes > limit:
        flag = "use --offload, or lower --samples or --sequence-length" if job.tokens else "free some memory"
        if job.text == SELF:
            flag += ", or give --calibration builtin"
        raise CapacityError(
            f"about {expected.peak_bytes / 2**20:,.0f} MiB are needed and {limit / 2**20:,.0f} MiB are there "
            f"({job.samples} x {job.sequence_length} tokens); {flag}"
        )


@dataclass(frozen=True)
class _Speed:
    """This machine's speed, per second: multiplications of a calibration forward, multiplications of float32 matrices,
    and numbers of an elementwise operation."""

    products: float
    float32: float
    passes: float


@cache
def _speed(device: torch.device) -> _Speed:
    """The speed of ``device``, measured once per process."""
    size = 1024 if device.type == "cpu" else 8192
    with torch.device(device):
        rows, weight, out = torch.ones(4096, size), torch.ones(size, size), torch.ones(4096, size)

    def done() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def best(work: Callable[[], Tensor]) -> float:
        work()  # the first one starts threads
        done()
        began, seconds = time.perf_counter(), math.inf
        while time.perf_counter() - began < _MEASURING:
            start = time.perf_counter()
            work()
            done()
            seconds = min(seconds, time.perf_counter() - start)
        return seconds

    with torch.no_grad():
        with fast_products():
            linear = best(lambda: nn.functional.linear(rows, weight))
        plain = best(lambda: torch.mm(rows, weight, out=out))
        passes = best(lambda: torch.sigmoid(rows, out=out))
    products = len(rows) * weight.numel()
    return _Speed(products / linear, products / plain, rows.numel() / passes)


def peak_bytes() -> int:
    """The most memory this process has held so far.

    From /proc where there is one: the peak of ``getrusage`` includes that of the process this one was forked from,
    which may be large.
    """
    status = Path("/proc/self/status")
    told = status.read_text().partition("VmHWM:")[2].split() if status.exists() else []
    if told:
        return int(told[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
