"""``LayerStats``: what the inputs of linear layers looked like during calibration.

Knows matrices of activations; does not know models, nor how weights are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows are reduced in chunks that stay in cache; columns in blocks, because only H's upper triangle is computed.
_ROWS = 1024
_COLUMNS = 192


class LayerStats:
    """Running statistics of the input shared by one or more linears.

    With X float32 [tokens, in], after every ``update``:
    tokens    rows seen
    hessian   float32 [in, in], H = 2/tokens * X^T X (GPTQ, arXiv 2210.17323), or None where not asked for
    diagonal  float32 [in], H's diagonal, the importance of each input
    absmax    float32 [in], the largest magnitude of each input
    The mean is updated rather than a sum, so a long run does not overflow.
    """

    def __init__(self, in_features: int, *, hessian: bool = True) -> None:
        self.tokens = 0
        self.absmax = torch.zeros(in_features)
        self._upper = torch.zeros(in_features, in_features) if hessian else None
        self._diagonal = torch.zeros(in_features)

    def update(self, inputs: Tensor) -> None:
        """Add the rows of ``inputs`` [..., in]."""
        rows = inputs.reshape(-1, inputs.shape[-1]).to(torch.float32)
        for chunk in rows.split(_ROWS):
            self._add(chunk)

    def _add(self, chunk: Tensor) -> None:
        before, self.tokens = self.tokens, self.tokens + chunk.shape[0]
        keep, gain = before / self.tokens, 2.0 / self.tokens
        torch.maximum(self.absmax, chunk.abs().amax(dim=0), out=self.absmax)
        if self._upper is None:
            self._diagonal.mul_(keep).add_(chunk.square().sum(dim=0), alpha=gain)
            return
        for start in range(0, chunk.shape[1], _COLUMNS):
            block = self._upper[start : start + _COLUMNS, start:]
            block.addmm_(chunk[:, start : start + _COLUMNS].t(), chunk[:, start:], beta=keep, alpha=gain)

    @property
    def hessian(self) -> Tensor | None:
        if self._upper is None:
            return None
        upper = self._upper.triu()
        return upper + upper.triu(1).t()

    @property
    def diagonal(self) -> Tensor:
        return self._diagonal if self._upper is None else self._upper.diagonal().clone()

    def finite(self) -> bool:
        """Whether every input seen was finite (one NaN or infinity reaches the diagonal)."""
        return bool(torch.isfinite(self.diagonal).all()) and bool(torch.isfinite(self.absmax).all())
