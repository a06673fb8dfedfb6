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


def joined_kv_b(keys: Tensor, values: Tensor) -> Tensor:
    """The linear from the latent to keys and values, [heads * (nope + value), rank], of its two halves: the keys
    [heads, rank, nope], which llama.cpp keeps transposed, and the values [heads, value, rank]."""
    return torch.cat([keys.transpose(1, 2), values], 1).reshape(-1, values.shape[-1])
