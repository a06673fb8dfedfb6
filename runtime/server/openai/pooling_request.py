"""The requests of ``/rerank``, ``/score`` and ``/classify``, in the shapes of vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from qserve.runtime.sampling import RequestError
from qserve.runtime.server.openai.openapi import PROMPT
from qserve.runtime.server.openai.protocol import MAX_PROMPTS, prompt_list
from qserve.runtime.server.openai.strict import NotDone, Strict


class _Pooled(Strict):
    """``use_activation`` false: logits instead of probabilities."""

    not_done: ClassVar[NotDone] = {"truncate_prompt_tokens": (), "add_special_tokens": (True,)}

    model: str | None = None
    use_activation: bool | None = None
    priority: int | None = None
    timeout: float | None = None
    user: str | None = None

    @property
    def activates(self) -> bool:
        return self.use_activation is not False


class ScoreOptions(_Pooled):
    """``pooling``: of an embedding model. ``instruction``: what Qwen3-Reranker judges by."""

    pooling: Literal["mean", "last"] | None = None
    instruction: Annotated[str, Field(min_length=1)] | None = None


_TEXT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "object",
            "required": ["text"],
            "properties": {"text": {"type": "string", "minLength": 1}},
            "additionalProperties": False,
        },
    ]
}
_TEXTS = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TEXT}


def _text(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {"text"}:
        value = value["text"]
    if not isinstance(value, str) or not value:
        raise PydanticCustomError("text", "must hold texts only, none of them empty")
    return value


def _text_list(value: Any) -> list[str]:
    """Texts, each a string or ``{"text": …}``, as strings."""
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("texts", "must be a list of texts")
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError("texts", f"holds {len(value):,} texts, at most {MAX_PROMPTS:,} are allowed")
    return list(map(_text, value))


class RerankRequest(ScoreOptions):
    """``top_n`` 0 returns all documents."""

    not_done: ClassVar[NotDone] = {
        **_Pooled.not_done,
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "rank_fields": ([],),
    }

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[Any, WithJsonSchema(_TEXTS)]
    top_n: int | None = Field(default=None, ge=0)
    return_documents: bool | None = None

    _documents = field_validator("documents")(_text_list)


class ScoreRequest(ScoreOptions):
    """One text of ``text_1`` is compared with all of ``text_2``; as many of both are compared pair by pair."""

    text_1: Annotated[Any, WithJsonSchema({"anyOf": [*_TEXT["anyOf"], _TEXTS]})]
    text_2: Annotated[Any, WithJsonSchema({"anyOf": [*_TEXT["anyOf"], _TEXTS]})]

    @field_validator("text_1", "text_2")
    @classmethod
    def _texts(cls, value: Any) -> list[str]:
        return _text_list(value if isinstance(value, list) else [value])

    def pairs(self) -> list[tuple[str, str]]:
        first = self.text_1 * (len(self.text_2) if len(self.text_1) == 1 else 1)
        if len(first) != len(self.text_2):
            what = f"text_2 holds {len(self.text_2)} texts, text_1 {len(first)}: give one text_1, or as many as text_2"
            raise RequestError(what, "text_2")
        return list(zip(first, self.text_2))


class ClassifyRequest(_Pooled):
    """``input`` becomes a list: of texts, or of lists of token ids."""

    input: Annotated[Any, WithJsonSchema({"anyOf": PROMPT})]

    _inputs = field_validator("input")(prompt_list)
