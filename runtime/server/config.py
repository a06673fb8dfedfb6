"""``ServerConfig``: the options of the server, with their defaults. It imports nothing heavy: help must be cheap."""

from __future__ import annotations

from dataclasses import dataclass, field

from qserve.checkpoint.errors import UsageError
from qserve.runtime.server.tool_formats import NAMES

TOOL_FORMAT_CHOICES = ("auto", "none", *NAMES)
REASONING_CHOICES = ("auto", "none")


@dataclass(frozen=True)
class ServerConfig:
    """How the server behaves. Raises ``UsageError`` for a choice that there is not.

    Attributes:
        api_keys: callers must show one of these; none means everybody may call.
        model_name: what the model is called in requests and answers; None takes the engine's name.
        drain_timeout: seconds that running requests may still take after a first SIGTERM.
        max_body_bytes: larger request bodies are refused.
        body_timeout: seconds in which a request body must have arrived.
        tool_format: how the model writes tool calls, a name of ``tool_formats.TOOL_FORMATS``; auto goes by its chat
            template, none refuses tools.
        reasoning: auto splits reasoning off the answers of models whose chat template marks it; none does not.
        vllm_metrics: ``/metrics`` repeats everything under vLLM's prefix.
        otlp_endpoint: URL of an OpenTelemetry collector that gets the traces; None makes none.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    model_name: str | None = None
    drain_timeout: float = 30.0
    max_body_bytes: int = 8 << 20
    body_timeout: float = 30.0
    vllm_metrics: bool = False
    otlp_endpoint: str | None = None
    tool_format: str = "auto"
    reasoning: str = "auto"

    def __post_init__(self) -> None:
        for name, choices in (("tool_format", TOOL_FORMAT_CHOICES), ("reasoning", REASONING_CHOICES)):
            if (value := getattr(self, name)) not in choices:
                raise UsageError(f"unknown --{name.replace('_', '-')} {value!r}: choose from {', '.join(choices)}")
