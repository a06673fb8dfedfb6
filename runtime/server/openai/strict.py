"""``Strict``: the base of every part of a request's body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from annotated_types import MaxLen
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

NotDone = Mapping[str, tuple[Any, ...]]
"""Fields that OpenAI has and this server does not support, each with the values that ask for nothing."""


class Strict(BaseModel):
    """Unknown fields are errors; those in ``not_done`` too, unless they hold null or a value listed there."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)
    not_done: ClassVar[NotDone] = {}
    longest: ClassVar[dict[str, int]] = {}  # of lists: pydantic would validate that many items before it counts

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        rules = ((name, rule) for name, field in cls.model_fields.items() for rule in field.metadata)
        cls.longest = {name: rule.max_length for name, rule in rules if isinstance(rule, MaxLen)}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, longest in cls.longest.items():
            if isinstance(items := data.get(name), list) and len(items) > longest:
                what = f"holds {len(items):,} items, at most {longest:,} are allowed"
                raise PydanticCustomError("too_long", what, {"param": name})
        for name in cls.not_done.keys() & data.keys():
            if data[name] is not None and data[name] not in cls.not_done[name]:
                raise PydanticCustomError(
                    "unsupported_parameter", "'{param}' is not supported by this server", {"param": name}
                )
        return {name: value for name, value in data.items() if name not in cls.not_done}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema, with the fields that may be given but must ask for nothing."""
        schema = handler.resolve_ref_schema(handler(core))
        idle = {name: {"enum": [None, *values]} for name, values in cls.not_done.items()}
        schema["properties"] = schema.get("properties", {}) | idle
        return schema
