"""Confidence intervals by resampling (Efron 1979)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

RESAMPLES = 2000
_SEED = 20260101


def resampled_means(sums: Tensor, counts: Tensor) -> Tensor:
    """float64 [RESAMPLES, ...]: the mean over tokens of each resample of the units, drawn with replacement.

    sums float64 [units, ...] and counts float64 [units]: sums over, and numbers of, the tokens of each unit. Every call
    gives the same result.
    """
    generator = torch.Generator().manual_seed(_SEED)
    units = len(counts)
    drawn = torch.randint(0, units, (RESAMPLES, units), generator=generator)
    weights = torch.zeros(RESAMPLES, units, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    total = weights @ counts  # 0 / 0 where a resample drew no token: NaN
    return (weights @ sums.flatten(1)).reshape(RESAMPLES, *sums.shape[1:]) / total.view(-1, *[1] * (sums.dim() - 1))


def interval(resampled: Tensor, of: Callable[[Tensor], Tensor] = lambda means: means) -> tuple[float, float]:
    """The middle 95 % of ``of(resampled)``, one number for each resample."""
    low, high = of(resampled).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def mean_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean of independent samples; None where there are fewer than two."""
    if len(samples) < 2:
        return None
    values = torch.tensor(samples, dtype=torch.float64)
    return interval(resampled_means(values[:, None], torch.ones(len(values), dtype=torch.float64))[:, 0])


def standard_error(samples: Sequence[float]) -> float:
    """The standard error of the mean; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    mean = math.fsum(samples) / len(samples)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in samples) / (len(samples) - 1) / len(samples))
