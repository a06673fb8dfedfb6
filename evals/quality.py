"""How far a model is from its base, token by token: perplexity, KL divergence, top-1 agreement.

Both models are measured through the serving engine, so the numbers belong to the kernels that serve; or, in families
that it does not compute, both through transformers. Knows scorers and windows of tokens; does not know limits
(``gate``) or files.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Protocol

import torch
from torch import Tensor

from qserve.calibration.text import Text
from qserve.calibration.windows import evaluation_windows
from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import CheckpointError, DataError, UsageError
from qserve.checkpoint.source import ModelSource
from qserve.evals.worst import WorstTokens
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.rope import context_limit

Progress = Callable[[int, int], None]


class Scorer(Protocol):
    """What gives each token of a text its probability: an ``Engine``, or a ``TransformersScorer``."""

    source: ModelSource
    model_name: str
    vocab_size: int
    tokenizer: Any

    def score(self, tokens: list[int]) -> Iterator[tuple[int, Tensor]]:
        """``(position, float32 [n, vocab])``: row i holds the log-probabilities of the token at position + i + 1."""
        ...


@dataclass(frozen=True)
class EvalJob:
    """What to score: the first ``tokens`` tokens of ``text``, in consecutive windows of ``window`` tokens."""

    text: Text
    tokens: int = 16384
    window: int = 1024


@dataclass
class Divergence:
    """Per scored token, float64: negative log-likelihoods (nats), KL(base || model) (nats), same first choice."""

    base_nll: Tensor
    nll: Tensor
    kl: Tensor
    agree: Tensor

    @property
    def tokens(self) -> int:
        return len(self.nll)


def has_native_decoder(source: ModelSource) -> bool:
    try:
        decoder_config(source.config, source.name)
    except CheckpointError:
        return False
    return True


def eval_config(
    window: int, models: Sequence[ModelSource], *, kernels: str = "auto", threads: int | None = None
) -> EngineConfig:
    """An engine for scoring one window at a time: chunks as they are served, and no more KV cache than needed.

    Raises ``UsageError`` where a window does not fit the context of one of ``models``.
    """
    for model in models:
        context = _context(model)
        if window >= context:  # the engine adds a token to the prompt that it scores
            raise UsageError(f"--window {window} must be below the context of {model.name}, {context} tokens")
    return EngineConfig(max_model_len=window + 1, max_num_seqs=64, kernels=kernels, threads=threads)


def scorers(
    base: ModelSource, model: ModelSource, window: int, *, kernels: str = "auto", threads: int | None = None
) -> tuple[Scorer, Scorer]:
    """Both models, loaded: engines where both have a native decoder, else both by transformers.

    Raises ``UsageError`` where the window does not fit, or ``kernels`` are named for a family that uses none.
    """
    config = eval_config(window, (base, model), kernels=kernels, threads=threads)
    if has_native_decoder(base) and has_native_decoder(model):
        return Engine(base, config), Engine(model, config)
    if kernels != "auto":
        raise UsageError(f"--kernels {kernels}: {model.name} has no native decoder and is measured by transformers")
    if threads is not None:
        torch.set_num_threads(threads)
    from qserve.evals.transformers_scorer import TransformersScorer  # imports much of transformers

    return TransformersScorer(base), TransformersScorer(model)


def _context(model: ModelSource) -> float:
    if has_native_decoder(model):
        return context_limit(decoder_config(model.config, model.name))
    stated = model.config.get("max_position_embeddings")
    return stated if isinstance(stated, int) else math.inf


def compare(
    base: Scorer,
    model: Scorer,
    windows: Tensor,
    progress: Progress | None = None,
    worst: WorstTokens | None = None,
) -> Divergence:
    """Score ``windows`` int64 [n, length] with both scorers; tokens 2 .. length of each window count.

    Only one chunk of log-probabilities of each model is in memory. Raises ``CheckpointError`` where a model
    computes NaN.
    """
    if base.vocab_size != model.vocab_size:
        raise DataError(
            f"{base.model_name} has {base.vocab_size} tokens and {model.model_name} {model.vocab_size}: "
            "they cannot be compared token by token"
        )
    parts: list[tuple[Tensor, ...]] = []
    for number, window in enumerate(windows):
        tokens = window.tolist()
        for (start, p), (other, q) in zip(base.score(tokens), model.score(tokens), strict=True):
            if start != other or p.shape != q.shape:
                raise DataError("the two models are scored in different chunks: give them the same token budget")
            rows = min(len(p), len(tokens) - 1 - start)
            parts.append(_compare_rows(p[:rows], q[:rows], window[start + 1 : start + 1 + rows]))
            if worst is not None:
                worst.add(window, start, p[:rows], q[:rows], parts[-1][2])
        if progress:
            progress(number + 1, len(windows))
    result = Divergence(*(torch.cat(part) for part in zip(*parts)))
    for scorer, values in ((base, result.base_nll), (model, result.nll)):
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{scorer.model_name} computes NaN or infinity: the checkpoint is damaged")
        if float(values.mean()) > 700.0:  # exp of it would overflow
            raise CheckpointError(f"{scorer.model_name} gives the text no probability: the checkpoint is damaged")
    return result


def _compare_rows(p: Tensor, q: Tensor, following: Tensor) -> tuple[Tensor, ...]:
    """p, q float32 [n, vocab] log-probabilities; following int64 [n]."""
    index = following[:, None]
    kl = (p.exp() * (p - q)).sum(-1, dtype=torch.float64).clamp_min(0.0)
    return (
        -p.gather(1, index)[:, 0].double(),
        -q.gather(1, index)[:, 0].double(),
        kl,
        (p.argmax(-1) == q.argmax(-1)).double(),
    )


def windows_of(job: EvalJob, base: ModelSource) -> Tensor:
    """int64 [n, window]: what is scored. Raises ``DataError`` where the text is too short."""
    ids = base.tokenizer()(job.text.text, add_special_tokens=False, verbose=False)["input_ids"]
    return evaluation_windows(ids, job.tokens, job.window)


def check(job: EvalJob, base: ModelSource) -> None:
    """Refuse now what ``measure`` would refuse after the work of making the model to be measured."""
    eval_config(job.window, (base,))
    windows_of(job, base)
    base.sha256()


def measure(
    base: Scorer,
    model: Scorer,
    job: EvalJob,
    progress: Progress | None = None,
    worst: WorstTokens | None = None,
) -> QualityCard:
    """The card of ``model`` against ``base``; ``worst`` is shown every token. Raises ``DataError`` where the text is
    too short."""
    if model.tokenizer.get_vocab() != base.tokenizer.get_vocab():
        raise DataError(f"{model.model_name} and {base.model_name} have different tokenizers")
    found = compare(base, model, windows_of(job, base.source), progress, worst)
    return card_of(found, base.source, job, _kernel_path(model))


def card_of(found: Divergence, base: ModelSource, job: EvalJob, kernel_path: str) -> QualityCard:
    quantiles = found.kl.quantile(torch.tensor([0.5, 0.9], dtype=torch.float64))
    return QualityCard(
        base_name=base.name,
        base_sha256=base.sha256(),
        data_name=job.text.name,
        data_sha256=job.text.sha256,
        tokens=found.tokens,
        window=job.window,
        perplexity_base=math.exp(float(found.base_nll.mean())),
        perplexity=math.exp(float(found.nll.mean())),
        kl_mean=float(found.kl.mean()),
        kl_median=float(quantiles[0]),
        kl_p90=float(quantiles[1]),
        top1_agreement=float(found.agree.mean()),
        kernel_path=kernel_path,
        created=datetime.now(UTC).date().isoformat(),
        versions={"qserve-llm": version("qserve-llm"), "torch": version("torch"), "python": platform.python_version()},
        scope="next-token distributions on one English text; says nothing of other languages or of long contexts",
    )


def _kernel_path(model: Scorer) -> str:
    if not isinstance(model, Engine):
        return "transformers (dequantized; no native decoder)"
    isa = getattr(model.executor, "isa", "torch")
    return f"{model.executor.name} ({isa}, KV {model.config.kv_cache_dtype}, head {model.config.head})"
