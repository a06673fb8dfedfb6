"""``qserve demo``: the whole job on a small model, with the same steps that the other commands take."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from qserve import console, steps
from qserve.calibration.text import load_text
from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.summary import summarize
from qserve.evals import throughput
from qserve.evals.gate import Gate, GateReport, enforce, judge
from qserve.evals.quality import EvalJob
from qserve.quantize.job import QuantizeJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle, claim_socket

QUESTION = "What is the capital of France?"

JOB = QuantizeJob(method="gptq", bits=4, group_size=64, calibration="builtin", samples=48, sequence_length=512)
GATES = (Gate("kl_mean", 0.13, "at_most"), Gate("perplexity_increase", 0.12, "at_most"))
"""What was measured, with a margin for other machines; see BENCHMARKS.md."""


def run_demo(*, keep: bool, out: Path | None) -> None:
    """Fetch, quantize, gate, serve, ask, and print one table. Raises ``GateFailed`` where the quality is lost."""
    began = time.perf_counter()
    with ExitStack() as stack:
        sock = claim_socket("127.0.0.1", 0)
        stack.callback(sock.close)
        base = steps.open_source("demo")
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qserve-demo-"))) / "smollm2-w4"
        job = EvalJob(load_text(JOB.calibration or "builtin", "evaluate"), tokens=4096, window=512)
        reports: list[GateReport] = []

        def measure(staged: Path, unfinished: Path) -> QualityCard:
            return steps.measure(steps.open_source(str(staged)), base, job, unfinished=unfinished).card

        def accept(card: QualityCard) -> None:
            reports.extend(judge(GATES, card))
            enforce(reports)

        card = steps.quantize(base, out, JOB, measure, accept).card
        assert card is not None
        source = steps.open_source(str(out))
        engine = steps.load(source, EngineConfig())
        with console.progress("speed") as update:
            speed = throughput.measure(engine, throughput.text_tokens(source), 1, throughput.Load(64, 64), 3)
            update(1, 1)
        with ServerHandle(engine, config=ServerConfig(model_name="demo"), sock=sock) as server:
            console.line(f"\nuser       {QUESTION}")
            console.out.print("assistant  ", end="")
            steps.ask(server.url, "demo", QUESTION)
            console.line()
            _table(base, source, card, speed, reports)
            console.line(f"done in {time.perf_counter() - began:.0f} s")
            if keep:
                console.note(f"serving demo on {server.url} until Ctrl-C")
                try:
                    server.wait()
                except KeyboardInterrupt:
                    console.note("stopped")


def _table(
    base: ModelSource, source: ModelSource, card: QualityCard, speed: throughput.Speed, reports: list[GateReport]
) -> None:
    before, after = summarize(base), summarize(source)
    rows = [
        ("size", f"{console.size(before.bf16_bytes)} as bf16", console.size(after.stored_bytes)),
        ("bits per weight", "16", f"{after.bits_per_weight:.2f}, linears {after.packed_bits_per_weight:.2f}"),
        ("perplexity", f"{card.perplexity_base:.2f}", f"{card.perplexity:.2f} ({card.perplexity_increase:+.1%})"),
        ("KL divergence, mean", "0", f"{card.kl_mean:.4f} nats"),
        ("top-1 agreement", "100%", f"{card.top1_agreement:.1%}"),
        ("prefill", "", f"{speed.prefill:.0f} tokens/s"),
        ("decode", "", f"{speed.decode:.0f} tokens/s"),
    ]
    console.table("SmolLM2-135M-Instruct, GPTQ 4 bit, groups of 64", ("", "base", "quantized"), rows)
    console.line(
        f"The downloaded file was itself 4-bit ({console.size(before.stored_bytes)}, Q4_1): the base is what it "
        "decodes to, on a grid that this format does not share."
    )
    console.line(f"measured on {card.tokens:,} tokens of {card.data_name}; gates: " + ", ".join(
        f"{report.metric} {report.value:.3f} {'<=' if report.kind == 'at_most' else '>='} {report.limit}"
        for report in reports
    ))
