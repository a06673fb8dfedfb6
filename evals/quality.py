"""The quality of a model beside its base, and its quality card: perplexity, KL divergence, top-1 agreement.

Both models are measured through the serving engine, so the numbers belong to the kernels that serve; or, for families
that it does not compute, both through transformers. Limits are in ``gate``.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from qserve.calibration.text import Text
from qserve.calibration.windows import evaluation_windows
from qserve.checkpoint.calibration_record import CalibrationRecord
from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import CheckpointError, DataError, UsageError
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.tokenizer import leading_tokens
from qserve.evals.divergence import Divergence, Progress, Scorer, compare
from qserve.evals.partial import Partial
from qserve.evals.pieces import Piece, of_documents, of_windows, sliding
from qserve.evals.quality_report import metrics
from qserve.evals.reference import Reference, Setting, vocabulary_hash
from qserve.evals.report import intervals_of
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.rope import context_limit
from qserve.runtime.runner import DecoderRunner

MOST_OVERLAP = 0.1
_SCOPE = "next-token distributions on one English text; says nothing of other languages or of long contexts"


@dataclass(frozen=True)
class EvalJob:
    """What to score: the first ``tokens`` tokens of ``text``. Either in windows of ``window`` tokens, one every
    ``stride`` (None: consecutive), or document by document, those longer than ``window`` in parts. The text may be the
    one that a model was calibrated on only if ``allow_calibration_text``."""

    text: Text
    tokens: int = 16384
    window: int = 1024
    by: Literal["window", "document"] = "window"
    stride: int | None = None
    allow_calibration_text: bool = False

    def setting(self, base: ModelSource) -> Setting:
        return Setting(
            base.name, base.sha256(), self.text.name, self.text.sha256, self.by, self.window,
            self.stride or self.window, bool(leading_tokens(base.tokenizer())),
        )  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """The card, and the values behind it: those ``found`` at each token of ``pieces``."""

    card: QualityCard
    found: Divergence
    pieces: Sequence[Piece]


def has_native_decoder(source: ModelSource) -> bool:
    try:
        decoder_config(source.config, source.name)
    except CheckpointError:
        return False
    return True


def eval_config(
    window: int,
    models: Sequence[ModelSource],
    *,
    kernels: str = "auto",
    threads: int | None = None,
    kv_cache_dtype: str = "auto",
) -> EngineConfig:
    """An engine for scoring one window at a time: chunks as they are served, and no more KV cache than needed.

    Raises ``UsageError`` where a window does not fit the context of one of ``models``.
    """
    for model in models:
        context = _context(model)
        if window >= context:  # the engine adds a token to the prompt that it scores
            raise UsageError(f"--window {window} must be below the context of {model.name}, {context} tokens")
    return EngineConfig(
        max_model_len=window + 1, max_num_seqs=64, kernels=kernels, threads=threads, kv_cache_dtype=kv_cache_dtype
    )


def scorers(
    base: ModelSource, model: ModelSource, window: int, *, kernels: str = "auto", threads: int | None = None,
    kv_cache_dtype: str = "auto",
) -> tuple[Scorer, Scorer]:  # fmt: skip
    """Both models, loaded: engines where both have a native decoder, else both through transformers.
    ``kv_cache_dtype``: of ``model``; the base has its own.

    Raises ``UsageError`` where the window does not fit, or ``kernels`` are named for a family that uses none.
    """
    config = eval_config(window, (base, model), kernels=kernels, threads=threads)
    first = scorer(base, config, (base, model))
    return first, scorer(model, replace(config, kv_cache_dtype=kv_cache_dtype), (base, model))


def scorer(source: ModelSource, config: EngineConfig, models: Sequence[ModelSource] = ()) -> Scorer:
    """``source`` loaded: as an engine if it and all ``models`` that it is compared with have a native decoder."""
    if all(map(has_native_decoder, (source, *models))):
        return Engine(source, config)
    for flag, value in (("--kernels", config.kernels), ("--kv-cache-dtype", config.kv_cache_dtype)):
        if value != "auto":
            raise UsageError(f"{flag} {value}: {source.name} has no native decoder and is measured by transformers")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    from qserve.evals.transformers_scorer import TransformersScorer  # imports much of transformers

    return TransformersScorer(source)


def _context(model: ModelSource) -> float:
    if has_native_decoder(model):
        return context_limit(decoder_config(model.config, model.name))
    stated = model.config.get("max_position_embeddings")
    return stated if isinstance(stated, int) else math.inf


def pieces_of(job: EvalJob, base: ModelSource) -> list[Piece]:
    """The pieces to score, which begin as requests do. Raises ``DataError`` where the text is too short or has no
    documents."""
    tokenizer = base.tokenizer()
    leading = leading_tokens(tokenizer)
    if job.window <= len(leading):
        raise UsageError(f"--window must be above {len(leading)}: so many tokens stand before every text")
    if job.by == "window":
        ids = job.text.tokens(tokenizer)
        if job.stride is None:
            return of_windows(evaluation_windows(ids, job.tokens, job.window, leading), len(leading))
        return sliding(ids, job.tokens, job.window, job.stride, leading)
    if not job.text.documents:
        raise DataError(
            f"--by document: {job.text.name} is one text; give a JSONL file with a document in each line, or a dataset"
        )
    encoded: list[list[int]] = []
    for document in job.text.document_tokens(tokenizer):
        encoded.append(document)
        if sum(map(len, encoded)) >= job.tokens:
            break
    return of_documents(encoded, job.tokens, job.window, leading)


def overlap(
    record: CalibrationRecord | None, setting: Setting, pieces: Sequence[Piece], tokenizer: Any, *, allowed: bool
) -> float:
    """The share of the text to score, 0 to 1, that was calibrated on. Raises ``DataError`` where that is the same text,
    unless ``allowed``: such figures say nothing of other text."""
    if record is None:
        return 0.0
    share = record.share(tokenizer.batch_decode([piece.tokens for piece in pieces], skip_special_tokens=True))
    if not allowed and (share > MOST_OVERLAP or record.data_sha256 == setting.data_sha256):
        raise DataError(
            f"{setting.data_name} is calibration text: {share:.1%} of its runs of eight words are in what was read of "
            f"{record.data_name}; evaluate on other text, or insist with --allow-calibration-text"
        )
    return share


def check(job: EvalJob, base: ModelSource) -> None:
    """Refuse now what ``measure`` would refuse only after the model to be measured has been made."""
    eval_config(job.window, (base,))
    pieces_of(job, base)
    base.sha256()


def require_one_vocabulary(base: Scorer | Reference, model: Scorer) -> None:
    """Raise ``DataError`` where the two do not have the same tokens."""
    theirs = model.tokenizer.get_vocab()
    same = (
        vocabulary_hash(theirs) == base.vocabulary
        if isinstance(base, Reference)
        else theirs == base.tokenizer.get_vocab()
    )
    if not same:
        raise DataError(f"{model.model_name} and {base.model_name} have different tokenizers")


def measure(
    base: Scorer,
    model: Scorer,
    job: EvalJob,
    progress: Progress | None = None,
    unfinished: Path | None = None,
) -> Measurement:
    """``model`` against ``base``. ``unfinished`` is a file for the results of an interrupted call; the same call goes
    on from there. Raises ``DataError`` where the text is too short."""
    require_one_vocabulary(base, model)
    setting, pieces = job.setting(base.source), pieces_of(job, base.source)
    seen = overlap(
        model.source.calibration, setting, pieces, base.tokenizer, allowed=job.allow_calibration_text
    )  # fmt: skip
    partial = None
    if unfinished is not None:
        partial = Partial(unfinished, measurement_key(setting, model, pieces), replaces=True)
    found = compare(base, model, pieces, progress, partial)
    return Measurement(card_of(found, setting, model, seen), found, pieces)


def card_of(found: Divergence, setting: Setting, model: Scorer, seen: float = 0.0, remark: str = "") -> QualityCard:
    """The card of a measurement of ``model``. ``seen``: the ``overlap`` with its calibration text. ``remark`` is added
    to its statement of scope."""
    record = model.source.calibration
    quantiles = found.kl.quantile(torch.tensor([0.5, 0.9], dtype=torch.float64))
    return QualityCard(
        base_name=setting.base_name,
        base_sha256=setting.base_sha256,
        data_name=setting.data_name,
        data_sha256=setting.data_sha256,
        tokens=found.tokens,
        window=setting.window,
        bos=setting.bos,
        model_sha256=model.source.sha256(),
        calibration_name="" if record is None else record.data_name,
        calibration_sha256="" if record is None else record.data_sha256,
        calibration_overlap=seen,
        perplexity_base=math.exp(float(found.base_nll.mean())),
        perplexity=math.exp(float(found.nll.mean())),
        kl_mean=float(found.kl.mean()),
        kl_median=float(quantiles[0]),
        kl_p90=float(quantiles[1]),
        top1_agreement=float(found.agree.mean()),
        kernel_path=kernel_path(model),
        created=datetime.now(UTC).date().isoformat(),
        versions=_versions(),
        scope="; ".join(filter(None, (_SCOPE, _cut(setting), remark))),
        intervals=intervals_of(metrics(found, setting)),
    )


def measurement_key(base: Setting, model: Scorer, pieces: Sequence[Piece]) -> str:
    """Everything a measurement depends on, so that it is never continued with the results of another."""
    stored = [item.name for item in fields(Divergence)]
    facts = [asdict(base), model.source.sha256(), kernel_path(model), _versions(), stored]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for piece in pieces:
        digest.update(f"{piece.first} {piece.unit} {piece.tokens.tolist()}".encode())
    return digest.hexdigest()


def kernel_path(model: Scorer) -> str:
    """The kernels that compute the model, for the card."""
    if not isinstance(model, Engine):
        return "transformers (dequantized; no native decoder)"
    isa = getattr(model.runner.decoder.executor, "isa", "torch") if isinstance(model.runner, DecoderRunner) else "torch"
    return f"{model.kernels} ({isa}, KV {model.config.kv_cache_dtype}, head {model.config.head})"


def _cut(setting: Setting) -> str:
    if setting.by == "document":
        return "each document by itself"
    return "" if setting.stride == setting.window else f"a window every {setting.stride:,} tokens"


def _versions() -> dict[str, str]:
    return {"qserve-llm": version("qserve-llm"), "torch": version("torch"), "python": platform.python_version()}
