"""``Offload``: the tiers of an engine's KV cache at work: their orders are carried out, their costs measured."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from qserve.checkpoint.errors import CapacityError
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.staging import fingerprint
from qserve.kernels.threads import torch_threads
from qserve.runtime.backend import LoadedModel
from qserve.runtime.block_files import BlockFiles
from qserve.runtime.block_store import BlockStore
from qserve.runtime.block_tiers import BlockTiers, Key, Outcome, Rates, Transfer
from qserve.runtime.config import EngineConfig
from qserve.runtime.runner import DecoderRunner
from qserve.runtime.step_plan import StepPlan

_PROBED = 8  # blocks
_PREFILL = 64  # tokens of prompts in a step that tells what a block costs; fewer take longer each


class Offload:
    """``tiers`` is the engine's part, which plans; the rest does what was planned. ``identity``: a name that two caches
    share only if equal digests mean equal bits in them; empty where nobody else reads them."""

    def __init__(self, source: ModelSource, config: EngineConfig, loaded: LoadedModel) -> None:
        """Raises ``CapacityError`` where memory holds no block, ``UsageError`` where the directory cannot be used."""
        assert isinstance(loaded.runner, DecoderRunner), "another runner has no blocks to copy"
        block_bytes = loaded.runner.block_bytes
        if (count := config.offload_memory // block_bytes) < 1:
            raise CapacityError(f"--kv-offload-memory {config.offload_memory} holds no KV block of {block_bytes} bytes")
        self._runner = loaded.runner
        self._num_blocks = loaded.cache.num_blocks
        # Computing the tokens of a block makes a block of each group.
        self._block_share = loaded.cache.block_size / len(loaded.cache.windows)
        self.block_bytes = block_bytes
        self._slots = slots = self._runner.add_slots(count)
        memory_seconds, disk_seconds, files = _copy_seconds(self._runner, self._num_blocks, count), 0.0, None
        self.identity = ""
        if config.kv_offload_dir is not None or config.kv_transfer:
            self.identity = _identity(source, loaded, self._runner)
        if config.kv_offload_dir is not None:
            files = BlockFiles(Path(config.kv_offload_dir), config.kv_offload_dir_size, self.identity, block_bytes)
            disk_seconds = files.probe()
        self.tiers = BlockTiers(count, None if files is None else files.keys(), Rates(memory_seconds, disk_seconds))
        self._store = BlockStore(slots, files)

    def settle(self, timeout: float = 0.0) -> None:
        """Note what the disk has done. Waits up to ``timeout`` seconds if requests wait for it."""
        for outcome in self._store.outcomes(timeout if self.tiers.num_reading else 0.0):
            self.tiers.finish(outcome)

    def begin(self, transfers: Iterable[Transfer]) -> None:
        self._store.begin(transfers)

    def drop(self, transfers: Iterable[Transfer]) -> None:
        """These are not begun, because the plans before them failed."""
        for transfer in transfers:
            self.tiers.finish(Outcome(transfer, done=False))

    def read(self, number: int) -> bytes:
        """What is in a block or slot. No plan that copies to it may be waiting."""
        block = self._runner.block(number).cpu().contiguous()
        self.tiers.sent += 1
        return block.flatten().view(torch.uint8).numpy().tobytes()

    def receive(self, key: Key, content: bytes) -> bool:
        """Keep a block of another replica, if there is a slot for it. No copies may be waiting for a plan."""
        if len(content) != self.block_bytes or (slot := self.tiers.receive(key)) is None:
            return False
        self._slots[slot].flatten().view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return True

    def landed(self, plan: StepPlan, seconds: float) -> None:
        """A plan was computed in ``seconds``, which tell what a block costs."""
        if sum(len(each.token_ids) for each in plan.sequences if each.is_prefill) >= _PREFILL:
            self.tiers.computed(seconds / plan.num_tokens * self._block_share)

    def close(self, findable: Iterable[tuple[Key, int]] | None) -> None:
        """Write to disk what is in memory and what is ``findable`` in the cache, and end. None: write nothing, for a
        rank has ended, and a part of every block with it."""
        self._store.close(() if findable is None else self._rest(findable))

    def _rest(self, findable: Iterable[tuple[Key, int]]) -> Iterator[tuple[Key, Tensor]]:
        self.settle()
        slots = {key: self._num_blocks + slot for key, slot in self.tiers.filled().items()}
        for key, number in (slots | dict(findable)).items():
            if not self.tiers.is_on_disk(key):
                yield key, self._runner.block(number)


def _copy_seconds(runner: DecoderRunner, num_blocks: int, slots: int) -> float:
    """Measured seconds to copy a block from memory into the cache, which is empty yet."""
    copies = [(num_blocks + i % slots, i % num_blocks) for i in range(_PROBED)]
    with torch_threads(1):  # as steps do
        for _ in range(2):  # memory that was never touched is slow
            began = time.perf_counter()
            runner.copy_blocks(copies)
            seconds = (time.perf_counter() - began) / len(copies)
    return seconds


def _identity(source: ModelSource, loaded: LoadedModel, runner: DecoderRunner) -> str:
    """A name that two caches share only if equal tokens have equal bits in them."""
    varies = "longrope" in json.dumps(source.config)  # its frequencies depend on the length of the context
    return fingerprint({
        "checkpoint": source.sha256(),
        "windows": str(loaded.cache.windows),
        "context": str(loaded.limits.max_model_len if varies else None),
        **runner.cache_facts(),
    })
