"""Tables of rotary position embeddings (Su et al., 2021) with the scalings that checkpoints ask for."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qserve.checkpoint.errors import CheckpointError
from qserve.runtime.models.config import DecoderConfig

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def rope_type(config: DecoderConfig) -> str:
    parameters = config.hf.rope_parameters
    kind = str(parameters.get("rope_type", "default"))
    if kind not in SCALINGS:
        raise CheckpointError(f"RoPE scaling {kind!r} is not served; known are {', '.join(SCALINGS)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0 and not config.family.partial_rotary:
        raise CheckpointError(f"a partial rotary factor is not served for {config.model_type} models")
    return kind


def context_limit(config: DecoderConfig) -> int:
    """Positions that the tables may cover.

    The dynamic scaling changes every frequency once a sequence outgrows ``max_position_embeddings``, so that keys in
    the cache would have to be rotated again. Up to that length it is plain RoPE, so that length is the limit.
    """
    return config.max_position_embeddings


def rope_tables(config: DecoderConfig, positions: int) -> tuple[Tensor, Tensor]:
    """(cosine, sine), each float32 [positions, rotary_dim / 2].

    LongRoPE (arXiv 2402.13753) has one set of frequencies for sequences up to the length of the first training, and one
    for longer ones. Cached keys are rotated once, so all sequences use the same set: the second where ``positions``
    exceeds that length.
    """
    kind = rope_type(config)
    scale = 1.0
    if kind == "default":
        parameters = config.hf.rope_parameters
        rotary_dim = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        frequencies = 1.0 / (parameters["rope_theta"] ** exponents)
    else:
        length = positions if kind == "longrope" else None
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config.hf, torch.device("cpu"), seq_len=length)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies.float()
    return (angles.cos() * scale).contiguous(), (angles.sin() * scale).contiguous()
