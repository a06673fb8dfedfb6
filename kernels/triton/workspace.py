"""Memory that the products of one executor share: they run one after another.

Two executors may run at once, so each has its own. Memory is allocated when products are prepared. A tensor that was
handed out stays where it is, because graphs remember addresses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.kernels.triton.tuning.configs import SPLIT_ROWS, Config


class Workspace:
    """Scratch memory on a device, by name and dtype; it starts as zeros."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, elements: int, dtype: torch.dtype) -> Tensor:
        """At least ``elements`` of ``dtype``; everyone who asks by this name gets the same memory."""
        held = self._held.get((name, dtype))
        if held is None or held.numel() < elements:
            held = torch.zeros(max(1, elements), dtype=dtype, device=self.device)
            self._held[name, dtype] = held
        return held

    def splits(self, configs: dict[int, Config], rows: int, padded_n: int) -> tuple[Tensor, Tensor]:
        """(partial sums, arrivals) for products of at most ``rows`` rows with ``configs`` by bucket."""
        partial = arrived = 0
        for bucket, config in configs.items():
            if config.splits > 1:
                most = min(bucket, rows, SPLIT_ROWS)
                partial = max(partial, config.splits * most * padded_n)
                arrived = max(arrived, -(-most // config.block_m) * (padded_n // config.block_n))
        return self.take("partial", partial, torch.float32), self.take("arrived", arrived, torch.int32)
