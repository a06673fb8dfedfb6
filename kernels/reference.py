"""Every operation in plain torch: slow, obvious, and what the fast kernels are tested against.

Packed products use dequantized weights, and inputs are rounded only where the weight says so. The reference therefore
also measures what the kernels' own rounding costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar, assert_never

import torch
from torch import Tensor
from torch.nn import functional as F

from qserve.checkpoint.grid import E2M1, E4M3
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import process_group
from qserve.kernels.executor import HOST, Step
from qserve.kernels.kv_cache import decode_packed, encode_packed, hadamard, inverse_hadamard, packed_parts
from qserve.kernels.ops import (
    BLOCK_SIZE,
    PACKED_KV,
    SCALED_KV,
    Activation,
    AllGather,
    AllReduce,
    Argmax,
    Attention,
    Cast,
    CausalConv,
    Embed,
    Experts,
    ExpertSum,
    Function,
    GatedDelta,
    Gather,
    HeadLinear,
    HeadNorm,
    LatentAttention,
    LatentKV,
    LayerNorm,
    Linear,
    LogSoftmax,
    Lora,
    Op,
    PositionEmbed,
    RMSNorm,
    RopeKV,
    Route,
    Rows,
    SigmoidMul,
    SoftCap,
)

INT8_MAX = 127.0
_NAN_CODE = -128  # of an int8 cache, whose numbers end at -127
_SMALLEST = 1e-30  # below it, 1 / scale would overflow
_SMALLEST_SUM = 1e-20  # of scores that are divided by it
CLAMP = 7.0
"""The largest gate of GPT-OSS, and the largest magnitude of what it gates."""
_FUNCTIONS: dict[Function, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "swigluoai": lambda x: x.clamp(max=CLAMP) * (1.702 * x.clamp(max=CLAMP)).sigmoid(),
}


def gated(gate: Tensor, factor: Tensor, function: Function) -> Tensor:
    """``function`` of the gate, times its factor."""
    return _FUNCTIONS[function](gate) * (factor.clamp(-CLAMP, CLAMP) + 1.0 if function == "swigluoai" else factor)


def round_e4m3(x: Tensor) -> Tensor:
    """float32 -> float8_e4m3fn: to the nearest, ties to even, saturated; NaN stays."""
    return x.clamp(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn)


def round_e2m1(x: Tensor) -> Tensor:
    """float32: the nearest e2m1 number to each, ties to even, saturated; NaN becomes 6."""
    size = x.abs().nan_to_num_(nan=6.0).clamp_(max=6.0)
    unit = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (size / unit).round_().mul_(unit).copysign_(x)


def round_input(x: Tensor, activations: ActivationScheme, input_scale: float | None = None) -> Tensor:
    """The input of a product [..., in] as ``activations`` rounds it, in float32.

    A dynamic scale is the largest magnitude over 127 (int8) or 448 (e4m3): of a token, or of each ``group_size``
    inputs of it (the last group may be short). ``tensor`` is taken per token, which is finer: with one scale for the
    whole tensor a token's neighbours could change it. A static scheme takes ``input_scale`` and saturates; where it
    rounds to e2m1 (NVFP4), a group's scale is that times the e4m3 number which lays its largest magnitude on 6. Values
    are rounded half to even. NaN or infinity turns all inputs that share its dynamic scale into NaN, and the whole row
    where the scale is static.
    """
    spans = x.float()[..., None, :]
    width = x.shape[-1]
    if activations.granularity == "group":
        size = activations.group_size
        spans = F.pad(x.float(), (0, -width % size)).unflatten(-1, (-1, size))
    absmax = spans.abs().amax(-1, keepdim=True)
    if activations.grid is E2M1:
        assert input_scale is not None
        scale = round_e4m3(absmax / torch.tensor(E2M1.largest * input_scale)).float() * torch.tensor(input_scale)
        codes = round_e2m1(spans * torch.where(scale > 0, 1.0 / scale, 0.0))
        return torch.where(absmax.isfinite(), codes * scale, torch.nan).flatten(-2)[..., :width]
    limit = activations.grid.largest
    if input_scale is None:
        scale = absmax / limit
        # A scalar divided by a tensor would be computed as reciprocal times scalar, which rounds twice.
        inverse = torch.where(absmax < _SMALLEST, 0.0, torch.full_like(absmax, limit) / absmax)
    else:
        scale = torch.tensor(input_scale, dtype=torch.float32)
        inverse = 1.0 / scale
    scaled = spans * inverse
    codes = round_e4m3(scaled).float() if activations.grid is E4M3 else scaled.clamp(-128, 127).round()
    rounded = torch.where(absmax.isfinite(), codes * scale, torch.nan)
    return rounded.flatten(-2)[..., :width]


def encode_kv(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [..., kv_heads, head_dim] as a scaled cache stores it; scale [kv_heads]."""
    x = (x / scale[:, None]).masked_fill(~x.isfinite(), torch.nan)
    if dtype == torch.float8_e4m3fn:
        return round_e4m3(x)
    return x.round().clamp(-INT8_MAX, INT8_MAX).nan_to_num(_NAN_CODE).to(torch.int8)


def decode_kv(codes: Tensor, scale: Tensor) -> Tensor:
    """float32: the inverse of ``encode_kv``."""
    x = codes.float()
    if codes.dtype == torch.int8:
        x = x.masked_fill(codes == _NAN_CODE, torch.nan)
    return x * scale[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float32 [..., width]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [tokens, heads, head_dim]; cosine, sine [tokens, rotary_dim / 2]; the rest of head_dim passes through."""
    half = cosine.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cosine[:, None], sine[:, None]
    return torch.cat([first * c - second * s, second * c + first * s, rest], -1)


def _norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [tokens, heads, head_dim]; weight of one head, or of all together."""
    return rms_norm(x, weight, eps) if len(weight) == x.shape[-1] else rms_norm(x.flatten(1), weight, eps).view_as(x)


def _rope_kv(op: RopeKV, step: Step, rows: slice) -> None:
    qkv = op.qkv[rows]
    row = qkv.view(len(qkv), op.heads + 2 * op.kv_heads, op.head_dim)
    q, k, v = row.float().split([op.heads, op.kv_heads, op.kv_heads], 1)
    if op.q_norm is not None:
        q = _norm_heads(q, op.q_norm, op.eps)
    if op.k_norm is not None:
        k = _norm_heads(k, op.k_norm, op.eps)
    positions, slots = step.positions[rows].long(), step.slots[rows].long()
    k = rotate(k, op.cosine[positions], op.sine[positions])
    if op.k_center is not None:
        k = k - op.k_center
    q = rotate(q, op.cosine[positions], op.sine[positions])
    if op.q_scale is not None:
        q = q * op.q_scale[positions, None, None]
    if op.kv_dtype == PACKED_KV:
        q, k, v = hadamard(q), hadamard(k), hadamard(v)
    row.copy_(torch.cat([q, k, v], 1))
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    if op.kv_dtype == PACKED_KV:
        for cache, x, are_keys in ((op.k_cache, k, True), (op.v_cache, v, False)):
            for part, numbers in zip(packed_parts(cache, op.head_dim, keys=are_keys), encode_packed(x)):
                part[block, :, offset] = numbers
    elif op.kv_dtype in SCALED_KV:
        assert op.k_scale is not None and op.v_scale is not None
        # torch indexes no float8: its bytes are written.
        keys, values = encode_kv(k, op.k_scale, op.k_cache.dtype), encode_kv(v, op.v_scale, op.v_cache.dtype)
        op.k_cache.view(torch.int8)[block, :, :, offset] = keys.view(torch.int8)
        op.v_cache.view(torch.int8)[block, :, offset] = values.view(torch.int8)
    else:
        op.k_cache[block, :, :, offset] = k.to(op.k_cache.dtype)
        op.v_cache[block, :, offset] = v.to(op.v_cache.dtype)


def _cached(cache: Tensor, blocks: Tensor, scale: Tensor | None, head_dim: int, *, keys: bool) -> Tensor:
    """float32 [blocks, kv_heads, ...] of a cache."""
    if cache.dtype == torch.uint8:
        numbers = decode_packed(*(part[blocks] for part in packed_parts(cache, head_dim, keys=keys)))
        return numbers.mT if keys else numbers
    if scale is None:
        return cache[blocks].float()
    codes = cache.view(torch.int8)[blocks].view(cache.dtype).movedim(1, -2)
    return decode_kv(codes, scale).movedim(-2, 1)


def _attention(op: Attention, step: Step, rows: slice) -> None:
    group = op.heads // op.kv_heads
    for s, (first, last) in enumerate(pairwise(step.seq_start.tolist())):
        begin, end = max(first, rows.start), min(last, rows.stop)
        if begin >= end:
            continue
        positions = step.positions[begin:end].long()
        length = int(positions[-1]) + 1
        blocks = step.block_tables[s, : -(-length // BLOCK_SIZE)].long()
        k = _cached(op.k_cache, blocks, op.k_scale, op.head_dim, keys=True).permute(1, 0, 3, 2)
        v = _cached(op.v_cache, blocks, op.v_scale, op.head_dim, keys=False).permute(1, 0, 2, 3)
        k, v = (x.reshape(op.kv_heads, -1, op.head_dim)[:, :length] for x in (k, v))
        q = op.qkv[begin:end, : op.heads * op.head_dim].float().view(-1, op.heads, op.head_dim).transpose(0, 1)
        keys = torch.arange(length, device=positions.device)
        seen = keys <= positions[:, None]
        if op.window > 0:
            seen &= keys > positions[:, None] - op.window
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * op.scale
        if op.softcap > 0:
            scores = op.softcap * (scores / op.softcap).tanh()
        scores = scores.masked_fill(~seen, -torch.inf)
        if op.sinks is not None:
            scores = torch.cat([scores, op.sinks.view(-1, 1, 1).expand(-1, len(positions), 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        out = weights @ v.repeat_interleave(group, 0)
        if op.kv_dtype == PACKED_KV:
            out = inverse_hadamard(out)
        op.out[begin:end] = out.transpose(0, 1).reshape(end - begin, -1)


def _latent_kv(op: LatentKV, step: Step, rows: slice) -> None:
    positions, slots = step.positions[rows].long(), step.slots[rows].long()
    cosine, sine = op.cosine[positions], op.sine[positions]
    latent, key = op.kv[rows].float().split([op.rank, op.rope], -1)
    stored = torch.cat([rms_norm(latent, op.norm, op.eps), rotate(key[:, None], cosine, sine)[:, 0]], -1)
    op.cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = stored.to(op.cache.dtype)
    op.out[rows] = rotate(op.q[rows].float(), cosine, sine).to(op.out.dtype)


def _latent_attention(op: LatentAttention, step: Step, rows: slice) -> None:
    for s, (first, last) in enumerate(pairwise(step.seq_start.tolist())):
        begin, end = max(first, rows.start), min(last, rows.stop)
        if begin >= end:
            continue
        positions = step.positions[begin:end].long()
        length = int(positions[-1]) + 1
        blocks = step.block_tables[s, : -(-length // BLOCK_SIZE)].long()
        keys = op.cache[blocks].float().flatten(0, 1)[:length]
        seen = torch.arange(length, device=positions.device) <= positions[:, None, None]
        q = op.q[begin:end].float().view(end - begin, op.heads, -1)
        weights = (q @ keys.T * op.scale).masked_fill(~seen, -torch.inf).softmax(-1)
        op.out[begin:end] = (weights @ keys[:, : op.rank]).flatten(1)


def _embed(op: Embed, ids: Tensor, out: Tensor) -> None:
    table, count = op.table, len(op.table) if isinstance(op.table, Tensor) else op.table.out_features
    if op.sampled is not None:
        ids = torch.where(ids < 0, op.sampled[(-1 - ids).clamp_min(0)].clamp_min(0), ids)
    ids = ids - op.first
    here = (ids >= 0) & (ids < count)
    ids = ids[here]
    if isinstance(table, Tensor):
        out[here] = table[ids].float() * op.scale
        return
    zeros = None if table.zeros is None else table.zeros[ids]
    found = replace(table, stored=table.codes[ids], scales=table.scales[ids], zeros=zeros)
    out[here] = found.dequantize() * op.scale


def _route(op: Route, rows: slice) -> None:
    logits = op.logits[rows].float()
    scores = logits.sigmoid() if op.sigmoid else logits.softmax(-1)
    choice = scores if op.bias is None else scores + op.bias
    if op.groups > 1:
        grouped = choice.unflatten(-1, (op.groups, -1))
        best = _highest(grouped.topk(op.group_best, -1).values.sum(-1), op.top_groups)
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter(-1, best, True)
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts = _highest(choice, op.top_k)
    weights = scores.gather(-1, experts)
    if op.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(_SMALLEST_SUM)
    op.experts[rows] = experts.int()
    op.weights[rows] = weights * op.scale


def _highest(values: Tensor, count: int) -> Tensor:
    """int64 [..., count]: the indices of the highest values, NaN above all; of equal ones the lowest first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _product(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor):
        return F.linear(x, weight.float(), bias)
    if weight.activations is not None:
        x = round_input(x, weight.activations, weight.input_scale)
    return F.linear(x, weight.dequantize(), bias)


def _experts(op: Experts, rows: slice) -> None:
    x, chosen, ranks = op.x[rows].float(), op.experts[rows], op.ranks
    if ranks.size > 1:
        parts = op.parts.view(-1, chosen.shape[1], op.out.shape[1])[rows]
    else:
        parts = torch.zeros(*chosen.shape, op.out.shape[1], device=x.device)
    for e in chosen.unique().tolist():
        if not op.first <= e < op.first + len(op.gate_up):
            continue
        token, j = (chosen == e).nonzero(as_tuple=True)
        biases = [None if each is None else each[e - op.first] for each in (op.gate_up_bias, op.down_bias)]
        gate, up = _product(x[token], op.gate_up[e - op.first], biases[0]).chunk(2, -1)
        parts[token, j] = _product(gated(gate, up, op.function), op.down[e - op.first], biases[1])
    if op.terms is not None:
        op.terms[rows] = parts.flatten(1)
        return
    if ranks.size > 1:
        ranks.meet()
    own = slice((ranks.rank - rows.start) % ranks.size, None, ranks.size)
    _sum_terms(parts[own], op.weights[rows][own], op.out[rows][own], op.accumulate)


def _sum_terms(terms: Tensor, weights: Tensor, out: Tensor, accumulate: bool) -> None:
    """One term after the other: a sum over a dimension may have another order."""
    total = torch.zeros_like(terms[:, 0])
    for j in range(terms.shape[1]):
        total = total + weights[:, j, None] * terms[:, j]
    out.copy_(out + total if accumulate else total)


def _lora(op: Lora, step: Step, rows: slice) -> None:
    slots = torch.tensor([], dtype=torch.int32) if step.adapters is None else step.adapters[rows]
    for slot in slots[slots >= 0].unique().tolist():
        chosen = (slots == slot).nonzero().flatten() + rows.start
        x = op.x[chosen].float()
        for (start, size), held in zip(op.slots.parts, op.slots.held[slot]):
            if held is not None:
                a, b = held.matrices(size)
                op.out[chosen, start : start + size] += held.scale * (x @ a.T) @ b.T


def _sequences(step: Step, rows: slice) -> Iterator[tuple[int, int, int, int, bool]]:
    """For each sequence with tokens among ``rows``: its first one there, the one behind its last, the slot of its
    state, the slot that gets a copy of it afterwards or -1, and whether it begins there. A sequence whose state is
    saved on the way comes in parts."""
    assert step.state_slots is not None
    saves = [-1] * step.tokens if step.state_saves is None else step.state_saves.tolist()
    for s, (first, last) in enumerate(pairwise(step.seq_start.tolist())):
        begin = max(first, rows.start)
        for end in range(begin + 1, min(last, rows.stop) + 1):
            if saves[end - 1] >= 0 or end == min(last, rows.stop):
                yield begin, end, int(step.state_slots[s]), saves[end - 1], not step.positions[begin]
                begin = end


def _leave_state(held: Tensor, slot: int, saved: int, state: Tensor) -> None:
    held[slot] = state
    if saved >= 0:
        held[saved] = state


def _causal_conv(op: CausalConv, step: Step, rows: slice) -> None:
    for begin, end, slot, saved, begins in _sequences(step, rows):
        before = torch.zeros_like(op.state[slot]) if begins else op.state[slot]
        inputs = torch.cat([before, op.x[begin:end].float()])
        _leave_state(op.state, slot, saved, inputs[end - begin :])
        op.x[begin:end] = F.silu((inputs.unfold(0, op.width, 1) * op.weight.T).sum(-1)).to(op.x.dtype)


def _gated_delta(op: GatedDelta, step: Step, rows: slice) -> None:
    keys, values, group = op.key_heads * op.key_dim, op.heads * op.value_dim, op.heads // op.key_heads
    for begin, end, slot, saved, begins in _sequences(step, rows):
        q, k, v, z, b, a = op.x[begin:end].float().split([keys, keys, values, values, op.heads, op.heads], 1)
        q, k = (x.unflatten(1, (op.key_heads, -1)) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(group, 1) for x in (q * op.key_dim**-0.5, k))
        v, z = (x.unflatten(1, (op.heads, -1)) for x in (v, z))
        decay = (op.rate * F.softplus(a + op.dt_bias)).exp()
        state, kept = torch.zeros_like(op.state[slot]) if begins else op.state[slot], []
        for t in range(end - begin):
            state = decay[t, :, None, None] * state
            change = b[t].sigmoid()[:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t, :, :, None] * change[:, None]
            kept.append(torch.einsum("hkv,hk->hv", state, q[t]))
        _leave_state(op.state, slot, saved, state)
        out = rms_norm(torch.stack(kept), op.norm, op.eps) * F.silu(z)
        op.out[begin:end] = out.flatten(1).to(op.out.dtype)


@dataclass(frozen=True)
class _Product:
    """A linear whose weight is dequantized once, at load."""

    op: Linear
    rows: Rows
    weight: Tensor
    bias: Tensor | None

    def run(self, rows: slice) -> None:
        x, out, packed = self.op.x[rows].float(), self.op.out, self.op.weight
        if isinstance(packed, QuantizedWeight) and packed.activations is not None:
            x = round_input(x, packed.activations, packed.input_scale)
        y = F.linear(x, self.weight, self.bias)
        out[rows] = out[rows] + y if self.op.accumulate else y


def prepare(op: Op) -> Op | _Product:
    """``op`` made ready for ``compute``: its weight is dequantized."""
    if not isinstance(op, Linear):
        return op
    weight = op.weight.dequantize() if isinstance(op.weight, QuantizedWeight) else op.weight.float()
    return _Product(op, op.rows, weight, None if op.bias is None else op.bias.float())


def compute(op: Op | _Product, step: Step, rows: slice) -> None:
    """Compute ``rows`` of an operation of ``step``: the definition of every operation. Rows that are computed one at a
    time depend on no other; computed together, their sums may have another order."""
    match op:
        case _Product():
            op.run(rows)
        case Linear():
            compute(prepare(op), step, rows)
        case Embed():
            _embed(op, step.token_ids[rows].long(), op.out[rows])
        case RMSNorm():
            y = rms_norm(op.x[rows], op.weight, op.eps)
            op.out[rows] = op.out[rows] + y if op.accumulate else y.to(op.out.dtype)
        case LayerNorm():
            bias = None if op.bias is None else op.bias.float()
            op.out[rows] = F.layer_norm(op.x[rows].float(), (op.width,), op.weight.float(), bias, op.eps)
        case HeadNorm():
            heads = op.x[rows].float().unflatten(-1, (-1, op.head_dim))
            op.x[rows] = F.layer_norm(heads, (op.head_dim,), eps=op.eps).flatten(-2) * op.weight.float()
        case PositionEmbed():
            op.out[rows] += op.table[step.positions[rows].long() + op.offset]
        case Cast():
            op.out[rows] = op.x[rows]
        case RopeKV():
            _rope_kv(op, step, rows)
        case Attention():
            _attention(op, step, rows)
        case HeadLinear():
            op.out[rows] = torch.einsum("rhi,hoi->rho", op.x[rows].float(), op.weight.float()).to(op.out.dtype)
        case LatentKV():
            _latent_kv(op, step, rows)
        case LatentAttention():
            _latent_attention(op, step, rows)
        case Activation():
            x = op.x[rows].float()
            if op.gated:
                gate, up = x.chunk(2, -1)
                y = gated(gate, up, op.function)
            else:
                y = _FUNCTIONS[op.function](x)
            op.out[rows] = y.to(op.out.dtype)
        case Gather():
            op.out[rows] = op.x[step.logit_rows[rows].long()]
        case SoftCap():
            op.x[rows] = op.cap * (op.x[rows] / op.cap).tanh()
        case Argmax():
            bad = op.x[rows].isnan().any(-1)
            op.out[rows] = torch.where(bad, -1, op.x[rows].argmax(-1)).int()
        case Route():
            _route(op, rows)
        case Experts():
            _experts(op, rows)
        case ExpertSum():
            terms, weights = op.terms[rows], op.weights[rows]
            _sum_terms(terms.view(*weights.shape, -1), weights, op.out[rows], op.accumulate)
        case Lora():
            _lora(op, step, rows)
        case CausalConv():
            _causal_conv(op, step, rows)
        case GatedDelta():
            _gated_delta(op, step, rows)
        case SigmoidMul():
            op.out[rows] = (op.out[rows].float() * op.gate[rows].float().sigmoid()).to(op.out.dtype)
        case LogSoftmax():
            op.x[rows] = op.x[rows].log_softmax(-1)
        case AllGather() if op.split:
            for rank, columns in enumerate(op.split):
                part = op.out[rows, columns.start : columns.stop].contiguous()
                if rank == op.ranks.rank and op.own is not None:
                    part = op.own[rows]
                process_group.broadcast(op.ranks, part, rank)
                op.out[rows, columns.start : columns.stop] = part
        case AllGather():
            op.ranks.meet()
        case AllReduce():
            process_group.all_reduce(op.ranks, op.out[rows])
        case _:
            assert_never(op)


class _ReferenceProgram:
    def __init__(self) -> None:
        self.ops: list[Op | _Product] = []

    def add(self, ops: Sequence[Op]) -> None:
        self.ops += [prepare(op) for op in ops]

    def run(self, step: Step) -> None:
        for op in self.ops:
            compute(op, step, slice(0, step.count(op)))


D = TypeVar("D", bound="Op | _Product | Step | QuantizedWeight")


def on_device(declared: D, device: torch.device) -> D:
    """``declared`` with all of its tensors on ``device``; those that are there already are not copied."""
    found = {field.name: getattr(declared, field.name) for field in fields(declared)}
    moved: Any = {name: x.to(device) for name, x in found.items() if isinstance(x, Tensor)}
    moved |= {name: tuple(_moved(each, device) for each in x) for name, x in found.items() if isinstance(x, tuple)}
    return replace(declared, **moved)


def _moved(weight: Tensor | QuantizedWeight, device: torch.device) -> Tensor | QuantizedWeight:
    return weight.to(device) if isinstance(weight, Tensor) else on_device(weight, device)


class Fallback:
    """The reference of an operation without a kernel, inside a program that has kernels for others. ``invariant``: one
    row at a time, so that no neighbour changes a row there either. ``device``: where the buffers are."""

    def __init__(self, op: Op, *, invariant: bool, device: torch.device = HOST.device) -> None:
        self._op, self._invariant = on_device(prepare(op), device), invariant

    def run(self, step: Step) -> None:
        count = step.count(self._op)
        size = 1 if self._invariant else max(1, count)
        for row in range(0, count, size):
            compute(self._op, step, slice(row, row + size))


class ReferenceExecutor:
    """Runs anywhere torch runs. Its products change their last bits with the batch size."""

    name = "reference"
    batch_invariant = False
    asynchronous = False
    warm_sizes: Sequence[int] = ()
    placement = HOST

    def supports(self, op: Op) -> str | None:
        return None

    def packed_bytes(self, scheme: WeightScheme, activations: ActivationScheme | None, out: int, inp: int) -> int:
        canonical = out * inp + out * scheme.groups(inp) * (4 if scheme.symmetric else 5)
        return 4 * out * inp + canonical

    def program(self, max_rows: int) -> _ReferenceProgram:
        return _ReferenceProgram()
