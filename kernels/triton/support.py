"""What the Triton kernels can compute, on which GPU, and the reason where they cannot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.checkpoint.grid import E4M3, INTEGERS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.kernels.abi import name_of
from qserve.kernels.ops import (
    SCALED_KV,
    Activation,
    Argmax,
    Attention,
    Embed,
    Gather,
    Linear,
    LogSoftmax,
    Op,
    RMSNorm,
    RopeKV,
)
from qserve.kernels.triton import linear
from qserve.kernels.triton.target import NEEDED, Feature, Target

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST_ROW = 16384  # of a norm, whose row one program holds
_MOST_HEADS = 64  # sharing a key head: the rows of a tile


@dataclass(frozen=True)
class Kernel:
    """A kernel as shown to people: ``needs`` is a feature that not every GPU has."""

    name: str
    computes: str
    needs: Feature | None = None


COMPUTED = (Embed, RMSNorm, Linear, RopeKV, Attention, Activation, Gather, Argmax, LogSoftmax)
"""The operations that have a kernel at all."""
KERNELS = (
    Kernel("embed", "packed embeddings, dequantized as they are looked up"),
    Kernel("fill", "tokens that were sampled in the step before, where they are still on the device"),
    Kernel("gather", "dense embeddings, and the rows whose logits are wanted"),
    Kernel("rms_norm", "RMSNorm, and its rows in 8 bits for the product that reads them"),
    Kernel("rope_kv", "rotation, and keys and values into a cache in fp16, bf16 or int8"),
    Kernel("rope_kv fp8", "the same into a cache in e4m3", "fp8"),
    Kernel("attention", "paged attention of prompts and decodes over fp16, bf16 or int8"),
    Kernel("attention fp8", "the same over e4m3", "fp8"),
    Kernel("weight_only", "products with integer weights of 2 to 8 bits (dense ones are cuBLAS's)"),
    Kernel("eight_bit", "products with weights and inputs in int8"),
    Kernel("eight_bit fp8", "products with weights and inputs in e4m3", "fp8"),
    Kernel("persistent", "8-bit products of more than 256 rows, fed by the copy engine (sm_90, sm_100)", "tma"),
    Kernel("dequantize", "integer weights in 16 bits: cuBLAS multiplies more than 512 rows by them"),
    Kernel("inputs", "inputs of products, rounded or reordered"),
    Kernel("silu_mul", "SiLU of the gate times up, and its rows in 8 bits likewise"),
    Kernel("argmax", "the greedy token"),
    Kernel("log_softmax", "log-probabilities of prompts"),
)


def unsupported(op: Op, gpu: Target, compiled: bool) -> str | None:
    """None, or why no kernel computes ``op``. ``compiled``: for a GPU, not in the interpreter."""
    if not isinstance(op, COMPUTED):
        return f"{name_of(type(op))} has no Triton kernel"
    match op:
        case Embed(table=QuantizedWeight() as table):
            if table.g_idx is not None:
                return "embeddings with groups out of order have no Triton kernel"
            if table.scheme.grid not in (INTEGERS, E4M3):
                return f"embeddings as {table.scheme} have no Triton kernel"
            return _float8(gpu) if table.scheme.grid is E4M3 else None
        case Embed(table=Tensor() as table) if table.dtype not in _FLOATS:
            return f"embeddings in {table.dtype} have no Triton kernel"
        case RMSNorm() if op.x.shape[1] > _WIDEST_ROW:
            return f"a norm over {op.x.shape[1]} values has no Triton kernel: at most {_WIDEST_ROW}"
        case RMSNorm(accumulate=True):
            return "a norm that accumulates has no Triton kernel"
        case Activation() if not (op.function == "silu" and op.gated):
            return f"{op.function}{' that is gated' * op.gated} has no Triton kernel"
        case Linear():
            return linear.supports(op.weight, gpu)
        case RopeKV() if 2 * op.cosine.shape[1] != op.head_dim:
            return "a rotation of a part of each head has no Triton kernel"
        case RopeKV() if (op.q_norm is None) != (op.k_norm is None):
            return "a norm of queries without one of keys has no Triton kernel"
        case RopeKV() if op.norm_over_heads:
            return "a norm over all heads has no Triton kernel"
        case RopeKV() if op.q_scale is not None:
            return "a scale of queries has no Triton kernel"
        case Attention() if op.softcap:
            return "a cap of scores has no Triton kernel"
        case RopeKV() | Attention():
            return _cache(op, gpu, compiled)
    return None


def _cache(op: RopeKV | Attention, gpu: Target, compiled: bool) -> str | None:
    dtype = op.k_cache.dtype
    if op.head_dim % 16 or op.head_dim > 256:
        return f"head_dim {op.head_dim} is not a multiple of 16 up to 256"
    if op.heads // op.kv_heads > _MOST_HEADS:
        return f"{op.heads // op.kv_heads} query heads share a key head: at most {_MOST_HEADS}"
    if dtype not in (*_FLOATS, *SCALED_KV) or (dtype == torch.float32 and compiled):
        return f"a KV cache in {dtype} has no Triton kernel"
    if dtype in SCALED_KV and (op.k_scale is None or op.v_scale is None):
        return f"a KV cache in {dtype} needs scales"
    if not op.k_cache.transpose(2, 3).is_contiguous():
        return "keys that do not lie token by token have no Triton kernel"
    return _float8(gpu) if dtype == torch.float8_e4m3fn else None


def _float8(gpu: Target) -> str | None:
    return None if "fp8" in gpu.features else f"e4m3 needs {NEEDED['fp8']}, not {gpu.architecture}"
