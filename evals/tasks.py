"""Tasks of lm-eval on this engine, in this process: the answers that it asks of a model, and its figures side by side.

The tasks are lm-eval's own or YAML files. lm-eval is optional and imported where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.errors import DataError, QServeError, UsageError
from qserve.checkpoint.tokenizer import leading_tokens, plain_tokens
from qserve.evals.bootstrap import standard_error
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams

INSTALL = 'tasks are run by lm-eval, which is not installed: pip install "qserve-llm[evals]"'
_MOST_TOKENS = 256  # of an answer, where the task sets no limit
_MOST_STOPS = 4
_Z = 1.959964


class Answers:
    """The answers that lm-eval asks of a model, by an engine that serves nobody else. ``tell`` is called after each."""

    def __init__(self, engine: Engine, tell: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._tell = tell
        # The engine adds a token to the prompt that it scores.
        self._context = engine.max_model_len - 1

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Natural logarithm of the probability of ``continuation`` after ``context``, and whether each of its tokens
        is the likeliest. A text that does not fit the model's context is cut at its left."""
        engine = self._engine
        stripped = context.rstrip()  # spaces belong to the token that follows them
        whole = engine.encode(context + continuation)
        start = len(engine.encode(stripped))
        if not context:
            whole, start = [self._start(), *plain_tokens(engine.tokenizer, continuation)], 1
        if start >= len(whole):
            raise DataError(f"the continuation {continuation!r} has no token of its own after {context[-40:]!r}")
        cut = max(0, len(whole) - self._context)
        if cut >= start:
            raise DataError(f"a continuation of {len(whole) - start:,} tokens does not fit {self._context:,}")
        whole, start = self._cut(whole, cut), start - cut
        total, greedy = self._score(whole, start)
        self._tell()
        return total, greedy

    def rolling(self, text: str) -> float:
        """The log-likelihood of a whole text, each token once, in parts where it is longer than the model's context.
        Parts after the first begin half a context before the first token that they score."""
        tokens = [self._start(), *plain_tokens(self._engine.tokenizer, text)]
        total, done = 0.0, 1
        while done < len(tokens):
            begin = 0 if done == 1 else max(0, done - self._context // 2)
            end = min(len(tokens), begin + self._context)
            total += self._score(self._cut(tokens[:end], begin), done - begin)[0]
            done = end
        self._tell()
        return total

    def generate(self, prompts: Sequence[str], settings: Sequence[dict[str, Any]]) -> list[str]:
        """Texts up to a stop string, greedy where the task does not say otherwise; all prompts together, batched."""
        params = [_params(each) for each in settings]
        room = [self._engine.max_model_len - (each.max_tokens or 0) for each in params]
        encoded: list[str | list[int]] = [
            self._cut(tokens, max(0, len(tokens) - max(1, limit)))
            for tokens, limit in zip(map(self._engine.encode, prompts), room)
        ]
        texts = [""] * len(prompts)
        for output in self._engine.generate(encoded, params):
            texts[int(output.request_id)] += output.text
            if output.finish_reason is not None:
                self._tell()
        return [_until(text, _stops(each)) for text, each in zip(texts, settings)]

    def _cut(self, tokens: list[int], count: int) -> list[int]:
        """Without ``count`` tokens at its left. It still begins as requests do."""
        leading = leading_tokens(self._engine.tokenizer) if count else []
        return [*leading, *tokens[count + len(leading) :]]

    def _start(self) -> int:
        """The token that stands before a text without context."""
        tokenizer = self._engine.tokenizer
        token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if token is None:
            raise DataError(f"{self._engine.model_name} has no token to begin a text with")
        return int(token)

    def _score(self, tokens: list[int], start: int) -> tuple[float, bool]:
        """The log-likelihood of the tokens from ``start`` on, and whether each is the likeliest."""
        total, greedy = 0.0, True
        ids = torch.tensor(tokens)
        for position, rows in self._engine.score(tokens):
            low, high = max(start, position + 1), min(len(tokens), position + 1 + len(rows))
            if low >= high:
                continue
            chosen: Tensor = rows[low - position - 1 : high - position - 1]
            target = ids[low:high]
            total += float(chosen.gather(1, target[:, None]).double().sum())
            greedy = greedy and bool((chosen.argmax(-1) == target).all())
        return total, greedy


def _params(settings: dict[str, Any]) -> SamplingParams:
    """lm-eval's ``gen_kwargs`` as ours. Raises ``DataError`` for one that has no meaning here."""
    known = {key: value for key, value in settings.items() if key != "until"}
    sample = known.pop("do_sample", None)
    temperature = float(known.pop("temperature", 0.0))
    limit = next((int(known.pop(key)) for key in ("max_gen_toks", "max_new_tokens", "max_tokens") if key in known),
                 _MOST_TOKENS)  # fmt: skip
    top_p = float(known.pop("top_p", 1.0))
    if known:
        raise DataError(f"a task asks for {', '.join(sorted(known))} in generation_kwargs, which is not known here")
    return SamplingParams(
        max_tokens=limit, temperature=0.0 if sample is False else temperature, top_p=top_p, seed=0,
        stop=_stops(settings)[:_MOST_STOPS],
    )  # fmt: skip


def _stops(settings: dict[str, Any]) -> tuple[str, ...]:
    until = settings.get("until") or ()
    return tuple(each for each in ([until] if isinstance(until, str) else until) if each)


def _until(text: str, stops: Sequence[str]) -> str:
    """Cut at the first stop string: an engine watches for a few, and a task may have more."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


@dataclass(frozen=True)
class TaskResult:
    """One figure of one task: the mean and its standard error, and a number for each document where there is one."""

    task: str
    metric: str
    value: float
    stderr: float | None
    higher_is_better: bool
    documents: tuple[float, ...]


@dataclass(frozen=True)
class Compared:
    """The same figure of two models. ``difference`` is model less base, with the standard error of the mean of the
    documents' differences, which is smaller than that of two independent runs. It is None without documents."""

    base: TaskResult | None
    model: TaskResult

    @property
    def difference(self) -> float | None:
        return None if self.base is None else self.model.value - self.base.value

    @property
    def stderr(self) -> float | None:
        if self.base is None or not self.model.documents or len(self.base.documents) != len(self.model.documents):
            return None
        return standard_error([own - other for own, other in zip(self.model.documents, self.base.documents)])

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the difference."""
        return None if self.stderr is None else _Z * self.stderr


def half_width(result: TaskResult) -> float | None:
    """Half of the 95 % interval of one model's figure."""
    return None if result.stderr is None else _Z * result.stderr


def require_lm_eval() -> None:
    """Raise ``QServeError`` that names what to install where lm-eval is missing."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise QServeError(INSTALL) from None


def run_tasks(
    engine: Engine, tasks: Sequence[str], directory: Path | None, limit: int | None,
    progress: Callable[[int, int], None],
) -> list[TaskResult]:  # fmt: skip
    """lm-eval's figures for ``tasks``, which may be among the YAML files in ``directory``; ``limit``: documents of
    each. Raises ``UsageError`` for a task that does not exist."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    done = total = 0

    def tell() -> None:
        nonlocal done
        done += 1
        progress(min(done, total), total)

    answers = Answers(engine, tell)

    class Adapter(LM):  # type: ignore[misc]
        """lm-eval's interface; each request holds its arguments as a tuple."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            self._more(requests)
            return [answers.loglikelihood(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            self._more(requests)
            return [answers.rolling(*request.args) for request in requests]

        def generate_until(self, requests: list[Any]) -> list[str]:
            self._more(requests)
            return answers.generate([each.args[0] for each in requests], [each.args[1] for each in requests])

        def _more(self, requests: list[Any]) -> None:
            nonlocal total
            total += len(requests)

    manager = TaskManager(include_path=None if directory is None else str(directory))
    if missing := [task for task in tasks if not manager.match_tasks([task])]:
        where = "" if directory is None else f" and {directory}"
        raise UsageError(f"--tasks: lm-eval{where} has no task {', '.join(missing)}")
    found = simple_evaluate(
        model=Adapter(), tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=1000, log_samples=True
    )
    return results_of(found)


def results_of(found: Any) -> list[TaskResult]:
    """The return value of ``simple_evaluate``, task by task; names show filters other than the first."""
    results = []
    for task, figures in found["results"].items():
        samples = sorted(found.get("samples", {}).get(task, []), key=lambda sample: sample["doc_id"])
        for key, value in figures.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float) or math.isnan(value):
                continue
            own = [each[metric] for each in samples if metric in each and each.get("filter", chosen) == chosen]
            numeric = all(isinstance(each, int | float) for each in own)
            documents = tuple(map(float, own)) if numeric else ()
            # Only then is the figure the mean of its documents, and the difference the mean of their differences.
            if documents and not math.isclose(sum(documents) / len(documents), value, rel_tol=1e-6, abs_tol=1e-9):
                documents = ()
            error = figures.get(f"{metric}_stderr,{chosen}")
            better = found.get("higher_is_better", {}).get(task, {}).get(metric, True)
            name = metric if chosen == "none" else f"{metric} ({chosen})"
            stderr = float(error) if isinstance(error, int | float) and not math.isnan(error) else None
            results.append(TaskResult(task, name, float(value), stderr, bool(better), documents))
    return results
