"""``SpeculativeConfig``: how tokens are drafted, in vLLM's spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from qserve.checkpoint.errors import UsageError

METHODS = ("ngram", "suffix")
MAX_DRAFT = 64


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafts are what followed the newest tokens where they came before.

    Attributes:
        method: ngram looks in the request's own prompt and output; suffix also in recent answers to the same tenant.
        num_speculative_tokens: tokens of a draft at most. How many there are is decided in each step.
        prompt_lookup_min: the newest tokens that must have come before, at least.
        prompt_lookup_max: tokens up to which a match is compared: longer ones count alike.
        suffix_decoding_max_cached_requests: recent answers that are kept for a tenant, with ``suffix``.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 16
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 8
    suffix_decoding_max_cached_requests: int = 64

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """The configuration with these options. Raises ``UsageError`` for an unknown name or a value of another kind.
        """
        known = [each.name for each in fields(cls)]
        for name, value in options.items():
            if name not in known:
                raise UsageError(f"--speculative-config has no {name!r:.80}: choose from {', '.join(known)}")
            wanted = str if name == "method" else int
            if type(value) is not wanted:
                raise UsageError(f"{name} of --speculative-config must be {_KINDS[wanted]}, not {value!r:.80}")
        return cls(**options)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"method {self.method!r:.80} of --speculative-config is not served: "
                             f"choose from {', '.join(METHODS)}")
        for name, most in (
            ("num_speculative_tokens", MAX_DRAFT),
            ("prompt_lookup_min", MAX_DRAFT),
            ("prompt_lookup_max", MAX_DRAFT),
            ("suffix_decoding_max_cached_requests", 1 << 16),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"{name} of --speculative-config must be 1 to {most}, not {getattr(self, name)}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise UsageError(f"prompt_lookup_min {self.prompt_lookup_min} of --speculative-config exceeds "
                             f"prompt_lookup_max {self.prompt_lookup_max}")


_KINDS = {str: "a text", int: "a whole number"}
