"""``ServerConfig``: the options of the server, with their defaults. It imports nothing heavy: help must be cheap."""

from __future__ import annotations

from dataclasses import dataclass, field

from qserve.checkpoint.errors import UsageError

MAX_STREAM_INTERVAL = 1024


@dataclass(frozen=True)
class ServerConfig:
    """How the server behaves.

    Attributes:
        api_keys: callers must show one of these; none means everybody may call.
        model_name: what the model is called in requests and answers; None takes the engine's name.
        drain_timeout: seconds that running requests may still take after a first SIGTERM.
        max_body_bytes: larger request bodies are refused.
        body_timeout: seconds in which a request body must have arrived.
        stream_interval: tokens that are gathered for one event of a stream; the first goes out at once.
        vllm_metrics: ``/metrics`` repeats everything under vLLM's prefix.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    model_name: str | None = None
    drain_timeout: float = 30.0
    max_body_bytes: int = 8 << 20
    body_timeout: float = 30.0
    stream_interval: int = 1
    vllm_metrics: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.stream_interval <= MAX_STREAM_INTERVAL:
            raise UsageError(
                f"--stream-interval must be between 1 and {MAX_STREAM_INTERVAL}, not {self.stream_interval}"
            )
