"""The fields of a request that say what its output must look like, and the one ``Constraint`` that they become.

The fields are OpenAI's ``response_format``, and vLLM's ``structured_outputs`` and ``guided_*``. Whether a schema, an
expression or a grammar is valid is found when it is compiled.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from pydantic import BaseModel

from qserve.runtime.constraint import Constraint
from qserve.runtime.sampling import RequestError

_KINDS = ("json", "regex", "choice", "grammar")
ANY_OBJECT = '{"type": "object"}'
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class StructuredFields(BaseModel):
    """At most one of these fields, and one kind within it, may ask for something."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def constraint(self) -> Constraint | None:
        """None where the output is free. Raises ``RequestError`` naming a field that is malformed or one too many."""
        found = [
            _response_format(self.response_format),
            *_structured_outputs(self.structured_outputs),
            *(_constraint(kind, getattr(self, f"guided_{kind}"), f"guided_{kind}") for kind in _KINDS),
        ]
        asked = [constraint for constraint in found if constraint is not None]
        if len(asked) > 1:
            _refuse(asked[1].param, f"{asked[0].param} constrains the output too; give one of them")
        return asked[0] if asked else None


def _response_format(value: Any) -> Constraint | None:
    if value is None:
        return None
    field = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        _refuse(field, "must be an object whose type is text, json_object or json_schema")
    _known(field, value, {"type", "json_schema"} if kind == "json_schema" else {"type"})
    if kind != "json_schema":
        return Constraint("json_schema", ANY_OBJECT, field) if kind == "json_object" else None
    inner, field = value.get("json_schema"), "response_format.json_schema"
    if not isinstance(inner, dict):
        _refuse(field, "must be an object with a name and a schema")
    _known(field, inner, {"name", "description", "schema", "strict"})
    name, strict, description = inner.get("name"), inner.get("strict"), inner.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(f"{field}.name", "must be 1 to 64 letters, digits, underscores or dashes")
    if not isinstance(strict, bool | None):
        _refuse(f"{field}.strict", "must be true or false; either way the output follows the schema")
    if not isinstance(description, str | None):
        _refuse(f"{field}.description", "must be a string")
    if not isinstance(inner.get("schema"), dict):
        _refuse(f"{field}.schema", "must be an object, a JSON schema")
    return Constraint("json_schema", json.dumps(inner["schema"]), f"{field}.schema")


def _structured_outputs(value: Any) -> list[Constraint | None]:
    if value is None:
        return []
    field = "structured_outputs"
    if not isinstance(value, dict):
        _refuse(field, f"must be an object with one of {', '.join(_KINDS)} or json_object")
    _known(field, value, {*_KINDS, "json_object"})
    wanted = value.get("json_object")
    if not isinstance(wanted, bool | None):
        _refuse(f"{field}.json_object", "must be true or false")
    found = [_constraint(kind, value.get(kind), f"{field}.{kind}") for kind in _KINDS]
    return [*found, Constraint("json_schema", ANY_OBJECT, f"{field}.json_object") if wanted else None]


def _constraint(kind: str, value: Any, param: str) -> Constraint | None:
    if value is None:
        return None
    if kind == "json":
        if not isinstance(value, dict | str):
            _refuse(param, "must be a JSON schema, as an object or as text")
        return Constraint("json_schema", value if isinstance(value, str) else json.dumps(value), param)
    if kind == "choice":
        if not isinstance(value, list):
            _refuse(param, "must be a list of strings, at least one")
        return Constraint("choice", json.dumps(value), param)
    if not isinstance(value, str):
        _refuse(param, "must be a string")
    return Constraint("regex" if kind == "regex" else "lark", value, param)


def _known(field: str, value: dict[str, Any], names: set[str]) -> None:
    for name in value.keys() - names:
        _refuse(f"{field}.{name:.40}", "is not a field that this server knows")


def _refuse(param: str, why: str) -> NoReturn:
    raise RequestError(f"{param}: {why}", param)
