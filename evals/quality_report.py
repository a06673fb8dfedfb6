"""The report of a comparison with the base: the card's figures with confidence intervals and their sources."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise

import torch
from torch import Tensor

from qserve.checkpoint.card import QualityCard
from qserve.evals.bootstrap import interval, resampled_means
from qserve.evals.divergence import Divergence
from qserve.evals.gate import GateReport
from qserve.evals.reference import Setting
from qserve.evals.report import Metric, Plot, Report, Section, Series
from qserve.evals.worst import WorstToken, section

_BINS = 8
_SURE = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


def quality_report(
    card: QualityCard,
    name: str,
    command: str,
    gates: Sequence[GateReport] = (),
    found: Divergence | None = None,
    setting: Setting | None = None,
    floor: Divergence | None = None,
    worst: Sequence[WorstToken] = (),
) -> Report:
    """The report of a quality card; with the values ``found`` at each token also its intervals and plots. ``floor`` is
    the cost of the base's own rounding, ``worst`` are the tokens with the largest divergence."""
    known = {} if found is None or setting is None else {each.name: each for each in metrics(found, setting, floor)}
    rows = [
        ("perplexity", f"{card.perplexity_base:.3f}", f"{card.perplexity:.3f} ({card.perplexity_increase:+.2%})",
         _range(known, "perplexity", ".3f")),
        ("KL divergence, mean (nats)", "0", f"{card.kl_mean:.4f}", _range(known, "kl_mean", ".4f")),
        ("KL divergence, median", "0", f"{card.kl_median:.4f}", ""),
        ("KL divergence, p90", "0", f"{card.kl_p90:.4f}", ""),
        ("top-1 agreement", "100 %", f"{card.top1_agreement:.2%}", _range(known, "top1_agreement", ".2%")),
    ]  # fmt: skip
    if found is not None:
        rows.insert(4, ("KL divergence, p99", "0", f"{known['kl_p99'].value:.4f}", ""))
        rows.insert(1, ("perplexity, increase", "", f"{card.perplexity_increase:+.2%}",
                        _range(known, "perplexity_increase", "+.2%")))  # fmt: skip
    if "perplexity_documents" in known:
        each = known["perplexity_documents"]
        rows.insert(1, ("perplexity, every document the same weight", "", f"{each.value:.3f}",
                        _range(known, each.name, ".3f")))  # fmt: skip
    if floor is not None:
        rows.append(("noise floor: KL of the base from itself with a float32 KV cache", "0",
                     f"{known['noise_floor_kl'].value:.2g}", ""))  # fmt: skip
    header: tuple[str, ...] = ("", card.base_name, name, "95 % interval")
    if not known:
        header, rows = header[:3], [row[:3] for row in rows]  # type: ignore[misc]
    pieces = "documents" if setting is not None and setting.by == "document" else f"windows of {card.window:,}"
    pieces += ", each after BOS" if card.bos else ""
    title = f"{card.tokens:,} tokens of {card.data_name}, {pieces}; {card.kernel_path}"
    sections = [Section(title, header, tuple(rows))]
    plots: tuple[Plot, ...] = ()
    if found is not None:
        by_position, by_confidence = _position_plot(found), _confidence_plots(found)
        sections += [_table("By position", by_position), _table("By the base's confidence", *by_confidence)]
        plots = (by_position, *by_confidence, _tail_plot(found))
    if worst:
        sections.append(section(worst))
    data = {
        "card": card.to_json(), "setting": setting and asdict(setting), "worst": [asdict(each) for each in worst]
    }  # fmt: skip
    return Report(
        "quality", f"Quality of {name}", command, data, tuple(sections), tuple(gates), metrics=tuple(known.values()),
        plots=plots,
    )  # fmt: skip


def metrics(found: Divergence, setting: Setting, floor: Divergence | None = None) -> list[Metric]:
    """Intervals by resampling windows or documents; none where there is only one."""
    sums, counts = found.by_unit(found.base_nll, found.nll, found.kl, found.agree)
    means = (sums / counts[:, None]).T
    draws = resampled_means(sums, counts) if len(counts) > 1 else None
    pairing = hashlib.sha256(json.dumps([asdict(setting), found.tokens], sort_keys=True).encode()).hexdigest()[:16]

    def ranged(metric: Metric, of: Tensor | None, samples: Tensor) -> Metric:
        low, high = (None, None) if of is None else interval(of)
        return replace(metric, low=low, high=high, samples=tuple(samples.tolist()), pairing=pairing)

    base, own = float(found.base_nll.mean()), float(found.nll.mean())
    quantiles = found.kl.quantile(torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64)).tolist()
    rise = None if draws is None else (draws[:, 1] - draws[:, 0]).exp() - 1
    perplexity = None if draws is None else draws[:, 1].exp()
    result = [
        ranged(Metric("kl_mean", float(found.kl.mean()), "nats", "lower"), _column(draws, 2), means[2]),
        ranged(Metric("top1_agreement", float(found.agree.mean()), "", "higher"), _column(draws, 3), means[3]),
        ranged(Metric("perplexity", math.exp(own), "", "lower"), perplexity, means[1]),
        ranged(Metric("perplexity_increase", math.exp(own - base) - 1, "", "lower"), rise, means[1] - means[0]),
        *(Metric(f"kl_{key}", value, "nats", "lower") for key, value in zip(("median", "p90", "p99"), quantiles)),
        Metric("perplexity_base", math.exp(base)),
    ]
    if setting.by == "document":
        even = None if draws is None else resampled_means(means[1][:, None], torch.ones_like(counts))[:, 0].exp()
        value = math.exp(float(means[1].mean()))
        result.insert(3, ranged(Metric("perplexity_documents", value, "", "lower"), even, means[1]))
    if floor is not None:
        result.append(Metric("noise_floor_kl", float(floor.kl.mean()), "nats"))
    return result


def _column(draws: Tensor | None, index: int) -> Tensor | None:
    return None if draws is None else draws[:, index]


def _position_plot(found: Divergence) -> Plot:
    last = int(found.position.max()) + 1
    edges = sorted({round(1 + (last - 1) * step / _BINS) for step in range(_BINS + 1)})
    within = [(found.position >= low) & (found.position < high) for low, high in pairwise(edges)]
    ticks = tuple(f"{low}–{high - 1}" for low, high in pairwise(edges))
    return Plot(
        "Divergence by position", "Mean KL divergence of the tokens at each place of their window or document, with "
        "95 % intervals. A rise to the right means that errors add up along the context.",
        "place of the token", "KL divergence (nats)", (_binned(found, found.kl, within, "KL divergence"),),
        ticks=ticks,
    )  # fmt: skip


def _confidence_plots(found: Divergence) -> tuple[Plot, Plot]:
    """KL, and the share of flipped first choices, by how sure the base was; only bins that have tokens."""
    buckets = list(pairwise(_SURE))
    within = [(found.confidence >= low) & ((found.confidence < high) | (high == 1.0)) for low, high in buckets]
    used = [index for index, mask in enumerate(within) if bool(mask.any())]
    within = [within[index] for index in used]
    ticks = tuple(f"{buckets[index][0]:g}–{buckets[index][1]:g}" for index in used)
    where = "probability of the base's first choice"
    return (
        Plot("Divergence by confidence", "Mean KL divergence by how sure the base was, with 95 % intervals.",
             where, "KL divergence (nats)", (_binned(found, found.kl, within, "KL divergence"),), "bar", ticks),
        Plot("Flips by confidence", "Share of tokens whose first choice is another than the base's. Flips where the "
             "base wavers are cheap; flips where it was sure change answers.",
             where, "share of flips", (_binned(found, 1 - found.agree, within, "flips"),), "bar", ticks),
    )  # fmt: skip


def _tail_plot(found: Divergence) -> Plot:
    ordered = found.kl.clamp_min(1e-6).sort().values
    places = torch.linspace(0, len(ordered) - 1, min(120, len(ordered))).round().long()
    share = 1 - places.double() / len(ordered)
    series = Series("tokens", tuple(ordered[places].tolist()), tuple(share.tolist()))
    return Plot(
        "Tail of the divergence", "Which share of the tokens diverges by more than so much. The mean hides the tail.",
        "KL divergence (nats)", "share of tokens above", (series,), log_x=True, log_y=True,
        marks=((max(1e-6, float(found.kl.mean())), "mean"),),
    )  # fmt: skip


def _binned(found: Divergence, values: Tensor, within: Sequence[Tensor], name: str) -> Series:
    lows, highs, means = [], [], []
    for mask in within:
        mean = float(values[mask].mean())
        sums, counts = found.by_unit(values, where=mask)
        low, high = (mean, mean) if len(counts) < 2 else interval(_filled(resampled_means(sums, counts)[:, 0], mean))
        means.append(mean)
        lows.append(min(low, mean))
        highs.append(max(high, mean))
    return Series(name, tuple(map(float, range(len(means)))), tuple(means), tuple(lows), tuple(highs))


def _filled(draws: Tensor, mean: float) -> Tensor:
    """A resample without a token in a bin says nothing of that bin, so it gets the mean."""
    return torch.where(draws.isfinite(), draws, mean)


def _table(title: str, *plots: Plot) -> Section:
    header = (plots[0].x, *(heading for plot in plots for heading in (plot.y, "95 % interval")))
    rows = []
    for place, tick in enumerate(plots[0].ticks):
        cells = [tick]
        for plot in plots:
            series = plot.series[0]
            cells += [f"{series.y[place]:.4f}", f"{series.low[place]:.4f} to {series.high[place]:.4f}"]
        rows.append(tuple(cells))
    return Section(title, header, tuple(rows))


def _range(known: dict[str, Metric], name: str, form: str) -> str:
    metric = known.get(name)
    if metric is None or metric.low is None or metric.high is None:
        return ""
    return f"{metric.low:{form}} to {metric.high:{form}}"
