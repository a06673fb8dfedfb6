"""Checkpoints of one base beside each other: which of them no other beats in size, divergence and speed at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import DataError
from qserve.evals.report import Metric, Plot, Report, Section, Series

_SETTING = ("base_sha256", "data_sha256", "tokens", "window", "bos")
_WORDS = {"base_sha256": "base", "data_sha256": "text", "tokens": "number of tokens", "window": "window", "bos": "BOS"}


@dataclass(frozen=True)
class Candidate:
    """One checkpoint.

    stored_bytes  of its weights
    card          what it lost
    rates         requests at once -> output tokens per second here; empty where speed was not measured
    """

    name: str
    stored_bytes: int
    card: QualityCard
    rates: Mapping[int, float] = field(default_factory=dict)

    def beats(self, other: Candidate) -> bool:
        """Whether it is as small, as close to the base and as fast as ``other``, and better in one of these."""
        losses = [(self.stored_bytes, other.stored_bytes), (self.card.kl_mean, other.card.kl_mean)]
        losses += [(-rate, -other.rates[level]) for level, rate in self.rates.items()]
        return all(own <= theirs for own, theirs in losses) and any(own < theirs for own, theirs in losses)


def require_one_setting(named: Sequence[tuple[str, QualityCard]]) -> None:
    """Raise ``DataError`` where two cards do not compare: by base, text, tokens, window or BOS."""
    first, card = named[0]
    for name, other in named[1:]:
        if apart := [_WORDS[each] for each in _SETTING if getattr(card, each) != getattr(other, each)]:
            raise DataError(
                f"the cards of {first} and {name} differ in {', '.join(apart)}; give --against BASE to measure all anew"
            )


def front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats, the smallest first."""
    kept = [each for each in candidates if not any(other.beats(each) for other in candidates)]
    return sorted(kept, key=lambda each: (each.stored_bytes, each.card.kl_mean))


def pareto_report(candidates: Sequence[Candidate], command: str) -> Report:
    """All of them, the smallest first, each with who beats it, and divergence over size as a plot."""
    ranked = sorted(candidates, key=lambda each: (each.stored_bytes, each.card.kl_mean))
    levels = list(ranked[0].rates)
    header = ("checkpoint", "MB", "KL mean, 95 %", "perplexity", "same first choice",
              *(f"tok/s, {level} at once" for level in levels), "beaten by")  # fmt: skip
    rows = []
    for each in ranked:
        card, better = each.card, [other.name for other in ranked if other.beats(each)]
        rows.append((
            each.name, f"{each.stored_bytes / 1e6:.1f}",
            f"{card.kl_mean:.4f} [{card.end('kl_mean', 'low'):.4f}, {card.end('kl_mean', 'high'):.4f}]",
            f"{card.perplexity:.2f} ({card.perplexity_increase:+.1%})", f"{card.top1_agreement:.1%}",
            *(f"{each.rates[level]:,.0f}" for level in levels), ", ".join(better) or "none",
        ))  # fmt: skip
    base = ranked[0].card
    title = f"against {base.base_name} on {base.tokens:,} tokens of {base.data_name}"
    metrics = []
    for each in ranked:
        ends = each.card.end("kl_mean", "low"), each.card.end("kl_mean", "high")
        metrics.append(Metric(f"kl_mean/{each.name}", each.card.kl_mean, "nats", "lower", *ends))
        metrics.append(Metric(f"size/{each.name}", each.stored_bytes, "bytes", "lower"))
        metrics += [
            Metric(f"output_rate/{level}/{each.name}", rate, "tok/s", "higher") for level, rate in each.rates.items()
        ]
    return Report(
        "pareto", f"{len(ranked)} checkpoints of {base.base_name}", command,
        {"checkpoints": [asdict(each) for each in ranked], "front": [each.name for each in front(ranked)]},
        (Section(title, header, tuple(rows)),), metrics=tuple(metrics), plots=(_plot(ranked),),
    )  # fmt: skip


def _plot(ranked: Sequence[Candidate]) -> Plot:
    edge = front(ranked)
    series = [Series("not beaten", tuple(each.stored_bytes / 1e6 for each in edge),
                     tuple(each.card.kl_mean for each in edge))]  # fmt: skip
    for each in ranked:
        ends = (each.card.end("kl_mean", "low"),), (each.card.end("kl_mean", "high"),)
        series.append(Series(each.name, (each.stored_bytes / 1e6,), (each.card.kl_mean,), *ends))
    caption = "Mean divergence with its 95 % interval, over the size of the weights. No point on the line is beaten."
    return Plot("Divergence and size", caption, "MB", "mean KL divergence (nats)", tuple(series), "scatter")
