"""Paged attention of decodes and of prompts, timed on a GPU: ours over 16-bit and FP8 caches, FlashInfer, and torch
without pages.

A ``Problem`` is one step of equally long sequences over one of several copies of a cache. The copies take turns, so
each has left the GPU's cache when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qserve.evals.bench.gpu.linears import INVARIANT
from qserve.evals.bench.gpu.peers import missing
from qserve.kernels.executor import Step
from qserve.kernels.ops import BLOCK_SIZE, Attention
from qserve.kernels.triton.attention import attend_decodes, attend_tiles
from qserve.kernels.triton.executor import TritonExecutor
from qserve.kernels.triton.schedule import divide, share_out
from qserve.kernels.triton.split_decode import attend_splits
from qserve.kernels.triton.staging import Batch, Staging
from qserve.kernels.triton.target import Feature

SCALE = 0.02  # of FP8 keys and values
_SAMPLED = 128  # new tokens at either end of a prompt that are checked


@dataclass(frozen=True)
class Heads:
    """The number of query heads and of key heads of a model, and their width."""

    queries: int
    keys: int
    width: int


@dataclass(frozen=True)
class Problem:
    """``batch`` sequences of ``context`` tokens; the last ``new`` tokens of each are the queries: one that decodes, or
    all of a prompt.

    ``qkv`` [batch * new, (queries + 2 keys) * width]; ``k``, ``v`` [copies * batch * pages of a sequence, keys, 16,
    width], 16-bit or e4m3 by ``SCALE``. Sequence s of copy c has every ``copies * batch``-th page, from c * batch + s
    on.
    """

    heads: Heads
    batch: int
    context: int
    new: int
    copies: int
    qkv: Tensor
    k: Tensor
    v: Tensor

    @property
    def fp8(self) -> bool:
        return self.k.dtype == torch.float8_e4m3fn

    @property
    def pages(self) -> int:
        return -(-self.context // BLOCK_SIZE)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that a step reads."""
        return cache_bytes(self.heads, self.batch, self.context, self.k.dtype)

    @property
    def operations(self) -> int:
        seen = self.new * self.context - self.new * (self.new - 1) // 2
        return 4 * self.batch * seen * self.heads.queries * self.heads.width

    def table(self, copy: int) -> Tensor:
        """int32 [batch, pages], in the host's memory."""
        first = copy * self.batch + torch.arange(self.batch, dtype=torch.int32)
        return first[:, None] + torch.arange(self.pages, dtype=torch.int32) * (self.copies * self.batch)

    def gathered(self, copy: int) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, keys, context, width] in the cache's type, without pages."""
        table = self.table(copy).long().to(self.k.device)
        k, v = (cache.view(torch.uint8)[table].view(cache.dtype) for cache in (self.k, self.v))
        return tuple(x.transpose(1, 2).flatten(2, 3)[:, :, : self.context] for x in (k, v))  # type: ignore[return-value]

    @property
    def queries(self) -> Tensor:
        """[batch, new, queries, width]"""
        width = self.heads.queries * self.heads.width
        return self.qkv[:, :width].view(self.batch, self.new, self.heads.queries, self.heads.width)

    @cached_property
    def _sampled(self) -> Tensor:
        """Some of the new tokens: all, or those at either end."""
        every = torch.arange(self.new)
        return every if self.new <= 2 * _SAMPLED else torch.cat([every[:_SAMPLED], every[-_SAMPLED:]])

    @cached_property
    def _want(self) -> Tensor:
        scale = SCALE if self.fp8 else 1.0
        k, v = (x.float() * scale for x in self.gathered(0))
        some = self._sampled
        at = (self.context - self.new + some)[:, None]
        seen = (torch.arange(self.context) <= at).to(k.device)
        q = self.queries[:, some].transpose(1, 2).float()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)

    def error(self, y: Tensor) -> float:
        """The norm of the error of ``y`` [batch, new, queries, width], for copy 0, relative to that of the right
        result; of many new tokens, those at either end count."""
        return float((y[:, self._sampled].float() - self._want).norm() / self._want.norm())


def cache_bytes(heads: Heads, batch: int, context: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of ``batch`` sequences."""
    return 2 * batch * context * heads.keys * heads.width * dtype.itemsize


def problem(
    heads: Heads, batch: int, context: int, new: int, copies: int, device: torch.device, dtype: torch.dtype,
    cache: torch.dtype,
) -> Problem:  # fmt: skip
    """A random ``Problem``."""
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(batch * new, (heads.queries + 2 * heads.keys) * heads.width, generator=generator, device=device)
    shape = (copies * batch * -(-context // BLOCK_SIZE), heads.keys, BLOCK_SIZE, heads.width)
    pages = torch.empty(2, *shape, dtype=cache, device=device)
    for page in pages.flatten(0, 1).split(1 << 12):  # piece by piece: random numbers have 32 bits first
        values = torch.randn(page.shape, generator=generator, device=device)
        page.copy_((values / SCALE).clamp(-448, 448) if cache == torch.float8_e4m3fn else values)
    return Problem(heads, batch, context, new, copies, qkv.to(dtype), pages[0], pages[1])


@dataclass(frozen=True)
class Contestant:
    """``hold`` makes a call for every copy, which returns [batch, new, queries, width]; the rest is as for a
    product."""

    name: str
    fp8: bool
    hold: Callable[[Problem], list[Callable[[], Tensor]]]
    ours: bool = False
    missing: Callable[[], str | None] = lambda: None

    @property
    def needs(self) -> Feature | None:
        return "fp8" if self.fp8 else None


def _ours(problem: Problem, invariant: bool = False) -> list[Callable[[], Tensor]]:
    heads, device, new = problem.heads, problem.qkv.device, problem.new
    executor = TritonExecutor(device, problem.qkv.dtype, invariant=invariant)
    scale = torch.full((heads.keys,), SCALE, device=device) if problem.fp8 else None
    out = torch.empty(problem.batch, new, heads.queries, heads.width, dtype=problem.qkv.dtype, device=device)
    op = Attention(
        problem.qkv, out.view(problem.batch * new, -1), problem.k.transpose(2, 3), problem.v, heads.queries, heads.keys,
        heads.width, heads.width**-0.5, 0, scale, scale,
    )  # fmt: skip
    each = torch.arange(problem.context - new, problem.context, dtype=torch.int32)
    positions = each.repeat(problem.batch)
    starts = torch.arange(problem.batch + 1, dtype=torch.int32) * new
    none = torch.empty(0, dtype=torch.int32)
    shares, sharing = new == 1 and not invariant, executor.sharing(op)

    def call(copy: int) -> Callable[[], Tensor]:
        table = problem.table(copy)
        at = (table[:, each.long() // BLOCK_SIZE] * BLOCK_SIZE + each % BLOCK_SIZE).reshape(-1)
        step = Step(positions, positions, at, starts, table, none)
        work = divide(step, executor.queries(op))
        if shares:
            work = share_out(step, executor.queries(op), sharing, [0])
        batch, _ = Staging(device).load(step, work, len(positions), 0)
        if new > 1:
            return partial(tiles, batch)
        slots = sharing.slots if shares else len(batch.units)
        values = torch.empty(slots, heads.queries, heads.width, device=device)
        softmax = torch.empty(slots, heads.queries, 2, device=device)
        arrived = torch.zeros(slots * heads.keys, dtype=torch.int32, device=device)
        return partial(splits, batch, values, softmax, arrived) if shares else partial(units, batch, values, softmax)

    def tiles(batch: Batch) -> Tensor:
        attend_tiles(op, executor.tile_shape(op), batch.tiles, batch.positions, batch.staged)
        return out

    def units(batch: Batch, values: Tensor, softmax: Tensor) -> Tensor:
        attend_decodes(
            op, executor.tile_shape(op), values, softmax, batch.units, batch.counts, batch.decodes,
            batch.positions, batch.staged, min(executor.programs(op), len(values) * heads.keys),
        )  # fmt: skip
        return out

    def splits(batch: Batch, values: Tensor, softmax: Tensor, arrived: Tensor) -> Tensor:
        attend_splits(op, sharing, values, softmax, arrived, batch.splits[0], batch.positions, batch.staged)
        return out

    return [call(copy) for copy in range(problem.copies)]


def _flashinfer(problem: Problem) -> list[Callable[[], Tensor]]:
    flashinfer = import_module("flashinfer")
    heads, device = problem.heads, problem.qkv.device
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    queries = problem.queries[:, 0].contiguous()
    scale = SCALE if problem.fp8 else None

    def call(copy: int) -> Callable[[], Tensor]:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        starts = torch.arange(problem.batch + 1, dtype=torch.int32) * problem.pages
        last = torch.full((problem.batch,), (problem.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32)
        wrapper.plan(
            starts, problem.table(copy).reshape(-1).to(device), last, heads.queries, heads.keys, heads.width,
            BLOCK_SIZE, q_data_type=queries.dtype, kv_data_type=problem.k.dtype,
        )  # fmt: skip
        run = partial(wrapper.run, queries, (problem.k, problem.v), k_scale=scale, v_scale=scale)
        return lambda: run()[:, None]

    return [call(copy) for copy in range(problem.copies)]


def _torch(problem: Problem, backend: SDPBackend | None = None) -> list[Callable[[], Tensor]]:
    queries = problem.queries.transpose(1, 2).contiguous()

    def call(copy: int) -> Callable[[], Tensor]:
        k, v = (x.contiguous() for x in problem.gathered(copy))

        def run() -> Tensor:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(queries, k, v, is_causal=problem.new > 1, enable_gqa=True)
            return out.transpose(1, 2)

        return run

    return [call(copy) for copy in range(problem.copies)]


def _no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "there is no GPU"


CONTESTANTS = (
    Contestant("qserve", False, _ours, ours=True),
    Contestant("qserve", True, _ours, ours=True),
    Contestant(INVARIANT, False, partial(_ours, invariant=True)),
    Contestant(INVARIANT, True, partial(_ours, invariant=True)),
    Contestant("torch, without pages", False, _torch),
    Contestant("FlashInfer", False, _flashinfer, missing=partial(missing, "flashinfer")),
    Contestant("FlashInfer", True, _flashinfer, missing=partial(missing, "flashinfer")),
)
"""For decodes."""
PROMPTS = (
    *(each for each in CONTESTANTS if each.ours or each.name == INVARIANT),
    Contestant("torch, FlashAttention", False, partial(_torch, backend=SDPBackend.FLASH_ATTENTION), missing=_no_gpu),
    Contestant("torch, cuDNN", False, partial(_torch, backend=SDPBackend.CUDNN_ATTENTION), missing=_no_gpu),
)
"""For prompts, which begin at the first token."""
