"""The steps that commands share, each with its progress bar: open, quantize, load, measure, show."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

from qserve import console
from qserve.checkpoint import convert as conversion
from qserve.checkpoint.calibration_record import CalibrationRecord
from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.demo import DEMOS, demo_path
from qserve.checkpoint.errors import CheckpointError, QServeError
from qserve.checkpoint.source import ModelSource, open_model
from qserve.checkpoint.tokenizer import use_chat_template
from qserve.evals import quality
from qserve.evals.gate import GateReport, table
from qserve.quantize.job import QuantizeJob
from qserve.quantize.report import Progress, ProgressEvent, QuantizeReport
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.memory import MemoryPlan

_BARS = ("generate", "sensitivity", "gradients", "quantize", "distill", "imatrix")
"""The phases of quantizing that show a bar here."""


def open_source(model: str, chat_template: Path | None = None, *, base: bool = False) -> ModelSource:
    """Open MODEL; the first use of a demo model downloads it. ``chat_template``: a file, instead of its own. ``base``:
    it is what others are made of and compared with, so its numbers count, and not how fast it is."""
    if (demo := DEMOS.get(model)) and not demo_path(demo).exists():
        if demo.notice:
            console.note(demo.notice)
        with console.progress("download") as update:
            source = open_model(model, progress=update)
    else:
        source = open_model(model, in_floats=base)
    if chat_template is not None:
        use_chat_template(source.tokenizer(), chat_template)
    return source


def operations(source: ModelSource) -> str:
    """What computes the operations of ``source`` on this machine."""
    from qserve.kernels import registry
    from qserve.runtime.models.config import decoder_config
    from qserve.runtime.models.decoder import missing_kernels
    from qserve.runtime.models.kv_scales import cache_dtype

    executor = registry.make()
    try:
        config = decoder_config(source.config, source.name)
        missing = missing_kernels(source, config, executor, cache_dtype("auto", source))
    except CheckpointError as error:
        return f"no native decoder, transformers may serve it (docs/models.md): {error}"
    if not missing:
        return f"{executor.name}: each has a kernel"
    slow = "; ".join(f"{count} x {what}" for what, count in missing.items())
    return f"{executor.name}, but for those computed by the torch reference: {slow}"


def plan(source: ModelSource, out: Path, job: QuantizeJob) -> list[str]:
    """What ``quantize`` would do, in lines; refuses whatever that would refuse."""
    from qserve.quantize import pipeline

    return pipeline.check(source, out, job).lines()


def quantize(
    source: ModelSource,
    out: Path,
    job: QuantizeJob,
    measure: Callable[[Path, Path], QualityCard | None] | None = None,
    accept: Callable[[QualityCard], None] | None = None,
    permit: Callable[[CalibrationRecord | None], None] | None = None,
) -> QuantizeReport:
    """Run the pipeline with a bar for each phase; a measurement shows its own."""
    from qserve.quantize import pipeline  # imports much of transformers, which others need not wait for

    with _bars() as tell:
        return pipeline.run(source, out, job, progress=tell, measure=measure, accept=accept, permit=permit)


def imatrix(source: ModelSource, out: Path, job: QuantizeJob) -> str:
    """Write an importance matrix; what came of it, in a line."""
    from qserve.quantize.imatrix import write_imatrix

    with _bars() as tell:
        tensors = write_imatrix(source, out, job, tell)
    return f"{out}: {tensors} tensors, {job.tokens:,} tokens"


@contextmanager
def _bars() -> Iterator[Progress]:
    """What is told of phases of ``_BARS`` moves a bar."""
    with ExitStack() as bar:
        phase = ""
        update: Callable[[int, int], None] = lambda done, total: None  # noqa: E731

        def tell(event: ProgressEvent) -> None:
            nonlocal phase, update
            if event.message:
                console.note(event.message)
            if event.phase != phase:
                bar.close()
                phase = event.phase
                if phase in _BARS:
                    update = bar.enter_context(console.progress(phase))
            if event.phase in _BARS:
                update(event.done, event.total)

        yield tell


def convert(source: ModelSource, out: Path, format: str, loaders: Sequence[str], *, overwrite: bool) -> list[str]:
    """Rewrite a checkpoint; what came of it, in lines."""
    with console.progress("convert") as update:
        report = conversion.convert(source, out, format, loaders=loaders, overwrite=overwrite, progress=update)
    return [
        f"{out}: {report.modules} modules in {report.format}",
        *report.notes,
        *(f"  {verdict}" for verdict in report.verdicts),
    ]


def load(source: ModelSource, config: EngineConfig, *, quiet: bool = False) -> Engine:
    """``quiet``: without a progress bar, where every line must be one for machines."""
    if quiet:
        return Engine(source, config)
    with console.progress("load") as update:
        return Engine(source, config, progress=update, planned=_show_plan)


def _show_plan(plan: MemoryPlan) -> None:
    for text in plan.lines():
        console.note(text)


def measure(
    model: ModelSource,
    base: ModelSource,
    job: quality.EvalJob,
    kernels: str = "auto",
    threads: int | None = None,
    unfinished: Path | None = None,
) -> quality.Measurement:
    """``model`` against ``base``, both through the serving engine, or both through transformers where that has no
    decoder for their family. ``unfinished`` as in ``quality.measure``."""
    pair = quality.scorers(base, model, job.window, kernels=kernels, threads=threads)
    with console.progress("evaluate") as update:
        return quality.measure(*pair, job, update, unfinished)


def show_card(card: QualityCard, gates: Sequence[GateReport]) -> None:
    for text in [*card.summary(), *(table(gates) if gates else [])]:
        console.line(text)


def ask(url: str, model: str, question: str, *, chat: bool = True) -> None:
    """One question over HTTP, its answer streamed to the terminal; without ``chat`` the model goes on with the text."""
    body = {"model": model, "stream": True, "temperature": 0, "max_tokens": 64 if chat else 24}
    body |= {"messages": [{"role": "user", "content": question}]} if chat else {"prompt": question}
    content = json.dumps(body).encode()
    route = "chat/completions" if chat else "completions"
    request = Request(f"{url}/{route}", content, {"Content-Type": "application/json"})
    direct = build_opener(ProxyHandler({}))  # this machine is not behind the proxy
    with direct.open(request, timeout=120) as response:
        for raw in response:
            data = raw.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise QServeError(f"the server answered: {chunk['error']['message']}")
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") if chat else choice["text"]
                console.out.print(piece or "", end="")
    console.line()
