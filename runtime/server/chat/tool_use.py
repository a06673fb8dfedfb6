"""``OfferedTool``: a function that the model may call, and ``ToolUse``, what a request wants of its tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OfferedTool:
    """A function that the model may call. ``parameters`` is the JSON schema of its arguments.

    ``strict``: arguments must be held to the whole schema. Otherwise the parts that a grammar cannot express are left
    out.
    """

    name: str
    parameters: Mapping[str, Any]
    description: str | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}


@dataclass(frozen=True)
class ToolUse:
    """What a request wants of its tools.

    Attributes:
        shown: the tools that the model is told of; none where it may not call any.
        callable: those of them that it may call.
        required: it must call one.
        parallel: it may call several.
    """

    shown: tuple[OfferedTool, ...] = ()
    callable: tuple[OfferedTool, ...] = ()
    required: bool = False
    parallel: bool = True

    @property
    def constrained(self) -> bool:
        """Whether a grammar must hold the output to what is allowed."""
        return bool(self.callable) and (
            self.required or not self.parallel or any(tool.strict for tool in self.callable)
        )
