"""Linear products, timed against each other on a GPU: ours, and those of torch.

A ``Problem`` is a weight and inputs, a ``Contestant`` a way to hold the weight and to multiply by it. Those of other
packages are in ``peers``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from qserve.checkpoint.grid import E4M3
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import ops
from qserve.kernels.reference import round_input
from qserve.kernels.triton import linear
from qserve.kernels.triton.inputs import Rounded, round_rows
from qserve.kernels.triton.target import Feature
from qserve.kernels.triton.tuning.tune import weight_bytes
from qserve.kernels.triton.workspace import Workspace

Schemes = tuple[WeightScheme, ActivationScheme | None]
SCHEMES: dict[str, Schemes | None] = {
    "bf16": None,
    "W4A16 g128": (WeightScheme(4, 128), None),
    "W8A16 g128": (WeightScheme(8, 128), None),
    "W8A8 int8": (WeightScheme(8, -1), ActivationScheme("int8")),
    "FP8 channel": (WeightScheme(8, -1, dtype="fp8"), ActivationScheme("fp8")),
    "FP8 tensor": (WeightScheme(8, -1, dtype="fp8", rows=-1), ActivationScheme("fp8", "tensor", dynamic=False)),
    "FP8 128x128": (WeightScheme(8, 128, dtype="fp8", rows=128), ActivationScheme("fp8", "group", group_size=128)),
}
"""Weights and inputs of a problem; None for neither rounded."""
INVARIANT = "qserve, invariant"
"""The mode in which a row is the same in every batch: its cost is a comparison like any other."""
_SAMPLED = 128  # outputs at either end of a product that are checked
_STEP = 2.0**-6  # the scale of inputs in e4m3: the largest is 7
_WIDEST = 128  # inputs that share a scale, at least
_INNER = 8  # k tiles side by side in torch's 4-bit layout for CUDA


@dataclass(frozen=True)
class Problem:
    """``x`` [most rows, in] and a weight [out, in] on its device; ``scheme`` is a name in ``SCHEMES``."""

    scheme: str
    x: Tensor
    weight: Tensor | QuantizedWeight

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        weight = self.weight
        return (weight if isinstance(weight, Tensor) else weight.codes).shape  # type: ignore[return-value]

    @property
    def packed(self) -> QuantizedWeight:
        assert isinstance(self.weight, QuantizedWeight)
        return self.weight

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """Some outputs, and their weights in float32."""
        count = self.shape[0]
        some = torch.arange(count)[[*range(min(_SAMPLED, count)), *range(max(0, count - _SAMPLED), count)]]
        if isinstance(self.weight, Tensor):
            return some, self.weight[some].float()
        zeros = None if self.weight.zeros is None else self.weight.zeros[some]
        part = replace(self.weight, stored=self.weight.codes[some], scales=self.weight.scales[some], zeros=zeros)
        return some, part.dequantize()

    def error(self, y: Tensor) -> float:
        """The norm of the error of the product of the first rows of ``x``, relative to that of the right result."""
        some, weight = self._ends
        x = self.x[: len(y)].float()
        if isinstance(self.weight, QuantizedWeight) and self.weight.activations is not None:
            x = round_input(x, self.weight.activations, self.weight.input_scale)
        want = x.double() @ weight.double().t()
        return float((y[:, some].double() - want).norm() / want.norm())


def problem(scheme: str, shape: tuple[int, int], rows: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """A random problem. Scales are float16 numbers, so that every format holds them. Inputs that are rounded to e4m3
    are e4m3 numbers already, so that a tie or an emulated conversion does not count as an error of the product."""
    out, inp = shape
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, inp, generator=generator, device=device).to(dtype)
    wanted = SCHEMES[scheme]
    if wanted is None:
        dense = torch.randn(shape, generator=generator, device=device) * 0.02
        return Problem(scheme, x, dense.to(dtype))
    weights, activations = wanted
    if activations is not None and activations.grid is E4M3:
        x = (x.float() / _STEP).to(torch.float8_e4m3fn).to(dtype) * _STEP
        x[:, ::_WIDEST] = E4M3.largest * _STEP  # so that the scale of every group is the step
    height, groups = weights.row_height(out), weights.groups(inp)
    scales = torch.rand(-(-out // height), groups, generator=generator, device=device) * 0.008 + 0.001
    scales = scales.half().float().repeat_interleave(height, 0)[:out].contiguous()
    if weights.grid is E4M3:
        values = torch.randn(shape, generator=generator, device=device).to(torch.float8_e4m3fn)
        codes = values.view(torch.uint8)
    else:
        codes = torch.randint(0, weights.max_code + 1, shape, generator=generator, device=device, dtype=torch.uint8)
    static = activations is not None and not activations.dynamic
    scale = _STEP if static else None
    return Problem(scheme, x, QuantizedWeight(weights, codes, scales, activations=activations, input_scale=scale))


@dataclass(frozen=True)
class Held:
    """A weight made ready. ``run`` returns [rows, out] for the first rows of ``x``, in memory that the next run may
    reuse; it reads ``nbytes`` of the weight."""

    run: Callable[[int], Tensor]
    nbytes: int


@dataclass(frozen=True)
class Contestant:
    """``hold`` a problem's weight, each time in memory of its own. ``missing``: why it is not available here, or None.

    ``ours``: whether the engine runs it. ``needs``: a feature that not every GPU has.
    """

    name: str
    scheme: str
    hold: Callable[[Problem], Held]
    ours: bool = False
    missing: Callable[[], str | None] = lambda: None
    needs: Feature | None = None


_memory = lru_cache(Workspace)  # products are timed one after another


def _ours(problem: Problem, invariant: bool = False) -> Held:
    out = torch.empty(len(problem.x), problem.shape[0], dtype=problem.x.dtype, device=problem.x.device)
    product = linear.prepare(ops.Linear(problem.x, problem.weight, out), _memory(problem.x.device), invariant)
    if isinstance(product, linear.DensePrepared):
        product.weight = product.weight.clone()  # a weight of its own
        nbytes = product.weight.nbytes
    else:
        nbytes = weight_bytes(product)  # type: ignore[arg-type]

    def run(rows: int) -> Tensor:
        product.run(rows)
        return out[:rows]

    return Held(run, nbytes)


def _cublas(problem: Problem) -> Held:
    assert isinstance(problem.weight, Tensor)
    weight = problem.weight.clone()
    return Held(lambda rows: F.linear(problem.x[:rows], weight), weight.nbytes)


def _int4pack(problem: Problem) -> Held:
    """torch's own, called tinygemm: codes less 8, with a scale and an offset for each group."""
    packed, dtype = problem.packed, problem.x.dtype
    scales = packed.scales.t()
    both = torch.stack([scales, torch.zeros_like(scales)], -1).to(dtype).contiguous()
    size = packed.scheme.group_size
    if problem.x.device.type == "cpu":
        codes = torch._convert_weight_to_int4pack_for_cpu(packed.codes.int(), 1)
        product = torch._weight_int4pack_mm_for_cpu
    else:
        codes = torch._convert_weight_to_int4pack(packed.codes[:, ::2] << 4 | packed.codes[:, 1::2], _INNER)
        product = torch._weight_int4pack_mm
    return Held(lambda rows: product(problem.x[:rows], codes, size, both), codes.nbytes + both.nbytes)


def _scaled(problem: Problem, rounding: bool) -> Held:
    """cuBLAS for e4m3. With ``rounding`` the inputs are rounded first, as ours are; otherwise they already are."""
    packed, x = problem.packed, problem.x
    weight = packed.codes.clone().view(torch.float8_e4m3fn).t()
    each = packed.scheme.rows == 1  # scales of tokens and outputs, or of whole tensors
    scales = packed.scales.t().contiguous() if each else packed.scales[0, 0].clone()
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    inputs = torch.empty(len(x), 1, device=x.device)
    rounded = Rounded(codes, inputs, packed.input_scale)
    round_rows(x, rounded, len(x))

    def run(rows: int) -> Tensor:
        if rounding:
            round_rows(x, rounded, rows)
        scale = inputs[:rows] if each else inputs[0, 0]
        return torch._scaled_mm(codes[:rows], weight, scale_a=scale, scale_b=scales, out_dtype=x.dtype)

    return Held(run, weight.nbytes + scales.nbytes)


def needs(scheme: str) -> Feature | None:
    return "fp8" if scheme.startswith("FP8") else None


CONTESTANTS = (
    Contestant("cuBLAS", "bf16", _cublas),
    *(Contestant("qserve", scheme, _ours, ours=True, needs=needs(scheme)) for scheme in SCHEMES),
    *(
        Contestant(INVARIANT, scheme, partial(_ours, invariant=True), needs=needs(scheme))
        for scheme in ("W4A16 g128", "FP8 channel")
    ),
    Contestant("torch._weight_int4pack_mm", "W4A16 g128", _int4pack),
    *(
        Contestant(name, scheme, partial(_scaled, rounding=rounding), needs="fp8")
        for scheme in ("FP8 channel", "FP8 tensor")
        for name, rounding in (("torch._scaled_mm", False), ("torch._scaled_mm, inputs rounded before", True))
    ),
)  # fmt: skip
"""Available wherever torch is."""
