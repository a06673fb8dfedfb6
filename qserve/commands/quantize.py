"""``qserve quantize``: compress a model, and publish the checkpoint if it passes its gates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qserve import console
from qserve.checkpoint.errors import GateFailed, UsageError
from qserve.commands.options import (
    AllowCalibrationText,
    Data,
    Loaders,
    MaxKl,
    MaxPpl,
    MinTop1,
    Model,
    Out,
    Overwrite,
    Tokens,
    Window,
)
from qserve.commands.quantize_options import (
    ActOrder,
    Bits,
    Calibration,
    CheckpointFormat,
    Device,
    DryRun,
    Effort,
    EmbeddingBits,
    GroupSize,
    HeadBits,
    Hours,
    KeepExperts,
    KvCache,
    KvScales,
    Lora,
    MaxMemory,
    Method,
    Minimize,
    Offload,
    ReportDir,
    Samples,
    Scheme,
    Seed,
    SequenceLength,
    Symmetric,
    TargetBits,
)
from qserve.commands.values import byte_count, command_line, eval_job, gates, names
from qserve.quantize.job import QuantizeJob

if TYPE_CHECKING:
    from qserve.checkpoint.calibration_record import CalibrationRecord
    from qserve.checkpoint.card import QualityCard
    from qserve.checkpoint.source import ModelSource
    from qserve.evals.gate import Gate, GateReport
    from qserve.evals.quality import EvalJob

_JOB = QuantizeJob()
_LOADERS = ",".join(_JOB.loaders)


def quantize(
    model: Model,
    out: Out,
    scheme: Scheme = _JOB.scheme,
    bits: Bits = _JOB.bits,
    group_size: GroupSize = _JOB.group_size,
    sym: Symmetric = _JOB.symmetric,
    method: Method = "auto",
    effort: Effort = _JOB.effort,
    hours: Hours = None,
    act_order: ActOrder = _JOB.act_order,
    head: HeadBits = _JOB.head_bits,
    embeddings: EmbeddingBits = _JOB.embedding_bits,
    keep_experts: KeepExperts = _JOB.keep_experts,
    kv_cache: KvCache = "none",
    kv_scales: KvScales = _JOB.kv_granularity,
    target_bits: TargetBits = None,
    minimize: Minimize = None,
    format: CheckpointFormat = _JOB.format,
    loaders: Loaders = _LOADERS,
    calibration: Calibration = _JOB.calibration or "none",
    samples: Samples = _JOB.samples,
    sequence_length: SequenceLength = _JOB.sequence_length,
    seed: Seed = _JOB.seed,
    overwrite: Overwrite = _JOB.overwrite,
    lora: Lora = None,
    device: Device = _JOB.device,
    offload: Offload = _JOB.offload,
    max_memory: MaxMemory = None,
    dry_run: DryRun = False,
    report_dir: ReportDir = None,
    max_kl: MaxKl = None,
    max_ppl_increase: MaxPpl = None,
    min_top1: MinTop1 = None,
    data: Data = "builtin",
    tokens: Tokens = 8192,
    window: Window = 512,
    allow_calibration_text: AllowCalibrationText = False,
) -> None:
    """Compress MODEL into a checkpoint at OUT; with gates, publish it only if it passes them.

    Everything that can be refused is refused before calibration, and OUT appears complete or not at all. A run that
    was interrupted or killed goes on where it stopped when it is called again. What fails a gate is kept aside: the
    same command with looser gates publishes it, without quantizing again.
    """
    from qserve import steps

    if minimize not in (None, "size"):
        raise UsageError(f"--minimize knows size, not {minimize!r}")
    if minimize and max_kl is None:
        raise UsageError("--minimize size needs the divergence that is allowed: --max-kl")
    wanted = gates(max_kl, max_ppl_increase, min_top1)
    job = QuantizeJob(
        scheme=scheme,
        bits=bits,
        group_size=group_size,
        symmetric=sym,
        head_bits=head,
        embedding_bits=embeddings,
        keep_experts=keep_experts,
        kv_cache=None if kv_cache == "none" else kv_cache,  # type: ignore[arg-type]  # checked by the job, as are others
        kv_granularity=kv_scales,  # type: ignore[arg-type]
        method=None if method == "auto" else method,
        effort=effort,  # type: ignore[arg-type]
        hours=hours,
        act_order=act_order,
        target_bits=target_bits,
        max_kl=max_kl if minimize else None,
        calibration=None if calibration == "none" else calibration,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
        format=format,
        loaders=names(loaders),
        overwrite=overwrite,
        device=device,
        offload=offload,
        max_memory=byte_count(max_memory),
    )
    source = steps.open_source(model, base=True)
    if lora is not None:
        from qserve.checkpoint.merged import merged

        source = merged(source, lora)
    if dry_run:
        for text in steps.plan(source, out, job):
            console.line(text)
        return
    evaluation = None
    if wanted or report_dir:
        evaluation = eval_job(data, tokens, window, allow_calibration_text=allow_calibration_text)
    _publish(source, out, job, evaluation, wanted, report_dir)


def _publish(
    source: ModelSource,
    out: Path,
    job: QuantizeJob,
    evaluation: EvalJob | None,
    wanted: list[Gate],
    report_dir: Path | None,
) -> None:
    """Quantize, measure if there is an ``evaluation``, judge by the gates ``wanted``, and report the result."""
    from qserve import steps
    from qserve.evals import quality
    from qserve.evals.gate import enforce, judge
    from qserve.evals.worst import worst_tokens

    if evaluation is not None:
        quality.check(evaluation, source)
    verdicts: list[GateReport] = []
    measured: list[quality.Measurement] = []  # one for each attempt of mixed precision

    def measure(staged: Path, unfinished: Path) -> QualityCard:
        assert evaluation is not None
        measured.append(steps.measure(steps.open_source(str(staged)), source, evaluation, unfinished=unfinished))
        return measured[-1].card

    def permit(record: CalibrationRecord | None) -> None:
        if evaluation is not None:
            setting, pieces = evaluation.setting(source), quality.pieces_of(evaluation, source)
            allowed = evaluation.allow_calibration_text
            quality.overlap(record, setting, pieces, source.tokenizer(), allowed=allowed)

    def accept(card: QualityCard) -> None:
        verdicts[:] = judge(wanted, card)
        enforce(verdicts)

    try:
        report = steps.quantize(source, out, job, measure if evaluation else None, accept, permit)
    except GateFailed as failed:
        failed.add_note("the same command with looser gates publishes it, without making it again; or delete it")
        raise
    for layer in report.layers:
        if layer.fallback:
            console.line(f"{layer.module}: {layer.fallback}")
    peak = console.size(report.peak_bytes)
    console.line(f"{out}: {len(report.layers)} linears in {report.seconds:.0f} s, peak memory {peak}")
    for verdict in report.verdicts:
        console.line(f"  {verdict}")
    if report.card is not None:
        steps.show_card(report.card, verdicts)
    if report_dir is not None:
        from qserve.evals.quantize_report import write_quantize_report  # imports matplotlib

        worst = worst_tokens(measured[-1].found, measured[-1].pieces, source.tokenizer())
        for path in write_quantize_report(report_dir, report, name=out.name, command=command_line(), worst=worst):
            console.line(f"report: {path}")
