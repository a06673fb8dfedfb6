"""``qserve quantize``: compress a model, and publish the checkpoint if it passes its gates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    needs_plots,
)
from qserve.commands.values import byte_count, command_line, eval_job, gates, names
from qserve.quantize.job import QuantizeJob
from qserve.quantize.methods import METHODS

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
    scheme: Annotated[
        str,
        typer.Option(
            help="Which numbers. weights: integers of --bits, inputs stay floats. w8a8: int8 weights and inputs. fp8: "
            "e4m3 per channel and per token; fp8-tensor: one scale each; fp8-static: the same with calibrated input "
            "scales; fp8-block: blocks of 128 x 128."
        ),
    ] = _JOB.scheme,
    bits: Annotated[
        int, typer.Option(help="Bits per weight: 2, 3, 4, 6 or 8. Fewer are smaller and, below 4, clearly worse.")
    ] = _JOB.bits,
    group_size: Annotated[
        int,
        typer.Option(
            help="Inputs that share a scale, -1 for all: smaller groups are closer to the model and larger on disk (a "
            "scale takes 16 bits)."
        ),
    ] = _JOB.group_size,
    sym: Annotated[
        bool,
        typer.Option(
            "--sym/--asym",
            help="Whether zero is always the same code, or each group has a zero point of its own, as AWQ's "
            "kernels expect.",
        ),
    ] = _JOB.symmetric,
    method: Annotated[
        str,
        typer.Option(
            help="How codes are chosen. "
            + " ".join(f"{method.name}: {method.help}." for method in METHODS.values())
            + " auto: gptq, smoothquant for w8a8, rtn for fp8."
        ),
    ] = "auto",
    effort: Annotated[
        str,
        typer.Option(
            help="How much time gptq may take. fast: each layer keeps its own error small. normal, twice as long: it "
            "also makes up for what earlier layers lost. best, ten times as long: the rounding is then learned "
            "(SignRound) and, where the whole model fits memory, all scales are tuned for its predictions."
        ),
    ] = _JOB.effort,
    act_order: Annotated[
        bool,
        typer.Option(
            "--act-order/--no-act-order",
            help="GPTQ: round the inputs with the largest values first, "
            "when most others are left to make up for the error. Costs nothing when serving.",
        ),
    ] = _JOB.act_order,
    head: Annotated[
        int,
        typer.Option(
            help="Bits of the output head, the largest layer of small models: 8, 6 or 4; 0 keeps it in 16. A head that "
            "is the embedding (tied) becomes a layer of its own."
        ),
    ] = _JOB.head_bits,
    embeddings: Annotated[
        int,
        typer.Option(
            help="Bits of the embedding: 8, or 6 for smaller files (in memory a code takes a byte in both); 0 keeps it "
            "in 16. A head that is the embedding (tied) has them too, unless --head gives it its own."
        ),
    ] = _JOB.embedding_bits,
    keep_experts: Annotated[
        bool,
        typer.Option(
            "--keep-experts",
            help="Leave the experts of a mixture as they are stored: in MXFP4 (GPT-OSS), in fp8 or in 16 bits.",
        ),
    ] = _JOB.keep_experts,
    kv_cache: Annotated[
        str, typer.Option(help="Calibrate scales for a KV cache in int8 or fp8; none leaves that to the server.")
    ] = "none",
    kv_scales: Annotated[
        str,
        typer.Option(
            help="Scales of the KV cache: tensor, one for each layer's keys and values, "
            "which most servers read; or head, one for each of their heads, a little closer."
        ),
    ] = _JOB.kv_granularity,
    target_bits: Annotated[
        float | None,
        typer.Option(
            help="Mixed precision: choose each layer's bits, or with fp8 and w8a8 which layers keep 16, so that the "
            "average, scales included, is at most this."
        ),
    ] = None,
    minimize: Annotated[
        str | None,
        typer.Option(
            help="size: choose each layer's bits so that the checkpoint is the smallest "
            "whose divergence from the model, measured, is within --max-kl.",
            metavar="size",
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            help="gptq, gptq_v2, awq, compressed-tensors or fp8; auto takes the one most loaders read, and for mixed "
            "precision compressed-tensors, which stores no zero points that are all alike."
        ),
    ] = _JOB.format,
    loaders: Loaders = _LOADERS,
    calibration: Annotated[
        str,
        typer.Option(
            help="Calibration text: self (the model writes half of it), builtin, a text or JSONL file (lines with "
            "text or messages), a dataset, or none (rtn).",
            metavar="SOURCE",
        ),
    ] = _JOB.calibration or "none",
    samples: Annotated[int, typer.Option(help="Calibration samples.")] = _JOB.samples,
    sequence_length: Annotated[int, typer.Option(help="Tokens per calibration sample.")] = _JOB.sequence_length,
    seed: Annotated[int, typer.Option(help="Which samples are drawn.")] = _JOB.seed,
    overwrite: Overwrite = _JOB.overwrite,
    lora: Annotated[
        Path | None,
        typer.Option(help="A LoRA adapter (PEFT's directory) that is merged into MODEL first.", metavar="PATH"),
    ] = None,
    offload: Annotated[bool, typer.Option(help="Keep hidden states on disk, few of them in memory.")] = _JOB.offload,
    max_memory: Annotated[
        str | None, typer.Option(help="Plan with this much memory, as 16GiB. [default: what is free]", metavar="SIZE")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show plan, forecast and size of the output, and stop.")
    ] = False,
    report_dir: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="Write quantization.json, .md and .html with plots there. Where they replace those of another job on "
            "the same model and text, its divergence and size are shown beside.",
            metavar="DIR",
            callback=needs_plots,
        ),
    ] = None,
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
        scheme=scheme,  # type: ignore[arg-type]  # checked by the job itself, as are the others
        bits=bits,
        group_size=group_size,
        symmetric=sym,
        head_bits=head,
        embedding_bits=embeddings,
        keep_experts=keep_experts,
        kv_cache=None if kv_cache == "none" else kv_cache,  # type: ignore[arg-type]
        kv_granularity=kv_scales,  # type: ignore[arg-type]
        method=None if method == "auto" else method,
        effort=effort,  # type: ignore[arg-type]
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
        offload=offload,
        max_memory=byte_count(max_memory),
    )
    source = steps.open_source(model)
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
