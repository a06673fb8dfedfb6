"""The report of a quality card. Knows what a measurement found and how to show it; measures nothing."""

from __future__ import annotations

from collections.abc import Sequence

from qserve.checkpoint.card import QualityCard
from qserve.evals.gate import GateReport
from qserve.evals.report import Report, Section


def quality_report(card: QualityCard, name: str, command: str, gates: Sequence[GateReport] = ()) -> Report:
    """The report of a quality card."""
    rows = (
        ("perplexity", f"{card.perplexity_base:.3f}", f"{card.perplexity:.3f} ({card.perplexity_increase:+.2%})"),
        ("KL divergence, mean (nats)", "0", f"{card.kl_mean:.4f}"),
        ("KL divergence, median", "0", f"{card.kl_median:.4f}"),
        ("KL divergence, p90", "0", f"{card.kl_p90:.4f}"),
        ("top-1 agreement", "100 %", f"{card.top1_agreement:.2%}"),
    )
    title = f"{card.tokens:,} tokens of {card.data_name}, windows of {card.window:,}; {card.kernel_path}"
    section = Section(title, ("", card.base_name, name), rows)
    return Report("quality", f"Quality of {name}", command, {"card": card.to_json()}, (section,), tuple(gates))
