"""The JSON schema of a tool's arguments, as far as arguments that are written as bare text need it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]  # by the name of a function, the JSON schema of its arguments
_JSON_TYPES: dict[type, set[str]] = {
    type(None): {"null"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, list: {"array"},
    dict: {"object"}, str: set(),
}  # fmt: skip


def schema_of(schemas: Schemas, name: str, key: str) -> Mapping[str, Any]:
    """The schema of one argument, empty where there is none."""
    schema = schemas.get(name, {})
    properties = schema.get("properties")
    found = resolved(properties.get(key) if isinstance(properties, Mapping) else None, schema)
    return {"anyOf": alternatives(found, schema)}


def alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The choices of a schema that says nothing but these, or the schema itself."""
    for key in ("anyOf", "oneOf"):
        if schema.get(key) and not schema.keys() - {key, "title", "description", "default", "examples"}:
            return [resolved(choice, root) for choice in schema[key]]
    return [schema]


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, or the one among the definitions of ``root`` that it refers to; empty where it is no object."""
    match schema:
        case {"$ref": str(reference)}:
            _, _, path = reference.partition("#/")
            found: Any = root
            for part in path.split("/"):
                found = found.get(part) if isinstance(found, Mapping) else None
            return found if isinstance(found, Mapping) and path else {}
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows as far as it says so itself; empty where it does not."""
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(map(str, given)) if isinstance(given, list) else set()
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            types |= types_of(choice) if isinstance(choice, Mapping) else set()
    return types


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """The value of an argument that was written as bare text. A text that is not of the schema's type stays a string:
    the caller sees what the model wrote."""
    types = types_of(schema)
    if types == {"string"} or any(not types and text in (one.get("enum") or ()) for one in alternatives(schema, {})):
        return text
    words = {"True": True, "False": False, "None": None}
    if text.strip() in words and "string" not in types:
        return words[text.strip()]
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text
    return value if "string" not in types or _JSON_TYPES[type(value)] & types else text


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
