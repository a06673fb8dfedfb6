"""``DraftModel``: a smaller model that guesses what comes next, and its own cache of keys and values.

Knows names, tokens and positions; does not know requests, or when a guess is worth its time (``ModelDrafter``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.checkpoint.source import ModelSource, open_model
from qserve.kernels.ops import BLOCK_SIZE
from qserve.kernels.threads import torch_threads
from qserve.runtime.backend import LoadedModel
from qserve.runtime.blocks import BlockManager
from qserve.runtime.cache import blocks_needed
from qserve.runtime.config import EngineConfig
from qserve.runtime.memory import available_memory, block_bytes_of
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.kv_scales import cache_dtype
from qserve.runtime.models.rope import context_limit
from qserve.runtime.native_backend import NativeBackend
from qserve.runtime.parallel.support import of_one_rank
from qserve.runtime.runner import DecoderRunner
from qserve.runtime.step_plan import ScheduledSequence, StepPlan

CACHE_SHARE = 8  # of free memory the cache takes one part of so many, where requests could fill that


class Span(NamedTuple):
    """Tokens of a sequence to compute, from position ``start`` of the cache on. The last ``num_guesses`` of them are
    asked what follows them. ``states``: for an EAGLE-3 head, the target's hidden states [tokens, …] of the position
    before each token; None for a guess of its own."""

    name: str
    token_ids: tuple[int, ...]
    start: int
    num_guesses: int
    states: Tensor | None = None


class DraftModel:
    """``max_tokens`` and ``max_guesses`` are those of one step. ``blocks`` has a table for each sequence that was
    opened. ``note`` says, in a line, what memory the model takes."""

    kind = "draft model"

    def __init__(self, loaded: LoadedModel, name: str, *, enable_prefix_caching: bool = True) -> None:
        limits, memory = loaded.limits, loaded.memory
        self.vocab_size, self.max_model_len = limits.vocab_size, limits.max_model_len
        self.max_tokens, self.max_guesses = limits.max_num_batched_tokens, limits.max_num_logits
        cache = loaded.cache
        self.blocks = BlockManager(cache.num_blocks, cache.block_size, enable_prefix_caching, cache.windows)
        taken = (memory.weights + memory.workspace) / 2**20
        self.note = (f"{self.kind} {name}: {taken:.1f} MiB, and {memory.kv_cache / 2**20:.1f} MiB of KV cache for "
                     f"{cache.num_blocks} blocks")
        self._runner = loaded.runner
        self._step = 0
        self._copies: list[tuple[int, int]] = []

    @classmethod
    def load(cls, model: str, config: EngineConfig, target: ModelSource, vocabulary: Mapping[str, int]) -> DraftModel:
        """Load ``model``, to draft for a ``target`` with this ``vocabulary``, which is served as ``config`` says. Do it
        before the target is loaded: all memory is then in use, so the target is planned for what is left.

        Raises ``UsageError`` where the vocabulary differs or the model generates nothing, ``CheckpointError`` where it
        has no native decoder, ``CapacityError`` where it does not fit.
        """
        source = open_model(model)
        require_vocabulary(source, target, vocabulary)
        decoder = decoder_config(source.config, source.name)
        layout, context = decoder.cache_layout, context_limit(decoder)
        if layout.states:
            raise UsageError(f"{source.name} cannot draft: it keeps a state of each sequence, and a wrong guess cannot "
                             "be taken back out of it")
        context = min(context, config.max_model_len or context)
        block_bytes = block_bytes_of(layout, cache_dtype("auto", source))
        free = available_memory()
        if torch.cuda.is_available():
            free = min(free, torch.cuda.mem_get_info()[0])
        wanted = config.max_num_seqs * blocks_needed(context, BLOCK_SIZE, layout.windows)
        num_blocks = min(wanted, max(1, free // CACHE_SHARE // block_bytes))
        options = replace(
            of_one_rank(config), max_model_len=None, kv_cache_memory=num_blocks * block_bytes,
            gpu_memory_utilization=None, kv_offload_memory=None, kv_offload_dir=None, kv_transfer=False,
            kv_cache_dtype="auto", quantization=None, enable_lora=False, lora_modules=(), speculative_config=None,
        )  # fmt: skip
        try:
            loaded = NativeBackend().load(source, options)
        except CapacityError as error:
            raise CapacityError(f"draft model {source.name}: {error}") from None
        if not loaded.generates:
            raise UsageError(f"draft model {source.name} is a classifier and generates no text")
        assert isinstance(loaded.runner, DecoderRunner)
        loaded.runner.decoder.kv.zero_()  # memory that was never written would still look free
        return cls(loaded, source.name, enable_prefix_caching=config.enable_prefix_caching)

    def reserve(self, name: str, start: int, stop: int) -> bool:
        """Make the positions ``start .. stop - 1`` of a sequence writable. False, changing nothing, without room."""
        if not self.blocks.can_allocate(name, stop, write_from=start):
            return False
        self._copies += self.blocks.allocate(name, stop, write_from=start)
        return True

    def run(self, spans: Sequence[Span]) -> list[list[int]]:
        """Compute ``spans``, whose positions are reserved, and return the guesses of each: the likeliest tokens, -1
        where a row of logits holds a NaN."""
        plan = StepPlan(
            self._step,
            tuple(
                ScheduledSequence(
                    span.name, span.token_ids, span.start, self.blocks.block_tables(span.name), span.num_guesses, False
                )
                for span in spans
            ),
            (),
            tuple(self._copies),
        )
        self._copies = []
        self._step += 1
        with torch_threads(1):
            output = self._runner.run(plan, _nothing_is_scored)
            output.wait()
        rest = iter(output.greedy.tolist())
        return [[next(rest) for _ in range(span.num_guesses)] for span in spans]


def require_vocabulary(draft: ModelSource, target: ModelSource, vocabulary: Mapping[str, int]) -> None:
    """Raises ``UsageError`` unless the tokens of ``draft`` are those of ``target``, whose ``vocabulary`` is given."""
    other = draft.tokenizer().get_vocab()
    if other != vocabulary:
        token = min(key for key in {*other, *vocabulary} if other.get(key) != vocabulary.get(key))
        raise UsageError(
            f"draft model {draft.name} has another vocabulary than {target.name}: token {token!r:.40} is number "
            f"{other.get(token, 'none')} there and {vocabulary.get(token, 'none')} here; choose one of the same family"
        )


def _nothing_is_scored(request_id: str, start: int, rows: Tensor) -> None:
    raise AssertionError("a draft model was asked for the rows of a prompt")
