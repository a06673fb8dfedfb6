"""``GenerationConfig``: what a model's ``generation_config.json`` says of sampling and of where an answer ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.files import read_json_object
from qserve.checkpoint.source import ModelSource
from qserve.runtime.sampling import Defaults, RequestError, SamplingParams

_FILE = "generation_config.json"
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of the file that set defaults, as in vLLM, by their names in ``SamplingParams``."""


@dataclass(frozen=True)
class GenerationConfig:
    """``defaults``: values of ``SamplingParams`` for requests that do not say. ``eos_token_ids``: tokens that end an
    answer. ``origin``: where they are from."""

    defaults: Defaults = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()
    origin: str = _FILE

    @classmethod
    def of(cls, source: ModelSource, choice: str = "auto") -> GenerationConfig:
        """``choice``: auto reads the model's file, vllm reads its ends of answers alone, anything else is the path of
        another file or of its directory. Ends named by the model's configuration and its tokenizer count in any case.

        Raises ``CheckpointError`` or ``UsageError`` where a value is not valid.
        """
        if choice in ("auto", "vllm"):
            content, origin = source.generation_config(), _FILE
        else:
            path = Path(choice).expanduser()
            path = path / _FILE if path.is_dir() else path
            if not path.is_file():
                raise UsageError(f"--generation-config must be auto, vllm or a file; there is no {path}")
            content, origin = read_json_object(path), str(path)
        ends: set[int] = set()
        for value in (content.get("eos_token_id"), source.config.get("eos_token_id"), source.tokenizer().eos_token_id):
            ends.update(value if isinstance(value, list) else [] if value is None else [value])
        return cls({} if choice == "vllm" else _defaults(content, origin), frozenset(ends), origin)

    def line(self) -> str | None:
        """The defaults in one line, None where there are none."""
        shown = ", ".join(f"{name} {value:g}" for name, value in self.defaults.items())
        hint = "--generation-config vllm leaves them out"
        return f"sampling defaults of {self.origin}: {shown}; {hint}" if shown else None


def _defaults(content: Mapping[str, Any], origin: str) -> dict[str, int | float]:
    given = {name: content[key] for key, name in _FIELDS.items() if content.get(key) is not None}
    try:
        params = SamplingParams(**{"max_tokens": None, **given})
    except RequestError as error:
        raise CheckpointError(f"{origin}: {error}; --generation-config vllm leaves its defaults out") from None
    return {name: getattr(params, name) for name in given}
