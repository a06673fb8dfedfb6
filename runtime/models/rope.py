"""Tables of rotary position embeddings (Su et al., 2021) with the scalings that checkpoints ask for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qserve.checkpoint.errors import CheckpointError
from qserve.runtime.models.config import DecoderConfig

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def _checked(config: DecoderConfig, kind: str | None) -> dict[str, Any]:
    """The parameters of layers of ``kind``. Raises ``CheckpointError`` where they are not served."""
    given = config.hf.rope_parameters if kind is None else config.hf.rope_parameters[kind]
    parameters = {"rope_type": "default", **given}
    if (scaling := parameters["rope_type"]) not in SCALINGS:
        raise CheckpointError(f"RoPE scaling {scaling!r} is not served; known are {', '.join(SCALINGS)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0 and not config.family.partial_rotary:
        raise CheckpointError(f"a partial rotary factor is not served for {config.model_type} models")
    return parameters


def context_limit(config: DecoderConfig) -> int:
    """Positions that the tables may cover.

    The dynamic scaling changes every frequency once a sequence outgrows ``max_position_embeddings``, so that keys in
    the cache would have to be rotated again. Up to that length it is plain RoPE, so that length is the limit.
    """
    return config.max_position_embeddings


def rope_tables(config: DecoderConfig, kind: str | None, positions: int) -> tuple[Tensor, Tensor]:
    """(cosine, sine) of the layers of ``kind`` (of ``rope_kinds``), each float32 [positions, rotary_dim / 2].

    LongRoPE (arXiv 2402.13753) has one set of frequencies for sequences up to the length of the first training, and one
    for longer ones. Cached keys are rotated once, so all sequences use the same set: the second where ``positions``
    exceeds that length.
    """
    if not any(config.rotated):
        return torch.empty(positions, 0), torch.empty(positions, 0)
    parameters, scale = _checked(config, kind), 1.0
    if (scaling := parameters["rope_type"]) == "default":
        rotary_dim = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        frequencies = 1.0 / (parameters["rope_theta"] ** exponents)
    else:
        length = positions if scaling == "longrope" else None
        initial = ROPE_INIT_FUNCTIONS[scaling]
        frequencies, scale = initial(config.hf, torch.device("cpu"), seq_len=length, layer_type=kind)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies.float()
    return (angles.cos() * scale).contiguous(), (angles.sin() * scale).contiguous()


def query_scale(config: DecoderConfig, positions: int) -> Tensor | None:
    """float32 [positions], by which queries are multiplied; None where they are not."""
    if not config.family.scaled_queries:
        return None
    parameters = config.hf.rope_parameters
    length, beta = (float(parameters[key]) for key in ("original_max_position_embeddings", "llama_4_scaling_beta"))
    steps = (torch.arange(positions, dtype=torch.float32) / length).floor()
    return 1 + beta * (1 + steps).log()
