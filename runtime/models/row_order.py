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


def qkv_orders(config: DecoderConfig, rotary_dim: int) -> Orders:
    """For the linears ``Modules.qkv``."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    stored = torch.arange((heads + 2 * kv_heads) * dim)
    if config.modules.grouped:
        groups = stored.view(kv_heads, -1, dim)
        q, k, v = groups[:, :-2].reshape(heads, dim), groups[:, -2], groups[:, -1]
    else:
        q, k, v = stored.view(-1, dim).split([heads, kv_heads, kv_heads])
    order = element_order(config, rotary_dim)
    parts = [q[:, order].flatten(), k[:, order].flatten(), v.flatten()]
    if len(config.modules.qkv) == 1:
        parts = [torch.cat(parts)]
    else:  # each linear counts its own rows
        parts = [part - part.min() for part in parts]
    return [None if torch.equal(part, torch.arange(len(part))) else part for part in parts]
