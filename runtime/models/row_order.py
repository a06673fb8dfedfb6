"""The rows of queries, keys and values as a checkpoint stores them, in the order in which ``RopeKV`` takes them."""

from __future__ import annotations

import torch
from torch import Tensor


def half_split(rotary_dim: int, head_dim: int) -> Tensor:
    """int64 [head_dim]: elements that rotate as neighbouring pairs (2 i, 2 i + 1), in the order in which they rotate as
    pairs half of ``rotary_dim`` apart. Scores do not change, as queries and keys are ordered alike."""
    elements = torch.arange(head_dim)
    return torch.cat([elements[:rotary_dim:2], elements[1:rotary_dim:2], elements[rotary_dim:]])


def qkv_rows(heads: int, kv_heads: int, head_dim: int, *, grouped: bool, pairs: Tensor) -> tuple[Tensor, ...]:
    """int64 [heads * head_dim], [kv_heads * head_dim] twice: the rows of queries, keys and values in one joined matrix.

    ``grouped``: it holds for each key head its queries, then its key, then its value; else all queries, all keys, all
    values. ``pairs`` orders the elements of each query and key.
    """
    rows = torch.arange((heads + 2 * kv_heads) * head_dim)
    if grouped:
        groups = rows.view(kv_heads, -1, head_dim)
        q, k, v = groups[:, :-2].reshape(heads, head_dim), groups[:, -2], groups[:, -1]
    else:
        q, k, v = rows.view(-1, head_dim).split([heads, kv_heads, kv_heads])
    return q[:, pairs].flatten(), k[:, pairs].flatten(), v.flatten()
