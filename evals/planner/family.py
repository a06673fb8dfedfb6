"""From a config.json to a ``ModelShape``, by the description of its family and without transformers.

An architecture that is not known is refused by name: a wrong size is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import FAMILIES, Family, under_its_family
from qserve.checkpoint.text_part import text_config
from qserve.evals.planner.shape import Linear, ModelShape

_MOST = 2**40


LLAMA_4 = "llama4_text"
_KNOWN = {**FAMILIES, LLAMA_4: Family(qkv_bias=None, out_bias=None)}
_UNSAID: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131072, "sliding_window": 4096,
    },
}  # fmt: skip
"""What a nested configuration leaves out where it is as the family has it."""


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that the content of a config.json describes; of a model that also sees or hears, that of its text part.

    Raises ``CheckpointError`` for an architecture that is not known, and for a key that is missing or no number.
    """
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{name}: config.json is no JSON object")
    config = under_its_family(config)
    kind, text = config.get("model_type"), config.get("text_config")
    if kind not in _KNOWN and isinstance(text, Mapping):
        return replace(shape_of(_text_part(config, text), name), part_of=str(kind))
    if kind not in _KNOWN:
        raise CheckpointError(
            f"{name} is of type {kind!r}, whose arithmetic is not known; known are {', '.join(_KNOWN)}"
        )
    family = _KNOWN[kind]
    try:
        keys = _Keys({**config, **family.keys(config)}, name)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name}: config.json is not a valid {kind} configuration: {error}") from None
    return _decoder(keys, kind, family)


def _text_part(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text part, with what only the whole says of it. It has no further part."""
    return {**_UNSAID.get(str(text.get("model_type")), {}), **text_config(config, text)}


class _Keys:
    """Whole positive numbers of a configuration by name."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name

    def get(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.name}: config.json lacks {key}")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
            raise CheckpointError(f"{self.name}: {key} must be a whole number, not {value!r}")
        if value == 0 and default is None:
            raise CheckpointError(f"{self.name}: {key} is 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)

    def stored_as(self) -> str | None:
        quantization = self.config.get("quantization_config")
        return str(quantization.get("quant_method", "unknown")) if isinstance(quantization, Mapping) else None


def _decoder(keys: _Keys, kind: str, family: Family) -> ModelShape:
    hidden, layers, vocab = keys.get("hidden_size"), keys.get("num_hidden_layers"), keys.get("vocab_size")
    heads = keys.get("num_attention_heads")
    head = Linear("head", vocab, hidden, 1)
    llama_4 = kind == LLAMA_4
    mlp, mlp_other = (_interleaved(keys, hidden, layers), 0) if llama_4 else _feed_forward(keys, family, hidden, layers)
    modules = family.modules(keys.config)
    norm = hidden * (family.norm_weight + family.norm_bias)
    norms = norm * (layers * modules.norms + 1)
    tied = keys.flag("tie_word_embeddings", family.tied)
    context = keys.get("max_position_embeddings", _MOST)
    learned = (context + modules.position_offset) * hidden if modules.positions else 0
    if family.latent:
        nope, rope = keys.get("qk_nope_head_dim"), keys.get("qk_rope_head_dim")
        value, rank, q_rank = keys.get("v_head_dim", 0), keys.get("kv_lora_rank"), keys.get("q_lora_rank", 0)
        value = value or _divided(keys, hidden, heads)
        attention = [
            Linear("attention", rank + rope, hidden, layers),
            Linear("attention", heads * (nope + value), rank, layers),
            Linear("attention", hidden, heads * value, layers),
        ]
        if q_rank:
            attention.append(Linear("attention", q_rank, hidden, layers))
        attention.append(Linear("attention", heads * (nope + rope), q_rank or hidden, layers))
        biases = (q_rank + rank + rope + hidden) * keys.flag("attention_bias", False)
        return ModelShape(
            name=keys.name, family=kind, attention="MLA", hidden_size=hidden, vocab_size=vocab, num_layers=layers,
            num_heads=heads, kv_heads=1, kv_width=rank + rope, windows=(0,) * layers, score_width=nope + rope,
            value_width=value, latent_score_width=rank + rope, latent_value_width=rank,
            linears=(*attention, *mlp, head), embedding=vocab * hidden,
            other=norms + mlp_other + layers * (rank + q_rank + biases), tied=tied, context=context,
            stored_as=keys.stored_as(),
        )
    kv_heads = keys.get("num_key_value_heads", heads)
    if not kv_heads or heads % kv_heads:
        raise CheckpointError(f"{keys.name}: {heads} attention heads are not a multiple of {kv_heads} key heads")
    head_dim = keys.get("head_dim", 0) or _divided(keys, hidden, heads)
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    deltas = _deltas(keys, layers) if family.delta else 0
    attend, qkv_size = layers - deltas, q_size * (1 + family.gated_heads) + 2 * kv_size
    attention = [Linear("attention", qkv_size, hidden, attend), Linear("attention", hidden, q_size, attend)]
    delta, delta_other, state_bytes = _delta_nets(keys, hidden, deltas) if deltas else ([], 0, 0)
    asked = keys.flag("attention_bias", False)
    biases = qkv_size * (asked if family.qkv_bias is None else family.qkv_bias)
    biases += hidden * (asked if family.out_bias is None else family.out_bias)
    qk_norm = None if family.qk_norm_asked and not keys.flag("use_qk_norm", False) else family.qk_norm
    biases += {"head": 2 * head_dim, "all": q_size + kv_size, "layer": q_size + kv_size, None: 0}[qk_norm]
    biases += heads * family.sinks
    return ModelShape(
        name=keys.name, family=kind, attention=_kind(heads, kv_heads), hidden_size=hidden, vocab_size=vocab,
        num_layers=layers, num_heads=heads, kv_heads=kv_heads, kv_width=2 * kv_size,
        windows=_chunks(keys, layers) if llama_4 else _windows(keys, family, attend),
        score_width=head_dim, value_width=head_dim,
        latent_score_width=head_dim, latent_value_width=head_dim, linears=(*attention, *delta, *mlp, head),
        embedding=vocab * hidden + learned,
        other=norms + mlp_other + attend * biases + delta_other + vocab * family.head_bias,
        tied=tied, context=context, stored_as=keys.stored_as(), state_bytes=state_bytes,
    )


def _deltas(keys: _Keys, layers: int) -> int:
    """How many layers are gated delta nets."""
    kinds = keys.config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise CheckpointError(f"{keys.name}: layer_types does not say of each of {layers} layers what it is")
    if "full_attention" not in kinds:
        raise CheckpointError(f"{keys.name} has no layer of full attention")
    return kinds.count("linear_attention")


def _delta_nets(keys: _Keys, hidden: int, layers: int) -> tuple[list[Linear], int, int]:
    """Gated delta nets: their linears, their parameters that are no matrices, and the bytes that they keep of a
    request, in float32."""
    heads, key_dim = keys.get("linear_num_value_heads", 32), keys.get("linear_key_head_dim", 128)
    key_size = keys.get("linear_num_key_heads", 16) * key_dim
    value_dim, width = keys.get("linear_value_head_dim", 128), keys.get("linear_conv_kernel_dim", 4)
    convolved = 2 * key_size + heads * value_dim
    linears = [
        Linear("attention", convolved + heads * value_dim + 2 * heads, hidden, layers),
        Linear("attention", hidden, heads * value_dim, layers),
    ]
    other = layers * (convolved * width + 2 * heads + value_dim)
    return linears, other, 4 * layers * (convolved * (width - 1) + heads * key_dim * value_dim)


def _feed_forward(keys: _Keys, family: Family, hidden: int, layers: int) -> tuple[list[Linear], int]:
    """The feed-forward, dense or of experts, and its parameters that are no matrices."""
    if (experts := family.experts) is None:
        inner = keys.get("intermediate_size")
        biased = keys.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias
        ups = 2 if family.gated else 1
        return _dense("mlp", hidden, inner, layers, ups), layers * (ups * inner + hidden) * biased
    if experts.dense_between and not isinstance(keys.config.get("mlp_only_layers") or [], list):
        raise CheckpointError(f"{keys.name}: mlp_only_layers is not a list of layers")
    said = {key: keys.get(key, 0) for key in (experts.dense_layers, "decoder_sparse_step") if key}
    plain = layers - sum(experts.sparse({**keys.config, **said}, layers))
    linears = _dense("mlp", hidden, keys.get("intermediate_size"), plain) if plain else []
    layers -= plain
    if not layers:
        return linears, 0
    count = keys.get(next((name for name in experts.count if name in keys.config), experts.count[0]))
    inner = keys.get(experts.inner)
    linears += _experts(keys, hidden, inner, layers, count)
    if experts.shared_count and (shared := keys.get(experts.shared_count, 0)):
        linears += _dense("shared expert", hidden, shared * inner, layers)
    if experts.shared_inner and (shared := keys.get(experts.shared_inner, 0)):
        linears += _dense("shared expert", hidden, shared, layers)
    if experts.shared_gate:
        linears.append(Linear("router", 1, hidden, layers))
    biases = (count + count * (2 * inner + hidden)) * experts.biases + count * experts.score_bias
    return linears, layers * biases


def _interleaved(keys: _Keys, hidden: int, layers: int) -> list[Linear]:
    """The feed-forwards of Llama 4: experts and one for every token in some layers, a wider one in the others."""
    listed, step = keys.config.get("moe_layers"), keys.get("interleave_moe_layer_step", 1)
    sparse = len(listed) if isinstance(listed, list) else len(range(step - 1, layers, step)) if step else 0
    if sparse > layers:
        raise CheckpointError(f"{keys.name}: {sparse} of {layers} layers have experts")
    inner = keys.get("intermediate_size")
    return [
        *(_dense("mlp", hidden, keys.get("intermediate_size_mlp"), layers - sparse) if sparse < layers else []),
        *(_experts(keys, hidden, inner, sparse, keys.get("num_local_experts")) if sparse else []),
        *(_dense("shared expert", hidden, inner, sparse) if sparse else []),
    ]


def _chunks(keys: _Keys, layers: int) -> tuple[int, ...]:
    """The windows of Llama 4: layers that rotate look back within a chunk of tokens, at most all of it."""
    chunk, rotated = keys.get("attention_chunk_size", 8192), keys.config.get("no_rope_layers")
    if isinstance(rotated, list) and rotated:
        if len(rotated) != layers:
            raise CheckpointError(f"{keys.name}: no_rope_layers has {len(rotated)} entries for {layers} layers")
        return tuple(chunk if each else 0 for each in rotated)
    every = keys.get("no_rope_layer_interval", 4) or 4
    return tuple(chunk if (i + 1) % every else 0 for i in range(layers))


def _dense(kind: Any, hidden: int, inner: int, layers: int, ups: int = 2) -> list[Linear]:
    """``ups``: 2 with a gate, 1 without."""
    return [Linear(kind, ups * inner, hidden, layers), Linear(kind, hidden, inner, layers)]


def _experts(keys: _Keys, hidden: int, inner: int, layers: int, experts: int) -> list[Linear]:
    active = keys.get("num_experts_per_tok")
    if active > experts:
        raise CheckpointError(f"{keys.name}: num_experts_per_tok {active} exceeds the {experts} experts")
    return [
        Linear("experts", 2 * inner, hidden, layers, experts, active),
        Linear("experts", hidden, inner, layers, experts, active),
        Linear("router", experts, hidden, layers),
    ]


def _windows(keys: _Keys, family: Family, layers: int) -> tuple[int, ...]:
    asked = family.sliding and (not family.window_asked or keys.flag("use_sliding_window", False))
    window = keys.get("sliding_window", 0) if asked else 0
    kinds = keys.config.get("layer_types")
    if isinstance(kinds, list) and asked:
        unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if unknown or len(kinds) != layers:
            raise CheckpointError(f"{keys.name}: layer_types {unknown[:1] or len(kinds)} are not known")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if family.window_asked:
        first = keys.get("max_window_layers", 0)
        return tuple(window if i >= first else 0 for i in range(layers))
    every = family.sliding
    return tuple(0 if every > 1 and (i + 1) % every == 0 else window for i in range(layers))


def _divided(keys: _Keys, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise CheckpointError(f"{keys.name}: a hidden size of {hidden} is no multiple of {heads} heads")
    return hidden // heads


def _kind(heads: int, kv_heads: int) -> str:
    return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
