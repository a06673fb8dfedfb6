"""``LayerStats``: what the inputs of linear layers looked like during calibration."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from qserve.kernels.products import add_moment

# Rows are added in chunks, each shared among threads. The triangle of H is mirrored in blocks of columns.
_ROWS = 4096
_COLUMNS = 192


class LayerStats:
    """Running statistics of the input shared by one or more linears.

    With X float32 [tokens, in], after every ``update``:
    tokens    rows seen
    hessian   float32 [in, in], H = 2/tokens * X^T X (GPTQ, arXiv 2210.17323), or None where not asked for
    diagonal  float32 [in], H's diagonal, the importance of each input
    absmax    float32 [in], the largest magnitude of each input
    absmean   float32 [in], the mean magnitude of each input
    sample    float32 [at most sample_rows, in], evenly spaced rows of X; for what no moment can tell
    drift     float32 [in, in], 2/rows * (F - X)^T X over the rows for which F, the float model's input, is known: the
              drift of X away from F, as far as a linear layer can make up for it; None where F is known for no row
    target    float32 [out, in], 2/tokens * Y^T X, where Y is the output that the layer should have, without its bias:
              the float model's, F W^T, of which W ``drift`` is ``target`` - W H; of a layer that adds to the residual
              stream, what is missing to the float model's stream behind it. None unless Y is known for every row
    The mean is updated rather than a sum, so a long run does not overflow. Where products are in bfloat16, moments are
    those of X and F rounded to it, as layers see them; they are summed in float32.
    """

    def __init__(self, in_features: int, *, hessian: bool = True, sample_rows: int = 0) -> None:
        self.tokens = 0
        self.absmax = torch.zeros(in_features)
        self.absmean = torch.zeros(in_features)
        self.sample = torch.empty(0, in_features)
        self.drift: Tensor | None = None
        self._target: Tensor | None = None
        self._float_rows = 0
        self._sample_rows = sample_rows
        self._upper = torch.zeros(in_features, in_features) if hessian else None
        self._mirrored = False
        self._diagonal = torch.zeros(in_features)

    def update(self, inputs: Tensor, share: float = 1.0) -> None:
        """Add the rows of ``inputs`` [..., in], a fraction ``share`` of all rows that will come."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        wanted = min(len(rows), self._sample_rows - len(self.sample), math.ceil(share * self._sample_rows))
        if wanted > 0:
            spaced = torch.arange(wanted) * len(rows) // wanted
            self.sample = torch.cat([self.sample, rows[spaced].to(torch.float32)])
        for chunk in rows.split(_ROWS):
            self._add(chunk)

    def update_drift(self, inputs: Tensor, floats: Tensor) -> None:
        """Compare rows of ``inputs`` [..., in] with ``floats``, the float model's inputs in their place."""
        rows, wanted = inputs.reshape(-1, inputs.shape[-1]), floats.reshape(-1, inputs.shape[-1])
        if self.drift is None:
            self.drift = torch.zeros(rows.shape[1], rows.shape[1])
        self._add_floats(self.drift, rows, wanted.to(torch.float32).sub(rows.to(wanted.dtype)))

    def update_target(self, inputs: Tensor, outputs: Tensor) -> None:
        """Note ``outputs`` [..., out], the target where this layer gets ``inputs`` [..., in]."""
        rows, wanted = inputs.reshape(-1, inputs.shape[-1]), outputs.reshape(-1, outputs.shape[-1])
        if self._target is None:
            self._target = torch.zeros(wanted.shape[1], rows.shape[1])
        self._add_floats(self._target, rows, wanted)

    def _add_floats(self, moment: Tensor, rows: Tensor, floats: Tensor) -> None:
        before, self._float_rows = self._float_rows, self._float_rows + len(rows)
        keep, gain = before / self._float_rows, 2.0 / self._float_rows
        add_moment(moment, rows, floats, keep=keep, gain=gain)

    def _add(self, chunk: Tensor) -> None:
        self._mirrored = False
        before, self.tokens = self.tokens, self.tokens + chunk.shape[0]
        keep, gain = before / self.tokens, 2.0 / self.tokens
        self.absmean.mul_(keep)
        if self._upper is not None:
            total = torch.zeros_like(self.absmean)
            add_moment(self._upper, chunk, keep=keep, gain=gain, magnitudes=(self.absmax, total))
        else:
            chunk = chunk.to(torch.float32)
            magnitude = chunk.abs()
            torch.maximum(self.absmax, magnitude.amax(dim=0), out=self.absmax)
            total = magnitude.sum(dim=0)
            self._diagonal.mul_(keep).add_(chunk.square().sum(dim=0), alpha=gain)
        self.absmean.add_(total, alpha=1.0 / self.tokens)

    def divided(self, scale: Tensor) -> LayerStats:
        """The statistics of the same input with each feature divided by ``scale`` float32 [in], positive."""
        result = copy.copy(self)
        result.absmax, result.absmean = self.absmax / scale, self.absmean / scale
        result.sample = self.sample / scale
        result._diagonal = self._diagonal / scale.square()
        if self._upper is not None:
            result._upper = self._upper / scale / scale[:, None]
        if self.drift is not None:
            result.drift = self.drift / scale / scale[:, None]
        if self._target is not None:
            result._target = self._target / scale
        return result

    @property
    def target(self) -> Tensor | None:
        return self._target if self._float_rows == self.tokens else None

    @property
    def hessian(self) -> Tensor | None:
        """Not a copy: for the widest layers of large models it is gigabytes."""
        if self._upper is not None and not self._mirrored:
            for start in range(0, len(self._upper), _COLUMNS):
                stop = start + _COLUMNS
                corner = self._upper[start:stop, start:stop]
                corner.copy_(corner.triu() + corner.triu(1).t())
                self._upper[stop:, start:stop] = self._upper[start:stop, stop:].t()
            self._mirrored = True
        return self._upper

    @property
    def diagonal(self) -> Tensor:
        return self._diagonal if self._upper is None else self._upper.diagonal().clone()

    def finite(self) -> bool:
        """Whether every input seen was finite (one NaN or infinity reaches the diagonal)."""
        return bool(torch.isfinite(self.diagonal).all()) and bool(torch.isfinite(self.absmax).all())
