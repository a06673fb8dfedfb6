"""``Deployment``: the quantization, KV dtype, parallelism and number of replicas that serve a traffic at the least
cost.

Plans are tried and chosen here; the arithmetic is in the files beside this one. The cheapest wins, among equals the
least compressed, then the one with the fewest GPUs: the loss of quality is not known before ``qserve quantize`` and
``qserve eval`` have measured it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.evals.planner import cost
from qserve.evals.planner.catalog import Gpu
from qserve.evals.planner.demand import Traffic
from qserve.evals.planner.efficiency import Efficiency
from qserve.evals.planner.quantization import DEFAULT, Quantization, quantization
from qserve.evals.planner.replica import Load, Replica
from qserve.evals.planner.replica_roofline import MACHINE, Layout, ReplicaRoofline
from qserve.evals.planner.served import SERVED
from qserve.evals.planner.shape import ModelShape
from qserve.evals.planner.wish import MOST_GPUS, Wish
from qserve.evals.slo import Slo


@dataclass(frozen=True)
class Deployment:
    """One way to serve the traffic. ``refused`` says why it cannot, in which case ``replicas`` is 0.

    ``spare``: so many of the replicas may be lost; the traffic is served without them.
    """

    replica: Replica
    replicas: int
    gpu_price: float | None
    refused: str = ""
    spare: int = 0

    @property
    def roofline(self) -> ReplicaRoofline:
        return self.replica.roofline

    @property
    def missing(self) -> tuple[str, ...]:
        """What ``qserve run`` lacks to serve it; nothing where it can."""
        return SERVED.missing(self.roofline.shape, self.roofline.layout, self.roofline.kv_dtype)

    @property
    def gpus(self) -> int:
        return self.replicas * self.roofline.layout.gpus

    @property
    def load(self) -> Load:
        """The load of each replica under its part of the traffic, when ``spare`` replicas are lost."""
        return self.replica.under(self.replica.traffic.rate / (self.replicas - self.spare))

    @property
    def tokens_per_second(self) -> float:
        """Prompt and output tokens of the traffic."""
        return self.replica.traffic.rate * self.replica.traffic.tokens

    @property
    def full_tokens_per_second(self) -> float:
        """Prompt and output tokens that all replicas together can take."""
        return self.replicas * self.replica.full.rate * self.replica.traffic.tokens

    @property
    def dollars_per_hour(self) -> float | None:
        return None if self.gpu_price is None else self.gpus * self.gpu_price

    @property
    def dollars_per_month(self) -> float | None:
        hourly = self.dollars_per_hour
        return None if hourly is None else hourly * cost.HOURS_PER_MONTH

    @property
    def compression(self) -> tuple[float, float]:
        """Bits of a weight and bytes of a KV number, negated: less compression sorts first."""
        scheme = self.roofline.quantization.scheme
        return -16.0 if scheme is None else -float(scheme.bits), -self.roofline.kv_number

    @property
    def rank(self) -> tuple[object, ...]:
        """Smaller is better. Plans without a price come after those with one, ordered by their GPUs."""
        unknown = self.dollars_per_hour is None
        return unknown, self.dollars_per_hour or float(self.gpus), self.compression, self.roofline.layout.gpus


def consider(
    shape: ModelShape, gpu: Gpu, traffic: Traffic, slo: Slo, efficiency: Efficiency, wish: Wish
) -> list[Deployment]:
    """Every plan that is tried on ``gpu``, best first; impossible ones come last."""
    price = wish.gpu_price if wish.gpu_price is not None else gpu.price.dollars if gpu.price else None
    plans = []
    for scheme in _quantizations(gpu, wish):
        for kv_dtype in _kv_dtypes(gpu, wish):
            for layout in _layouts(shape, gpu, scheme, kv_dtype, traffic, efficiency, wish):
                roofline = ReplicaRoofline(shape, scheme, kv_dtype, gpu, layout, efficiency)
                plans.append(_plan(Replica(roofline, traffic, slo, wish.chunk), price, wish.spare))
    return sorted(plans, key=lambda plan: (bool(plan.refused), plan.rank))


def replica_roofline(
    shape: ModelShape, gpu: Gpu, layout: Layout, scheme: str, kv_dtype: str, efficiency: Efficiency
) -> ReplicaRoofline:
    """One replica as the user wishes it. Raises ``UsageError`` where ``gpu`` or the model cannot be used so."""
    wish = Wish(scheme, kv_dtype, layout.tp, layout.pp)
    if layout not in _layouts(shape, gpu, quantization(scheme), kv_dtype, Traffic(), efficiency, wish):
        raise UsageError(_unshared(shape, wish))
    return ReplicaRoofline(
        shape, _quantizations(gpu, wish)[0], _kv_dtypes(gpu, wish)[0], gpu, layout, efficiency
    )


def choose(
    shape: ModelShape, gpus: Sequence[Gpu], traffic: Traffic, slo: Slo, efficiency: Efficiency, wish: Wish
) -> tuple[Deployment, list[Deployment]]:
    """The best plan, and all plans that were tried.

    Raises ``CapacityError`` with the nearest miss where no plan serves the traffic within the limits, and
    ``UsageError`` where the request is longer than the model's context.
    """
    if traffic.longest > shape.context:
        raise UsageError(
            f"a request of {traffic.prompts or traffic.prompt} + {traffic.outputs or traffic.output} tokens exceeds "
            f"the context of {shape.name}, {shape.context} tokens"
        )
    plans = [plan for gpu in gpus for plan in consider(shape, gpu, traffic, slo, efficiency, wish)]
    possible = [plan for plan in plans if not plan.refused]
    if not possible:
        if not plans:
            raise CapacityError(_unshared(shape, wish))
        # Nearest is what came furthest: into memory, and then with the most memory or speed to spare.
        nearest = max(plans, key=lambda plan: (plan.replica.fits, plan.roofline.kv_room))
        raise CapacityError(f"no plan serves {shape.name} so; nearest is {describe(nearest)}: {nearest.refused}")
    return min(possible, key=lambda plan: plan.rank), plans


def _unshared(shape: ModelShape, wish: Wish) -> str:
    return (
        f"{shape.name} has {shape.num_heads} heads in {shape.num_layers} layers, which --tp {wish.tp or 1} "
        f"and --pp {wish.pp or 1} cannot share"
    )


def describe(plan: Deployment) -> str:
    """``w4g128, KV fp8, TP 2 on h200``."""
    roofline = plan.roofline
    return f"{roofline.quantization.name}, KV {roofline.kv_dtype}, {roofline.layout} on {roofline.gpu.key}"


def _plan(replica: Replica, price: float | None, spare: int) -> Deployment:
    if refused := _refusal(replica):
        return Deployment(replica, 0, price, refused)
    capacity = replica.full.rate * replica.roofline.efficiency.utilization
    return Deployment(replica, max(1, math.ceil(replica.traffic.rate / capacity)) + spare, price, spare=spare)


def _refusal(replica: Replica) -> str:
    roofline, slo = replica.roofline, replica.slo
    if not replica.fits:
        memory = roofline.gpu.memory * roofline.efficiency.memory
        request = roofline.kv_per_request(replica.traffic.held)
        return (
            f"{roofline.weights_per_gpu / 1e9:.1f} GB of weights and {request / 1e9:.2f} GB of KV cache for one "
            f"request exceed {memory / 1e9:.1f} GB of a GPU"
        )
    if replica.largest:
        return ""
    alone = replica.at(1)
    missed = [
        f"{name} {found * 1e3:.0f} ms exceeds {limit * 1e3:g} ms"
        for name, found, limit in (("TTFT", alone.ttft, slo.ttft), ("TPOT", alone.tpot, slo.tpot))
        if found > limit
    ]
    return f"with a single request running {' and '.join(missed)}"


def _quantizations(gpu: Gpu, wish: Wish) -> list[Quantization]:
    if wish.quantization is None:
        return [scheme for scheme in map(quantization, DEFAULT) if scheme.compute in gpu.flops]
    scheme = quantization(wish.quantization)
    if scheme.compute not in gpu.flops:
        raise UsageError(f"{gpu.name} has no products of {scheme.compute}, which {scheme.name} computes in")
    return [scheme]


def _kv_dtypes(gpu: Gpu, wish: Wish) -> list[str]:
    small = "fp8" if "fp8" in gpu.flops else "int8"
    if wish.kv_dtype == "fp8" and small != "fp8":
        raise UsageError(f"{gpu.name} has no fp8: take --kv-cache-dtype int8")
    return ["fp16", small] if wish.kv_dtype is None else [wish.kv_dtype]


def _layouts(
    shape: ModelShape, gpu: Gpu, scheme: Quantization, kv_dtype: str, traffic: Traffic, efficiency: Efficiency,
    wish: Wish,
) -> list[Layout]:
    """Powers of two of one machine's GPUs; several machines, as stages, only where one cannot hold the model."""
    degrees = [wish.tp] if wish.tp else [1, 2, 4, MACHINE]
    degrees = [tp for tp in degrees if shape.num_heads % tp == 0 and shape.hidden_size % tp == 0]
    if wish.pp:
        return [Layout(tp, wish.pp) for tp in degrees if wish.pp <= shape.num_layers]
    layouts = [Layout(tp) for tp in degrees]
    fitting = [
        layout
        for layout in layouts
        if ReplicaRoofline(shape, scheme, kv_dtype, gpu, layout, efficiency).largest_batch(traffic.held)
    ]
    if fitting or not layouts:
        return layouts
    most = layouts[-1].tp
    return [*layouts, *(Layout(most, pp) for pp in (2, 4, 8) if pp <= shape.num_layers and pp * most <= MOST_GPUS)]
