"""``CacheSpec``: what a layer keeps of past tokens; ``CacheLayout``: which layers share block tables.

Layers that keep the same form a group. A sequence has a block table for each group, and a group with a window gives
back the blocks behind it. Groups have the same number of layers at most, so all blocks have one size and any group can
take any block of the pool: nothing is divided beforehand. A model whose layers all keep the same is one group.

A layer that keeps a state of fixed size (``StateSpec``) takes no blocks. It has a slot for each running sequence, and
``BlockManager`` says which.

A layer that keeps something else of each token needs another field of ``CacheSpec``, a rule in
``blocks_needed``, and a rule in ``BlockManager`` for what is passed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod


@dataclass(frozen=True)
class CacheSpec:
    """Keys and values of one layer. ``window``: a query sees the keys of so many positions, its own included; 0 means
    all. ``latent``: values are a part of the keys, and nothing is kept beside these."""

    kv_heads: int
    head_dim: int
    window: int = 0
    latent: bool = False

    @property
    def width(self) -> int:
        """Numbers that are kept of a token."""
        return (1 if self.latent else 2) * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class StateSpec:
    """What one layer keeps of a sequence, however long it is: float32 tensors of these ``shapes``."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def nbytes(self) -> int:
        return 4 * sum(map(prod, self.shapes))


@dataclass(frozen=True)
class CacheGroup:
    """``layers`` that keep the same and share a block table."""

    spec: CacheSpec
    layers: tuple[int, ...]


@dataclass(frozen=True)
class CacheLayout:
    """The groups of a model, and by layer the states that some keep instead. Raises ``ValueError`` for layers whose
    blocks would differ in size, and where no layer has any."""

    groups: tuple[CacheGroup, ...]
    states: Mapping[int, StateSpec] = field(default_factory=dict)

    @classmethod
    def of(cls, specs: Sequence[CacheSpec | StateSpec]) -> CacheLayout:
        """The layout for the layers of a model. The rarest kind is one group; kinds with more layers are several."""
        paged = {layer: spec for layer, spec in enumerate(specs) if isinstance(spec, CacheSpec)}
        if len({spec.width for spec in paged.values()}) != 1:
            raise ValueError("layers of one cache must keep equally much of a token, and some layer must keep it")
        places = min(Counter(paged.values()).values())
        groups = []
        for spec in dict.fromkeys(paged.values()):
            layers = [layer for layer, other in paged.items() if other == spec]
            groups += [CacheGroup(spec, tuple(layers[i : i + places])) for i in range(0, len(layers), places)]
        states = {layer: spec for layer, spec in enumerate(specs) if isinstance(spec, StateSpec)}
        return cls(tuple(groups), states)

    def part(self, layers: range) -> CacheLayout:
        """The same groups with these layers alone, for a process that has no others."""
        groups = [CacheGroup(g.spec, tuple(layer for layer in g.layers if layer in layers)) for g in self.groups]
        return CacheLayout(tuple(groups), {layer: spec for layer, spec in self.states.items() if layer in layers})

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each group; 0 where a query sees all keys before it."""
        return tuple(group.spec.window for group in self.groups)

    @property
    def places(self) -> int:
        """Layers that a block has room for."""
        return max(len(group.layers) for group in self.groups)

    def place(self, layer: int) -> tuple[int, int]:
        """(group, place in its blocks) of ``layer``."""
        return next((g, group.layers.index(layer)) for g, group in enumerate(self.groups) if layer in group.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence, of all layers together."""
        return sum(spec.nbytes for spec in self.states.values())


def window_blocks(window: int, block_size: int) -> int:
    """Blocks that hold what one query sees, wherever in its block the query stands."""
    return -(-(window - 1) // block_size) + 1


def blocks_needed(num_tokens: int, block_size: int, windows: Sequence[int]) -> int:
    """Blocks of all groups needed to compute a sequence of ``num_tokens`` tokens, a step at a time."""
    count = -(-num_tokens // block_size)
    return sum(min(count, window_blocks(window, block_size)) if window else count for window in windows)


def tokens_held(num_blocks: int, block_size: int, windows: Sequence[int], most: int) -> int:
    """Tokens of the longest sequence, at most ``most``, for which ``num_blocks`` are enough."""
    low, high = 0, -(-most // block_size)  # in blocks: enough, and perhaps enough
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_needed(middle * block_size, block_size, windows) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return min(most, low * block_size)
