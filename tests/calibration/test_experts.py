"""Experts one by one against transformers' own modules, which compute them together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qserve.calibration import blocks
from qserve.calibration.blocks import walk
from qserve.calibration.experts import Experts, routers, split_experts
from qserve.calibration.skeleton import Skeleton
from qserve.calibration.stored_names import stored_names
from qserve.calibration.visit import Gather, Inputs, Replacement
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.source import open_model

Saved = Callable[[str], Path]
# The module that holds the experts in transformers, and the names of gate, up and down in the files.
NAMES = {
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen2_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize("family", NAMES)
def test_the_sum_over_experts_is_that_of_transformers(family: str, saved_model: Saved) -> None:
    path = saved_model(family)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()
    fused = model.model.layers[1].mlp.experts
    owner, names = NAMES[family]
    experts = Skeleton(open_model(path)).load(1).get_submodule(owner)
    assert isinstance(experts, Experts) and experts.count == 4
    assert [name for name, _ in experts.get_submodule("3").named_children()] == list(names)
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    # 4 stands for no expert; expert 1 gets no token.
    index = torch.tensor([[0, 2], [3, 0], [2, 4], [4, 4], [3, 2]]).repeat(10, 1)
    weights = torch.rand(50, 2, generator=torch.Generator().manual_seed(1))
    ran: list[str] = []
    for name, expert in experts.named_children():
        expert.register_forward_pre_hook(lambda module, args, name=name: ran.append(name))
    with torch.no_grad():
        found, expected = experts(hidden, index, weights), fused(hidden, index, weights)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert bool((found[3] == 0).all()) and bool((found[0] != 0).all())
    assert ran == ["0", "2", "3"]


def test_every_expert_sees_its_own_tokens(
    saved_model: Saved, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of them only where the walk wants that."""
    monkeypatch.setattr(blocks, "reach_every_expert", lambda block, tokens: None)
    path = saved_model("mixtral")
    chosen: list[torch.Tensor] = []
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    with torch.no_grad():
        model(tokens)
    seen: dict[str, int] = {}

    def note(inputs: Inputs) -> Replacement:
        seen.update(dict.fromkeys(inputs.names, inputs.stats.tokens if inputs.stats else 0))
        return Replacement(inputs.weights)

    next(walk(Skeleton(open_model(path)), tokens)).replace(note, Gather(hessian=False))
    for index, count in enumerate(chosen[0].flatten().bincount(minlength=4).tolist()):
        for name in ("w1", "w3", "w2"):
            assert seen[f"model.layers.0.block_sparse_moe.experts.{index}.{name}"] == count
    assert sum(seen[f"model.layers.0.block_sparse_moe.experts.{index}.w2"] for index in range(4)) == 2 * tokens.numel()


def test_experts_that_are_stored_together_are_refused(saved_model: Saved) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(saved_model("qwen3_moe"))
    with pytest.raises(UsageError, match="not stored one by one"):
        split_experts(model, stored_names(model, model.state_dict()))
    source = open_model(saved_model("qwen3_moe"))
    model.model.layers[1].mlp.experts.is_transposed = True
    with pytest.raises(UsageError, match=r"cannot be taken apart \(is_transposed"):
        split_experts(model, stored_names(model, source.names()))


def test_a_router_is_what_decides_between_experts() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decide = nn.Linear(8, 4)
            self.share = nn.Linear(8, 1)
            self.project = nn.Linear(8, 8)
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.norm = nn.LayerNorm(4)

    block = nn.Sequential(Mixture(), nn.Linear(8, 4), nn.Linear(8, 1))
    assert routers(block) == ["0.decide", "0.share"]
