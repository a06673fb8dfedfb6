"""The operations that a model step is made of: the half of the contract that models write and executors read.

A model describes itself once as a list of operations over fixed buffers (a program); an executor prepares that
list at load and runs it for every step. Every buffer is row-major, lies where the executor's ``Placement`` says, and
has room for the largest step.

An operation is declared only here. The C kernels get its fields and then its properties by name (``abi.structure``).
``reference.compute`` defines it in torch, and an executor without a kernel for it runs that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.kernels.lora_slots import LoraSlots
from qserve.kernels.ranks import ALONE, Ranks

BLOCK_SIZE = 16
"""Tokens per KV block: one 512-bit vector of scores."""
SCALED_KV = (torch.int8, torch.float8_e4m3fn)
"""The KV caches that need scales."""
PACKED_KV: torch.dtype = torch.uint4  # type: ignore[attr-defined]  # its stubs lack it
"""The KV cache of 4-bit codes with a step and a low for each token and head, held in uint8."""

Rows = Literal["tokens", "logits"]
Function = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swigluoai"]
"""x * sigmoid(x), GELU by erf and by tanh, max(x, 0) and its square, and GPT-OSS's: y * sigmoid(1.702 y) for
y = min(x, 7). Where the last is a gate, what it gates is clamped to -7 .. 7, and 1 is added to it. C numbers them in
this order, from 1."""


@dataclass(frozen=True)
class Embed:
    """out[r] = table[token_ids[r]] * scale; table [vocab, width] in float32, float16 or bfloat16, or packed.

    A packed table takes a byte for each code, even for 6 bits: a token reads only one row, so narrower codes would not
    be faster, only a quarter smaller.

    On an asynchronous executor a token id -1 - i stands for ``sampled[i]`` (int32), or for token 0 where that is
    negative: a token that is on the device and not yet known to the host.

    ``first``: the token of the table's first row. Rows of ``out`` whose token is not in the table stay as they are:
    another rank writes them.
    """

    table: Tensor | QuantizedWeight
    out: Tensor
    sampled: Tensor | None = None
    scale: float = 1.0
    first: int = 0


@dataclass(frozen=True)
class PositionEmbed:
    """out[r] += table[positions[r] + offset]; table [positions, width] in float32, float16 or bfloat16."""

    table: Tensor
    out: Tensor
    offset: int = 0

    @property
    def width(self) -> int:
        return self.out.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype


@dataclass(frozen=True)
class RMSNorm:
    """out[r] = x[r] / sqrt(mean(x[r] ** 2) + eps) * weight (Zhang and Sennrich, 2019), or added to ``out[r]`` where
    ``accumulate`` (a norm behind a sublayer; ``out`` is then the residual stream). ``out`` may be a slice of the
    columns of a wider buffer."""

    x: Tensor
    weight: Tensor
    out: Tensor
    eps: float
    rows: Rows = "tokens"
    accumulate: bool = False

    @property
    def width(self) -> int:
        return self.x.shape[1]

    @property
    def out_stride(self) -> int:
        return self.out.stride(0)


@dataclass(frozen=True)
class LayerNorm:
    """out[r] = (x[r] - mean(x[r])) / sqrt(variance(x[r]) + eps) * weight + bias (Ba et al., 2016)."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    eps: float
    rows: Rows = "tokens"

    @property
    def width(self) -> int:
        return self.x.shape[1]


@dataclass(frozen=True)
class HeadNorm:
    """In place: LayerNorm of each ``head_dim`` numbers of x [tokens, heads * head_dim], times ``weight``
    [heads * head_dim] (Command R+). ``x`` may be a slice of the columns of a wider buffer."""

    x: Tensor
    weight: Tensor
    head_dim: int
    eps: float

    @property
    def heads(self) -> int:
        return self.x.shape[1] // self.head_dim

    @property
    def x_stride(self) -> int:
        return self.x.stride(0)


@dataclass(frozen=True)
class Cast:
    """out[r] = x[r] in the dtype of ``out``: the residual stream as the input of products, where no norm is between.
    Both may be slices of the columns of wider buffers."""

    x: Tensor
    out: Tensor

    @property
    def width(self) -> int:
        return self.x.shape[1]

    @property
    def x_stride(self) -> int:
        return self.x.stride(0)

    @property
    def out_stride(self) -> int:
        return self.out.stride(0)


@dataclass(frozen=True)
class Linear:
    """out[r] = W x[r] + bias, or added to ``out[r]`` where ``accumulate`` (the residual stream).

    ``weight`` is dense [out, in] or packed. If a packed weight has ``activations``, the input is rounded exactly as
    they say (see ``reference.round_input``) before the product. Otherwise an integer product may round its input to
    int8 with one scale per 64 inputs or fewer; every other product takes the input as it is, in float32.
    ``out`` may be a slice of the columns of a wider buffer. ``whole``: the outputs of all ranks, where this product has
    a part of them; an executor whose results are invariant cuts its sums as if all were here.
    """

    x: Tensor
    weight: Tensor | QuantizedWeight
    out: Tensor
    bias: Tensor | None = None
    accumulate: bool = False
    rows: Rows = "tokens"
    whole: int | None = None


@dataclass(frozen=True)
class Lora:
    """out[r] += scale * B (A x[r]) for every row r whose token has an adapter (``Step.adapters``), in the columns of
    each linear that the adapter changes (LoRA, arXiv 2106.09685). Other rows are not touched.

    ``slots`` holds the adapters; it may change between steps. ``out`` may be a slice of the columns of a wider buffer.
    """

    x: Tensor
    out: Tensor
    slots: LoraSlots


@dataclass(frozen=True)
class RopeKV:
    """Rotates q and k inside ``qkv`` [tokens, (heads + 2 kv_heads) * head_dim] and stores k and v in the cache.

    The rotation pairs element j with j + rotary_dim / 2; cosine, sine [positions, rotary_dim / 2]. A rotary_dim of 0
    rotates nothing. q_norm and k_norm [head_dim] normalize each head first (Qwen3), or [heads * head_dim] and
    [kv_heads * head_dim] all heads together (OLMo 2). q_scale, float32 [positions], multiplies the rotated queries.

    Caches: k [blocks, kv_heads, head_dim, 16], v [blocks, kv_heads, 16, head_dim], float32, float16, bfloat16, int8 or
    float8_e4m3fn. The last two hold k / k_scale and v / v_scale (scales float32 [kv_heads]), rounded to nearest, ties
    to even, and saturated: int8 at -127 and 127, e4m3 at -448 and 448. Values that are not finite are stored as NaN,
    which int8 writes as -128.

    uint8 caches [blocks, kv_heads, bytes] are those of ``PACKED_KV`` (kernels/kv_cache.py): behind all else queries,
    keys and values are turned by a Hadamard matrix, in place.

    k_center, float32 [kv_heads, head_dim], is subtracted from each rotated key. All scores of a query shift by the same
    amount, and a coarse cache spends no bits on what all keys have in common.
    """

    qkv: Tensor
    cosine: Tensor
    sine: Tensor
    k_cache: Tensor
    v_cache: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_center: Tensor | None = None
    q_scale: Tensor | None = None

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cosine.shape[1]

    @property
    def norm_over_heads(self) -> bool:
        """Whether the norms are of all heads together."""
        return any(norm is not None and len(norm) != self.head_dim for norm in (self.q_norm, self.k_norm))

    @property
    def kv_dtype(self) -> torch.dtype:
        return PACKED_KV if self.k_cache.dtype == torch.uint8 else self.k_cache.dtype


@dataclass(frozen=True)
class Attention:
    """Causal attention of the step's queries over the paged cache; ``window`` > 0 keeps the last that many keys.

    A score is query times key times ``scale``; where ``softcap`` > 0, it becomes softcap * tanh(score / softcap).
    sinks, float32 [heads], are scores that belong to no key: each takes its share of the softmax and adds nothing.

    Caches and their scales are those of ``RopeKV``; what comes of a ``PACKED_KV`` is turned back. ``out`` may be a
    slice of the columns of a wider buffer.
    """

    qkv: Tensor
    out: Tensor
    k_cache: Tensor
    v_cache: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        return PACKED_KV if self.k_cache.dtype == torch.uint8 else self.k_cache.dtype

    @property
    def out_stride(self) -> int:
        return self.out.stride(0)


@dataclass(frozen=True)
class HeadLinear:
    """out[r, h] = weight[h] x[r, h]: each head has a product of its own.

    x [tokens, heads, in] and out [tokens, heads, out] may be parts of the heads of wider buffers; weight [heads, out,
    in] in float32, float16 or bfloat16.
    """

    x: Tensor
    weight: Tensor
    out: Tensor

    @property
    def heads(self) -> int:
        return self.x.shape[1]


@dataclass(frozen=True)
class LatentKV:
    """Stores [latent | rope key] of each token in the cache, and rotates the queries (DeepSeek-V2, arXiv 2405.04434).

    kv, float32 [tokens, rank + rope], holds both before the RMS norm of the latent, by ``norm`` [rank], and before the
    rotation of the key; its contents are undefined afterwards. q [tokens, heads, rope] is rotated into ``out`` of the
    same shape; both may be parts of the heads of wider buffers. The rotation is that of ``RopeKV``; cosine, sine
    [positions, rope / 2].

    cache [blocks, 16, rank + rope], float32, float16 or bfloat16.
    """

    kv: Tensor
    norm: Tensor
    q: Tensor
    out: Tensor
    cosine: Tensor
    sine: Tensor
    cache: Tensor
    eps: float

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def rank(self) -> int:
        return self.norm.shape[0]

    @property
    def rope(self) -> int:
        return self.q.shape[2]

    @property
    def q_stride(self) -> int:
        return self.q.stride(0)

    @property
    def q_head(self) -> int:
        """Numbers from a head to the next."""
        return self.q.stride(1)

    @property
    def out_stride(self) -> int:
        return self.out.stride(0)

    @property
    def out_head(self) -> int:
        return self.out.stride(1)

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.cache.dtype


@dataclass(frozen=True)
class LatentAttention:
    """Causal attention of the step's queries over a cache of latents, whose first ``rank`` numbers are the values.

    All heads of q [tokens, heads * (rank + rope)] share the one key of a token. A score is query times key times
    ``scale``. out [tokens, heads * rank]. The cache is that of ``LatentKV``.
    """

    q: Tensor
    out: Tensor
    cache: Tensor
    heads: int
    scale: float

    @property
    def width(self) -> int:
        """rank + rope."""
        return self.cache.shape[2]

    @property
    def rank(self) -> int:
        return self.out.shape[1] // self.heads

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.cache.dtype


@dataclass(frozen=True)
class Activation:
    """out = function(gate) * up where ``gated``: x [tokens, 2 * width] holds both. Otherwise out = function(x), and
    ``out`` may be ``x``. ``out`` may be a slice of the columns of a wider buffer."""

    x: Tensor
    out: Tensor
    function: Function
    gated: bool

    @property
    def width(self) -> int:
        return self.out.shape[1]

    @property
    def out_stride(self) -> int:
        return self.out.stride(0)


@dataclass(frozen=True)
class Gather:
    """out[i] = x[logit_rows[i]]: the rows whose logits are wanted."""

    x: Tensor
    out: Tensor
    rows: Rows = "logits"

    @property
    def width(self) -> int:
        return self.x.shape[1]


@dataclass(frozen=True)
class SoftCap:
    """In place: x = cap * tanh(x / cap)."""

    x: Tensor
    cap: float
    rows: Rows = "logits"

    @property
    def width(self) -> int:
        return self.x.shape[1]


@dataclass(frozen=True)
class Argmax:
    """out[r] (int32) = the first index of the largest logit, or -1 where the row holds a NaN."""

    x: Tensor
    out: Tensor
    rows: Rows = "logits"

    @property
    def width(self) -> int:
        return self.x.shape[1]


@dataclass(frozen=True)
class LogSoftmax:
    """In place: logits become log-probabilities."""

    x: Tensor
    rows: Rows = "logits"

    @property
    def width(self) -> int:
        return self.x.shape[1]


@dataclass(frozen=True)
class Route:
    """Chooses ``top_k`` experts for each token, best first.

    The scores of a token are softmax(logits[r]), or sigmoid(logits[r]) where ``sigmoid``. The experts with the highest
    score + bias are chosen (bias float32 [experts], DeepSeek-V3), and of equal ones those with the lowest index.
    experts[r] (int32 [tokens, top_k]) holds their indices. weights[r] (float32, same shape) holds their scores without
    the bias, divided by their sum where ``renormalize``, times ``scale``.

    ``groups`` > 1: the experts form that many equal groups, and all choices come from the ``top_groups`` best ones. A
    group is as good as the sum of its ``group_best`` highest values of score + bias.

    A row of logits with a NaN still gets indices of different experts, and a NaN among its weights.
    """

    logits: Tensor
    experts: Tensor
    weights: Tensor
    bias: Tensor | None = None
    sigmoid: bool = False
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    scale: float = 1.0

    @property
    def count(self) -> int:
        return self.logits.shape[1]

    @property
    def top_k(self) -> int:
        return self.experts.shape[1]


@dataclass(frozen=True)
class Experts:
    """out[r] = sum over j of weights[r, j] * y_j, or added to ``out[r]`` where ``accumulate``. For the expert
    e = experts[r, j]: gate_up[e] x[r] is a gate and a factor, and y_j = down[e] (function(gate) * factor). Both
    products may have biases, float32 [experts, 2 * inner] and [experts, out width].

    experts int32 and weights float32 [tokens, top_k], as ``Route`` fills them: a token's experts differ. gate_up
    [2 * inner, width] and down [out width, inner]: one weight for each expert, all dense in one dtype, or all packed by
    one scheme with the same rounding of inputs (``Linear`` says how an input is rounded). An order of inputs and a
    static input scale are each expert's own.

    The terms are summed in the order of j, then added to ``out``: what a row gets does not depend on the others.

    gate_up_out [tokens * top_k, 2 * inner], activated [tokens * top_k, inner] and parts [tokens * top_k, out width]
    are memory for the intermediate values. Their contents are undefined afterwards.

    Where others have some experts, there are ``total`` of them, and here are those from ``first`` on. Then ``parts``
    and ``out`` are memory that all ``ranks`` share, and each sums up some rows; ``AllGather`` waits for all. Without
    ``ranks``, experts that are not here add nothing. Where ``terms`` are given, float32 [tokens, top_k * out width],
    they get all y_j of a token, zeros for experts that are not here, and ``out`` nothing; ``ExpertSum`` adds them.
    """

    x: Tensor
    gate_up: tuple[Tensor | QuantizedWeight, ...]
    down: tuple[Tensor | QuantizedWeight, ...]
    experts: Tensor
    weights: Tensor
    gate_up_out: Tensor
    activated: Tensor
    parts: Tensor
    out: Tensor
    accumulate: bool = False
    function: Function = "silu"
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    ranks: Ranks = ALONE
    total: int | None = None
    first: int = 0
    terms: Tensor | None = None


@dataclass(frozen=True)
class ExpertSum:
    """out[r] = sum over j of weights[r, j] * y_j in the order of j, then added to ``out[r]`` where ``accumulate``, as
    ``Experts`` adds the y_j of ``terms`` float32 [tokens, top_k * out width]."""

    terms: Tensor
    weights: Tensor
    out: Tensor
    accumulate: bool = False


@dataclass(frozen=True)
class SigmoidMul:
    """out[r] *= sigmoid(gate[r]); gate [tokens, 1] or as wide as ``out``, which may be a slice of the columns of a
    wider buffer."""

    gate: Tensor
    out: Tensor

    @property
    def width(self) -> int:
        return self.out.shape[1]

    @property
    def gates(self) -> int:
        return self.gate.shape[1]

    @property
    def out_stride(self) -> int:
        return self.out.stride(0)


@dataclass(frozen=True)
class CausalConv:
    """In place: each channel becomes SiLU(sum over j of weight[j] * input[t - width + 1 + j]), a causal convolution of
    its own inputs. x [tokens, channels] may be a slice of the columns of a wider buffer; weight is float32
    [width, channels].

    state, float32 [slots, width - 1, channels], holds the last inputs of each sequence, oldest first, in the slot that
    ``Step.state_slots`` names. A sequence whose first token here has position 0 begins with zeros. Afterwards the state
    is that behind its last token here, and copies of earlier ones are where ``Step.state_saves`` wants them.
    """

    x: Tensor
    weight: Tensor
    state: Tensor

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    @property
    def channels(self) -> int:
        return self.x.shape[1]

    @property
    def x_stride(self) -> int:
        return self.x.stride(0)


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule (Yang et al., arXiv 2412.06464) of the step's tokens, one after the other, in float32.

    x [tokens, 2 * key_heads * key_dim + 2 * heads * value_dim + 2 * heads] holds q and k of each key head, v and a gate
    z of each value head, and the numbers b and a of each. A key head serves heads / key_heads value heads that follow
    each other. q and k are divided by sqrt(|q|^2 + 1e-6), q also by sqrt(key_dim). The state S of a value head becomes

        S = exp(rate * softplus(a + dt_bias)) * S;    S = S + k (sigmoid(b) (v - S^T k))^T

    and out [tokens, heads * value_dim], which may be a slice of the columns of a wider buffer, the RMS norm of S^T q of
    each head, times ``norm`` [value_dim] and SiLU(z).

    rate (-exp(A_log)) and dt_bias are float32 [heads]. state, float32 [slots, heads, key_dim, value_dim], is kept as
    that of ``CausalConv``.
    """

    x: Tensor
    out: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    state: Tensor
    key_heads: int
    eps: float

    @property
    def heads(self) -> int:
        return self.state.shape[1]

    @property
    def key_dim(self) -> int:
        return self.state.shape[2]

    @property
    def value_dim(self) -> int:
        return self.state.shape[3]

    @property
    def out_stride(self) -> int:
        return self.out.stride(0)


@dataclass(frozen=True)
class AllGather:
    """Each of ``ranks`` has written columns or rows of its own of out [rows, width]; afterwards each sees all of it.

    Without a ``split``, ``out`` is memory that all share, and a rank may not write to it before the next ``AllGather``,
    of this buffer or another. With it each rank has an ``out`` of its own, in which it wrote the columns
    ``split[rank]``; or it wrote them into ``own`` [rows, len(split[rank])].
    """

    out: Tensor
    ranks: Ranks
    rows: Rows = "tokens"
    split: tuple[range, ...] = ()
    own: Tensor | None = None


@dataclass(frozen=True)
class AllReduce:
    """out [rows, width], of which each of ``ranks`` has one of its own, becomes the sum of all of them in each. Their
    order is that of the transport: the last bits may change with the number of rows."""

    out: Tensor
    ranks: Ranks
    rows: Rows = "tokens"


Op = (
    Embed
    | PositionEmbed
    | RMSNorm
    | LayerNorm
    | HeadNorm
    | Cast
    | Linear
    | RopeKV
    | Attention
    | Activation
    | Gather
    | SoftCap
    | Argmax
    | LogSoftmax
    | Route
    | Experts
    | ExpertSum
    | SigmoidMul
    | Lora
    | AllGather
    | AllReduce
    | HeadLinear
    | LatentKV
    | LatentAttention
    | CausalConv
    | GatedDelta
)
