"""Routing and experts: the reference against transformers, the kernels against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts, Glm4MoeTopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from qserve.kernels.ops import Executor, Experts, Op, Route, SigmoidMul, Step
from qserve.kernels.reference import ReferenceExecutor

WIDTH, INNER, COUNT = 48, 40, 6


def run(ops: list[Op], rows: int, executor: Executor | None = None) -> None:
    program = (executor or ReferenceExecutor()).program(rows)
    program.add(ops)
    ids = torch.arange(rows, dtype=torch.int32)
    starts = torch.tensor([0, rows], dtype=torch.int32)
    program.run(Step(ids, ids, ids, starts, torch.zeros(1, 1, dtype=torch.int32), ids[:0]))


def route(logits: Tensor, top_k: int, **rest: Any) -> Route:
    shape = len(logits), top_k
    return Route(logits, torch.full(shape, -1, dtype=torch.int32), torch.full(shape, torch.nan), **rest)


def glm(**changes: Any) -> Any:
    given = {
        "hidden_size": WIDTH, "moe_intermediate_size": INNER, "n_routed_experts": COUNT, "num_experts_per_tok": 2,
        "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True, **changes,
    }  # fmt: skip
    return AutoConfig.for_model("glm4_moe", **given)


def test_routing_by_softmax_is_that_of_mixtral() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", hidden_size=WIDTH, num_local_experts=5, num_experts_per_tok=3)
    router, x = MixtralTopKRouter(config), torch.randn(31, WIDTH)
    torch.nn.init.normal_(router.weight)
    logits, weights, experts = router(x)
    op = route(logits.detach(), 3, renormalize=True)
    run([op], len(x))
    assert torch.equal(op.experts.long(), experts)
    torch.testing.assert_close(op.weights, weights)
    plain = replace(op, renormalize=False)
    run([plain], len(x))
    torch.testing.assert_close(plain.weights, logits.softmax(-1).gather(-1, experts))


@pytest.mark.parametrize("changes", [{}, {"n_group": 1, "topk_group": 1}, {"norm_topk_prob": False}])
def test_routing_by_sigmoid_with_groups_is_that_of_glm(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = glm(**changes)
    router, x = Glm4MoeTopkRouter(config), torch.randn(31, WIDTH)
    torch.nn.init.normal_(router.weight, std=0.2)
    router.e_score_correction_bias.copy_(torch.randn(COUNT))
    logits, weights, experts = router(x)
    op = route(
        logits.detach(), 2, bias=router.e_score_correction_bias, sigmoid=True, renormalize=config.norm_topk_prob,
        groups=config.n_group, top_groups=config.topk_group, scale=2.5,
    )  # fmt: skip
    run([op], len(x))
    order, expected = op.experts.long().argsort(-1), experts.argsort(-1)  # that of transformers is not defined
    assert torch.equal(op.experts.long().gather(-1, order), experts.gather(-1, expected))
    torch.testing.assert_close(op.weights.gather(-1, order), weights.gather(-1, expected))
    for change in ({"bias": None}, {"sigmoid": False}, {"scale": 1.0}, {"renormalize": not op.renormalize}):
        assert differs(op, **change)
    assert op.groups == 1 or differs(op, groups=1)


def differs(op: Route, **change: Any) -> bool:
    other = replace(op, weights=torch.empty_like(op.weights), experts=torch.empty_like(op.experts), **change)
    run([other], len(op.logits))
    return not torch.allclose(other.weights, op.weights)


def test_of_equal_experts_the_first_are_chosen() -> None:
    op = route(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5]), 2, renormalize=True)
    run([op], 2)
    assert op.experts.tolist() == [[1, 2], [0, 1]]
    assert torch.equal(op.weights, torch.full((2, 2), 0.5))


def experts_op(
    x: Tensor, gate_up: Any, down: Any, experts: Tensor, weights: Tensor, out: Tensor, **rest: Any
) -> Experts:
    rows, top_k = experts.shape
    width, inner = out.shape[1], down[0].shape[1] if isinstance(down[0], Tensor) else down[0].in_features
    return Experts(
        x, tuple(gate_up), tuple(down), experts, weights, torch.empty(rows * top_k, 2 * inner),
        torch.empty(rows * top_k, inner), torch.empty(rows * top_k, width), out, **rest,
    )  # fmt: skip


def test_experts_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    module = Glm4MoeExperts(glm())
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x, weights = torch.randn(17, WIDTH), torch.rand(17, 3)
    experts = torch.stack([torch.randperm(COUNT - 1)[:3] for _ in x])  # nobody takes the last
    expected = module(x, experts, weights).detach()
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    out = torch.randn(17, WIDTH)
    op = experts_op(x, gate_up, down, experts.int(), weights, out.clone(), accumulate=True)
    run([op], len(x))
    torch.testing.assert_close(op.out - out, expected, rtol=1e-5, atol=1e-5)
    run([replace(op, accumulate=False)], len(x))
    torch.testing.assert_close(op.out, expected, rtol=1e-5, atol=1e-5)


def test_a_gate_scales_a_row_or_each_of_its_numbers() -> None:
    out = torch.randn(5, 7)
    for gate in (torch.randn(5, 1), torch.randn(5, 7)):
        got = out.clone()
        run([SigmoidMul(gate, got)], 5)
        torch.testing.assert_close(got, out * torch.sigmoid(gate))
