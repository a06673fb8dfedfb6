"""``AdapterPool``: which LoRA adapters an engine has, in which slots, and who uses them.

A name stands for one adapter. When it is unloaded, or another is loaded in its place, new requests no longer get the
old one; its slot is emptied when the last request that began with it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.checkpoint.lora import read_adapter
from qserve.runtime.digests import adapter_salt
from qserve.runtime.models.lora_layers import LaidOut, LoraLayers
from qserve.runtime.parallel.rank_adapters import RankAdapters
from qserve.runtime.sampling import RequestError

_NAME_LENGTH = 200


@dataclass(eq=False)
class Adapter:
    """A loaded adapter. ``users``: the sequences that have not ended; ``gone``: called when its slot is emptied."""

    name: str
    path: str
    sha256: str
    slot: int
    users: int = 0
    retired: bool = False
    gone: Callable[[], None] | None = field(default=None, repr=False)

    def salt(self, cache_salt: str) -> str:
        """For cached prefixes: only requests with the same content and ``cache_salt`` share them."""
        return adapter_salt(self.sha256, cache_salt)


class AdapterPool:
    """``layers``: where they act; None where adapters are not served. At most ``count`` are loaded at once; as many
    more slots are for those that still end their requests.

    One thread owns it, and only ``read`` may be called by others.
    """

    def __init__(
        self, layers: LoraLayers | RankAdapters | None = None, available: Callable[[], int] | None = None
    ) -> None:
        self._layers, self._available = layers, available
        slots = layers.count if layers else 0
        self._limit = slots // 2
        self._free = list(range(slots - 1, -1, -1))
        self._named: dict[str, Adapter] = {}
        self._slots: dict[int, Adapter] = {}

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """Those that new requests can name."""
        return tuple(self._named.values())

    def read(self, path: str) -> LaidOut:
        """Read an adapter's files and lay its matrices out. Raises ``UsageError``, ``CheckpointError`` or
        ``CapacityError``."""
        if self._layers is None:
            raise UsageError("adapters are not served: start the server with --enable-lora")
        adapter = read_adapter(Path(path).expanduser(), self._layers.shapes, max_rank=self._layers.max_rank)
        laid_out = self._layers.lay_out(adapter)
        if self._available is not None and laid_out.nbytes > (free := self._available()):
            raise CapacityError(f"{path} takes {laid_out.nbytes / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free; "
                                "unload another adapter, or choose a smaller --kv-cache-memory")
        return laid_out

    def add(self, name: str, path: str, adapter: LaidOut, *, replace: bool = False) -> Adapter:
        """Give ``adapter``, from ``read``, to new requests under ``name``; ``replace``: also if the name is taken.

        Raises ``UsageError`` for a name that is taken or none, and ``CapacityError`` where no slot is free.
        """
        assert self._layers is not None
        if not name or len(name) > _NAME_LENGTH or not name.isprintable():
            raise UsageError(f"the name of an adapter must be printable, with 1 to {_NAME_LENGTH} characters")
        old = self._named.get(name)
        if old is not None and not replace:
            raise UsageError(f"an adapter {name!r} is loaded already, from {old.path}; unload it first, or replace it")
        if (old is None and len(self._named) >= self._limit) or not self._free:
            raise CapacityError(f"{len(self._slots)} adapters are loaded or still in use, of at most {self._limit}; "
                                "unload one, or raise --max-loras")
        slot = self._free.pop()
        self._layers.put(slot, adapter)
        if old is not None:
            self._retire(old)
        made = self._named[name] = self._slots[slot] = Adapter(name, path, adapter.sha256, slot)
        return made

    def remove(self, name: str, gone: Callable[[], None] | None = None) -> None:
        """New requests no longer get ``name``. ``gone`` is called once no request uses it, maybe at once. Raises
        ``UsageError`` where there is none."""
        adapter = self._named.pop(name, None)
        if adapter is None:
            raise UsageError(f"no adapter {name!r:.200} is loaded")
        adapter.gone = gone
        self._retire(adapter)

    def find(self, name: str) -> Adapter:
        """Raises ``RequestError``."""
        if name not in self._named:
            raise RequestError(f"no adapter {name!r:.200} is loaded", "model")
        return self._named[name]

    def hold(self, slot: int) -> None:
        """A sequence with the adapter of ``slot`` (-1: none) began."""
        if slot >= 0:
            self._slots[slot].users += 1

    def release(self, slot: int) -> None:
        """A sequence with the adapter of ``slot`` (-1: none) ended."""
        if slot >= 0:
            self._slots[slot].users -= 1
            self._empty(self._slots[slot])

    def check(self, users: dict[int, int]) -> None:
        """Raise ``AssertionError`` where slots are lost or counts wrong. ``users``: the live sequences of each slot."""
        count = self._layers.count if self._layers else 0
        assert sorted([*self._free, *self._slots]) == list(range(count)), "a slot is lost"
        assert all(slot == adapter.slot for slot, adapter in self._slots.items())
        assert {slot: adapter.users for slot, adapter in self._slots.items() if adapter.users} == users
        for slot, adapter in self._slots.items():
            assert adapter.retired != (self._named.get(adapter.name) is adapter)
            assert adapter.users or not adapter.retired, f"slot {slot} is kept for nobody"
        assert set(self._named.values()) <= set(self._slots.values()) and len(self._named) <= self._limit

    def _retire(self, adapter: Adapter) -> None:
        adapter.retired = True
        self._empty(adapter)

    def _empty(self, adapter: Adapter) -> None:
        """Empty its slot if it is retired and nobody uses it."""
        assert self._layers is not None
        if adapter.retired and not adapter.users:
            self._layers.clear(adapter.slot)
            del self._slots[adapter.slot]
            self._free.append(adapter.slot)
            if adapter.gone is not None:
                adapter.gone()
