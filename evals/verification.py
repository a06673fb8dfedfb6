"""Whether a quality card still holds: the same figures on other windows of its own text.

A card that was copied, a base that was replaced and kernels that compute something else are all seen here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from qserve.calibration.text import Text
from qserve.calibration.windows import evaluation_windows
from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import DataError, UsageError
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.tokenizer import leading_tokens
from qserve.evals import quality
from qserve.evals.divergence import Progress, Scorer, compare
from qserve.evals.pieces import Piece, of_windows
from qserve.evals.reference import Setting

FIGURES: dict[str, Literal["lower", "higher"]] = {
    "kl_mean": "lower", "perplexity_increase": "lower", "top1_agreement": "higher",
}  # fmt: skip
"""The figures that are compared, and which way is better."""


@dataclass(frozen=True)
class Finding:
    """A figure of the card and of the sample, each with the ends of its 95 % interval."""

    name: str
    card: tuple[float, float, float]
    sample: tuple[float, float, float]

    @property
    def holds(self) -> bool:
        """Whether the sample is not worse beyond both intervals."""
        (_, low, high), (_, least, most) = self.card, self.sample
        return least <= high if FIGURES[self.name] == "lower" else most >= low


def require_base(card: QualityCard, base: ModelSource) -> None:
    """Raise ``DataError`` where ``base`` is not the model that the card compares with."""
    if base.sha256() != card.base_sha256:
        raise DataError(
            f"the card compares with {card.base_name} (sha256 {card.base_sha256[:12]}), {base.name} has "
            f"{base.sha256()[:12]}; give --against the same base"
        )


def fresh_windows(card: QualityCard, text: Text, base: ModelSource, tokens: int, seed: int) -> list[Piece]:
    """Windows of ``text`` drawn by ``seed``, as long as the card's, those first that the card did not score. Raises
    ``DataError`` for another text than the card's, or for one with too few windows."""
    if text.sha256 != card.data_sha256:
        raise DataError(
            f"the card was measured on {card.data_name} (sha256 {card.data_sha256[:12]}), {text.name} has "
            f"{text.sha256[:12]}; give --data the same text"
        )
    tokenizer = base.tokenizer()
    leading, ids = leading_tokens(tokenizer), text.tokens(tokenizer)
    width = card.window - len(leading)
    if width < 1:
        raise UsageError(f"the card's windows of {card.window} tokens are too short for this model")
    there, wanted = len(ids) // width, tokens // card.window
    if not 1 <= wanted <= there:
        raise DataError(
            f"{tokens:,} tokens are {wanted} of the {there} windows of {card.window} tokens that {text.name} has; "
            "choose --tokens to fit"
        )
    windows = of_windows(evaluation_windows(ids, there * card.window, card.window, leading), len(leading))
    scored = -(-card.tokens // max(1, card.window - max(1, len(leading))))  # the card's are the first
    order = torch.randperm(there, generator=torch.Generator().manual_seed(seed)).tolist()
    drawn = sorted(order, key=lambda window: window < scored)[:wanted]
    return [windows[window] for window in sorted(drawn)]


def verify(
    card: QualityCard, base: Scorer, model: Scorer, setting: Setting, pieces: list[Piece],
    progress: Progress | None = None,
) -> list[Finding]:  # fmt: skip
    """The card's figures beside those of ``pieces``."""
    quality.require_one_vocabulary(base, model)
    sample = quality.card_of(compare(base, model, pieces, progress), setting, model)
    return [Finding(name, _ends(card, name), _ends(sample, name)) for name in FIGURES]


def _ends(card: QualityCard, name: str) -> tuple[float, float, float]:
    return float(getattr(card, name)), card.end(name, "low"), card.end(name, "high")
