"""Paged decode attention, timed on a GPU: ours over 16-bit and FP8 caches, FlashInfer, and torch without pages.

A ``Decode`` is one step of equally long sequences over one of several copies of a cache. The copies take turns, so each
has left the GPU's cache when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional as F

from qserve.evals.bench.gpu.linears import INVARIANT
from qserve.evals.bench.gpu.peers import missing
from qserve.kernels.executor import Step
from qserve.kernels.ops import BLOCK_SIZE, Attention
from qserve.kernels.triton.attention import attend_decodes
from qserve.kernels.triton.executor import TritonExecutor
from qserve.kernels.triton.schedule import divide
from qserve.kernels.triton.staging import Staging
from qserve.kernels.triton.target import Feature

SCALE = 0.02  # of FP8 keys and values


@dataclass(frozen=True)
class Heads:
    """The number of query heads and of key heads of a model, and their width."""

    queries: int
    keys: int
    width: int


@dataclass(frozen=True)
class Decode:
    """``batch`` sequences of ``context`` tokens; the last token of each is the query.

    ``qkv`` [batch, (queries + 2 keys) * width]; ``k``, ``v`` [copies * batch * pages of a sequence, keys, 16, width],
    16-bit or e4m3 by ``SCALE``. Sequence s of copy c has every ``copies * batch``-th page from c * batch + s on.
    """

    heads: Heads
    batch: int
    context: int
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
        return 4 * self.batch * self.context * self.heads.queries * self.heads.width

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
        """[batch, queries, width]"""
        width = self.heads.queries * self.heads.width
        return self.qkv[:, :width].view(self.batch, self.heads.queries, self.heads.width)

    @cached_property
    def _want(self) -> Tensor:
        scale = SCALE if self.fp8 else 1.0
        k, v = (x.float() * scale for x in self.gathered(0))
        return F.scaled_dot_product_attention(self.queries[:, :, None].float(), k, v, enable_gqa=True)[:, :, 0]

    def error(self, y: Tensor) -> float:
        """The norm of the error of ``y`` [batch, queries, width], for copy 0, relative to that of the right result."""
        return float((y.float() - self._want).norm() / self._want.norm())


def cache_bytes(heads: Heads, batch: int, context: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of ``batch`` sequences."""
    return 2 * batch * context * heads.keys * heads.width * dtype.itemsize


def decode(
    heads: Heads, batch: int, context: int, copies: int, device: torch.device, dtype: torch.dtype, cache: torch.dtype
) -> Decode:
    """A random ``Decode``."""
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(batch, (heads.queries + 2 * heads.keys) * heads.width, generator=generator, device=device)
    shape = (copies * batch * -(-context // BLOCK_SIZE), heads.keys, BLOCK_SIZE, heads.width)
    pages = torch.empty(2, *shape, dtype=cache, device=device)
    for page in pages.flatten(0, 1).split(1 << 12):  # piece by piece: random numbers have 32 bits first
        values = torch.randn(page.shape, generator=generator, device=device)
        page.copy_((values / SCALE).clamp(-448, 448) if cache == torch.float8_e4m3fn else values)
    return Decode(heads, batch, context, copies, qkv.to(dtype), pages[0], pages[1])


@dataclass(frozen=True)
class Contestant:
    """``hold`` makes a call for every copy, which returns [batch, queries, width]. The rest is as for a product."""

    name: str
    fp8: bool
    hold: Callable[[Decode], list[Callable[[], Tensor]]]
    ours: bool = False
    missing: Callable[[], str | None] = lambda: None

    @property
    def needs(self) -> Feature | None:
        return "fp8" if self.fp8 else None


def _ours(decode: Decode, invariant: bool = False) -> list[Callable[[], Tensor]]:
    heads, device = decode.heads, decode.qkv.device
    executor = TritonExecutor(device, decode.qkv.dtype, invariant=invariant)
    scale = torch.full((heads.keys,), SCALE, device=device) if decode.fp8 else None
    out = torch.empty(decode.batch, heads.queries, heads.width, dtype=decode.qkv.dtype, device=device)
    op = Attention(
        decode.qkv, out.view(decode.batch, -1), decode.k.transpose(2, 3), decode.v, heads.queries, heads.keys,
        heads.width, heads.width**-0.5, 0, scale, scale,
    )  # fmt: skip
    positions = torch.full((decode.batch,), decode.context - 1, dtype=torch.int32)
    ends = torch.arange(decode.batch + 1, dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int32)

    def call(copy: int) -> Callable[[], Tensor]:
        table = decode.table(copy)
        slots = table[:, -1] * BLOCK_SIZE + (decode.context - 1) % BLOCK_SIZE
        step = Step(positions, positions, slots, ends, table, none)
        batch, _ = Staging(device).load(step, divide(step, 1), decode.batch, 0)
        units = len(batch.units)
        values = torch.empty(units, heads.queries, heads.width, device=device)
        softmax = torch.empty(units, heads.queries, 2, device=device)

        def run() -> Tensor:
            attend_decodes(
                op, executor.decode_shape(op), values, softmax, batch.units, batch.counts, batch.decodes,
                batch.positions, batch.staged, min(executor.programs(op), units * heads.keys),
            )  # fmt: skip
            return out

        return run

    return [call(copy) for copy in range(decode.copies)]


def _flashinfer(decode: Decode) -> list[Callable[[], Tensor]]:
    flashinfer = import_module("flashinfer")
    heads, device = decode.heads, decode.qkv.device
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    queries = decode.queries.contiguous()
    scale = SCALE if decode.fp8 else None

    def call(copy: int) -> Callable[[], Tensor]:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        starts = torch.arange(decode.batch + 1, dtype=torch.int32) * decode.pages
        last = torch.full((decode.batch,), (decode.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32)
        wrapper.plan(
            starts, decode.table(copy).reshape(-1).to(device), last, heads.queries, heads.keys, heads.width, BLOCK_SIZE,
            q_data_type=queries.dtype, kv_data_type=decode.k.dtype,
        )  # fmt: skip
        product: Callable[[], Tensor] = partial(
            wrapper.run, queries, (decode.k, decode.v), k_scale=scale, v_scale=scale
        )
        return product

    return [call(copy) for copy in range(decode.copies)]


def _torch(decode: Decode) -> list[Callable[[], Tensor]]:
    queries = decode.queries[:, :, None].contiguous()

    def call(copy: int) -> Callable[[], Tensor]:
        k, v = (x.contiguous() for x in decode.gathered(copy))
        return lambda: F.scaled_dot_product_attention(queries, k, v, enable_gqa=True)[:, :, 0]

    return [call(copy) for copy in range(decode.copies)]


CONTESTANTS = (
    Contestant("qserve", False, _ours, ours=True),
    Contestant("qserve", True, _ours, ours=True),
    Contestant(INVARIANT, False, partial(_ours, invariant=True)),
    Contestant(INVARIANT, True, partial(_ours, invariant=True)),
    Contestant("torch, without pages", False, _torch),
    Contestant("FlashInfer", False, _flashinfer, missing=partial(missing, "flashinfer")),
    Contestant("FlashInfer", True, _flashinfer, missing=partial(missing, "flashinfer")),
)
