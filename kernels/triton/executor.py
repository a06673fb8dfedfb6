"""``TritonExecutor``: programs of Triton kernels on a GPU, decodes from CUDA graphs.

A step's numbers are copied to the device asynchronously and its kernels are queued; nothing here waits for the device.
A step with one token per sequence is captured as a graph for each padded number of rows that occurs, with adapters and
without, and replayed from then on; every other step is launched kernel by kernel. In Triton's interpreter programs run
on the CPU.

Where ranks share a model, what they exchange is captured with the kernels around it. NCCL wants all ranks to capture or
replay the same exchanges at a time, and they do: what decides it is the same in all, for each has as many heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.grid import AFFINE, BNB_FP4, E4M3, NF4
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels.executor import Placement, Step
from qserve.kernels.ops import (
    PACKED_KV,
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
    SigmoidMul,
    SoftCap,
)
from qserve.kernels.reference import Fallback, on_device
from qserve.kernels.triton import latent_attention, linear, packed_kv
from qserve.kernels.triton.adapted_rows import adapted_rows
from qserve.kernels.triton.argmax import argmax
from qserve.kernels.triton.attention import (
    CHUNK,
    Shape,
    attend_decodes,
    attend_tiles,
    resident,
    tile_shape,
)
from qserve.kernels.triton.causal_conv import causal_conv
from qserve.kernels.triton.collectives import all_gather, all_reduce
from qserve.kernels.triton.eight_bit import EightBit
from qserve.kernels.triton.embed import embed
from qserve.kernels.triton.experts import PreparedExperts, sum_terms
from qserve.kernels.triton.fill import fill
from qserve.kernels.triton.gated_delta import PreparedDelta
from qserve.kernels.triton.gather import gather
from qserve.kernels.triton.head_linear import head_linear
from qserve.kernels.triton.inputs import Rounded
from qserve.kernels.triton.latent_attention import LatentShape
from qserve.kernels.triton.latent_kv import latent_kv
from qserve.kernels.triton.launch import only_compiles
from qserve.kernels.triton.log_softmax import log_softmax
from qserve.kernels.triton.lora import PreparedLora, shape_of
from qserve.kernels.triton.norm import norm
from qserve.kernels.triton.pointwise import activation, sigmoid_mul, soft_cap
from qserve.kernels.triton.rope_kv import rope_kv
from qserve.kernels.triton.route import route
from qserve.kernels.triton.runs import runs_of
from qserve.kernels.triton.schedule import Work, divide, is_decode, share_out
from qserve.kernels.triton.split_decode import Sharing, attend_splits, sharing
from qserve.kernels.triton.staging import Batch, Staging
from qserve.kernels.triton.support import unsupported
from qserve.kernels.triton.target import Target, target
from qserve.kernels.triton.tuning.configs import BUCKETS
from qserve.kernels.triton.tuning.tune import Tunable
from qserve.kernels.triton.workspace import Workspace

GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""The padded numbers of rows of a captured step; larger ones gain nothing from a graph."""

Launch = Callable[[Batch], None]
_Rows = RMSNorm | LayerNorm | Activation  # made row by row, so that a row can be rounded at once
_Paged = Attention | LatentAttention  # a program has layers of one of them


PARTIAL_BYTES = 256 << 20
"""The most bytes that units of decodes leave between their two kernels. For an 8B model it is enough for four million
keys; a step that reads more, from prefixes that its sequences share, is computed in parts."""


class _Partials:
    """Partial results of units or splits of decodes; all layers use the same memory in turn. ``arrived`` counts those
    of splits.

    It has its full size from the first decode on, so that the memory left for the cache is counted correctly.
    """

    def __init__(self) -> None:
        self.values = self.softmax = self.arrived = torch.empty(0)

    @staticmethod
    def most(op: _Paged, decodes: int, positions: int) -> int:
        """Units of this many ``decodes`` with ``positions`` each, or as many as ``PARTIAL_BYTES`` hold."""
        held = PARTIAL_BYTES // (op.heads * (_values(op) + 2) * 4)
        return max(1, min(held, decodes * -(-positions // _chunk(op))))

    def reserve(self, units: int, op: _Paged, memory: Workspace) -> bool:
        """Make room for ``units``; returns whether the memory moved. All programs share ``memory``."""
        if units <= len(self.values):
            return False
        shapes = (units, op.heads, _values(op)), (units, op.heads, 2)
        self.values, self.softmax = (
            memory.take(name, math.prod(shape), torch.float32)[: math.prod(shape)].view(shape)
            for name, shape in zip(("attention values", "attention softmax"), shapes)
        )
        if isinstance(op, Attention):
            self.arrived = memory.take("attention arrived", units * op.kv_heads, torch.int32)
        return True


def _values(op: _Paged) -> int:
    """Numbers of a value of a head."""
    return op.rank if isinstance(op, LatentAttention) else op.head_dim


def _chunk(op: _Paged) -> int:
    """Keys of a unit of work."""
    return latent_attention.chunk(op) if isinstance(op, LatentAttention) else CHUNK


class _TritonProgram:
    def __init__(self, executor: TritonExecutor, max_rows: int) -> None:
        self._executor = executor
        self._max_rows = max_rows
        self._launches: list[Launch] = []
        self._last: Op | None = None
        self._attention: _Paged | None = None
        self._windows: set[int] = set()
        self._keeps_states = False
        self._adapters = 0  # slots for them
        self._positions = 1 << 31  # of a sequence, at most; a rotation may have fewer
        self._pool: Any = None  # the memory pool that its graphs share
        self._rows: set[str] = set()
        self._staging = Staging(executor.placement.device)
        self._partials = _Partials()
        self._cache_at = 0
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._has_fallbacks = False  # if so there are no graphs, because the reference reads the step

    def add(self, ops: Sequence[Op]) -> None:
        for op in map(linear.with_finer_inputs, ops):
            if self._executor.supports(op) is not None:
                self._launches.append(self._by_reference(op))
                self._last = None
                continue
            self._rows.add(getattr(op, "rows", "tokens"))
            self._launches.append(self._prepare(op))
            self._last = op

    def run(self, step: Step) -> None:
        if not self._launches:  # the head of a classifier
            return
        tokens = step.tokens if "tokens" in self._rows else 0
        logits = step.logits if "logits" in self._rows else 0
        if self._has_fallbacks:
            self._step = on_device(step, self._executor.placement.device)
        captured = self._executor.has_graphs and max(tokens, logits) <= GRAPH_ROWS[-1]
        captured = captured and not self._has_fallbacks and not only_compiles()
        work = None
        if self._attention is not None:
            work = self._divide(step, self._attention)
            captured = captured and is_decode(step) and len(work.parts) <= 1
        runs = None
        if self._keeps_states:
            runs = runs_of(step, chunked=not self._executor.batch_invariant)
            captured = captured and is_decode(step)
        if captured:
            tokens, logits = (self._padded(rows) for rows in (tokens, logits))
        adapted = None
        if self._adapters:
            tile = shape_of(tokens, invariant=self._executor.batch_invariant).rows
            adapted = adapted_rows(step, self._adapters, tile)
        batch, moved = self._staging.load(step, work, tokens, logits, runs, adapted)
        if self._attention is not None:
            moved |= self._partials.reserve(self._slots(batch), self._attention, self._executor.memory)
            attention = self._attention
            cache = attention.cache if isinstance(attention, LatentAttention) else attention.k_cache
            place = cache.data_ptr()
            moved |= place != self._cache_at
            self._cache_at = place
        if moved and self._graphs:
            torch.cuda.synchronize()  # a graph may still be running
            self._graphs.clear()
            self._pool = None  # its memory ends with its graphs; nothing may be captured into it any more
        if not captured:
            self._launch(batch)
        elif graph := self._graphs.get(key := (tokens, logits, adapted is not None)):
            graph.replay()
        else:
            self._launch(batch)  # also compiles kernels, which a capture must not do
            self._graphs[key] = self._capture(batch)

    def _divide(self, step: Step, op: _Paged) -> Work:
        queries = self._executor.queries(op)
        if (shared := self._sharing(op)) is not None:
            return share_out(step, queries, shared, self._windows)
        return divide(step, queries, self._partials.most(op, self._max_rows, self._positions), _chunk(op))

    def _sharing(self, op: _Paged) -> Sharing | None:
        """How the keys of decodes are shared out, to no more programs than there can be tiles of keys; None where they
        are divided into units."""
        if isinstance(op, LatentAttention) or self._executor.batch_invariant:
            return None
        shared = self._executor.sharing(op)
        tiles = self._max_rows * -(-self._positions // shared.shape.keys)
        return replace(shared, programs=min(shared.programs, tiles))

    def _slots(self, batch: Batch) -> int:
        """Partial results that the decodes of any step may leave; none where this one has no decodes."""
        assert self._attention is not None
        if (shared := self._sharing(self._attention)) is not None:
            return shared.slots if any(map(len, batch.splits.values())) else 0
        most = self._partials.most(self._attention, self._max_rows, self._positions)
        return max((most, *(units for _, units in batch.parts))) if batch.parts else 0

    def _padded(self, rows: int) -> int:
        return rows and min(self._max_rows, next(size for size in GRAPH_ROWS if size >= rows))

    def _launch(self, batch: Batch) -> None:
        for launch in self._launches:
            launch(batch)

    def _capture(self, batch: Batch) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._launch(batch)
        return graph

    def _hold(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._executor.placement.device).contiguous()

    def _prepare(self, op: Op) -> Launch:
        match op:
            case Embed():
                return self._embed(op) if op.sampled is None else partial(self._fill, op.sampled, self._embed(op))
            case PositionEmbed():
                table, out, offset = self._hold(op.table), op.out, op.offset
                return lambda batch: gather(
                    table, batch.positions, out, batch.tokens, offset=offset, accumulate=True
                )
            case RMSNorm() | LayerNorm() | Activation():
                return self._row_by_row(op)
            case HeadNorm():
                return self._norm_heads(op.x, op.weight, op.head_dim, op.eps, center=True)
            case Cast():
                return lambda batch: gather(op.x, None, op.out, batch.tokens)
            case Linear():
                product = linear.prepare(op, self._executor.memory, self._executor.batch_invariant)
                self._round_at_once(op, product)
                if isinstance(product, Tunable):
                    self._executor.products.append(product)
                rows = op.rows  # not ``op``, which holds the original weight
                return lambda batch: product.run(_count(batch, rows))
            case Lora():
                self._adapters = len(op.slots.held)
                on = self._executor
                return PreparedLora(op, on.memory, self._max_rows, on.target, invariant=on.batch_invariant).run
            case RopeKV():
                self._positions = len(op.cosine)
                return self._rope_kv(op)
            case Attention():
                names = ("k_scale", "v_scale", "sinks")
                held: dict[str, Any] = {name: self._hold(x) for name in names if (x := getattr(op, name)) is not None}
                self._attention = replace(op, **held)
                self._windows.add(op.window)
                return partial(self._attend, self._attention)
            case HeadLinear():
                return self._head_linear(op)
            case LatentKV():
                self._positions = len(op.cosine)
                held = {name: self._hold(getattr(op, name).float()) for name in ("norm", "cosine", "sine")}
                latents = replace(op, **held)
                return lambda batch: latent_kv(latents, batch.positions, batch.slots, batch.tokens)
            case LatentAttention():
                self._attention = op
                return partial(self._attend_latents, op)
            case CausalConv():
                self._keeps_states = True
                return self._convolve(replace(op, weight=self._hold(op.weight)))
            case GatedDelta():
                self._keeps_states = True
                on = self._executor
                return PreparedDelta(op, on.memory, self._max_rows, on.target, on.batch_invariant).run
            case Gather():
                return lambda batch: gather(op.x, batch.logit_rows, op.out, batch.logits)
            case Route():
                bias = None if op.bias is None else self._hold(op.bias.float())
                return lambda batch: route(op, bias, batch.slots, batch.tokens)
            case Experts():
                experts = PreparedExperts(op, self._executor.memory, self._executor.batch_invariant)
                return lambda batch: experts.run(batch.tokens)
            case ExpertSum():
                return lambda batch: sum_terms(op, batch.tokens)
            case SoftCap():
                return lambda batch: soft_cap(op, _count(batch, op.rows))
            case SigmoidMul():
                return lambda batch: sigmoid_mul(op, batch.tokens)
            case Argmax():
                return lambda batch: argmax(op.x, op.out, batch.logits)
            case LogSoftmax():
                return lambda batch: log_softmax(op.x, batch.logits)
            case AllGather():
                gathered = all_gather(op, self._max_rows, self._executor.memory)
                return lambda batch: gathered(_count(batch, op.rows))
            case AllReduce():
                reduced = all_reduce(op)
                return lambda batch: reduced(_count(batch, op.rows))
            case _:
                raise AssertionError("what has no kernel is computed by its reference")

    def _by_reference(self, op: Op) -> Launch:
        self._has_fallbacks = True
        fallback = Fallback(op, invariant=self._executor.batch_invariant, device=self._executor.placement.device)
        return lambda batch: fallback.run(self._step)

    def _row_by_row(self, op: _Rows, into: Rounded | None = None) -> Launch:
        if isinstance(op, Activation):
            return lambda batch: activation(op, batch.tokens, into)
        weight, bias = self._hold(op.weight.float()), None
        if isinstance(op, LayerNorm) and op.bias is not None:
            bias = self._hold(op.bias.float())
        kind = {"center": isinstance(op, LayerNorm), "accumulate": isinstance(op, RMSNorm) and op.accumulate}
        x, out, eps, rows = op.x, op.out, op.eps, op.rows  # not ``op``, which holds the original weight
        return lambda batch: norm(x, weight, bias, out, eps, _count(batch, rows), into, **kind)

    def _norm_heads(self, x: Tensor, weight: Tensor, width: int, eps: float, *, center: bool) -> Launch:
        """In place: norms of each ``width`` columns."""
        weight, parts = self._hold(weight.float()), x.shape[1] // width
        return lambda batch: norm(x, weight, None, x, eps, batch.tokens, center=center, parts=parts)

    def _round_at_once(self, op: Linear, product: linear.Product) -> None:
        """If the last operation makes the input of ``op``, have it round that input to the 8 bits of ``product``."""
        maker = self._last
        if not isinstance(product, EightBit) or not isinstance(maker, _Rows) or maker.out is not op.x:
            return
        if op.rows == getattr(maker, "rows", "tokens") and (into := product.take_rounded()) is not None:
            self._launches[-1] = self._row_by_row(maker, into)

    def _rope_kv(self, op: RopeKV) -> Launch:
        names = ("cosine", "sine", "q_norm", "k_norm", "q_scale", "k_scale", "v_scale", "k_center")
        held: dict[str, Any] = {name: self._hold(x.float()) for name in names if (x := getattr(op, name)) is not None}
        ready, norms = replace(op, **held), []
        if op.norm_over_heads or (op.q_norm is None) != (op.k_norm is None):  # one program sees one head
            sizes = [op.heads * op.head_dim, op.kv_heads * op.head_dim]
            for x, weight in zip(op.qkv.split([*sizes, sizes[1]], 1), (op.q_norm, op.k_norm)):
                if weight is not None:
                    every, width = weight.repeat(x.shape[1] // len(weight)), len(weight)
                    norms.append(self._norm_heads(x, every, width, op.eps, center=False))
            ready = replace(ready, q_norm=None, k_norm=None)

        def launch(batch: Batch) -> None:
            for each in norms:
                each(batch)
            rope_kv(ready, batch.positions, batch.slots, batch.tokens)
            if ready.kv_dtype == PACKED_KV:
                packed_kv.store(ready, batch.slots, batch.tokens)

        return launch

    def _embed(self, op: Embed) -> Launch:
        if isinstance(op.table, Tensor):
            table = self._hold(op.table)
            return lambda batch: gather(table, batch.token_ids, op.out, batch.tokens, op.scale)
        packed = op.table
        fp8 = packed.scheme.grid is E4M3
        codes = self._hold(packed.codes.view(torch.float8_e4m3fn) if fp8 else packed.codes)
        scales = self._hold(packed.scales)
        zeros = None if packed.zeros is None else self._hold(packed.zeros)
        zero, group = 0 if fp8 else packed.scheme.zero, packed.scheme.group_width(packed.in_features)
        return lambda batch: embed(batch.token_ids, codes, scales, zeros, zero, group, op.out, batch.tokens, op.scale)

    def _fill(self, sampled: Tensor, embed: Launch, batch: Batch) -> None:
        fill(batch.token_ids, sampled, batch.tokens)
        embed(batch)

    def _head_linear(self, op: HeadLinear) -> Launch:
        invariant = self._executor.batch_invariant
        product = replace(op, weight=self._hold(op.weight.to(op.x.dtype)))
        return lambda batch: head_linear(product, batch.tokens, invariant=invariant)

    def _convolve(self, op: CausalConv) -> Launch:
        return lambda batch: causal_conv(
            op, batch.runs, batch.positions, batch.saves, decode=len(batch.runs) == batch.tokens
        )

    def _attend(self, op: Attention, batch: Batch) -> None:
        if len(batch.tiles):
            attend_tiles(op, self._executor.tile_shape(op), batch.tiles, batch.positions, batch.staged)
        if (shared := self._sharing(op)) is None:
            programs = min(self._executor.programs(op), len(self._partials.values) * op.kv_heads)
            self._parts(partial(attend_decodes, op, self._executor.tile_shape(op)), programs, batch)
        elif len(splits := batch.splits[op.window]):
            held = self._partials
            attend_splits(
                op, shared, held.values, held.softmax, held.arrived, splits, batch.positions, batch.staged
            )
        if op.kv_dtype == PACKED_KV:
            packed_kv.turn_back(op, batch.tokens)

    def _attend_latents(self, op: LatentAttention, batch: Batch) -> None:
        tiles, decodes = self._executor.latent_shapes(op)
        if len(batch.tiles):
            latent_attention.attend_tiles(op, tiles, batch.tiles, batch.positions, batch.staged)
        programs = self._executor.latent_programs(op)
        programs = min(programs, len(self._partials.values) * decodes.parts(op))
        self._parts(partial(latent_attention.attend_decodes, op, decodes), programs, batch)

    def _parts(self, attend: Callable[..., None], programs: int, batch: Batch) -> None:
        """The decodes of each part of the work, by so many ``programs``."""
        values, softmax = self._partials.values, self._partials.softmax
        units, decodes = batch.units, batch.decodes
        for index, (count, used) in enumerate(batch.parts):
            mine = decodes if index + 1 == len(batch.parts) else decodes[:count]  # padding follows the last one
            attend(
                values, softmax, units, batch.counts[index:], mine, batch.positions, batch.staged, programs
            )
            units, decodes = units[used:], decodes[count:]


def _count(batch: Batch, rows: str) -> int:
    return batch.logits if rows == "logits" else batch.tokens


_UNPACKED = (NF4, BNB_FP4, AFFINE)


class TritonExecutor:
    """The Triton kernels on one device.

    With ``invariant``, all work is cut in fixed shapes, whatever runs beside it: a row's result depends neither on the
    batch nor on the chunks of its prompt. The price is that decode attention has larger tiles, and units of equal
    length instead of equal shares.
    """

    name = "triton"

    def __init__(
        self, device: torch.device, activations: torch.dtype = torch.bfloat16, *, invariant: bool = False
    ) -> None:
        self.placement = Placement(device, activations, keys_by_token=True, dense=activations, unpacked=_UNPACKED)
        self.batch_invariant = invariant
        self.target: Target = target(device)
        self.has_graphs = self.asynchronous = device.type == "cuda"
        self.warm_sizes: Sequence[int] = (*GRAPH_ROWS, BUCKETS[-2])  # sizes to capture graphs and compile kernels for
        self.products: list[Tunable] = []  # of all programs
        self.memory = Workspace(device)

    def supports(self, op: Op) -> str | None:
        if self.batch_invariant and self.has_graphs and isinstance(op, Linear) and isinstance(op.weight, Tensor):
            return "dense products are those of cuBLAS, which vary with the batch"
        return unsupported(linear.with_finer_inputs(op), self.target, self.has_graphs)

    def packed_bytes(self, scheme: WeightScheme, activations: ActivationScheme | None, out: int, inp: int) -> int:
        return linear.packed_bytes(scheme, activations, out, inp)

    def tile_shape(self, op: Attention) -> Shape:
        return tile_shape(op, self.target, self.batch_invariant)

    def sharing(self, op: Attention) -> Sharing:
        """How the keys of decodes are shared out, unless it is ``invariant``."""
        return sharing(op, self.target)

    def programs(self, op: Attention) -> int:
        """Programs that take turns at the units of decodes where it is ``invariant``: as many as run at a time."""
        return self.target.sms * resident(op, self.tile_shape(op), self.target.shared_bytes)

    def latent_shapes(self, op: LatentAttention) -> tuple[LatentShape, LatentShape]:
        """For prompts, and for decodes."""
        bytes_each, warp = self.target.shared_bytes, self.target.warp
        tiles = latent_attention.tile_shape(op, bytes_each, warp, folded=self.batch_invariant)
        return tiles, tiles if self.batch_invariant else latent_attention.decode_shape(op, bytes_each, warp)

    def latent_programs(self, op: LatentAttention) -> int:
        """As ``programs``."""
        return self.target.sms * latent_attention.resident(op, self.latent_shapes(op)[1], self.target.shared_bytes)

    def queries(self, op: _Paged) -> int:
        """Queries of a sequence in one tile."""
        if isinstance(op, LatentAttention):
            return self.latent_shapes(op)[0].queries(op)
        return self.tile_shape(op).rows // (op.heads // op.kv_heads)

    def program(self, max_rows: int) -> _TritonProgram:
        return _TritonProgram(self, max_rows)
