"""``Family``: the properties of a model type that its configuration does not say, and the table of all families.

The native decoder, the GGUF reader and the planner read the same row. A family similar to Llama is a row here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from qserve.checkpoint import gguf_keys, keys, modules
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.modules import LLAMA, Modules


@dataclass(frozen=True)
class Multipliers:
    """Constants by which a model scales what it computes.

    Attributes:
        embedding: scales the embeddings.
        residual: scales what each sublayer adds to the residual stream.
        attention: scales the attention scores; None for 1 / sqrt(head_dim).
        logits: scales the logits.
    """

    embedding: float = 1.0
    residual: float = 1.0
    attention: float | None = None
    logits: float = 1.0


@dataclass(frozen=True)
class Experts:
    """Feed-forwards of which a router takes a few for each token. Names are keys of the configuration.

    Attributes:
        count: the number of experts, under the first of these names that is there.
        inner: the width of one.
        top_k: how many of them a token takes.
        shared_inner: the width of an expert that every token takes too.
        shared_gate: this expert is behind a gate of its own.
        shared_count: the width of such an expert, in widths of the others.
        dense_layers: the number of first layers that have a plain feed-forward instead.
        dense_between: so have the layers in ``mlp_only_layers``, and all but every ``decoder_sparse_step``-th.
        biases: router and experts have biases.
        function: of their gates.
        sigmoid: scores are the sigmoid of what the router gives, not the softmax.
        score_bias: a bias for each expert corrects its score.
        renormalize: the weights of a token sum to one; None where the configuration says (``norm_topk_prob``).
        groups: only experts of the best groups are taken (``n_group``, ``topk_group``).
        group_best: how many experts of a group say how good it is.
        scale: scales the weights of a token.
    """

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    inner: str = "moe_intermediate_size"
    top_k: str = "num_experts_per_tok"
    shared_inner: str | None = None
    shared_gate: bool = False
    shared_count: str | None = None
    dense_layers: str | None = None
    dense_between: bool = False
    biases: bool = False
    function: Literal["silu", "swigluoai"] = "silu"
    sigmoid: bool = False
    score_bias: bool = False
    renormalize: bool | None = None
    groups: bool = False
    group_best: int = 2
    scale: str | None = None

    def sparse(self, config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
        """For each layer whether it has experts."""
        first = config.get(self.dense_layers) or 0 if self.dense_layers else 0
        step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
        between = self.dense_between
        return tuple(i >= first and not (between and (i in dense or (i + 1) % step)) for i in range(layers))


@dataclass(frozen=True)
class Gguf:
    """How llama.cpp's files store a family.

    Attributes:
        architecture: its name there. Families that differ only in a window, or in experts, may share one.
        names: keys of its configuration that have other names than Llama's.
        says: what its configuration says besides, of the file's metadata.
        permuted: rows of queries and keys lie in the order of llama.cpp's rotation, which rotates neighbouring pairs.
        rotates_by_kind: layers with a window have a rotation of their own, which is never scaled.
        renormalized: the weights of a token's experts sum to one where the file does not say.
        keeps_mxfp4: experts in MXFP4 are served as they are, in which the family is published.
        untruncated: dimensions between which YaRN blends are not rounded, and it scales where nothing is said.
        pre: its pre-tokenizer, by which it is told from families that are stored alike.
    """

    architecture: str
    names: keys.Names = field(default_factory=dict)
    says: Callable[[gguf_keys.Facts], dict[str, Any]] = gguf_keys.none
    permuted: bool = False
    rotates_by_kind: bool = False
    renormalized: bool = False
    keeps_mxfp4: bool = False
    untruncated: bool = False
    pre: str | None = None


@dataclass(frozen=True)
class Family:
    """The properties of a model type that its configuration does not say.

    Attributes:
        native: the native decoder serves it.
        one_plus: norms multiply by 1 + their weight (Gemma).
        qk_norm: queries and keys are normalized: each ``head``, ``all`` heads together, or each head by a LayerNorm
            with a weight of its own (``layer``). None where they are not.
        qk_norm_asked: they are only with ``use_qk_norm``.
        qkv_bias, out_bias: biases of the attention's linears; None where the configuration says (``attention_bias``).
        mlp_bias: biases of the feed-forward; None where the configuration says (``mlp_bias``).
        tied: whether the output layer is the embedding where the configuration does not say.
        sliding: every ``sliding``-th layer attends to everything, the others to a window; 1 where all have the window,
            0 where there is none.
        window_asked: the window holds only with ``use_sliding_window``.
        partial_rotary: the first ``partial_rotary_factor`` of each head is rotated; elsewhere all of it is.
        rotated: from the configuration, as transformers reads it: for each layer whether queries and keys are rotated;
            None where all are.
        scaled_queries: queries grow with the logarithm of their position (``llama_4_scaling_beta``).
        capped_scores, capped_logits: by ``attn_logit_softcapping`` and ``final_logit_softcapping``.
        latent: attention goes through one latent vector for each token (DeepSeek).
        sinks: each head has a score that belongs to no key.
        gated_heads: the linear of queries has a gate for each number of a head's output, behind the head's query.
        delta: layers of type ``linear_attention`` are gated delta nets.
        experts: None where the feed-forward is one.
        layer_norm: norms subtract the mean (LayerNorm); else they are RMS norms.
        norm_weight: norms multiply by a weight.
        norm_bias: these norms have biases.
        gated: the feed-forward has a gate.
        parallel: attention and feed-forward read the same residual stream; None where the configuration says
            (``use_parallel_residual``).
        head_bias: the output layer has a bias.
        modules: the names of its modules, from the configuration in Llama's keys.
        keys: what its configuration says in Llama's keys, where it has others.
        served: the values that the native decoder needs at keys of the configuration.
        multipliers: from the configuration, as transformers reads it.
        gguf: None where the GGUF reader does not know it.
    """

    native: bool = False
    one_plus: bool = False
    qk_norm: Literal["head", "all", "layer"] | None = None
    qk_norm_asked: bool = False
    qkv_bias: bool | None = False
    out_bias: bool | None = False
    mlp_bias: bool | None = False
    tied: bool = False
    sliding: int = 0
    window_asked: bool = False
    partial_rotary: bool = False
    rotated: Callable[[Any], Sequence[Any]] | None = None
    scaled_queries: bool = False
    capped_scores: bool = False
    capped_logits: bool = False
    latent: bool = False
    sinks: bool = False
    gated_heads: bool = False
    delta: bool = False
    experts: Experts | None = None
    layer_norm: bool = False
    norm_weight: bool = True
    norm_bias: bool = False
    gated: bool = True
    parallel: bool | None = False
    head_bias: bool = False
    modules: Callable[[Mapping[str, Any]], Modules] = lambda config: LLAMA
    keys: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    served: Mapping[str, Any] = field(default_factory=dict)
    multipliers: Callable[[Any], Multipliers] = lambda config: Multipliers()
    gguf: Gguf | None = None


def _granite(config: Any) -> Multipliers:
    return Multipliers(
        config.embedding_multiplier, config.residual_multiplier, config.attention_multiplier, 1 / config.logits_scaling
    )


def _hyperclovax(config: Any) -> Multipliers:
    return replace(_granite(config), logits=config.logits_scaling)


def _gemma(config: Any) -> Multipliers:
    return Multipliers(config.hidden_size**0.5)


def _gemma2(config: Any) -> Multipliers:
    return Multipliers(config.hidden_size**0.5, attention=config.query_pre_attn_scalar**-0.5)


def _cohere(config: Any) -> Multipliers:
    return Multipliers(logits=config.logit_scale)


def _latent(config: Any) -> Multipliers:
    """YaRN sharpens scores by the square of its own factor for ``mscale_all_dim``."""
    rope, scale = config.rope_parameters, (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if rope.get("rope_type", "default") != "default" and (every := rope.get("mscale_all_dim")) and rope["factor"] > 1:
        scale *= (0.1 * every * math.log(rope["factor"]) + 1.0) ** 2
    return Multipliers(attention=scale)


def _minicpm3(config: Any) -> Multipliers:
    residual, logits = config.scale_depth / config.num_hidden_layers**0.5, config.dim_model_base / config.hidden_size
    return Multipliers(config.scale_emb, residual, _latent(config).attention, logits)


def _latent_modules(config: Mapping[str, Any]) -> Modules:
    return replace(LLAMA, interleaved=bool(config.get("rope_interleave", True)))


def _gpt2(config: Any) -> Multipliers:
    return Multipliers(attention=None if config.scale_attn_weights else 1.0)


def _in_windows(config: Any) -> list[bool]:
    """For each layer whether it is rotated: where some layers have a window, only those are."""
    return [config.sliding_window is None or kind == "sliding_attention" for kind in config.layer_types]


def _falcon(config: Mapping[str, Any]) -> Modules:
    if not config.get("use_parallel_residual", True):
        return modules.FALCON
    if config.get("num_ln_in_parallel_attn") == 2:
        return replace(modules.FALCON, attention_norm="ln_attn", mlp_norm="ln_mlp")
    return replace(modules.FALCON, mlp_norm=None)


def _stablelm(config: Mapping[str, Any]) -> Modules:
    return replace(modules.STABLELM, mlp_norm=None) if config.get("use_parallel_residual") else modules.STABLELM


_GEMMA = Family(
    native=True, one_plus=True, qkv_bias=None, out_bias=None, tied=True, multipliers=_gemma,
    served={"use_bidirectional_attention": False}, gguf=Gguf("gemma"),
)  # fmt: skip
_GEMMA2 = replace(
    _GEMMA, sliding=2, capped_scores=True, capped_logits=True, modules=lambda config: modules.GEMMA2, keys=keys.gemma2,
    multipliers=_gemma2, gguf=Gguf("gemma2", keys.GEMMA2, gguf_keys.gemma2),
)  # fmt: skip
_OLMO2 = Family(
    native=True, qk_norm="all", qkv_bias=None, out_bias=None, modules=lambda config: modules.OLMO2, gguf=Gguf("olmo2")
)
_GLM = Family(
    native=True, qkv_bias=None, partial_rotary=True, modules=lambda config: modules.GLM, keys=keys.attention_biased,
    gguf=Gguf("chatglm"),
)
_COHERE = Family(
    native=True, layer_norm=True, parallel=True, qkv_bias=None, out_bias=None, tied=True,
    modules=lambda config: modules.COHERE, keys=keys.cohere, multipliers=_cohere,
    gguf=Gguf("command-r", keys.LAYER_NORM, gguf_keys.cohere),
)  # fmt: skip
_GPT2 = Family(
    native=True, layer_norm=True, norm_bias=True, gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True,
    modules=lambda config: modules.GPT2, keys=keys.gpt2, multipliers=_gpt2,
    served={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}, gguf=Gguf("gpt2", keys.GPT2),
)  # fmt: skip
_DEEPSEEK = Experts(
    ("n_routed_experts",), shared_count="n_shared_experts", dense_layers="first_k_dense_replace", groups=True,
    scale="routed_scaling_factor",
)  # fmt: skip
_DEEPSEEK_V3 = replace(_DEEPSEEK, sigmoid=True, score_bias=True)
_LATENT = Family(
    native=True, latent=True, qkv_bias=None, out_bias=None, modules=_latent_modules, multipliers=_latent
)
_QWEN_MOE = Experts(dense_between=True)
_SHARED_QWEN_MOE = replace(_QWEN_MOE, shared_inner="shared_expert_intermediate_size", shared_gate=True)
_QWEN3_5 = Family(
    native=True, one_plus=True, qk_norm="head", qkv_bias=None, out_bias=None, partial_rotary=True, gated_heads=True,
    delta=True, keys=keys.qwen3_next,
)  # fmt: skip
_MIXTRAL = Experts(("num_local_experts",), "intermediate_size", renormalize=True)
_GRANITE_MOE = Family(
    native=True, qkv_bias=None, out_bias=None, multipliers=_granite, modules=lambda config: modules.GRANITE_MOE,
    experts=_MIXTRAL, gguf=Gguf("granitemoe", says=gguf_keys.granite, permuted=True),
)  # fmt: skip

FAMILIES = {
    "llama": Family(
        native=True, qkv_bias=None, out_bias=None, mlp_bias=None,
        gguf=Gguf("llama", permuted=True),
    ),
    "mistral": Family(native=True, sliding=1, gguf=Gguf("llama", permuted=True)),
    "qwen2": Family(native=True, qkv_bias=True, sliding=1, window_asked=True, gguf=Gguf("qwen2")),
    "qwen3": Family(
        native=True, qk_norm="head", qkv_bias=None, out_bias=None, sliding=1, window_asked=True,
        gguf=Gguf("qwen3"),
    ),
    "phi3": Family(
        native=True, sliding=1, partial_rotary=True, modules=lambda config: modules.PHI3,
        gguf=Gguf("phi3", says=gguf_keys.phi3),
    ),
    "granite": Family(
        native=True, qkv_bias=None, out_bias=None, mlp_bias=None, multipliers=_granite,
        gguf=Gguf("granite", says=gguf_keys.granite, permuted=True),
    ),
    "smollm3": Family(
        native=True, qkv_bias=None, out_bias=None, mlp_bias=None, tied=True, sliding=1, window_asked=True,
        rotated=lambda config: config.no_rope_layers, gguf=Gguf("smollm3", permuted=True),
    ),
    "cohere": replace(_COHERE, qk_norm="layer", qk_norm_asked=True),
    "cohere2": replace(
        _COHERE, sliding=4, keys=keys.cohere2, rotated=lambda config: config.no_rope_layers,
        gguf=Gguf("cohere2", keys.LAYER_NORM, gguf_keys.cohere),
    ),
    "starcoder2": Family(
        native=True, layer_norm=True, norm_bias=True, gated=False, qkv_bias=None, out_bias=None, mlp_bias=None,
        tied=True, sliding=1, modules=lambda config: modules.STARCODER2, keys=keys.starcoder2,
        gguf=Gguf("starcoder2", keys.STARCODER2),
    ),
    "falcon": Family(
        native=True, layer_norm=True, norm_bias=True, gated=False, parallel=None, qkv_bias=None, out_bias=None,
        mlp_bias=None, tied=True, modules=_falcon, keys=keys.falcon, served={"alibi": False},
        gguf=Gguf("falcon", keys.FALCON, gguf_keys.falcon),
    ),
    "gpt_neox": Family(
        native=True, layer_norm=True, norm_bias=True, gated=False, parallel=None, qkv_bias=None, out_bias=None,
        mlp_bias=True, partial_rotary=True, modules=lambda config: modules.GPT_NEOX, keys=keys.gpt_neox,
        gguf=Gguf("gptneox", keys.GPT_NEOX, gguf_keys.gpt_neox),
    ),
    "phi": Family(
        native=True, layer_norm=True, norm_bias=True, gated=False, parallel=True, qkv_bias=True, out_bias=True,
        mlp_bias=True, head_bias=True, partial_rotary=True, modules=lambda config: modules.PHI, keys=keys.phi,
        served={"qk_layernorm": False}, gguf=Gguf("phi2", keys.LAYER_NORM),
    ),
    "stablelm": Family(
        native=True, layer_norm=True, norm_bias=True, parallel=None, qkv_bias=None, partial_rotary=True,
        qk_norm="layer", qk_norm_asked=True, modules=_stablelm, keys=keys.stablelm,
        gguf=Gguf("stablelm", keys.STABLELM, gguf_keys.stablelm),
    ),
    "olmo": Family(
        native=True, layer_norm=True, norm_weight=False, qkv_bias=None, out_bias=None, keys=keys.olmo,
        served={"clip_qkv": False}, gguf=Gguf("olmo", says=gguf_keys.olmo, permuted=True),
    ),
    "nemotron": Family(
        native=True, one_plus=True, layer_norm=True, norm_bias=True, gated=False, qkv_bias=None, out_bias=None,
        mlp_bias=None, partial_rotary=True, modules=lambda config: modules.NEMOTRON, keys=keys.nemotron,
        gguf=Gguf("nemotron", keys.NEMOTRON),
    ),
    "jais2": Family(
        native=True, layer_norm=True, norm_bias=True, gated=False, qkv_bias=None, out_bias=None, mlp_bias=None,
        modules=lambda config: modules.NEMOTRON, keys=keys.jais2, gguf=Gguf("jais2", keys.LAYER_NORM),
    ),
    "opt": Family(
        native=True, layer_norm=True, norm_bias=True, gated=False, qkv_bias=None, out_bias=None, mlp_bias=None,
        tied=True, modules=lambda config: modules.OPT, keys=keys.opt,
        served={
            "do_layer_norm_before": True, "project_in": False, "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
        },
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(
        _GPT2, modules=lambda config: modules.GPT_BIGCODE, keys=keys.gpt_bigcode, served={"add_cross_attention": False},
        gguf=Gguf("starcoder", keys.GPT2, gguf_keys.gpt_bigcode),
    ),
    "gpt_neo": replace(
        _GPT2, qkv_bias=False, sliding=1, modules=lambda config: modules.GPT_NEO, keys=keys.gpt_neo, served={},
        multipliers=lambda config: Multipliers(attention=1.0), gguf=None,
    ),
    "gptj": Family(
        native=True, layer_norm=True, norm_bias=True, gated=False, parallel=True, mlp_bias=True, head_bias=True,
        partial_rotary=True, modules=lambda config: modules.GPTJ, keys=keys.gptj,
    ),
    "hyperclovax": Family(
        native=True, qkv_bias=None, out_bias=None, mlp_bias=None, multipliers=_hyperclovax,
        modules=lambda config: modules.HYPERCLOVAX if config.get("use_post_norm", True) else LLAMA,
    ),
    "ministral": Family(native=True, sliding=1),
    "ministral3": Family(native=True, sliding=1, scaled_queries=True, gguf=Gguf("mistral3", permuted=True)),
    "arcee": Family(
        native=True, gated=False, qkv_bias=None, out_bias=None, mlp_bias=None, modules=lambda config: modules.NEMOTRON,
        gguf=Gguf("arcee", permuted=True),
    ),
    "seed_oss": Family(native=True, qkv_bias=None, mlp_bias=None, keys=keys.attention_biased, gguf=Gguf("seed_oss")),
    "cwm": Family(native=True, sliding=4, keys=keys.cwm),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, sliding=4, gguf=Gguf("olmo2", rotates_by_kind=True)),
    "exaone4": Family(
        native=True, qk_norm="head", sliding=4, modules=lambda config: modules.OLMO2, rotated=_in_windows,
        gguf=Gguf("exaone4"),
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, modules=lambda config: modules.GLM4, gguf=Gguf("glm4")),
    "helium": Family(native=True, qkv_bias=None, mlp_bias=None, modules=lambda config: modules.INTERLEAVED),
    "ernie4_5": Family(
        native=True, qkv_bias=None, out_bias=None, mlp_bias=None, tied=True, keys=keys.ernie4_5,
        modules=lambda config: modules.INTERLEAVED, gguf=Gguf("ernie4_5", keys.ERNIE4_5),
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "vaultgemma": replace(_GEMMA2, modules=lambda config: modules.VAULTGEMMA, gguf=None),
    "gemma3_text": replace(
        _GEMMA2, qk_norm="head", capped_scores=False, sliding=6, gguf=Gguf("gemma3", keys.GEMMA2, gguf_keys.gemma3)
    ),
    "mixtral": Family(
        native=True, sliding=1, modules=lambda config: modules.MIXTRAL, experts=_MIXTRAL,
        gguf=Gguf("llama", permuted=True),
    ),
    "qwen2_moe": Family(
        native=True, qkv_bias=True, sliding=1, window_asked=True, modules=lambda config: modules.QWEN2_MOE,
        experts=_SHARED_QWEN_MOE, gguf=Gguf("qwen2moe"),
    ),
    "qwen3_moe": Family(
        native=True, qk_norm="head", qkv_bias=None, out_bias=None, sliding=1, window_asked=True, experts=_QWEN_MOE,
        gguf=Gguf("qwen3moe", renormalized=True),
    ),
    "qwen3_next": replace(
        _QWEN3_5, modules=lambda config: modules.QWEN3_NEXT, experts=_SHARED_QWEN_MOE,
        gguf=Gguf("qwen3next", says=gguf_keys.qwen3_next, renormalized=True),
    ),
    "qwen3_5_text": replace(_QWEN3_5, gguf=Gguf("qwen35", says=gguf_keys.qwen3_next)),
    "qwen3_5_moe_text": replace(
        _QWEN3_5, keys=keys.qwen3_5_moe, modules=lambda config: modules.QWEN2_MOE,
        experts=replace(_SHARED_QWEN_MOE, dense_between=False, renormalize=True),
        gguf=Gguf("qwen35moe", says=gguf_keys.qwen3_next),
    ),
    "glm4_moe": Family(
        native=True, qk_norm="head", qk_norm_asked=True, qkv_bias=None, partial_rotary=True, experts=_DEEPSEEK_V3,
        gguf=Gguf("glm4moe"),
    ),
    "dots1": Family(
        native=True, qk_norm="head", qkv_bias=None, out_bias=None, sliding=1, experts=_DEEPSEEK_V3, gguf=Gguf("dots1"),
    ),
    "olmoe": Family(
        native=True, qk_norm="all", qkv_bias=None, out_bias=None, served={"clip_qkv": False},
        experts=Experts(("num_experts",), "intermediate_size"), gguf=Gguf("olmoe"),
    ),
    "minimax_m2": Family(
        native=True, qk_norm="all", partial_rotary=True, modules=lambda config: modules.MIXTRAL,
        experts=replace(_MIXTRAL, sigmoid=True, score_bias=True), gguf=Gguf("minimax-m2"),
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": replace(_GRANITE_MOE, experts=replace(_MIXTRAL, shared_inner="shared_intermediate_size")),
    "gpt_oss": Family(
        native=True, qkv_bias=True, out_bias=True, sliding=2, sinks=True, modules=lambda config: modules.GPT_OSS,
        served={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        experts=replace(_MIXTRAL, biases=True, function="swigluoai"),
        gguf=Gguf("gpt-oss", keeps_mxfp4=True, untruncated=True),
    ),
    "deepseek_v2": replace(
        _LATENT, mlp_bias=None, keys=keys.deepseek_v2, modules=lambda config: modules.INTERLEAVED,
        experts=replace(_DEEPSEEK, group_best=1, renormalize=False),
        gguf=Gguf("deepseek2", says=gguf_keys.deepseek_v2),
    ),
    "deepseek_v3": replace(_LATENT, experts=_DEEPSEEK_V3, gguf=Gguf("deepseek2")),
    "glm4_moe_lite": replace(
        _LATENT, keys=keys.glm4_moe_lite, experts=replace(_DEEPSEEK_V3, dense_layers=None, dense_between=True),
        gguf=Gguf("deepseek2", says=gguf_keys.glm4_moe_lite, pre="glm4"),
    ),
    "minicpm3": replace(_LATENT, mlp_bias=None, tied=True, modules=lambda config: LLAMA, multipliers=_minicpm3),
    "youtu": replace(_LATENT, tied=True, gguf=Gguf("deepseek2")),
}  # fmt: skip


_SAME = {"kimi_k2": "deepseek_v3"}
"""Model types that are a family by another name, for which transformers would run code beside the weights."""


def under_its_family(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config``, with the name of the family that it is."""
    if (family := _SAME.get(str(config.get("model_type")))) is None:
        return dict(config)
    return {key: value for key, value in config.items() if key != "auto_map"} | {"model_type": family}


def transformers_config(config: Mapping[str, Any], name: str) -> Any:
    """transformers' configuration of ``config``, whose type must be in the table, with what its family writes under
    other keys also under Llama's. Raises ``CheckpointError`` for one that transformers refuses."""
    from transformers import AutoConfig  # slow to import

    kind = config["model_type"]
    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "model_type", "auto_map")}
    try:
        hf = AutoConfig.for_model(kind, **plain)
    except Exception as error:  # transformers validates with several kinds of exception
        raise CheckpointError(f"{name}: config.json is not a valid {kind} configuration: {error}") from None
    for key, value in FAMILIES[kind].keys(hf.to_dict()).items():
        setattr(hf, key, value)
    return hf


def native_families() -> list[str]:
    """The model types that the native decoder serves."""
    return [name for name, family in FAMILIES.items() if family.native]
