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

RENAMED = {"kv_cache_memory_bytes": "kv_cache_memory"}
FIELDS = tuple(each.name for each in fields(EngineConfig))


@dataclass(frozen=True)
class Fixed:
    """An argument that is no choice here. ``values`` are taken, because they say what is done anyway; no values at all
    means that any is taken, because no answer depends on it. ``why``: what to do instead of another value."""

    values: tuple[Any, ...]
    why: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raises ``UsageError`` for a value that is not served. ``name`` is how the user wrote the argument."""
        if self.values and not any(value == each and type(value) is type(each) for each in self.values):
            raise UsageError(f"{name} {value!r:.80} is not served: {self.why}")


_ONE_DEVICE = "a model runs on one GPU, or on the CPU of one machine; start a server for each"
FIXED: Mapping[str, Fixed] = {
    "tensor_parallel_size": Fixed((1,), _ONE_DEVICE),
    "pipeline_parallel_size": Fixed((1,), _ONE_DEVICE),
    "data_parallel_size": Fixed((1,), _ONE_DEVICE),
    "enable_expert_parallel": Fixed((False,), _ONE_DEVICE),
    "distributed_executor_backend": Fixed((None, "mp", "uni"), _ONE_DEVICE),
    "trust_remote_code": Fixed((False,), "code that comes with a model is never run"),
    "enable_lora": Fixed((False,), "merge the adapter into the model first"),
    "speculative_config": Fixed((None,), "answers are not drafted"),
    "hf_overrides": Fixed((None, {}), "change config.json"),
    "cpu_offload_gb": Fixed((0, 0.0), "weights stay where they are computed with; quantize the model to fewer bits"),
    "num_gpu_blocks_override": Fixed((None,), "give kv_cache_memory, in bytes"),
    "block_size": Fixed((None, 16), "a KV block has 16 tokens"),
    "max_logprobs": Fixed((20,), "a request may ask for up to 20"),
    "load_format": Fixed(("auto", "safetensors", "gguf"), "models are safetensors or GGUF"),
    "config_format": Fixed(("auto", "hf"), "models are safetensors with config.json, or GGUF"),
    "tokenizer_mode": Fixed(("auto", "hf"), "the tokenizer is the one in the model's files"),
    "skip_tokenizer_init": Fixed((False,), "an engine has its tokenizer"),
    "limit_mm_per_prompt": Fixed((None, {}), "models take text alone"),
    "runner": Fixed(("auto", "generate", "pooling"), "a model generates and embeds"),
    "task": Fixed((None, "auto", "generate", "embed"), "a model generates and embeds"),
    "enable_chunked_prefill": Fixed((None, True), "prompts are always computed in chunks"),
    "enforce_eager": Fixed(()),
    "swap_space": Fixed(()),
    "max_seq_len_to_capture": Fixed(()),
    "disable_custom_all_reduce": Fixed(()),
    "disable_log_stats": Fixed(()),
}


def engine_config(options: Mapping[str, Any], base: EngineConfig | None = None) -> EngineConfig:
    """``base`` with ``options``: fields of ``EngineConfig`` and arguments of vLLM's ``LLM``.

    Raises ``UsageError`` naming an option that is unknown or has a value that is not served.
    """
    changes: dict[str, Any] = {}
    for given, value in options.items():
        name = RENAMED.get(given, given)
        if name in FIELDS:
            changes[name] = value
        elif name in FIXED:
            FIXED[name].check(name, value)
        else:
            close = get_close_matches(given, [*FIELDS, *RENAMED, *FIXED], n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; the options are {', '.join(FIELDS)}"
            raise UsageError(f"unknown option {given!r:.80}{hint}")
    return replace(base or EngineConfig(), **changes)
