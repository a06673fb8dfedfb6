"""``DeltaConfig``: the gated delta nets of a decoder (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PretrainedConfig

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.modules import Modules
from qserve.runtime.cache import StateSpec
from qserve.runtime.parallel.shard import Shard


@dataclass(frozen=True)
class DeltaConfig:
    """Which layers are gated delta nets, and their shape: that of ``GatedDelta``; ``width`` is ``CausalConv``'s."""

    layers: tuple[bool, ...]
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Numbers of a token that go through the convolution: q, k and v."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Numbers of a token that the projections give: q, k, v, z, b and a."""
        return self.convolved + self.values + 2 * self.heads

    def part(self, shard: Shard) -> DeltaConfig:
        """What a rank computes: some key heads with their value heads, or some value heads of one key head."""
        values, keys = shard.heads(self.heads, self.key_heads)
        return replace(self, key_heads=len(keys), heads=len(values))

    def own(self, shard: Shard) -> list[tuple[int, range]]:
        """Of q, k, v, z, b and a how many numbers there are of a token, and which of them a rank has."""
        values, keys = shard.heads(self.heads, self.key_heads)
        key = self.keys, range(keys.start * self.key_dim, keys.stop * self.key_dim)
        value = self.values, range(values.start * self.value_dim, values.stop * self.value_dim)
        return [key, key, value, value, (self.heads, values), (self.heads, values)]

    @property
    def state(self) -> StateSpec:
        """What a layer keeps of a sequence: the states of ``CausalConv`` and of ``GatedDelta``."""
        return StateSpec(((self.width - 1, self.convolved), (self.heads, self.key_dim, self.value_dim)))

    def sizes(self, modules: Modules) -> list[int]:
        """Outputs of each of the linears ``Modules.delta_in``."""
        if len(modules.delta_in) == 2:
            return [self.convolved + self.values, 2 * self.heads]
        return [self.convolved, self.values, self.heads, self.heads]

    def orders(self, modules: Modules, shard: Shard) -> Sequence[Tensor | None]:
        """For each of them the order of the outputs that a rank has. Where there are two, each holds what belongs to a
        key head side by side: its q, k, v and z, or b and a."""
        own, two = self.own(shard), len(modules.delta_in) == 2
        if not two and shard.size == 1:
            return [None] * len(modules.delta_in)
        parts = [own[:4], own[4:]] if two else [own[:3], own[3:4], own[4:5], own[5:]]
        orders = [places(each) for each in parts]
        if not two:
            return orders
        group = self.heads // self.key_heads
        widths = [self.key_dim, self.key_dim, group * self.value_dim, group * self.value_dim], [group, group]
        stored = [
            torch.cat([part.flatten() for part in torch.arange(size).view(self.key_heads, -1).split(each, 1)])
            for size, each in zip(self.sizes(modules), widths)
        ]
        return [every[order] for every, order in zip(stored, orders)]


def places(own: Sequence[tuple[int, range]]) -> Tensor:
    """Where the numbers are that a rank has of several, which follow each other: how many of each, and which."""
    begins = accumulate((size for size, _ in own), initial=0)
    return torch.cat([torch.tensor(some) + begin for begin, (_, some) in zip(begins, own)])


def delta_config(hf: PretrainedConfig, name: str) -> DeltaConfig:
    """Raises ``CheckpointError`` where the numbers contradict each other."""
    heads, key_heads = hf.linear_num_value_heads, hf.linear_num_key_heads
    if key_heads < 1 or heads < 1 or heads % key_heads:
        raise CheckpointError(f"{name}: {heads} linear value heads are no multiple of {key_heads} linear key heads")
    if hf.linear_conv_kernel_dim < 2:
        raise CheckpointError(f"{name}: a convolution of {hf.linear_conv_kernel_dim} tokens is not served")
    layers = tuple(kind == "linear_attention" for kind in hf.layer_types)
    if all(layers):
        raise CheckpointError(f"{name} has no layer of full attention, which is not served")
    return DeltaConfig(
        layers, key_heads, heads, hf.linear_key_head_dim, hf.linear_value_head_dim, hf.linear_conv_kernel_dim
    )
