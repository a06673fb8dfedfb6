"""``ServerConfig``: the options of the server, with their defaults. It imports nothing heavy: help must be cheap."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from qserve.checkpoint.errors import UsageError

_ORIGIN = re.compile(r"https?://[^/\s?#@]+")


@dataclass(frozen=True)
class ServerConfig:
    """How the server behaves.

    Attributes:
        api_keys: callers must show one of these; none means everybody may call.
        api_keys_file: a TOML file of hashed keys with limits, see ``keys.py``; it is read again on SIGHUP.
        tls_cert, tls_key: PEM files; with both the server speaks HTTPS.
        cors_origins: web pages of these origins may call from a browser, none by default.
        step_timeout: seconds after which a step of the model counts as stuck and the server ends; 0 waits for ever.
        model_name: what the model is called in requests and answers; None takes the engine's name.
        drain_timeout: seconds that running requests may still take after a first SIGTERM.
        max_body_bytes: larger request bodies are refused.
        body_timeout: seconds in which a request body must have arrived.
        vllm_metrics: ``/metrics`` repeats everything under vLLM's prefix.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_keys_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cors_origins: tuple[str, ...] = ()
    step_timeout: float = 120.0
    model_name: str | None = None
    drain_timeout: float = 30.0
    max_body_bytes: int = 8 << 20
    body_timeout: float = 30.0
    vllm_metrics: bool = False

    def __post_init__(self) -> None:
        if any(not key or key != key.strip() or not key.isascii() for key in self.api_keys):
            raise UsageError("--api-key must be ASCII, not empty, and without spaces around it")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key are given together or not at all")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise UsageError(f"--cors-origin must be like https://chat.example.org or *, not {origin!r:.100}")
        if not 0 <= self.step_timeout < float("inf"):
            raise UsageError(f"--step-timeout must be a number of seconds, 0 for none, not {self.step_timeout}")
