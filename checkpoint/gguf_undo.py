"""What llama.cpp's converter does to weights, undone: each function makes transformers' tensor of the file's."""

from __future__ import annotations

import torch
from torch import Tensor


def unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order of q and k (weight [out, in] or bias [out]).

    Its RoPE turns neighbouring rows (0, 1), (2, 3), ... of a head; Hugging Face's turns row i with i + dim/2.
    """
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def regroup(tensor: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Rows of all queries, all keys and all values, as groups: for each key head its queries, its key and its value."""
    group, dim = heads // kv_heads, tensor.shape[0] // (heads + 2 * kv_heads)
    rest = tensor.shape[1:]
    q, k, v = tensor.split([heads * dim, kv_heads * dim, kv_heads * dim])
    parts = [q.reshape(kv_heads, group * dim, *rest), *(x.reshape(kv_heads, dim, *rest) for x in (k, v))]
    return torch.cat(parts, 1).reshape(tensor.shape)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.T.contiguous() if tensor.dim() > 1 else tensor


def minus_one(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) - 1


def untiled(tensor: Tensor, key_heads: int, heads: int, first: int = 0) -> Tensor:
    """Rows from ``first`` on are those of the value ``heads`` of a gated delta net. llama.cpp has the first of each key
    head, then the second of each, and so on; transformers has those of a key head side by side."""
    rows = tensor[first:]
    rows = rows.reshape(heads // key_heads, key_heads, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
    return torch.cat([tensor[:first], rows])


def untiled_columns(tensor: Tensor, key_heads: int, heads: int) -> Tensor:
    return untiled(tensor.T, key_heads, heads).T.contiguous()


def log_of_rates(tensor: Tensor, key_heads: int, heads: int) -> Tensor:
    """The logarithms [heads] of the rates of a gated delta net, of which llama.cpp keeps the negative."""
    return untiled(tensor.neg().log(), key_heads, heads)


def rates(tensor: Tensor, key_heads: int, heads: int) -> Tensor:
    """The inverse of ``log_of_rates``."""
    order = untiled(torch.arange(heads), key_heads, heads).argsort()
    return tensor.float().exp().neg()[order]


def joined_qkvz(qkv: Tensor, z: Tensor, key_heads: int, keys: int) -> Tensor:
    """One linear for q, k, v and z of a gated delta net, which holds what belongs to a key head side by side. ``qkv``:
    all q, all k and all v; of the first two there are ``keys`` rows each."""
    parts = [*qkv.split([keys, keys, len(qkv) - 2 * keys]), z]
    return torch.cat([part.reshape(key_heads, -1, part.shape[1]) for part in parts], 1).reshape(-1, qkv.shape[1])


def in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """The rows of both, or their numbers, in turn."""
    return torch.stack([gate, up], 1).flatten(0, 1)


def half_rows(tensor: Tensor, half: int) -> Tensor:
    """One half of the rows of two linears, of which each has as many."""
    return tensor.chunk(2)[half].clone()


def joined_kv_b(keys: Tensor, values: Tensor) -> Tensor:
    """The linear from the latent to keys and values, [heads * (nope + value), rank], of its two halves: the keys
    [heads, rank, nope], which llama.cpp keeps transposed, and the values [heads, value, rank]."""
    return torch.cat([keys.transpose(1, 2), values], 1).reshape(-1, values.shape[-1])


OF_ROWS = (unpermute, regroup, untiled, joined_qkvz, in_turn, half_rows)
"""Those that only choose and order rows, which codes and scales have as well as numbers."""
