"""What vLLM's engine arguments mean here. Most are fields of ``EngineConfig`` under the same name; the others are in
two tables. ``LLM`` and ``qserve run`` go by the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from qserve.checkpoint.errors import UsageError
from qserve.runtime.config import EngineConfig
from qserve.runtime.speculative_config import SpeculativeConfig

RENAMED = {"kv_cache_memory_bytes": "kv_cache_memory", "model_impl": "backend"}
FIELDS = tuple(each.name for each in fields(EngineConfig))


@dataclass(frozen=True)
class NoChoice:
    """An argument that is no choice here. ``values`` are taken, because they say what is done anyway; where there are
    none, any value is, because no answer depends on it. ``why``: what to do instead of another value."""

    values: tuple[Any, ...] = ()
    why: str = ""
    of: type | None = None

    @property
    def kind(self) -> type:
        """bool for a switch; else what a value on the command line is read as."""
        return self.of or next((type(each) for each in self.values if isinstance(each, bool | int | float)), str)

    def read(self, text: str) -> Any:
        try:
            return self.kind(text)
        except ValueError:
            return text

    def check(self, value: Any, shown: str) -> None:
        """Raises ``UsageError`` for a value that is not served. ``shown``: the argument as the user wrote it."""
        if self.values and not any(value == each and type(value) is type(each) for each in self.values):
            raise UsageError(f"{shown} is not served: {self.why}")


_ONE_DEVICE = "a model runs on one GPU, or on the CPUs of one machine; start a server for each"
NO_CHOICE: Mapping[str, NoChoice] = {
    "data_parallel_size": NoChoice((1,), _ONE_DEVICE),
    "enable_expert_parallel": NoChoice((False,), _ONE_DEVICE),
    "distributed_executor_backend": NoChoice((None, "mp", "uni"), _ONE_DEVICE),
    "trust_remote_code": NoChoice((False,), "code that comes with a model is never run"),
    "hf_overrides": NoChoice((None, {}), "change config.json"),
    "cpu_offload_gb": NoChoice((0.0, 0), "weights stay where they are computed with; quantize the model to fewer bits"),
    "num_gpu_blocks_override": NoChoice((None,), "choose the size of the KV cache in bytes"),
    "block_size": NoChoice((16, None), "a KV block has 16 tokens"),
    "max_logprobs": NoChoice((20,), "a request may ask for up to 20"),
    "load_format": NoChoice(("auto", "safetensors", "gguf"), "models are safetensors or GGUF"),
    "config_format": NoChoice(("auto", "hf"), "models are safetensors with config.json, or GGUF"),
    "tokenizer_mode": NoChoice(("auto", "hf"), "the tokenizer is the one in the model's files"),
    "skip_tokenizer_init": NoChoice((False,), "an engine has its tokenizer"),
    "limit_mm_per_prompt": NoChoice((None, {}), "models take text alone"),
    "runner": NoChoice(("auto", "generate", "pooling"), "a model generates and embeds"),
    "task": NoChoice((None, "auto", "generate", "embed"), "a model generates and embeds"),
    "enable_chunked_prefill": NoChoice((True, None), "prompts are always computed in chunks"),
    "enable_auto_tool_choice": NoChoice((True,), "--tool-format none refuses tools"),
    "enforce_eager": NoChoice(of=bool),
    "swap_space": NoChoice(of=float),
    "max_seq_len_to_capture": NoChoice(of=int),
    "disable_custom_all_reduce": NoChoice(of=bool),
    "disable_log_stats": NoChoice(of=bool),
    "disable_log_requests": NoChoice(of=bool),
}


def engine_config(options: Mapping[str, Any], base: EngineConfig | None = None) -> EngineConfig:
    """``base`` with ``options``: fields of ``EngineConfig`` and arguments of vLLM's ``LLM``.

    Raises ``UsageError`` naming an option that is unknown or has a value that is not served.
    """
    changes: dict[str, Any] = {}
    for given, value in options.items():
        name = RENAMED.get(given, given)
        if name == "speculative_config" and isinstance(value, Mapping):
            value = SpeculativeConfig.of(value)
        if name in FIELDS:
            changes[name] = value
        elif name in NO_CHOICE:
            NO_CHOICE[name].check(value, f"{name}={value!r:.80}")
        else:
            close = get_close_matches(given, [*FIELDS, *RENAMED, *NO_CHOICE], n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; the options are {', '.join(FIELDS)}"
            raise UsageError(f"unknown option {given!r:.80}{hint}")
    return replace(base or EngineConfig(), **changes)
