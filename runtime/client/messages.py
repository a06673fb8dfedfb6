"""Commands to an engine and its answers: plain data, so that it may run in another process or on another machine.

Both directions keep their order. Every ``Submit`` is answered by ``Accepted`` or ``Refused``; outputs of a request come
after it was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qserve.runtime.classifier import Classes
from qserve.runtime.config import EngineConfig
from qserve.runtime.journal import StepRecord
from qserve.runtime.output import RequestOutput
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.snapshot import EngineSnapshot
from qserve.runtime.stats import EngineStats

if TYPE_CHECKING:
    from qserve.runtime.engine import Engine


RefusalKind = Literal["request", "queue_full", "failure"]


@dataclass(frozen=True)
class AdapterInfo:
    """A loaded adapter; ``sha256`` is of its content."""

    name: str
    sha256: str


@dataclass(frozen=True)
class KvTransfer:
    """``identity``: replicas of the same one may exchange KV blocks. ``block_bytes``: of a block of one of ``groups``
    groups of layers. ``most``: blocks that may be received at once."""

    identity: str
    block_bytes: int
    groups: int
    most: int


@dataclass(frozen=True)
class EngineInfo:
    """Facts that do not change while an engine runs. ``kernels``: the name of its executor. ``classes``: what its
    classifier tells apart, None without one. ``sampling_defaults``: for requests that do not say.
    ``adapters``: those that were loaded at the start."""

    model_name: str
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    max_waiting: int
    max_waiting_tokens: int
    block_size: int
    kernels: str
    stats: EngineStats  # before the first request
    sampling_defaults: dict[str, int | float]
    classes: Classes | None = None
    adapters: tuple[AdapterInfo, ...] = ()
    kv_transfer: KvTransfer | None = None

    @classmethod
    def of(cls, engine: Engine) -> EngineInfo:
        offload, groups = engine.offload, len(engine.scheduler.blocks.windows)
        return cls(
            model_name=engine.model_name,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            hidden_size=engine.limits.hidden_size,
            eos_token_ids=tuple(sorted(engine.eos_token_ids)),
            max_waiting=engine.config.max_waiting,
            max_waiting_tokens=engine.scheduler.backlog.max_tokens,
            block_size=engine.scheduler.blocks.block_size,
            kernels=engine.kernels,
            stats=engine.stats(),
            sampling_defaults=dict(engine.generation_config.defaults),
            classes=engine.classifier.classes if engine.classifier else None,
            adapters=tuple(AdapterInfo(each.name, each.sha256) for each in engine.adapters.loaded),
            kv_transfer=KvTransfer(offload.identity, offload.block_bytes, groups, offload.tiers.num_slots // 2)
            if offload is not None and engine.config.kv_transfer else None,
        )


@dataclass(frozen=True)
class Submit:
    """Prompts that belong together: either all are queued or none.

    ``request_ids``: one for each prompt, never used before. ``grammar``: ``params.constraint`` in llguidance's format,
    if it is known to compile in time. ``adapter``: the name of a loaded one.
    """

    request_ids: list[str]
    prompts: list[list[int]]
    params: SamplingParams
    grammar: str | None = None
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    weight: float = 1.0
    adapter: str | None = None


@dataclass(frozen=True)
class LoadAdapter:
    """Read an adapter from the directory ``path``; ``replace``: also where ``name`` is taken. Answered, under the same
    ``number``, by ``AdapterLoaded`` or ``AdapterRefused``."""

    number: int
    name: str
    path: str
    replace: bool = False


@dataclass(frozen=True)
class UnloadAdapter:
    """Take no more requests for ``name``. Answered by ``AdapterUnloaded``, when its requests have ended, or by
    ``AdapterRefused``."""

    number: int
    name: str


@dataclass(frozen=True)
class Abort:
    """End these requests, except those that have ended. It has no answer."""

    request_ids: list[str]


@dataclass(frozen=True)
class TakeSnapshot:
    """Answered by ``SnapshotTaken``."""


@dataclass(frozen=True)
class WatchBlocks:
    """Answered by ``BlocksChanged`` with all blocks, and by one after each step that changes some, until it is sent
    again with ``on`` false."""

    on: bool = True


@dataclass(frozen=True)
class KvBlock:
    """What is in a KV block of one group of layers. ``digest``: in hex."""

    group: int
    digest: str
    content: bytes


@dataclass(frozen=True)
class ReadBlocks:
    """Answered, under the same ``number``, by ``BlocksRead``. ``digests``: in hex; all groups of each."""

    number: int
    digests: list[str]


@dataclass(frozen=True)
class StoreBlocks:
    """Keep blocks that another replica has computed. Answered, under the same ``number``, by ``BlocksStored``."""

    number: int
    blocks: list[KvBlock]


@dataclass(frozen=True)
class PrepareGrammars:
    """Prepare the engine, so that the first constraint need not wait. It has no answer."""


@dataclass(frozen=True)
class Stop:
    """End every request and the engine; answered by ``Ended``."""


@dataclass(frozen=True)
class Load:
    """The first command to another process; answered by ``Loaded`` or ``Ended``. ``model``: a path."""

    model: str
    config: EngineConfig


Command = (
    Load
    | Submit
    | LoadAdapter
    | UnloadAdapter
    | Abort
    | TakeSnapshot
    | WatchBlocks
    | ReadBlocks
    | StoreBlocks
    | PrepareGrammars
    | Stop
)


@dataclass(frozen=True)
class Accepted:
    """``request_id``: the first of the ``Submit``."""

    request_id: str


@dataclass(frozen=True)
class Refused:
    """``kind``: whether the request is at fault, the queue is full, or the engine is at fault."""

    request_id: str
    kind: RefusalKind
    message: str
    param: str | None = None


@dataclass(frozen=True)
class AdapterLoaded:
    number: int
    adapter: AdapterInfo


@dataclass(frozen=True)
class AdapterUnloaded:
    number: int


@dataclass(frozen=True)
class AdapterRefused:
    number: int
    message: str


@dataclass(frozen=True)
class StepDone:
    """``outputs``: what a step added to requests. ``record`` is of a step that began within ``seconds``."""

    outputs: list[RequestOutput]
    record: StepRecord | None
    seconds: float


@dataclass(frozen=True)
class StepFailed:
    """The step failed, and every accepted request has ended with it; the engine goes on."""


@dataclass(frozen=True)
class SnapshotTaken:
    snapshot: EngineSnapshot


@dataclass(frozen=True)
class BlocksChanged:
    """Digests, in hex, of KV blocks that can be found, and of those that cannot be any more. ``whole``: these are all
    that can be found; otherwise those that changed."""

    held: list[str]
    gone: list[str]
    whole: bool = False


@dataclass(frozen=True)
class BlocksRead:
    """Those that are in the cache or in memory."""

    number: int
    blocks: list[KvBlock]


@dataclass(frozen=True)
class BlocksStored:
    """``count``: of those that were new and found room."""

    number: int
    count: int


@dataclass(frozen=True)
class Ended:
    """The last event. ``failure``: why the engine cannot go on, None where it was told to stop."""

    failure: str | None


@dataclass(frozen=True)
class Loaded:
    info: EngineInfo


@dataclass(frozen=True)
class Heartbeat:
    """Sent now and then by another process. ``step_seconds``: how long the current step has been running."""

    step_seconds: float


Event = (
    Loaded
    | Heartbeat
    | Accepted
    | Refused
    | AdapterLoaded
    | AdapterUnloaded
    | AdapterRefused
    | StepDone
    | StepFailed
    | SnapshotTaken
    | BlocksChanged
    | BlocksRead
    | BlocksStored
    | EngineStats
    | Ended
)
