"""``DecoderConfig``: the shape of a decoder, read from a Hugging Face configuration by the description of its family.

A configuration that the native decoder does not compute exactly is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import FAMILIES, Family, Multipliers, native_families, transformers_config
from qserve.checkpoint.modules import Modules
from qserve.kernels.ops import Function
from qserve.runtime.cache import CacheLayout, CacheSpec, StateSpec
from qserve.runtime.models.delta_config import DeltaConfig, delta_config
from qserve.runtime.models.latent_config import LatentConfig, latent_config
from qserve.runtime.models.moe_config import MoeConfig, moe_config

ACTIVATIONS: dict[str, Function] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
"""The functions of feed-forwards by transformers' names."""


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder.

    Attributes:
        parallel: attention and feed-forward read the same residual stream.
        windows: the sliding window of each layer in tokens, 0 for full attention.
        rotated: for each layer whether its queries and keys are rotated.
        rope_kinds: for each layer the key of its parameters in ``rope_parameters``, None where all layers share them.
        head_dim: of latent attention only what is rotated. There all heads share one key head, that of the cache.
        score_cap, logit_cap: ``Attention.softcap`` and ``SoftCap.cap``, 0 for none.
    """

    model_type: str
    family: Family
    modules: Modules
    multipliers: Multipliers
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    activation: Function
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    parallel: bool
    windows: tuple[int, ...]
    rotated: tuple[bool, ...]
    rope_kinds: tuple[str | None, ...]
    score_cap: float
    logit_cap: float
    moe: MoeConfig | None
    latent: LatentConfig | None
    delta: DeltaConfig | None
    hf: PretrainedConfig

    @property
    def attention_scale(self) -> float:
        """The factor of the attention scores."""
        return self.head_dim**-0.5 if self.multipliers.attention is None else self.multipliers.attention

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def attended_size(self) -> int:
        """Numbers that attention gives a token."""
        return self.num_attention_heads * self.value_dim

    @property
    def value_dim(self) -> int:
        """Those of one head."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def cache_layout(self) -> CacheLayout:
        width = self.latent.width if self.latent else self.head_dim
        kept: list[CacheSpec | StateSpec] = [
            CacheSpec(self.num_key_value_heads, width, window, self.latent is not None) for window in self.windows
        ]
        if self.delta is not None:
            kept = [self.delta.state if delta else spec for delta, spec in zip(self.delta.layers, kept)]
        return CacheLayout.of(kept)

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        layers = self.num_hidden_layers - (sum(self.delta.layers) if self.delta is not None else 0)
        return layers * self.cache_layout.groups[0].spec.width * element_size


def decoder_config(config: dict[str, Any], name: str) -> DecoderConfig:
    """Read ``config`` (the content of config.json). Raises ``CheckpointError`` for a model not computed here."""
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if kind is None or family is None or not family.native:
        raise CheckpointError(f"{name} is of type {kind!r}; the native decoder serves {', '.join(native_families())}")
    hf = transformers_config(config, name)
    for key, wanted in family.served.items():
        if (found := getattr(hf, key, wanted) or False) != wanted:
            raise CheckpointError(f"{name} has {key} {found!r} in config.json; only {wanted!r} is served")
    if hf.hidden_act not in ACTIVATIONS:
        raise CheckpointError(f"{name} uses the activation {hf.hidden_act!r}; known are {', '.join(ACTIVATIONS)}")
    if family.experts and ACTIVATIONS[hf.hidden_act] != "silu":
        raise CheckpointError(f"{name} has experts with the activation {hf.hidden_act!r}; only silu is served")
    if family.qk_norm_asked and not hf.use_qk_norm:
        family = replace(family, qk_norm=None)
    heads = hf.num_attention_heads
    kv_heads = 1 if family.latent else getattr(hf, "num_key_value_heads", None) or heads
    if kv_heads < 1 or heads % kv_heads:
        raise CheckpointError(f"{name}: {heads} attention heads are not a multiple of {kv_heads} key heads")
    return DecoderConfig(
        model_type=kind,
        family=family,
        modules=family.modules(hf.to_dict()),
        multipliers=family.multipliers(hf),
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        activation=ACTIVATIONS[hf.hidden_act],
        num_hidden_layers=hf.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        rms_norm_eps=hf.rms_norm_eps,
        max_position_embeddings=hf.max_position_embeddings,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        parallel=bool(hf.use_parallel_residual) if family.parallel is None else family.parallel,
        windows=_windows(hf, family, name),
        rotated=_rotated(hf, family),
        rope_kinds=_rope_kinds(hf),
        score_cap=float(hf.attn_logit_softcapping or 0) if family.capped_scores else 0.0,
        logit_cap=float(hf.final_logit_softcapping or 0) if family.capped_logits else 0.0,
        moe=moe_config(hf, family.experts, name) if family.experts else None,
        latent=latent_config(hf) if family.latent else None,
        delta=delta_config(hf, name) if family.delta else None,
        hf=hf,
    )


def is_classifier(config: dict[str, Any]) -> bool:
    """Whether ``config`` is of a model with a classification head in the place of its output layer."""
    return any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ())


def _rotated(hf: PretrainedConfig, family: Family) -> tuple[bool, ...]:
    if family.rotated is None:
        return (family.modules(hf.to_dict()).positions is None,) * int(hf.num_hidden_layers)
    return tuple(map(bool, family.rotated(hf)))


def _rope_kinds(hf: PretrainedConfig) -> tuple[str | None, ...]:
    kinds = getattr(hf, "layer_types", None) or ()
    by_kind = bool(kinds) and set(kinds) <= set(getattr(hf, "rope_parameters", None) or ())
    return tuple(kinds) if by_kind else (None,) * int(hf.num_hidden_layers)


def _windows(hf: PretrainedConfig, family: Family, name: str) -> tuple[int, ...]:
    # A family without windows ignores the key in transformers, and so do we.
    window = int(getattr(hf, "sliding_window", None) or 0) if family.sliding else 0
    kinds = getattr(hf, "layer_types", None)
    if kinds is None:
        return (window,) * int(hf.num_hidden_layers)
    unknown = set(kinds) - {"full_attention", "sliding_attention", "linear_attention" if family.delta else ""}
    if unknown:
        raise CheckpointError(f"{name} has layers of type {sorted(unknown)[0]!r}, which is not served")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
