"""``LoraAdapter``: a LoRA adapter in PEFT's layout, read whole: for some linears W of a model the matrices A and B of
``W + scale * B A`` (Hu et al., arXiv 2106.09685).

What PEFT can save and is not computed here is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.container import DTYPES
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.safetensors_index import StoredTensor, read_header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_MAX_CONFIG = 1 << 20
_MAX_PATTERN = 200  # characters
# Patterns are regular expressions of whoever made the adapter. These bounds keep the time of a match short: a repeated
# group, or many repetitions, can take minutes on a name of thirty characters.
_MAX_REPEATS, _MAX_REPEATING = 2, 16
_REPEAT, _REPEATED_GROUP = re.compile(r"[*+?{]"), re.compile(r"[)][*+?{]")
_FLOATS = ("F32", "F16", "BF16")
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])(\.default)?\.weight")
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change the base, too
}
"""Keys of the configuration, and the values with which an adapter only adds ``scale * B A``."""


@dataclass(frozen=True)
class LoraWeight:
    """What is added to a linear [out, in]: ``scale * b @ a``; a [rank, in], b [out, rank], as stored."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)

    def delta(self) -> Tensor:
        """float32 [out, in]."""
        return self.scale * (self.b.float() @ self.a.float())


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter. ``modules``: by the name of the linear. ``sha256``: of both files, so equal ones give equal answers.
    ``transposed``: the base stores its linears [in, out] (PEFT's ``fan_in_fan_out``)."""

    path: Path
    sha256: str
    modules: dict[str, LoraWeight]
    transposed: bool = False

    @cached_property
    def rank(self) -> int:
        """The highest of its linears."""
        return max(weight.rank for weight in self.modules.values())


def read_adapter(
    path: Path, shapes: Mapping[str, tuple[int, int]], *, max_rank: int, as_stored: bool = False
) -> LoraAdapter:
    """Read the directory ``path``. ``shapes``: [out, in] of each linear of the base that can have an adapter; so they
    and ``max_rank`` bound what is read. ``as_stored``: they are [in, out] where the adapter says that its base is so.

    Raises ``CheckpointError`` for files that are missing or damaged, that hold something else than LoRA of these
    linears, or a higher rank.
    """
    if not os.path.isdir(path):  # a name that is too long names none, too
        raise CheckpointError(f"{path} is no directory; a LoRA adapter is one with {CONFIG} and {WEIGHTS}")
    content = _read_config(path / CONFIG)
    config = _parse_config(path / CONFIG, content)
    if not (path / WEIGHTS).exists():
        if (path / "adapter_model.bin").exists():
            raise CheckpointError(
                f"{path / 'adapter_model.bin'} is pickled, which can run code and is not read; save it as safetensors"
            )
        raise CheckpointError(f"{path} lacks {WEIGHTS}; is it a PEFT adapter?")
    stored = _pairs(path / WEIGHTS)
    scales: dict[str, float] = {}
    for module, (a, b) in stored.items():
        if module not in shapes:
            raise CheckpointError(f"{path} adapts {module}, which is no linear of this model that can have an adapter")
        out, inp = shapes[module][::-1] if as_stored and config.get("fan_in_fan_out") else shapes[module]
        rank = _pattern(config, "rank_pattern", module, "r")
        alpha = _pattern(config, "alpha_pattern", module, "lora_alpha")
        if rank > max_rank:
            raise CheckpointError(f"{path}: {module} has rank {rank:g}, the limit is {max_rank}; raise --max-lora-rank")
        if a.shape != (rank, inp) or b.shape != (out, rank):
            raise CheckpointError(
                f"{path}: {module} has matrices {list(a.shape)} and {list(b.shape)}; for rank {rank:g} this model "
                f"takes {[int(rank), inp]} and {[out, int(rank)]}"
            )
        scales[module] = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    data = _read(path / WEIGHTS)
    modules = {
        module: LoraWeight(_tensor(data, a), _tensor(data, b), scales[module]) for module, (a, b) in stored.items()
    }
    for module, weight in modules.items():
        if not (weight.a.isfinite().all() and weight.b.isfinite().all()):
            raise CheckpointError(f"{path}: {module} holds numbers that are not finite")
    return LoraAdapter(
        path, hashlib.sha256(content + data).hexdigest(), modules, bool(config.get("fan_in_fan_out"))
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _read_config(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_CONFIG:
            raise CheckpointError(f"{path} has more than {_MAX_CONFIG:,} bytes; is it a PEFT configuration?")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; is it a PEFT adapter?") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    return _read(path)


def _parse_config(path: Path, content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not valid JSON; fetch or write it again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(config).__name__}")
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {config.get('peft_type')!r:.80}; only LORA is served")
    for key, plain in _REFUSED.items():
        if (value := config.get(key)) not in plain:
            raise CheckpointError(f"{path} has {key} {value!r:.80}, which is not served; train without it, or merge it")
    for key in ("r", "lora_alpha"):
        _require_number(path, key, config.get(key))
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(f"{path}: {name} must be an object")
        if sum(_REPEAT.search(pattern) is not None for pattern in patterns) > _MAX_REPEATING:
            raise CheckpointError(f"{path}: {name} has over {_MAX_REPEATING} patterns that repeat; name the linears")
        for pattern, value in patterns.items():
            _require_number(path, f"{name} of {pattern!r:.80}", value)
            try:
                if len(pattern) > _MAX_PATTERN or not _is_simple(pattern):
                    raise ValueError
                re.compile(_whole(pattern))
            except (ValueError, re.error):
                raise CheckpointError(f"{path}: {name} has {pattern!r:.80}, no simple regular expression") from None
    return config


def _is_simple(pattern: str) -> bool:
    return len(_REPEAT.findall(pattern)) <= _MAX_REPEATS and _REPEATED_GROUP.search(pattern) is None


def _require_number(path: Path, what: str, value: Any) -> None:
    """``lora_alpha`` may be a fraction, and a rank that is one matches no matrix."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise CheckpointError(f"{path}: {what} must be a positive number, not {value!r:.80}")


def _whole(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _pattern(config: Mapping[str, Any], patterns: str, module: str, default: str) -> float:
    """The number of the first of ``patterns`` that ends the name of ``module``, as PEFT finds it."""
    found = (value for pattern, value in (config.get(patterns) or {}).items() if re.match(_whole(pattern), module))
    return next(found, config[default])  # type: ignore[no-any-return]


def _pairs(path: Path) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """A and B of each linear."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in read_header(path).items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{path} holds {name!r:.200}, which is no LoRA matrix of a linear and is not served")
        if stored.dtype not in _FLOATS or stored.nbytes != stored.numel * DTYPES[stored.dtype].itemsize:
            raise CheckpointError(f"{path}: {name} is stored as {stored.dtype}; served are {', '.join(_FLOATS)}")
        matrices = found.setdefault(match["module"], {})
        if match["matrix"] in matrices:
            raise CheckpointError(f"{path} holds lora_{match['matrix']} of {match['module']} twice")
        matrices[match["matrix"]] = stored
    for module, matrices in found.items():
        if len(matrices) < 2:
            raise CheckpointError(f"{path} holds only lora_{next(iter(matrices))} of {module}; write it again")
    if not found:
        raise CheckpointError(f"{path} holds no LoRA matrix")
    return {module: (matrices["A"], matrices["B"]) for module, matrices in found.items()}


def _tensor(data: bytes, stored: StoredTensor) -> Tensor:
    held = bytearray(data[stored.offset : stored.offset + stored.nbytes])
    if len(held) < stored.nbytes:
        raise CheckpointError(f"{stored.file} was cut short while it was read; fetch or write it again")
    return torch.frombuffer(held, dtype=DTYPES[stored.dtype]).reshape(stored.shape)
