"""``Backend``: a way to compute a model, and the facts that an engine gets about a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from qserve.checkpoint.source import ModelSource
from qserve.runtime.classifier import Classifier
from qserve.runtime.config import EngineConfig
from qserve.runtime.gpu_memory import GpuMemory
from qserve.runtime.memory import MemoryPlan
from qserve.runtime.models.lora_layers import LoraLayers
from qserve.runtime.parallel.pipeline_runner import PipelineRunner
from qserve.runtime.parallel.rank_adapters import RankAdapters
from qserve.runtime.parallel.rank_processes import RankProcesses
from qserve.runtime.runner import ModelRunner


@dataclass(frozen=True)
class CacheDescription:
    """The paged cache of keys and values: ``num_blocks`` of ``block_size`` tokens. A block holds tokens for one group
    of layers (``CacheLayout``); ``windows`` has the window of each group. ``keeps_states``: other layers keep
    a state of each sequence, in ``EngineConfig.num_state_slots`` slots."""

    num_blocks: int
    block_size: int
    windows: tuple[int, ...] = (0,)
    keeps_states: bool = False


@dataclass(frozen=True)
class Limits:
    """The sizes that a loaded model allows.

    Attributes:
        vocab_size: logits of a row.
        hidden_size: numbers of a hidden state.
        max_model_len: tokens of a request, prompt and output.
        max_num_batched_tokens: tokens of a step.
        max_num_logits: rows of logits of a step.
    """

    vocab_size: int
    hidden_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_logits: int


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        memory: how it is divided, for people.
        kernels: what computes, by name.
        classifier: the head that tells classes apart, where there is one.
        generates: whether there is an output layer, from which tokens are chosen.
        asynchronous: a run of the runner returns before it is computed.
        notes: remarks on how it is computed, in lines.
        gpu: the memory of the GPU that computes; None without one.
        lora: where adapters act; None where none are served.
        ranks: the processes of the other ranks; None where there is one.
        pipeline: the runner, where it runs steps in stages.
    """

    runner: ModelRunner
    cache: CacheDescription
    limits: Limits
    memory: MemoryPlan
    kernels: str
    asynchronous: bool = False
    classifier: Classifier | None = None
    generates: bool = True
    notes: tuple[str, ...] = ()
    gpu: GpuMemory | None = None
    lora: LoraLayers | RankAdapters | None = None
    ranks: RankProcesses | None = None
    pipeline: PipelineRunner | None = None


class Backend(Protocol):
    def load(
        self,
        source: ModelSource,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        planned: Callable[[MemoryPlan], None] | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> LoadedModel:
        """Load ``source`` as ``config`` asks. ``progress`` gets how much is loaded and how much there is; ``planned``
        may get the division of memory before anything is loaded. ``hidden_layers``: those whose input each step gives
        out (``StepOutput.hidden``).

        Raises ``CheckpointError`` or ``CapacityError`` where the model cannot be read or cannot fit, ``UsageError``
        for what the backend has not.
        """
        ...

    def plan(self, source: ModelSource, config: EngineConfig) -> MemoryPlan:
        """How ``load`` would divide the memory; nothing is loaded. Raises as ``load`` does."""
        ...
