"""``qserve demo``: the whole job on a small model, by the same steps as the other commands."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from qserve import console, steps
from qserve.calibration.text import load_text
from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.demo import DEMOS, DemoModel, terms_path
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.summary import summarize
from qserve.evals import product, quality, throughput
from qserve.evals.divergence import Scorer, compare
from qserve.evals.gate import Gate, GateReport, enforce, judge
from qserve.evals.quality import EvalJob
from qserve.pace import WINDOW, Pace, Recipe, choose
from qserve.quantize import rtn
from qserve.quantize.first_block import expected_seconds
from qserve.quantize.job import QuantizeJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.runner import DecoderRunner
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.listening import claim_socket
from qserve.runtime.server.serve import ServerHandle

QUESTION = "What is the capital of France?"
BEGINNING = "The capital of France is"
"""What a model without a chat template goes on with."""

JOB = QuantizeJob(method="gptq", bits=4, group_size=64, calibration="builtin", sequence_length=WINDOW)
GATES = (Gate("kl_mean", 0.13, "at_most"), Gate("perplexity_increase", 0.12, "at_most"))
"""What was measured of both models, with a margin for other machines and recipes; see BENCHMARKS.md."""

_FEW, _MORE = 4, 16
"""Numbers of samples with which the first block is quantized, to see the cost of one."""
_SCORED = 128
"""Tokens that are scored to see the cost of one."""
_LOADS = 3.0
"""The time of everything but quantizing and scoring (loading twice, hashing, writing, answering), in loads of the base.
"""


def run_demo(recipes: Sequence[Recipe], *, keep: bool, out: Path | None, model: str = "demo") -> None:
    """Fetch ``model`` (of ``DEMOS``), choose the first of ``recipes`` that ends in time, quantize, gate, serve, ask,
    and print one table.

    Raises ``GateFailed`` where the quality is lost."""
    began = time.perf_counter()
    with ExitStack() as stack:
        sock = claim_socket("127.0.0.1", 0)
        stack.callback(sock.close)
        base = steps.open_source(model)
        _introduce(base, DEMOS[model])
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qserve-demo-"))) / f"{model}-w4"
            stack.push(_forget_notes)
        text = load_text("builtin", "evaluate")
        quality.check(EvalJob(text, recipes[0].tokens, WINDOW), base)
        scoring = quality.eval_config(WINDOW, (base,))
        loading = time.perf_counter()
        scorer = quality.scorer(base, scoring)
        loaded = time.perf_counter()
        pace = _measure(base, scorer, EvalJob(text, _SCORED, _SCORED))
        passed = time.perf_counter() - began
        pace = replace(pace, rest=passed + _LOADS * (loaded - loading))
        recipe = choose(pace, recipes)
        _explain(recipe, pace)
        job = EvalJob(text, recipe.tokens, WINDOW)
        reports: list[GateReport] = []

        def measure(staged: Path, unfinished: Path) -> QualityCard:
            quantized = quality.scorer(steps.open_source(str(staged)), scoring)
            with console.progress("evaluate") as update:
                return quality.measure(scorer, quantized, job, update, unfinished).card

        def accept(card: QualityCard) -> None:
            reports[:] = judge(GATES, card)
            enforce(reports)

        card = steps.quantize(base, out, _job(recipe.samples, recipe.effort), measure, accept).card
        assert card is not None
        source = steps.open_source(str(out))
        engine = steps.load(source, EngineConfig())
        with console.progress("speed") as update:
            speed = throughput.measure(engine, throughput.text_tokens(source), 1, throughput.Load(64, 64), 3)
            update(1, 1)
        with ServerHandle(engine, config=ServerConfig(model_name="demo"), sock=sock) as server:
            chats = source.tokenizer().chat_template is not None
            question = QUESTION if chats else BEGINNING
            console.line(f"\n{'user       ' if chats else 'text       '}{question}")
            console.out.print("assistant  " if chats else "goes on    ", end="")
            steps.ask(server.url, "demo", question, chat=chats)
            console.line()
            _table(DEMOS[model].title, base, source, card, speed, reports)
            console.line(f"done in {time.perf_counter() - began:.0f} s")
            if keep:
                console.note(f"serving demo on {server.url} until Ctrl-C")
                try:
                    server.wait()
                except KeyboardInterrupt:
                    console.note("stopped")


def _forget_notes(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """They tell of work that is kept, which goes with the temporary directory."""
    if error is not None:
        error.__notes__ = []


def _introduce(base: ModelSource, model: DemoModel) -> None:
    stored = console.size(summarize(base).stored_bytes)
    console.note(
        f"base            {model.title}, as the 4-bit file ({model.kinds}, {stored}) that a package holds decodes: "
        "divergences from it compare methods, they do not say what 4 bits cost the model that was trained"
    )
    if model.terms is not None:
        console.note(f"terms           {model.notice}: {terms_path(model)}")


def _measure(base: ModelSource, scorer: Scorer, job: EvalJob) -> Pace:
    """The cost of the demo's work on this machine. The first block is quantized three times, and a piece of text scored
    with the base twice. The quantized model does not exist yet; it is taken to be as much faster as one of its
    products.
    """
    tokens = throughput.text_tokens(base)
    with console.progress("measure") as update:
        seconds: list[float] = []
        for samples, effort in ((_FEW, "normal"), (_MORE, "normal"), (_MORE, "fast")):
            update(len(seconds), 4)
            seconds.append(expected_seconds(base, _job(samples, effort), tokens))
        update(3, 4)
        began = time.perf_counter()
        compare(scorer, scorer, quality.pieces_of(job, base))
        token = (time.perf_counter() - began) / job.tokens * (1 + _share(base, scorer)) / 2
        update(4, 4)
    return Pace.of((_FEW, seconds[0]), (_MORE, seconds[1]), seconds[2], token, 0.0)


def _share(base: ModelSource, scorer: Scorer) -> float:
    """The time of a product of the quantized model as a share of the same product's time in its base."""
    if not isinstance(scorer, Engine) or not isinstance(scorer.runner, DecoderRunner) or scorer.overlaps:
        return 1.0
    executor = scorer.runner.decoder.executor
    weight = base.tensor("model.layers.0.mlp.down_proj.weight")
    packed = rtn.quantize(weight, None, JOB.weights).weight
    return product.seconds(executor, packed, _SCORED) / product.seconds(executor, weight, _SCORED)


def _explain(recipe: Recipe, pace: Pace) -> None:
    usual = QuantizeJob()
    minutes = pace.quantizing(usual.samples, usual.effort) / 60
    console.note(f"recipe          {recipe}: the demo is expected to take {pace.seconds(recipe):.0f} s here")
    console.note(
        f"                (qserve quantize takes {usual.samples} samples and effort {usual.effort} where nothing else "
        f"is said: {minutes:.1f} minutes here)"
    )


def _job(samples: int, effort: str) -> QuantizeJob:
    return replace(JOB, samples=samples, effort=effort)  # type: ignore[arg-type]  # checked by the job itself


def _table(
    title: str,
    base: ModelSource,
    source: ModelSource,
    card: QualityCard,
    speed: throughput.Speed,
    reports: list[GateReport],
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
    console.table(f"{title}, GPTQ 4 bit, groups of 64", ("", "base", "quantized"), rows)
    console.line(
        f"The downloaded file was itself 4-bit ({console.size(before.stored_bytes)}): the base is what it "
        "decodes to, on a grid that this format does not share."
    )
    console.line(f"measured on {card.tokens:,} tokens of {card.data_name}; gates: " + ", ".join(
        f"{report.metric} {report.value:.3f} {'<=' if report.kind == 'at_most' else '>='} {report.limit}"
        for report in reports
    ))
