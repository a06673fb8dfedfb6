"""``load``: from a checkpoint to a decoder in memory, which is divided before any weight is read.

Knows what the user allows (``EngineConfig``) and what a decoder needs; does not know requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from qserve.checkpoint.source import ModelSource
from qserve.kernels.ops import Executor
from qserve.runtime.config import EngineConfig
from qserve.runtime.memory import MemoryPlan, file_bytes, give_back, plan_memory, weight_bytes
from qserve.runtime.models.config import DecoderConfig
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from qserve.runtime.models.kv_cache import cache_dtype
from qserve.runtime.models.rope import context_limit


def load(
    source: ModelSource,
    model_config: DecoderConfig,
    config: EngineConfig,
    executor: Executor,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Decoder, MemoryPlan]:
    """The decoder, and how its memory was divided. ``progress`` takes the layers that are there, and all of them.

    Raises ``CheckpointError`` or ``CapacityError`` where the model cannot be read or cannot fit.
    """
    kv_dtype = cache_dtype(config.kv_cache_dtype, source)
    int8_head = source.spec is not None and config.head != "dense"
    limits = DecoderLimits(config.max_num_batched_tokens, config.max_num_seqs, 0, 0)
    memory = plan_memory(
        model_config,
        weights=weight_bytes(source, int8_head=int8_head),
        workspace=limits.workspace_bytes(model_config),
        kv_dtype=kv_dtype,
        context=context_limit(model_config),
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        kv_cache_memory=config.kv_cache_memory,
        files=file_bytes(source),
    )

    def loaded(done: int, total: int) -> None:
        give_back()  # now, not at the end: else what every layer left behind is the peak
        if progress is not None:
            progress(done, total)

    decoder = Decoder(
        source,
        model_config,
        executor,
        replace(limits, max_positions=memory.max_model_len, num_blocks=memory.num_blocks),
        kv_dtype=kv_dtype,
        int8_head=int8_head,
        progress=loaded,
    )
    give_back()
    return decoder, memory


def eos_token_ids(source: ModelSource) -> frozenset[int]:
    """From the generation configuration, the model's, and the tokenizer: any of them ends an answer."""
    found: set[int] = set()
    for value in (
        source.generation_config().get("eos_token_id"),
        source.config.get("eos_token_id"),
        source.tokenizer().eos_token_id,
    ):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
