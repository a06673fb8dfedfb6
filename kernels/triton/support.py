"""What the Triton kernels can compute, on which GPU, and the reason where they cannot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.checkpoint.grid import E4M3, INTEGERS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.kernels.kv_cache import PACKED_HEADS
from qserve.kernels.ops import (
    PACKED_KV,
    SCALED_KV,
    Attention,
    Embed,
    Experts,
    GatedDelta,
    HeadNorm,
    LatentAttention,
    LatentKV,
    LayerNorm,
    Linear,
    Op,
    PositionEmbed,
    RMSNorm,
    RopeKV,
    Route,
)
from qserve.kernels.triton import delta_chunks, experts, latent_attention, linear
from qserve.kernels.triton.target import NEEDED, Feature, Target

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST_ROW = 16384  # of a norm, whose row one program holds
_MOST_EXPERTS = 1024  # whose scores one program holds
_MOST_NUMBERS = 8192  # of the heads that share a key head: the rows of a tile
_MOST_PACKED = 16  # such heads over codes of 4 bits: the fewest rows that a tile of these has


@dataclass(frozen=True)
class Kernel:
    """A kernel as shown to people: ``needs`` is a feature that not every GPU has."""

    name: str
    computes: str
    needs: Feature | None = None


KERNELS = (
    Kernel("embed", "packed embeddings, dequantized as they are looked up"),
    Kernel("fill", "tokens that were sampled in the step before, where they are still on the device"),
    Kernel("gather", "dense embeddings, those of positions, and the rows whose logits are wanted"),
    Kernel("norm", "RMSNorm and LayerNorm, of rows or heads, and rows in 8 bits for the product that reads them"),
    Kernel("rope_kv", "rotation, and keys and values into a cache in fp16, bf16 or int8"),
    Kernel("rope_kv fp8", "the same into a cache in e4m3", "fp8"),
    Kernel("packed_kv", "heads times a Hadamard matrix, and keys and values into a cache of 4 bits"),
    Kernel("attention", "paged attention of prompts and decodes over fp16, bf16, int8 or 4 bits"),
    Kernel("attention fp8", "the same over e4m3", "fp8"),
    Kernel("latent_kv", "latents normed and rotated into a cache in fp16 or bf16, and their queries"),
    Kernel("latent_attention", "paged attention of prompts and decodes over latents that all heads share"),
    Kernel("head_linear", "products of heads, each with a weight of its own"),
    Kernel("causal_conv", "convolutions of gated delta nets, and their states"),
    Kernel("gated_delta", "the gated delta rule of decodes, token by token, and its states"),
    Kernel("delta_chunks", "the gated delta rule of prompts, by chunks of 64 tokens, and its states"),
    Kernel("gated_norm", "RMSNorm of heads, times SiLU of a gate"),
    Kernel("weight_only", "products with integer weights of 2 to 8 bits (dense ones are cuBLAS's)"),
    Kernel("lora", "adapters of rows, each with its own, behind the products of their inputs"),
    Kernel("trellis", "products with trellis codes of 2 to 4 bits, decoded from their streams"),
    Kernel("eight_bit", "products with weights and inputs in int8"),
    Kernel("eight_bit fp8", "products with weights and inputs in e4m3", "fp8"),
    Kernel("persistent", "8-bit products of more than 256 rows, fed by the copy engine (sm_90, sm_100)", "tma"),
    Kernel("dequantize", "integer weights in 16 bits: cuBLAS multiplies more than 512 rows by them"),
    Kernel("inputs", "inputs of products, rounded or reordered"),
    Kernel("pointwise", "activations, with rows in 8 bits likewise, gates, and caps of logits"),
    Kernel("route", "the experts that each token chooses"),
    Kernel("experts", "choices sorted by expert, for weight_only and eight_bit, and added in their order"),
    Kernel("argmax", "the greedy token"),
    Kernel("log_softmax", "log-probabilities of prompts"),
)


def unsupported(op: Op, gpu: Target, compiled: bool) -> str | None:
    """None, or why no kernel computes ``op``. ``compiled``: for a GPU, not in the interpreter."""
    match op:
        case Embed(table=QuantizedWeight() as table):
            if table.g_idx is not None:
                return "embeddings with groups out of order have no Triton kernel"
            if table.scheme.grid not in (INTEGERS, E4M3):
                return f"embeddings as {table.scheme} have no Triton kernel"
            return _float8(gpu) if table.scheme.grid is E4M3 else None
        case Embed(table=Tensor() as table) if table.dtype not in _FLOATS:
            return f"embeddings in {table.dtype} have no Triton kernel"
        case PositionEmbed() if op.dtype not in _FLOATS:
            return f"embeddings in {op.dtype} have no Triton kernel"
        case RMSNorm() | LayerNorm() if op.width > _WIDEST_ROW:
            return _too_wide(op.width)
        case HeadNorm() if op.head_dim > _WIDEST_ROW:
            return _too_wide(op.head_dim)
        case Linear():
            return linear.supports(op.weight, gpu)
        case Route() if op.count > _MOST_EXPERTS:
            return f"a choice among {op.count} experts has no Triton kernel: at most {_MOST_EXPERTS}"
        case Experts():
            return experts.supports(op, gpu)
        case RopeKV() if op.norm_over_heads and op.heads * op.head_dim > _WIDEST_ROW:
            return _too_wide(op.heads * op.head_dim)
        case RopeKV() | Attention():
            return _cache(op, gpu, compiled)
        case LatentKV():
            return _latents(op.rank, op.rope, op.kv_dtype, compiled)
        case LatentAttention():
            found = _latents(op.rank, op.width - op.rank, op.kv_dtype, compiled)
            return found or (_too_little_memory(op, gpu) if compiled else None)
        case GatedDelta() if op.key_dim > delta_chunks.WIDEST:
            return f"gated delta nets with keys of {op.key_dim} have no Triton kernel: at most {delta_chunks.WIDEST}"
    return None


def _too_wide(width: int) -> str:
    return f"a norm over {width} values has no Triton kernel: at most {_WIDEST_ROW}"


def _latents(rank: int, rope: int, dtype: torch.dtype, compiled: bool) -> str | None:
    most, turned = latent_attention.WIDEST
    if rank > most or rope > turned:
        return f"a latent of {rank} + {rope} has no Triton kernel: at most {most} + {turned}"
    if dtype not in _FLOATS or (dtype == torch.float32 and compiled):
        return f"a cache of latents in {dtype} has no Triton kernel"
    return None


def _too_little_memory(op: LatentAttention, gpu: Target) -> str | None:
    needed = latent_attention.needed(op, latent_attention.tile_shape(op, gpu.shared_bytes, gpu.warp))
    if needed > gpu.shared_bytes:
        return f"latents of {op.rank} need {needed >> 10} KiB of shared memory, {gpu.architecture} has less"
    return None


def _cache(op: RopeKV | Attention, gpu: Target, compiled: bool) -> str | None:
    dtype = op.kv_dtype
    if op.head_dim % 2 or op.head_dim > 256:
        return f"head_dim {op.head_dim} is not an even number up to 256"
    most = min(128, _MOST_NUMBERS // (1 << (op.head_dim - 1).bit_length()))
    if op.heads // op.kv_heads > most:
        return f"{op.heads // op.kv_heads} query heads of {op.head_dim} share a key head: at most {most}"
    if dtype == PACKED_KV and op.heads // op.kv_heads > _MOST_PACKED:
        return f"{op.heads // op.kv_heads} query heads share a key head in 4 bits: at most {_MOST_PACKED}"
    if dtype == PACKED_KV:
        return f"heads of {op.head_dim} in 4 bits have no Triton kernel" if op.head_dim % PACKED_HEADS else None
    if dtype not in (*_FLOATS, *SCALED_KV) or (dtype == torch.float32 and compiled):
        return f"a KV cache in {dtype} has no Triton kernel"
    if dtype in SCALED_KV and (op.k_scale is None or op.v_scale is None):
        return f"a KV cache in {dtype} needs scales"
    if not op.k_cache.transpose(2, 3).is_contiguous():
        return "keys that do not lie token by token have no Triton kernel"
    return _float8(gpu) if dtype == torch.float8_e4m3fn else None


def _float8(gpu: Target) -> str | None:
    return None if "fp8" in gpu.features else f"e4m3 needs {NEEDED['fp8']}, not {gpu.architecture}"
