"""``EngineStats``: an engine in a few numbers, cheap enough to be taken after every step."""

from __future__ import annotations

from dataclasses import dataclass

from qserve.runtime.block_tiers import BlockTiers
from qserve.runtime.scheduler import Scheduler


@dataclass(frozen=True)
class GpuUse:
    """What a process holds of a GPU, in bytes: ``allocated`` by tensors, ``reserved`` by torch for them and others to
    come. ``uuid`` names the device, as NVML does without its prefix."""

    uuid: str
    allocated: int
    reserved: int


@dataclass(frozen=True)
class OffloadUse:
    """The tiers of the KV cache (``BlockTiers``). ``memory``: the share of the slots that hold a block, 0 to 1;
    ``disk_blocks``: blocks on disk. ``block_seconds``: to compute a block, None until that was measured;
    ``load_seconds``: to bring one back from memory. The others count blocks since the start."""

    memory: float
    disk_blocks: int
    stored: int
    loaded: int
    written: int
    read: int
    received: int
    sent: int
    failed: int
    block_seconds: float | None
    load_seconds: float

    @classmethod
    def of(cls, tiers: BlockTiers) -> OffloadUse:
        return cls(
            tiers.num_filled / tiers.num_slots, tiers.num_on_disk, tiers.stored, tiers.loaded, tiers.written,
            tiers.read, tiers.received, tiers.sent, tiers.failed, tiers.block_seconds, tiers.rates.memory,
        )  # fmt: skip


@dataclass(frozen=True)
class EngineStats:
    """Gauges of one moment between two steps. ``prefix_queries``, ``prefix_hits`` (prompt tokens), ``num_preemptions``,
    ``num_drafts``, ``num_draft_tokens`` and ``num_accepted_tokens`` count since the start. ``kv_fragmentation``: the
    share of the allocated KV positions that hold nothing, 0 to 1. ``waiting``: for each tenant, the requests and prompt
    tokens that wait for their first step. ``gpu``, ``offload``: None without one. ``pipeline_idle``: for each stage of
    several, the share of the time in which it waited for a step while others computed one.
    """

    num_running: int
    num_waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    waiting_tokens: int
    kv_fragmentation: float
    waiting: dict[str, tuple[int, int]]
    gpu: GpuUse | None = None
    offload: OffloadUse | None = None
    pipeline_idle: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, scheduler: Scheduler, gpu: GpuUse | None = None, pipeline_idle: tuple[float, ...] = ()
    ) -> EngineStats:
        """The current stats; to be called by the thread that owns the scheduler."""
        blocks = scheduler.blocks
        return cls(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_blocks_total=blocks.num_blocks,
            kv_blocks_used=blocks.num_used,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_drafts=scheduler.drafts.num_drafts,
            num_draft_tokens=scheduler.drafts.num_draft_tokens,
            num_accepted_tokens=scheduler.drafts.num_accepted_tokens,
            waiting_tokens=scheduler.backlog.tokens,
            kv_fragmentation=min(1.0, scheduler.num_unused_slots / max(1, blocks.num_used * blocks.block_size)),
            waiting=scheduler.backlog.counts(),
            gpu=gpu,
            offload=OffloadUse.of(blocks.tiers) if blocks.tiers else None,
            pipeline_idle=pipeline_idle,
        )
