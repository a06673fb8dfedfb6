"""The meaning of an option's text: sizes, lists, gates, the text to evaluate with. Raises ``UsageError``."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from qserve.checkpoint.errors import UsageError
from qserve.runtime.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from qserve.evals.gate import Gate
    from qserve.evals.quality import EvalJob

API_KEY_VARIABLES = ("QSERVE_API_KEY", "VLLM_API_KEY")  # the second as in vLLM
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_count(text: str | None) -> int | None:
    """``512MiB``, ``4GB`` or a plain number of bytes; None where the option is not given."""
    if text is None:
        return None
    number = text.rstrip("BKMGIbkmgi ")
    try:
        value = float(number) * _UNITS[text[len(number) :].strip().upper()]
    except (ValueError, KeyError):
        value = 0.0
    if not 1 <= value < 2**63:
        raise UsageError(f"a size must be like 512MiB or 4GB, not {text!r}")
    return int(value)


def integers(text: str, option: str) -> list[int]:
    """Positive integers, separated by commas."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise UsageError(f"{option} must be positive numbers with commas between, not {text!r}")
    return values


def numbers(text: str, option: str) -> list[float]:
    """Positive numbers, integers or not, separated by commas."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if not all(0 < value < float("inf") for value in values):
        raise UsageError(f"{option} must be positive numbers with commas between, not {text!r}")
    return values


def named_paths(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """``NAME=PATH`` each, no name twice."""
    pairs = [text.partition("=") for text in texts]
    for name, _, path in pairs:
        if not name or not path:
            raise UsageError(f"--lora must be like sql=adapters/sql, not {name + path!r:.100}")
    names = [name for name, _, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--lora names {twice[0]!r:.100} twice")
    return tuple((name, path) for name, _, path in pairs)


def speculative_config(text: str | None) -> SpeculativeConfig | None:
    """How tokens are drafted, as JSON; None where the option is not given, or is null."""
    if text is None:
        return None
    try:
        options = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--speculative-config is no JSON: {error}") from None
    if options is None:
        return None
    if not isinstance(options, dict):
        raise UsageError(f"--speculative-config is a JSON object, as {{\"method\": \"ngram\"}}, not {text:.80}")
    return SpeculativeConfig.of(options)


def cpu_list(text: str | None) -> tuple[int, ...] | None:
    """``0,2-3`` as taskset takes it: CPU numbers and ranges; None where the option is not given."""
    if text is None:
        return None
    cpus: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part)
        ends = [] if found is None else [int(number) for number in found.groups() if number is not None]
        if not ends or ends[0] > ends[-1]:
            raise UsageError(f"--cpu-list must be CPUs and ranges of them, as 0,2-3, not {text!r}")
        cpus += range(ends[0], ends[-1] + 1)
    return tuple(cpus)


def api_keys(given: Sequence[str] | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those of the command line; where there are none, the one of the environment. An empty one is left for the server
    to refuse: it must not be open to all by mistake."""
    found = [environ[name] for name in API_KEY_VARIABLES if name in environ]
    return tuple(given or found[:1])


def names(text: str) -> tuple[str, ...]:
    """Names, separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def gates(max_kl: float | None, max_ppl_increase: str | None, min_top1: str | None) -> list[Gate]:
    """The gates that are given; where none is, nothing is imported."""
    if max_kl is None and max_ppl_increase is None and min_top1 is None:
        return []
    from qserve.evals.gate import quality_gates

    return quality_gates(max_kl=max_kl, max_ppl_increase=max_ppl_increase, min_top1=min_top1)


def eval_job(
    data: str, tokens: int, window: int, by: str = "window", stride: int | None = None, *,
    allow_calibration_text: bool = False,
) -> EvalJob:  # fmt: skip
    """``tokens`` of the text named ``data``, in windows of ``window`` tokens, or by document."""
    from qserve.calibration.text import load_text
    from qserve.evals.quality import EvalJob

    if window < 2:
        raise UsageError("--window must be at least 2")
    if tokens < window:
        raise UsageError(f"--tokens {tokens} does not fill one --window of {window}")
    if by not in ("window", "document"):
        raise UsageError(f"--by knows window and document, not {by!r}")
    if stride is not None and not (1 <= stride <= window and by == "window"):
        raise UsageError(f"--stride must be 1..{window}, the --window, and goes with --by window alone")
    return EvalJob(
        load_text(data, "evaluate"), tokens, window, "window" if by == "window" else "document", stride,
        allow_calibration_text,
    )  # fmt: skip


def command_line() -> str:
    """This command line for reports, without the script's directory."""
    return shlex.join(["qserve", *sys.argv[1:]])
