"""The report of a quantization: JSON for programs, Markdown for a repository, one HTML page for people.

Names and tokens come from strangers' models and texts, so they are escaped wherever they are shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import QServeError
from qserve.checkpoint.formats import format_named
from qserve.checkpoint.spec import QuantSpec
from qserve.evals import plots
from qserve.evals.page import document, figure, table
from qserve.evals.quality_report import quality_report
from qserve.evals.report import Metric, Report, Section
from qserve.evals.report_files import read_report, save, write_report
from qserve.evals.worst import WorstToken
from qserve.quantize.mixed.allocate import Tried
from qserve.quantize.report import QuantizeReport

NAME = "quantization"


def write_quantize_report(
    directory: Path, report: QuantizeReport, *, name: str, command: str, worst: Sequence[WorstToken] = ()
) -> tuple[Path, ...]:
    """Write ``quantization.json``, ``.md`` and ``.html`` into ``directory``, which is made; return their paths.

    ``name`` is the checkpoint's, ``command`` made it, ``worst`` are the tokens with the largest divergence. If a
    replaced report has measurements that can be compared with this one's, their sizes and divergences are shown too.
    Raises ``QServeError`` where a file cannot be written.
    """
    paths = tuple(directory / f"{NAME}.{ending}" for ending in ("json", "md", "html"))
    measured = _measured(report, name, paths[0])
    # The attempts of mixed precision include this checkpoint.
    sizes = (*report.tried, *measured[1:]) if report.tried else measured
    full = Report(
        NAME, f"Quantization of {name}", command, _data(report, measured, worst),
        _sections(report, name, sizes, worst), metrics=_metrics(report),
    )  # fmt: skip
    write_report(full, *paths[:2])
    save(paths[2], _page(full, report, sizes))
    return paths


def _measured(report: QuantizeReport, name: str, before: Path) -> tuple[Tried, ...]:
    """This checkpoint, if it was measured, and then those in the report at ``before`` that were measured against the
    same base on the same tokens. An older one of the same name is replaced."""
    if report.card is None:
        return ()
    own = Tried(name, report.bits_per_weight, report.card.kl_mean, measured=True)
    try:
        data = read_report(before).data
        others = [Tried(str(each["label"]), float(each["bits_per_weight"]), float(each["kl"]), measured=True)
                  for each in data["measured"]]
        comparable = _yardstick(QualityCard.from_json(data["card"])) == _yardstick(report.card)
    except (QServeError, KeyError, TypeError, ValueError):  # no file, or no such report
        return (own,)
    kept = [each for each in others if each.label != name and math.isfinite(each.bits_per_weight + each.kl)]
    return (own, *(kept if comparable else ()))


def _yardstick(card: QualityCard) -> tuple[object, ...]:
    """The properties that two divergences must share to be compared."""
    return card.base_sha256, card.data_sha256, card.tokens, card.window


def _data(report: QuantizeReport, measured: Sequence[Tried], worst: Sequence[WorstToken]) -> dict[str, Any]:
    return {
        "spec": _spec(report.spec),
        "format": report.format,
        "layers": [asdict(layer) for layer in report.layers],
        "notices": list(report.notices),
        "verdicts": [asdict(verdict) for verdict in report.verdicts],
        "forecast": asdict(report.forecast),
        "bits_per_weight": report.bits_per_weight,
        "checkpoint_bytes": report.checkpoint_bytes,
        "seconds": report.seconds,
        "peak_bytes": report.peak_bytes,
        "calibration_sha256": report.calibration_sha256,
        "card": None if report.card is None else report.card.to_json(),
        "tried": [asdict(each) for each in report.tried],
        "measured": [asdict(each) for each in measured],
        "worst": [asdict(each) for each in worst],
    }


def _metrics(report: QuantizeReport) -> tuple[Metric, ...]:
    card = report.card
    measured = () if card is None else (
        Metric("kl_mean", card.kl_mean, "nats", "lower"), Metric("perplexity", card.perplexity, "", "lower"),
        Metric("top1_agreement", card.top1_agreement, "", "higher"),
    )  # fmt: skip
    return (
        *measured, Metric("checkpoint_size", report.checkpoint_bytes, "bytes", "lower"),
        Metric("seconds", report.seconds, "s", "lower"), Metric("peak_memory", report.peak_bytes, "bytes", "lower"),
    )  # fmt: skip


def _spec(spec: QuantSpec) -> dict[str, Any]:
    return {
        "method": spec.method,
        "weights": asdict(spec.weights),
        "activations": None if spec.activations is None else asdict(spec.activations),
        "kv_cache": None if spec.kv_cache is None else asdict(spec.kv_cache),
        "act_order": spec.act_order,
        "overrides": {module: asdict(scheme) for module, scheme in spec.overrides.items()},
        "ignored": list(spec.ignored),
        "float_inputs": list(spec.float_inputs),
    }


def _sections(
    report: QuantizeReport, name: str, sizes: Sequence[Tried], worst: Sequence[WorstToken]
) -> tuple[Section, ...]:
    sections = [_summary(report)]
    if report.card is not None:
        sections += quality_report(report.card, name, "", worst=worst).sections
    if report.notices:
        sections.append(Section("Notes", ("",), tuple((notice,) for notice in report.notices)))
    verdicts = tuple((v.loader, "yes" if v.accepts else "no", v.reason) for v in report.verdicts)
    sections.append(Section("Loaders", ("loader", "loads it", "reason or need"), verdicts))
    points = [each for each in sizes if each.label]
    if points:
        rows = tuple(
            (p.label, f"{p.bits_per_weight:.3f}", f"{p.kl:.4f}", "measured" if p.measured else "predicted")
            for p in points
        )
        sections.append(Section("Sizes tried", ("", "bits per weight", "KL divergence, mean (nats)", ""), rows))
    layers = tuple(
        (
            layer.module,
            str(layer.scheme),
            f"{layer.error:.3g}",
            "" if layer.damping is None else f"{layer.damping:g}",
            str(layer.dead_inputs or ""),
            layer.fallback,
        )
        for layer in report.layers
    )
    sections.append(Section("Layers", ("linear", "scheme", "error", "damping", "dead inputs", "remark"), layers))
    return tuple(sections)


def _summary(report: QuantizeReport) -> Section:
    schemes = Counter(str(layer.scheme) for layer in report.layers)
    rows = {
        "method": report.spec.method,
        "weights": ", ".join(f"{count} x {scheme}" for scheme, count in schemes.most_common()),
        "inputs": str(report.spec.activations or "not rounded"),
        "KV cache": "" if report.spec.kv_cache is None else
        f"{report.spec.kv_cache}",
        "format": report.format,
        "size": f"{report.checkpoint_bytes / 2**20:,.1f} MiB "
        f"(forecast {report.forecast.checkpoint_bytes / 2**20:,.1f} MiB)",
        "time": f"{report.seconds:.0f} s (forecast {report.forecast.seconds:.0f} s)",
        "memory": f"{report.peak_bytes / 2**20:,.0f} MiB (forecast {report.forecast.peak_bytes / 2**20:,.0f} MiB)",
        "calibration text": f"sha256 {report.calibration_sha256[:12]}" if report.calibration_sha256 else "none",
    }  # fmt: skip
    return Section("Summary", ("", ""), tuple((key, value) for key, value in rows.items() if value))


def _page(full: Report, report: QuantizeReport, sizes: Sequence[Tried]) -> str:
    zeros = format_named(report.format).symmetric_zeros
    figures = [
        ("Error per layer", "Squared error of each linear's output on its calibration inputs, relative to the output.",
         plots.error_per_layer(report.layers)),
        ("Bits per layer", "Stored bits per weight, scales included.", plots.bits_per_layer(report.layers, zeros)),
    ]  # fmt: skip
    if sizes:
        figures.insert(0, (
            "Divergence against size",
            "KL divergence of the next-token distributions from the base model's. Bits are those of the linears inside "
            "the blocks.",
            plots.divergence_against_size(sizes),
        ))  # fmt: skip
    summary, *rest, layers = (table(section) for section in full.sections)
    details = f"<details><summary>Every linear ({len(report.layers)})</summary>{layers}</details>"
    return document(full, [summary, *(figure(*each) for each in figures), *rest, details])
