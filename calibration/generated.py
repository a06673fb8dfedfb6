"""``generated_windows``: calibration text that the model writes itself, as in arXiv 2410.17170 and 2305.17888."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qserve.checkpoint.cache_dir import cache_dir
from qserve.checkpoint.errors import CapacityError, DataError, UsageError
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.tokenizer import leading_tokens
from qserve.runtime.backend_choice import backend_for
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams

_AT_ONCE = 64

Progress = Callable[[int, int], None]


def generated_windows(source: ModelSource, samples: int, length: int, seed: int, progress: Progress) -> Tensor:
    """int64 [samples, length]: each begins as requests do, goes on with a token drawn from the whole vocabulary, and
    then as the model draws, at temperature 1. So it covers what the model knows.

    ``progress(done, total)`` counts tokens. The same call finds its windows in the user's cache: a run that resumes
    does not write them again. Raises ``DataError`` where the model cannot be run here.
    """
    tokenizer = source.tokenizer()
    leading = leading_tokens(tokenizer)
    if length < len(leading) + 2:
        raise DataError(f"windows of {length} tokens leave no room to write in; raise --sequence-length")
    asked = json.dumps([source.sha256(), samples, length, seed, leading])
    path = cache_dir() / "calibration" / f"{hashlib.sha256(asked.encode()).hexdigest()}.safetensors"
    if (kept := _kept(path, samples, length)) is not None:
        return kept
    vocabulary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, len(vocabulary), (samples,), generator=generator).tolist()
    prompts: list[str | list[int]] = [[*leading, vocabulary[each]] for each in drawn]
    windows = _continued(source, prompts, length, seed, progress)
    _keep(path, windows)
    return windows


def writing_bytes(source: ModelSource, length: int) -> int:
    """The memory that ``generated_windows`` needs beside this process and the files of the checkpoint. Raises
    ``DataError`` where the model cannot be run here."""
    with _said(source):
        plan = backend_for(source, _config(length)).plan(source, _config(length))
    return plan.weights + plan.workspace + plan.kv_cache


def _config(length: int) -> EngineConfig:
    return EngineConfig(
        max_model_len=length, max_num_seqs=_AT_ONCE, enable_prefix_caching=False, generation_config="vllm"
    )


@contextmanager
def _said(source: ModelSource) -> Iterator[None]:
    """What keeps the model from running is said of its calibration text."""
    try:
        yield
    except (CapacityError, UsageError) as error:
        raise DataError(
            f"{source.name} cannot be run here, so it cannot write its calibration text: {error}; give --calibration a "
            "text file, a dataset or builtin"
        ) from None


def _continued(
    source: ModelSource, prompts: list[str | list[int]], length: int, seed: int, progress: Progress
) -> Tensor:
    with _said(source):
        engine = Engine(source, _config(length))
    first = len(prompts[0])
    params = [
        SamplingParams(max_tokens=length - first, temperature=1.0, ignore_eos=True, seed=(seed + number) % 2**63)
        for number in range(len(prompts))
    ]
    written = [list(prompt) for prompt in prompts]
    done, total = 0, len(prompts) * (length - first)
    try:
        for output in engine.generate(prompts, params):
            if output.error is not None:
                raise DataError(f"{source.name} cannot write its calibration text: {output.error}")
            written[int(output.request_id)] += output.token_ids
            done += len(output.token_ids)
            progress(done, total)
    finally:
        engine.close()
    return torch.tensor(written, dtype=torch.int64)


def _kept(path: Path, samples: int, length: int) -> Tensor | None:
    try:
        windows = load_file(path)["windows"]
    except (OSError, KeyError, SafetensorError):
        return None
    return windows if windows.shape == (samples, length) and windows.dtype == torch.int64 else None


def _keep(path: Path, windows: Tensor) -> None:
    """A cache that cannot be written keeps nothing."""
    with suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        save_file({"windows": windows}, part)
        part.replace(path)
