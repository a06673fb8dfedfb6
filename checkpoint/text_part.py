"""The text part of a model that also takes images or sound, as a model of its own: its configuration and its tensors.

Its other parts are left out. Text alone never reaches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from qserve.checkpoint.families import FAMILIES

T = TypeVar("T")

_OF_THE_WHOLE = (
    "quantization_config", "tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
_ALIKE = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3",
    "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2",  # older configurations, in which the text part is not apart
}  # fmt: skip
"""Text parts that are a family by another name: their rotations differ only for images."""
_PREFIXES = {
    "language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model.",
    **{name: name for name in ("lm_head.", "model.layers.", "model.embed_tokens.", "model.norm.")},
}  # fmt: skip
"""Names of the text part's tensors, of older and of newer checkpoints, and their names in a model of its own."""


def text_config(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """``text``, the part of ``config`` that is about text, with what only the whole says of it."""
    said = {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    return {**{key: value for key, value in text.items() if key not in ("text_config", "vision_config")}, **said}


def text_part(config: dict[str, Any], tensors: dict[str, T]) -> tuple[dict[str, Any], dict[str, T]] | None:
    """The configuration and the tensors of the text part; None where ``config`` has no such part, or one of a family
    that the native decoder does not serve."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping) or config.get("model_type") in FAMILIES:
        return None
    kind = _ALIKE.get(str(text.get("model_type")), text.get("model_type"))
    if kind not in FAMILIES or not FAMILIES[kind].native:
        return None
    part = {**text_config(config, text), "model_type": kind, "architectures": [_class_name(kind)]}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(part.get(key), Mapping):
            part[key] = _for_text(part[key])
    named = {
        inside + name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        for prefix, inside in _PREFIXES.items()
        if name.startswith(prefix)
    }
    if not any(name.startswith("lm_head.") for name in named):
        part["tie_word_embeddings"] = True
    return part, named


def _class_name(kind: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # slow to import

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])


def _for_text(rotation: Mapping[str, Any]) -> dict[str, Any]:
    """Without the sections for the places in an image: a token of text has the same position in each."""
    kept = {key: value for key, value in rotation.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}
