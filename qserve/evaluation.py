"""The four measurements of ``qserve eval``, each from models to a report: divergence, a reference, tasks, needles; and
those of ``qserve verify`` and ``qserve compare``.

Combines ``evals`` with progress bars and output. The options of the command are in ``commands/evaluate``.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from qserve import console, steps
from qserve.calibration.text import Text, load_text
from qserve.checkpoint.card import QualityCard, write_card
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.source import ModelSource
from qserve.evals import quality, throughput, verification
from qserve.evals.divergence import Divergence, Scorer, compare
from qserve.evals.gate import Gate, GateReport, judge_values
from qserve.evals.needle import Haystack, search
from qserve.evals.needle_report import metrics as needle_metrics
from qserve.evals.needle_report import needle_report
from qserve.evals.pareto import Candidate, pareto_report, require_one_setting
from qserve.evals.partial import Partial
from qserve.evals.pieces import Piece
from qserve.evals.quality_report import metrics as quality_metrics
from qserve.evals.quality_report import quality_report
from qserve.evals.reference import Reference, Setting, record, stored_bytes, vocabulary_hash
from qserve.evals.report import Metric, Report, intervals_of
from qserve.evals.report_files import write_report
from qserve.evals.tasks import require_lm_eval, run_tasks
from qserve.evals.tasks_report import metrics as task_metrics
from qserve.evals.tasks_report import side_by_side, tasks_report
from qserve.evals.worst import worst_tokens
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine


def measure_quality(
    checkpoint: str, against: str, job: quality.EvalJob | None, kernels: str, threads: int | None, command: str,
    gates: Sequence[Gate], *, resume: Path | None, noise_floor: bool, card: bool, allow_calibration_text: bool,
    written: tuple[Path | None, Path | None, Path | None], kv_cache_dtype: str,
) -> list[GateReport]:  # fmt: skip
    """Against a base model, or, if ``job`` is None, against the reference file ``against``."""
    model = steps.open_source(checkpoint)
    base: Scorer | Reference
    setting: Setting
    pieces: Sequence[Piece]
    if job is None:
        reference = base = Reference.load(Path(against))
        setting, pieces = reference.setting, reference.pieces
        config = quality.eval_config(
            setting.window, (model,), kernels=kernels, threads=threads, kv_cache_dtype=kv_cache_dtype
        )
        scorer = quality.scorer(model, config)
        remark = (
            f"KL from the base's {reference.top:,} likeliest tokens, all others ({reference.rest_mean:.2%} on average) "
            "as one: never above the true value"
        )
    else:
        source = steps.open_source(against, base=True)
        base, scorer = quality.scorers(
            source, model, job.window, kernels=kernels, threads=threads, kv_cache_dtype=kv_cache_dtype
        )
        setting, pieces, remark = job.setting(source), quality.pieces_of(job, source), ""
    quality.require_one_vocabulary(base, scorer)
    seen = quality.overlap(
        model.calibration, setting, pieces, scorer.tokenizer, allowed=allow_calibration_text
    )  # fmt: skip
    partial = None if resume is None else Partial(resume, quality.measurement_key(setting, scorer, pieces))
    with console.progress("evaluate") as update:
        try:
            found = compare(base, scorer, pieces, update, partial=partial)
        except KeyboardInterrupt as stopped:
            if resume is not None:
                stopped.add_note(f"what was done is in {resume}: the same command goes on from there")
            raise
    floor = None
    if noise_floor:
        assert not isinstance(base, Reference)
        floor = _noise_floor(base, setting.window, pieces, kernels, threads)
    result = quality.card_of(found, setting, scorer, seen, remark)
    known = quality_metrics(found, setting, floor)
    reports = _judge(gates, known, found.tokens, result.kernel_path, {"perplexity_increase": result.perplexity_base})
    steps.show_card(result, reports)  # shown first, so that a file that cannot be written does not lose the measurement
    _show_intervals(known)
    worst = worst_tokens(found, pieces, scorer.tokenizer)
    write_report(quality_report(result, model.name, command, reports, found, setting, floor, worst), *written)
    if card and model.spec is not None and kv_cache_dtype == "auto":  # the card is of what is served by default
        write_card(model.path, result)
    if partial is not None:
        partial.remove()
    return reports


def verify_card(
    model: ModelSource, card: QualityCard, against: str, data: str, tokens: int, seed: int | None, kernels: str,
    threads: int | None,
) -> list[verification.Finding]:  # fmt: skip
    """The card's figures, measured again on other windows of its text."""
    base = steps.open_source(against, base=True)
    verification.require_base(card, base)
    text = load_text(data, "evaluate")
    drawn = secrets.randbits(32) if seed is None else seed
    pieces = verification.fresh_windows(card, text, base, tokens, drawn)
    console.line(f"sample          {len(pieces)} windows of {card.window:,} tokens, --seed {drawn}")
    setting = quality.EvalJob(text, tokens, card.window).setting(base)
    first, second = quality.scorers(base, model, card.window, kernels=kernels, threads=threads)
    with console.progress("verify") as update:
        return verification.verify(card, first, second, setting, pieces, update)


def compare_checkpoints(
    names: Sequence[str], against: str | None, job: quality.EvalJob | None, levels: Sequence[int], kernels: str,
    threads: int | None, command: str,
) -> Report:  # fmt: skip
    """Several checkpoints by size, divergence and speed at ``levels`` requests at once, one after the other in memory.
    With ``job`` they are measured ``against`` their base, else their cards count."""
    models = [steps.open_source(name) for name in names]
    cards = [_valid_card(model) for model in models] if job is None else []
    if cards:
        require_one_setting([(name, card) for name, card in zip(names, cards)])
    elif against is not None and job is not None:
        source = steps.open_source(against, base=True)
        all_of_them = (source, *models)
        config = quality.eval_config(job.window, all_of_them, kernels=kernels, threads=threads)
        base = quality.scorer(source, config, all_of_them)
        for model in models:
            scorer = quality.scorer(model, config, all_of_them)
            with console.progress(model.name[:12]) as update:
                cards.append(quality.measure(base, scorer, job, update).card)
            del scorer
        del base
    found = []
    for name, model, card in zip(names, models, cards):
        rates = {}
        if levels:
            engine = steps.load(model, EngineConfig(kernels=kernels, threads=threads, max_num_seqs=max(levels)))
            tokens = throughput.text_tokens(model)
            rates = {n: throughput.measure(engine, tokens, n, throughput.Load()).output for n in levels}
            engine.close()
        found.append(Candidate(name, model.stored_bytes(), card, rates))
    return pareto_report(found, command)


def _valid_card(model: ModelSource) -> QualityCard:
    if model.card is None:
        raise CheckpointError(f"{model.path} has no quality card; give --against its base to measure it")
    if isinstance(model, HFDirectory) and (problem := model.card_problem()):
        raise CheckpointError(problem)
    return model.card


def save_reference(
    checkpoint: str, job: quality.EvalJob, out: Path, top: int, kernels: str, threads: int | None
) -> None:
    """Store the model's predictions for the text of ``job``."""
    source = steps.open_source(checkpoint, base=True)
    config = quality.eval_config(job.window, (source,), kernels=kernels, threads=threads)
    pieces = quality.pieces_of(job, source)
    vocabulary = source.tokenizer().get_vocab()
    console.note(f"{out} will hold {console.size(stored_bytes(pieces, min(top, len(vocabulary))))}")
    with console.progress("record") as update:
        reference = record(
            quality.scorer(source, config), job.setting(source), vocabulary_hash(vocabulary), pieces, top, update
        )
    reference.save(out)
    console.line(
        f"{out}: {len(reference.following):,} tokens of {job.text.name}, {reference.top:,} likeliest of "
        f"{reference.vocab_size:,} each; all others have {reference.rest_mean:.3%} of the probability on average"
    )


def measure_tasks(
    checkpoint: str, against: str | None, tasks: Sequence[str], directory: Path | None, limit: int | None,
    kernels: str, threads: int | None, command: str, gates: Sequence[Gate],
    written: tuple[Path | None, Path | None, Path | None],
) -> list[GateReport]:  # fmt: skip
    """One model after the other, so that both need not fit in memory at once."""
    require_lm_eval()
    sources = [] if against is None else [steps.open_source(against, base=True)]
    sources.append(steps.open_source(checkpoint))
    results, path = [], ""
    for source in sources:
        engine = Engine(source, EngineConfig(kernels=kernels, threads=threads, max_waiting=1 << 16))
        path = quality.kernel_path(engine)
        with console.progress(source.name[:12]) as update:
            results.append(run_tasks(engine, tasks, directory, limit, update))
        del engine
    found = side_by_side(results[0] if against is not None else [], results[-1])
    reports = _judge(gates, task_metrics(found), len(found), path)
    base_name = None if against is None else sources[0].name
    return _tell(tasks_report(found, sources[-1].name, base_name, command, reports), written)


def measure_needles(
    checkpoint: str, text: Text, haystack: Haystack, kv_cache_dtypes: Sequence[str], kernels: str, threads: int | None,
    command: str, gates: Sequence[Gate], written: tuple[Path | None, Path | None, Path | None],
) -> list[GateReport]:  # fmt: skip
    source = steps.open_source(checkpoint)
    tokens = text.tokens(source.tokenizer())
    with console.progress("needle") as update:
        found = search(source, tokens, haystack, kv_cache_dtypes, update, kernels=kernels, threads=threads)
    reports = _judge(gates, needle_metrics(found), len(found), f"KV {', '.join(kv_cache_dtypes)}")
    return _tell(needle_report(found, source.name, command, reports), written)


def _noise_floor(
    base: Scorer, window: int, pieces: Sequence[Piece], kernels: str, threads: int | None
) -> Divergence:
    """The base as it serves against the base with float32 keys and values: smaller divergences cannot be seen."""
    if not isinstance(base, Engine):
        raise UsageError("--noise-floor: this family is measured by transformers in float32, which rounds nothing")
    config = quality.eval_config(window, (base.source,), kernels=kernels, threads=threads, kv_cache_dtype="fp32")
    with console.progress("noise floor") as update:
        return compare(Engine(base.source, config), base, pieces, update)


def _judge(
    gates: Sequence[Gate], known: Sequence[Metric], samples: int, environment: str,
    baselines: dict[str, float] | None = None,
) -> list[GateReport]:  # fmt: skip
    values = {metric.name: metric.value for metric in known}
    return judge_values(gates, values, samples, environment, baselines, intervals_of(known))


def _show_intervals(known: Sequence[Metric]) -> None:
    for metric in known:
        if metric.low is not None and metric.high is not None:
            name = metric.name.replace("_", " ")
            console.line(f"{name:<20}{metric.value:.4g}, 95 % within {metric.low:.4g} to {metric.high:.4g}")


def _tell(report: Report, written: tuple[Path | None, Path | None, Path | None]) -> list[GateReport]:
    for section in report.tables():
        console.table(section.title, section.header, section.rows)
    write_report(report, *written)
    return list(report.gates)
