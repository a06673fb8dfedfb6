"""``qserve eval``: a checkpoint against its base, tasks and needles, with gates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qserve.checkpoint.errors import UsageError
from qserve.commands.options import (
    ENGINE,
    AllowCalibrationText,
    Data,
    GateFile,
    HtmlOut,
    JsonOut,
    Kernels,
    MarkdownOut,
    MaxKl,
    MaxPpl,
    MinTop1,
    Threads,
    Tokens,
    Window,
)
from qserve.commands.values import command_line, eval_job, gates, integers, names

_ALWAYS = {"checkpoint", "kernels", "threads"}
_WRITTEN = {"json_path", "markdown_path", "html_path", "gate"}
_JUDGED = {"against", "max_kl", "max_ppl_increase", "min_top1", "card", "allow_calibration_text", "resume",
           "kv_cache_dtype"}
_TEXT = {"data", "tokens", "window", "by", "stride"}
# The options that belong to each measurement; one that is given but means nothing is refused.
_KINDS = {
    "--save-reference": _ALWAYS | _TEXT | {"save_reference", "reference_top"},
    "--tasks": _ALWAYS | _WRITTEN | {"against", "tasks", "tasks_dir", "task_limit"},
    "--needle": _ALWAYS | _WRITTEN | {
        "data", "needle", "needle_lengths", "needle_depths", "needle_samples", "kv_cache_dtypes"
    },
    "a reference": _ALWAYS | _WRITTEN | _JUDGED,
    "--against": _ALWAYS | _WRITTEN | _TEXT | _JUDGED | {"noise_floor"},
}  # fmt: skip


def evaluate(
    ctx: typer.Context,
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="The model to judge.")],
    against: Annotated[
        str | None,
        typer.Option(
            help="The base model it was made from, or a reference that --save-reference wrote.", metavar="MODEL|FILE"
        ),
    ] = None,
    data: Data = "builtin",
    tokens: Tokens = 16384,
    window: Window = 1024,
    by: Annotated[
        str, typer.Option(help="window: one text. document: each line of a JSONL file or row of a dataset by itself.")
    ] = "window",
    stride: Annotated[
        int | None, typer.Option(help="Begin a window every so many tokens; each counts once. [default: --window]")
    ] = None,
    json_path: JsonOut = None,
    markdown_path: MarkdownOut = None,
    html_path: HtmlOut = None,
    max_kl: MaxKl = None,
    max_ppl_increase: MaxPpl = None,
    min_top1: MinTop1 = None,
    gate: GateFile = None,
    kernels: Kernels = ENGINE.kernels,
    threads: Threads = None,
    card: Annotated[bool, typer.Option("--card/--no-card", help="Store the result inside CKPT.")] = True,
    allow_calibration_text: AllowCalibrationText = False,
    noise_floor: Annotated[
        bool, typer.Option("--noise-floor", help="Measure too what the rounding of the base's own KV cache costs.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(help="Keep what is done in FILE, and go on from it after an interruption.", metavar="FILE"),
    ] = None,
    save_reference: Annotated[
        Path | None,
        typer.Option(
            help="Store what CKPT, the base, predicts: --against FILE.safetensors then needs no base.",
            metavar="FILE",
        ),
    ] = None,
    reference_top: Annotated[
        int, typer.Option(help="Likeliest tokens that a reference holds one by one; all others count as one.")
    ] = 1024,
    tasks: Annotated[
        str | None, typer.Option(help="Run these tasks of lm-eval, of CKPT and --against.", metavar="LIST")
    ] = None,
    tasks_dir: Annotated[
        Path | None, typer.Option(help="YAML files of further tasks.", metavar="DIR")
    ] = None,
    task_limit: Annotated[int | None, typer.Option(help="Documents of each task. [default: all]")] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="KV cache of CKPT: fp16, fp32, int8, fp8 or int4_per_token_head; auto is what it says.")
    ] = "auto",
    needle: Annotated[
        bool, typer.Option("--needle", help="Look for a sentence in long texts, with different KV caches.")
    ] = False,
    needle_lengths: Annotated[str, typer.Option(help="Tokens of the texts.")] = "128,256,512,1024",
    needle_depths: Annotated[str, typer.Option(help="Where the sentence stands, in percent.")] = "0,25,50,75,100",
    needle_samples: Annotated[int, typer.Option(help="Sentences for each length and depth.")] = 2,
    kv_cache_dtypes: Annotated[
        str, typer.Option(help="KV caches to compare with the first: fp16, fp32, int8, fp8 or int4_per_token_head.")
    ] = "fp16,fp8",
) -> None:
    """Measure perplexity, KL divergence and top-1 agreement of CKPT against its base, on the kernels that serve.

    The result becomes the checkpoint's quality card. A gate that fails ends with exit code 3. With --tasks it runs
    tasks of lm-eval instead, with --needle it looks for needles in haystacks.
    """
    kind = _kind(ctx, against, save_reference, tasks, needle)
    from qserve import evaluation
    from qserve.calibration.text import load_text
    from qserve.evals.gate import enforce, read_gates
    from qserve.evals.needle import Haystack

    wanted = [*gates(max_kl, max_ppl_increase, min_top1), *([] if gate is None else read_gates(gate))]
    written = (json_path, markdown_path, html_path)
    if kind == "--save-reference":
        assert save_reference is not None
        if save_reference.suffix != ".safetensors" or reference_top < 1:
            raise UsageError("--save-reference must end in .safetensors, and --reference-top be at least 1")
        job = eval_job(data, tokens, window, by, stride)
        evaluation.save_reference(checkpoint, job, save_reference, reference_top, kernels, threads)
        return
    if kind == "--tasks":
        if task_limit is not None and task_limit < 1:
            raise UsageError("--task-limit must be at least 1")
        if tasks_dir is not None and not tasks_dir.is_dir():
            raise UsageError(f"--tasks-dir {tasks_dir} is not a directory")
        reports = evaluation.measure_tasks(
            checkpoint, against, names(tasks or ""), tasks_dir, task_limit, kernels, threads, command_line(), wanted,
            written,
        )  # fmt: skip
    elif kind == "--needle":
        haystack = Haystack(
            tuple(integers(needle_lengths, "--needle-lengths")), _shares(needle_depths), needle_samples
        )
        caches = names(kv_cache_dtypes)
        if not caches or "auto" in caches:
            raise UsageError("--kv-cache-dtypes must name fp16, fp32, int8, fp8 or int4_per_token_head")
        reports = evaluation.measure_needles(
            checkpoint, load_text(data, "evaluate"), haystack, caches, kernels, threads, command_line(), wanted,
            written,
        )  # fmt: skip
    else:
        assert against is not None
        measured = None
        if kind == "--against":
            measured = eval_job(data, tokens, window, by, stride, allow_calibration_text=allow_calibration_text)
        reports = evaluation.measure_quality(
            checkpoint, against, measured, kernels, threads, command_line(), wanted, resume=resume,
            noise_floor=noise_floor, card=card, allow_calibration_text=allow_calibration_text, written=written,
            kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip
    enforce(reports)


def _kind(
    ctx: typer.Context, against: str | None, save_reference: Path | None, tasks: str | None, needle: bool
) -> str:
    """The kind of measurement. Raises ``UsageError`` for options that do not belong to it."""
    asked = {"--save-reference": save_reference is not None, "--tasks": tasks is not None, "--needle": needle}
    chosen = [name for name, given in asked.items() if given]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} are measurements of their own: run them one by one")
    if not chosen and against is None:
        raise UsageError("give --against MODEL, the base to compare with; or --tasks, --needle or --save-reference")
    stored = against is not None and against.endswith(".safetensors")
    kind = chosen[0] if chosen else "a reference" if stored else "--against"
    flags = {each.name: each.opts[0] for each in ctx.command.params}
    for name, flag in flags.items():
        source = ctx.get_parameter_source(name or "")
        if source is not None and source.name == "COMMANDLINE" and name not in _KINDS[kind]:
            why = "which holds its own text" if kind == "a reference" else "where it means nothing"
            raise UsageError(f"{flag} does not go with {kind}, {why}")
    return kind


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) / 100 for part in text.split(","))
    except ValueError:
        raise UsageError(f"--needle-depths must be percentages with commas between, not {text!r}") from None
