"""``SpeculativeConfig``: how tokens are drafted, in vLLM's spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from qserve.checkpoint.errors import UsageError

METHODS = ("ngram", "suffix", "draft_model", "eagle3")
OF_MODELS = ("draft_model", "eagle3")
MAX_DRAFT = 64


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafts are what followed the newest tokens where they came before, or what a smaller model says, or a head of the
    model.

    Attributes:
        method: ngram looks in the request's own prompt and output; suffix also in recent answers to the same tenant;
            draft_model asks ``model``; eagle3 asks ``model``, an EAGLE-3 head in the speculators format.
        num_speculative_tokens: tokens of a draft at most. How many there are is decided in each step.
        prompt_lookup_min: the newest tokens that must have come before, at least.
        prompt_lookup_max: tokens up to which a match is compared: longer ones count alike.
        suffix_decoding_max_cached_requests: recent answers that are kept for a tenant, with ``suffix``.
        model: with draft_model, a model with the same vocabulary, as the command line takes one; with eagle3, the head.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 16
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 8
    suffix_decoding_max_cached_requests: int = 64
    model: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """The configuration with these options; a ``model`` without a method is a draft model. Raises ``UsageError``
        for an unknown name or a value of another kind."""
        known = [each.name for each in fields(cls)]
        for name, value in options.items():
            if name not in known:
                raise UsageError(f"--speculative-config has no {name!r:.80}: choose from {', '.join(known)}")
            wanted = str if name in ("method", "model") else int
            if type(value) is not wanted:
                raise UsageError(f"{name} of --speculative-config must be {_KINDS[wanted]}, not {value!r:.80}")
        inferred: dict[str, Any] = {"method": "draft_model"} if "model" in options else {}
        return cls(**{**inferred, **options})

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"method {self.method!r:.80} of --speculative-config is not served: "
                             f"choose from {', '.join(METHODS)}")
        if (self.method in OF_MODELS) != (self.model is not None):
            raise UsageError("--speculative-config: the methods draft_model and eagle3 need a model, as "
                             '{"method": "draft_model", "model": "DIR"}, and no other method has one')
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
