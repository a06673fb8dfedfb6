"""The steps of a plan as lines for a person to check: every number with its derivation.

It only shows numbers of the plan. GB are 10^9 bytes, GiB 2^30.
"""

from __future__ import annotations

import math
from collections import Counter

from qserve.evals.planner import cost
from qserve.evals.planner.deployment import Deployment
from qserve.evals.planner.replica_roofline import ReplicaRoofline
from qserve.evals.planner.shape import BLOCK
from qserve.runtime.state_slots import snapshots_for


def lines(plan: Deployment) -> list[tuple[str, str]]:
    """(name, arithmetic) for each number of a plan that is possible."""
    return [*_model(plan), *_memory(plan), *_decode(plan), *_prefill(plan), *_fleet(plan)]


def _model(plan: Deployment) -> list[tuple[str, str]]:
    roofline = plan.roofline
    shape, scheme = roofline.shape, roofline.quantization.scheme
    kinds = " + ".join(f"{count:,} {kind}" for kind, count in shape.parameters_by_kind().items() if count)
    found = [("parameters", f"{kinds} = {shape.parameters:,}")]
    if shape.active_parameters != shape.parameters:
        found.append(("of them per token", f"{shape.active_parameters:,}"))
    total = shape.weight_bytes(scheme)
    if scheme is None:
        found.append(("weights", f"{total / 2:,.0f} x 16 bits = {total / 1e9:.2f} GB"))
    else:
        packed = [linear for linear in shape.linears if linear.packed]
        count = sum(linear.count * linear.experts * linear.size for linear in packed)
        size = sum(linear.count * linear.experts * linear.weight_bytes(scheme) for linear in packed)
        found.append(
            (
                "weights",
                f"{count:,} x {size * 8 / count:.3f} bits ({scheme}, scales and zero points included) = "
                f"{size / 1e9:.2f} GB; + {(total - size) / 2:,.0f} x 16 bits (embedding, head, norms) = "
                f"{total / 1e9:.2f} GB",
            )
        )
    if shape.part_of is not None:
        found.append(("note", f"the text part of a {shape.part_of}: what sees or hears is not counted"))
    if shape.stored_as is not None:
        found.append(("note", f"the checkpoint is stored as {shape.stored_as}; the plan is for its shape, made anew"))
    return found


def _memory(plan: Deployment) -> list[tuple[str, str]]:
    roofline, traffic = plan.roofline, plan.replica.traffic
    shape, gpu, layout = roofline.shape, roofline.gpu, roofline.layout
    size, tokens = roofline.kv_number, traffic.held
    per_token = shape.kv_bytes_per_token(size)
    if shape.attention == "MLA":
        of = f"({shape.latent_value_width} latent + {shape.latent_score_width - shape.latent_value_width} RoPE)"
    else:
        of = f"2 x {shape.kv_heads} KV heads x {shape.score_width}"
    request, share = shape.kv_bytes(tokens, size), roofline.kv_per_request(tokens)
    found = [
        (
            f"KV per token ({shape.attention})",
            f"{of} x {len(shape.windows)} layers x {size:g} bytes = {per_token:,} bytes = {per_token / 1024:g} KiB",
        )
    ]
    if any(shape.windows):
        windows = ", ".join(
            f"{count} layers {f'keep {window:,} tokens' if window else 'keep all'}"
            for window, count in Counter(shape.windows).items()
        )
        found.append(("sliding window", f"{windows}, if the engine gives back what is behind it"))
    if shape.state_bytes:
        layers = shape.num_layers - len(shape.windows)
        found.append(("states", f"{layers} layers keep {shape.state_bytes / 1e6:.1f} MB of a request of any length"))
    held = f"{roofline.kv_room / 1e9:.1f} GB / {share / 1e6:.1f} MB"
    if shape.state_bytes:
        snapshots, each = snapshots_for(plan.replica.fits), roofline.states_per_request / 1e6
        held = f"({roofline.kv_room / 1e9:.1f} GB - {snapshots} snapshots of {each:.1f} MB) / {share / 1e6:.1f} MB"
    blocks = math.ceil(tokens / BLOCK)
    spread = f"; {share / 1e6:.1f} MB on each GPU of {layout}" if layout.gpus > 1 else ""
    room = gpu.memory * roofline.efficiency.memory
    return [
        *found,
        ("KV per request", f"{tokens:,.0f} tokens, {blocks} blocks of {BLOCK}: {request / 1e6:.1f} MB{spread}"),
        (
            "room per GPU",
            f"{gpu.memory / 1e9:.1f} GB ({gpu.memory / 2**30:.1f} GiB) x {roofline.efficiency.memory:g} = "
            f"{room / 1e9:.1f} GB; - {roofline.weights_per_gpu / 1e9:.1f} GB weights = {roofline.kv_room / 1e9:.1f} GB",
        ),
        (
            "largest batch",
            f"{held} = {plan.replica.fits} fit; "
            f"{plan.replica.largest} within {plan.replica.slo}",
        ),
    ]


def _decode(plan: Deployment) -> list[tuple[str, str]]:
    replica, load = plan.replica, plan.load
    parts = replica.roofline.decode_parts(load.batch, replica.context)
    alone = replica.roofline.decode_parts(1, replica.context)
    gpu, efficiency = replica.roofline.gpu, replica.roofline.efficiency
    return [
        (
            "reached bandwidth",
            f"{gpu.bandwidth / 1e12:g} TB/s x {efficiency.mbu:g} = {replica.roofline.bandwidth / 1e12:.3g} TB/s",
        ),
        ("a step of 1", f"{_sum(alone)}, looking back at {replica.context:g} tokens"),
        (f"a step of {load.batch}", f"{_sum(parts)} (decode, T)"),
        *_exchange(replica.roofline),
    ]


def _exchange(roofline: ReplicaRoofline) -> list[tuple[str, str]]:
    tp = roofline.layout.tp
    if tp == 1:
        return []
    count, latency = 2 * roofline.shape.num_layers, roofline.all_reduce_latency
    return [
        (
            "all-reduces",
            f"2 x {roofline.shape.num_layers} layers = {count} a step; each at least "
            f"{roofline.efficiency.all_reduce * 1e6:.1f} us + 2 x ({tp} - 1) hops = {latency * 1e6:.1f} us "
            f"(NCCL's cost model), together {_ms(count * latency)}",
        )
    ]


def _prefill(plan: Deployment) -> list[tuple[str, str]]:
    replica, load, roofline = plan.replica, plan.load, plan.roofline
    compute = roofline.quantization.compute
    peak, stages = roofline.gpu.flops[compute], roofline.layout.pp
    traffic = replica.traffic
    parts = roofline.prefill_parts(traffic.prompt, replica.chunk, traffic.computed)
    cached = f" (of {traffic.prompt:,}; the prefix cache has the others)" if traffic.computed < traffic.prompt else ""
    piped = f", {_ms(replica.prefill_latency)} through {stages} stages" if stages > 1 else ""
    drawn = "" if traffic.prompts is None else f"; {_ms(replica.prefill)} on average of {traffic.prompts}"
    chunks = f"{replica.chunks} chunk{'s' if replica.chunks > 1 else ''}"
    return [
        (
            "reached operations",
            f"{peak / 1e12:g} TFLOP/s ({compute}, dense) x {roofline.efficiency.mfu:g} = "
            f"{roofline.flops(compute) / 1e12:.3g} TFLOP/s",
        ),
        ("a prompt", f"{_sum(parts)} for {traffic.computed:,} tokens{cached} in {chunks} (prefill, S){drawn}{piped}"),
        (
            "TTFT",
            f"{_ms(load.waiting)} waiting + {_ms(replica.prefill_latency)} prefill + ({replica.chunks} + 1) x "
            f"{_ms(load.decode)} decodes beside it = {_ms(load.ttft)}",
        ),
        ("TPOT", f"{_ms(load.decode)} / (1 - {load.prefilling:.1%} spent on prompts) = {_ms(load.tpot)}"),
    ]


def _fleet(plan: Deployment) -> list[tuple[str, str]]:
    replica, full = plan.replica, plan.replica.full
    traffic, layout = replica.traffic, plan.roofline.layout
    utilization = plan.roofline.efficiency.utilization
    spare = f" + {plan.spare} spare" if plan.spare else ""
    found = [
        (
            "a replica takes",
            f"{full.batch} / ({traffic.output} x {_ms(full.tpot)}) = {full.rate:.2f} requests/s at most, "
            f"x {utilization:g} planned = {full.rate * utilization:.2f}",
        ),
        (
            "replicas",
            f"{traffic.rate:g} / {full.rate * utilization:.2f}, rounded up{spare} = {plan.replicas}, "
            f"of {layout.gpus} GPU{'s' if layout.gpus > 1 else ''} each = {plan.gpus}",
        ),
    ]
    hourly = plan.dollars_per_hour
    if hourly is None or plan.gpu_price is None:
        return found
    return [
        *found,
        (
            "an hour",
            f"{plan.gpus} x ${plan.gpu_price:.2f} = ${hourly:,.2f}; "
            f"x {cost.HOURS_PER_MONTH:g} h a month = ${hourly * cost.HOURS_PER_MONTH:,.0f}",
        ),
        (
            "a million tokens",
            f"${hourly:,.2f} / ({traffic.rate:g} x {traffic.tokens:,} x 3600 s) = "
            f"${cost.per_million(hourly, plan.tokens_per_second):.3f} at this traffic; "
            f"${cost.per_million(hourly, plan.full_tokens_per_second):.3f} if it were as much as they take",
        ),
    ]


def _sum(parts: dict[str, float]) -> str:
    shown = " + ".join(f"{_ms(seconds)} {name}" for name, seconds in parts.items() if seconds)
    return f"{shown} = {_ms(sum(parts.values()))}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"
