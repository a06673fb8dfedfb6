"""Orders of the rows of queries, keys and values: from how a checkpoint stores them to how ``RopeKV`` takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qserve.runtime.models.config import DecoderConfig

Orders = Sequence[Tensor | None]
"""For each of some linears int64 [outputs], or None where they stay as they are stored."""


def element_order(config: DecoderConfig, rotary_dim: int) -> Tensor:
    """int64 [head_dim]: the elements of each query and key. Pairs that rotate together come to lie half of the rotary
    dimensions apart, where they are stored as neighbours. Scores do not change, as both are ordered alike."""
    elements = torch.arange(config.head_dim)
    if not config.modules.interleaved:
        return elements
    return torch.cat([elements[:rotary_dim:2], elements[1:rotary_dim:2], elements[rotary_dim:]])


def qkv_orders(config: DecoderConfig, rotary_dim: int, queries: range, keys: range) -> Orders:
    """For the linears ``Modules.qkv``, of which the heads ``queries`` and ``keys`` are taken."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    stored = torch.arange((heads + 2 * kv_heads) * dim)
    if config.modules.grouped:
        groups = stored.view(kv_heads, -1, dim)
        q, k, v = groups[:, :-2].reshape(heads, dim), groups[:, -2], groups[:, -1]
    else:
        q, k, v = stored.view(-1, dim).split([heads, kv_heads, kv_heads])
    order = element_order(config, rotary_dim)
    joined = len(config.modules.qkv) == 1
    firsts = [0, 0, 0] if joined else [int(each.min()) for each in (q, k, v)]  # each linear counts its own rows
    q, k, v = (each[heads.start : heads.stop] for each, heads in ((q, queries), (k, keys), (v, keys)))
    parts = [each.flatten() - first for each, first in zip((q[:, order], k[:, order], v), firsts)]
    if joined:
        return [_unless_all(torch.cat(parts), len(stored))]
    return [_unless_all(part, count * dim) for part, count in zip(parts, (heads, kv_heads, kv_heads))]


def gate_orders(config: DecoderConfig, queries: range) -> tuple[Tensor, Tensor]:
    """The rows of the queries, and those of the gates, of the heads ``queries``, in a linear that holds for each head
    its query and then a gate."""
    dim = config.head_dim
    heads = torch.arange(config.num_attention_heads * 2 * dim).view(-1, 2, dim)[queries.start : queries.stop]
    return heads[:, 0].flatten(), heads[:, 1].flatten()


def part_of(count: int, part: range, times: int = 1) -> Tensor | None:
    """The outputs ``part`` of each of ``times`` times ``count`` that follow each other; None where that is all."""
    return _unless_all((torch.arange(times)[:, None] * count + torch.tensor(part)).flatten(), count * times)


def _unless_all(order: Tensor, count: int) -> Tensor | None:
    return None if torch.equal(order, torch.arange(count)) else order
