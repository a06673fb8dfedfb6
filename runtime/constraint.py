"""``Constraint``: what the output of a request must look like, as the client said it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Constraint:
    """The whole output must be a text of this language.

    Attributes:
        kind: json_schema (any JSON object where the schema is ``{"type": "object"}``), regex, choice or lark.
        text: the schema as JSON, the regular expression, a JSON list of strings, or a grammar in the Lark dialect of
            llguidance, which can embed ``%json`` schemas and regular expressions, or in the GBNF of llama.cpp.
        param: the field of the request that it came from, named in errors.
    """

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str
    param: str = "response_format"
