"""``MoeConfig``: the experts of a decoder and how its routers choose among them."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import Experts
from qserve.kernels.ops import Function


@dataclass(frozen=True)
class MoeConfig:
    """Experts of ``inner`` numbers, of which each token takes ``top_k``. The fields that ``Route`` has too are its own.

    Attributes:
        sparse: for each layer whether it has experts.
        shared: the width of the feed-forward that every token takes besides; 0 where there is none.
        shared_gate: this feed-forward is behind a gate.
        score_bias: the routers have a bias for each expert.
        biases: the experts have biases.
        function: of their gates.
    """

    sparse: tuple[bool, ...]
    count: int
    top_k: int
    inner: int
    shared: int
    shared_gate: bool
    score_bias: bool
    biases: bool
    function: Function
    sigmoid: bool
    renormalize: bool
    groups: int
    top_groups: int
    group_best: int
    scale: float


def moe_config(hf: PretrainedConfig, experts: Experts, name: str) -> MoeConfig:
    """Raises ``CheckpointError`` where the numbers contradict each other."""
    count = next(int(getattr(hf, key)) for key in experts.count if getattr(hf, key, None) is not None)
    top_k = int(getattr(hf, experts.top_k))
    groups, top_groups = (
        int(getattr(hf, key, None) or 1) if experts.groups else 1 for key in ("n_group", "topk_group")
    )
    if count % groups or top_groups > groups:
        raise CheckpointError(f"{name}: {count} experts cannot form {groups} groups, of which {top_groups} are chosen")
    if not 1 <= top_k <= count // groups * top_groups or (groups > 1 and count // groups < experts.group_best):
        raise CheckpointError(
            f"{name}: a token cannot take {top_k} experts of {top_groups} of {groups} groups of {count}"
        )
    inner, shared = int(getattr(hf, experts.inner)), 0
    if experts.shared_count:
        shared = inner * int(getattr(hf, experts.shared_count, None) or 0)
    if experts.shared_inner:
        shared = int(getattr(hf, experts.shared_inner))
    return MoeConfig(
        sparse=experts.sparse(hf.to_dict(), hf.num_hidden_layers),
        count=count,
        top_k=top_k,
        inner=inner,
        shared=shared,
        shared_gate=experts.shared_gate,
        score_bias=experts.score_bias,
        biases=experts.biases,
        function=experts.function,
        sigmoid=experts.sigmoid,
        renormalize=bool(hf.norm_topk_prob) if experts.renormalize is None else experts.renormalize,
        groups=groups,
        top_groups=top_groups,
        group_best=experts.group_best,
        scale=float(getattr(hf, experts.scale)) if experts.scale else 1.0,
    )
