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
    kernels: str
    stats: EngineStats  # before the first request
    sampling_defaults: dict[str, int | float]
    classes: Classes | None = None
    adapters: tuple[AdapterInfo, ...] = ()

    @classmethod
    def of(cls, engine: Engine) -> EngineInfo:
        return cls(
            model_name=engine.model_name,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            hidden_size=engine.limits.hidden_size,
            eos_token_ids=tuple(sorted(engine.eos_token_ids)),
            max_waiting=engine.config.max_waiting,
            max_waiting_tokens=engine.scheduler.backlog.max_tokens,
            kernels=engine.kernels,
            stats=engine.stats(),
            sampling_defaults=dict(engine.generation_config.defaults),
            classes=engine.classifier.classes if engine.classifier else None,
            adapters=tuple(AdapterInfo(each.name, each.sha256) for each in engine.adapters.loaded),
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


Command = Load | Submit | LoadAdapter | UnloadAdapter | Abort | TakeSnapshot | PrepareGrammars | Stop


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
    | EngineStats
    | Ended
)
