"""``ServerConfig``: the options of the server, with defaults. It imports nothing heavy, so that ``--help`` is fast."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from qserve.checkpoint.errors import UsageError
from qserve.runtime.server.chat.reasoning import REASONING_NAMES
from qserve.runtime.server.chat.tool_formats import FORMAT_NAMES, VLLM_PARSERS

_HOSTNAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ORIGIN = re.compile(r"https?://[^/\s?#@]+")
TOOL_FORMAT_CHOICES = ("auto", "none", *FORMAT_NAMES)
REASONING_CHOICES = ("auto", "none", *REASONING_NAMES)
MAX_STREAM_INTERVAL = 1024


@dataclass(frozen=True)
class ServerConfig:
    """How the server behaves. Raises ``UsageError`` for a choice that does not exist.

    Attributes:
        api_keys: callers must show one of these; none means everybody may call.
        api_keys_file: a TOML file of hashed keys with limits, see ``keys.py``; it is read again on SIGHUP.
        tls_cert, tls_key: PEM files; with both the server speaks HTTPS.
        allowed_hosts: names, besides localhost and addresses, that a server without keys answers to.
        cors_origins: web pages of these origins may call from a browser, none by default.
        step_timeout: seconds after which a step of the model counts as stuck and the server ends; 0 waits forever.
        model_name: what the model is called in requests and answers; None takes the engine's name.
        model_aliases: what else requests may call it.
        lora_dir: adapters may be loaded from directories below this one while the server runs; None allows none.
        batch_dir: where files and batches are kept; None keeps none. One server uses it at a time.
        batch_dir_size: bytes that it may have.
        drain_timeout: seconds that running requests may still take after a first SIGTERM.
        max_body_bytes: larger request bodies are refused.
        max_message_bytes: larger messages of a WebSocket end it.
        max_upload_bytes: of all bodies that are arriving, with a message for each open WebSocket; a tenant has half at
            most.
        body_timeout: seconds in which a request body must have arrived.
        stream_interval: tokens that are gathered for one event of a stream; the first token goes out at once.
        tool_format: how the model writes tool calls, a name of ``tool_formats.FORMAT_NAMES`` or vLLM's; auto
            goes by its chat template, none refuses tools.
        reasoning: auto splits reasoning off the answers of models whose chat template marks it; none
            does not; a name of ``reasoning.REASONING_NAMES`` says how it is marked.
        vllm_metrics: ``/metrics`` repeats everything under vLLM's prefix.
        otlp_endpoint: URL of an OpenTelemetry collector that gets the traces; None makes none.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_keys_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    step_timeout: float = 120.0
    model_name: str | None = None
    model_aliases: tuple[str, ...] = ()
    lora_dir: Path | None = None
    batch_dir: Path | None = None
    batch_dir_size: int = 16 << 30
    drain_timeout: float = 30.0
    max_body_bytes: int = 8 << 20
    max_message_bytes: int = 1 << 20
    max_upload_bytes: int = 256 << 20
    body_timeout: float = 30.0
    stream_interval: int = 1
    vllm_metrics: bool = False
    otlp_endpoint: str | None = None
    tool_format: str = "auto"
    reasoning: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tool_format", VLLM_PARSERS.get(self.tool_format, self.tool_format))
        if not 1 <= self.stream_interval <= MAX_STREAM_INTERVAL:
            raise UsageError(
                f"--stream-interval must be between 1 and {MAX_STREAM_INTERVAL}, not {self.stream_interval}"
            )
        if any(not key or key != key.strip() or not key.isascii() for key in self.api_keys):
            raise UsageError("an API key (--api-key) must be ASCII, not empty, and without spaces around it")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key are given together or not at all")
        named = [name for name in (self.model_name, *self.model_aliases) if name is not None]
        if len(set(named)) < len(named) or not all(name and name.isprintable() for name in named):
            raise UsageError("--served-model-name must be printable, and each name another")
        if self.lora_dir is not None and not self.lora_dir.is_dir():
            raise UsageError(f"--lora-dir {self.lora_dir} is no directory")
        for name in self.allowed_hosts:
            if not _HOSTNAME.fullmatch(name):
                raise UsageError(f"--allowed-hosts must be a name like llm.example.org, not {name!r:.100}")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise UsageError(f"--cors-origin must be like https://chat.example.org or *, not {origin!r:.100}")
        if not 0 <= self.step_timeout < float("inf"):
            raise UsageError(f"--step-timeout must be a number of seconds, 0 for none, not {self.step_timeout}")
        for name, choices in (("tool_format", TOOL_FORMAT_CHOICES), ("reasoning", REASONING_CHOICES)):
            if (value := getattr(self, name)) not in choices:
                raise UsageError(f"unknown --{name.replace('_', '-')} {value!r}: choose from {', '.join(choices)}")
