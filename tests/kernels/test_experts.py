"""Routing and experts: the reference against transformers, the kernels against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts, Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import NVFP4_INPUTS, ActivationScheme, WeightScheme
from qserve.kernels import native
from qserve.kernels.executor import Executor, Step
from qserve.kernels.ops import Activation, Experts, Function, Linear, Op, Route, SigmoidMul
from qserve.kernels.reference import ReferenceExecutor
from tests.kernels.quantized_weights import make_weight

WIDTH, INNER, COUNT = 48, 40, 6


def run(ops: list[Op], rows: int, executor: Executor | None = None) -> None:
    executor = executor or ReferenceExecutor()
    assert all(executor.supports(op) is None for op in ops)
    program = executor.program(rows)
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


def test_experts_with_biases_and_a_clamped_gate_are_those_of_gpt_oss() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=COUNT, num_experts_per_tok=3
    )
    module = GptOssExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    x, weights = torch.randn(17, WIDTH), torch.rand(17, 3)
    experts = torch.stack([torch.randperm(COUNT)[:3] for _ in x])
    expected = module(x, experts, weights).detach()
    apart = torch.cat([torch.arange(0, 2 * INNER, 2), torch.arange(1, 2 * INNER, 2)])  # all gates, then all factors
    gate_up = module.gate_up_proj.detach().transpose(1, 2)[:, apart].contiguous()
    op = experts_op(
        x, gate_up, module.down_proj.detach().transpose(1, 2).contiguous(), experts.int(), weights,
        torch.empty(17, WIDTH), function="swigluoai", gate_up_bias=module.gate_up_proj_bias.detach()[:, apart],
        down_bias=module.down_proj_bias.detach(),
    )  # fmt: skip
    run([op], len(x))
    torch.testing.assert_close(op.out, expected, rtol=1e-5, atol=1e-4)
    run([replace(op, function="silu")], len(x))
    assert not torch.allclose(op.out, expected, atol=1.0)


def test_a_gate_scales_a_row_or_each_of_its_numbers() -> None:
    out = torch.randn(5, 7)
    for gate in (torch.randn(5, 1), torch.randn(5, 7)):
        got = out.clone()
        run([SigmoidMul(gate, got)], 5)
        torch.testing.assert_close(got, out * torch.sigmoid(gate))


def executors() -> list[native.NativeExecutor]:
    return [native.NativeExecutor(2, isa) for isa in native.available()]


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("count", "groups", "top_k"), [(5, 1, 1), (128, 1, 8), (60, 4, 6), (21, 3, 3)])
def test_the_kernels_route_as_the_reference_does(count: int, groups: int, top_k: int, sigmoid: bool) -> None:
    torch.manual_seed(count)
    logits, bias = torch.randn(23, count), 0.1 * torch.randn(count)
    logits[3] = 0.25  # of equal experts the first
    rest: dict[str, Any] = {"sigmoid": sigmoid, "groups": groups, "top_groups": max(1, groups - 1)}
    for renormalize in (False, True):
        for given in (None, bias):
            want = route(logits, top_k, bias=given, renormalize=renormalize, scale=1.5, **rest)
            run([want], 23)
            for executor in executors():
                got = replace(want, experts=torch.empty_like(want.experts), weights=torch.empty_like(want.weights))
                run([got], 23, executor)
                assert torch.equal(got.experts, want.experts)
                torch.testing.assert_close(got.weights, want.weights, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_row_without_numbers_still_has_experts_and_harms_no_other(sigmoid: bool) -> None:
    logits = torch.randn(3, 12)
    logits[1, 4] = torch.nan
    for executor in [ReferenceExecutor(), *executors()]:
        op = route(logits, 4, sigmoid=sigmoid, renormalize=True, groups=3, top_groups=2)
        run([op], 3, executor)
        assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 12 for row in op.experts.tolist())
        assert op.weights[1].isnan().any() and op.weights[::2].isfinite().all()


def test_the_kernels_apply_gates_as_the_reference_does() -> None:
    out = torch.randn(9, 33)
    for gate in (torch.randn(9, 1), torch.randn(9, 33)):
        for executor in executors():
            got = out.clone()
            run([SigmoidMul(gate, got)], 9, executor)
            torch.testing.assert_close(got, out * torch.sigmoid(gate), rtol=2e-6, atol=1e-8)


INT8 = ActivationScheme("int8", "tensor", dynamic=False)
SCHEMES: dict[str, tuple[WeightScheme, ActivationScheme | None, bool]] = {
    "4-bit": (WeightScheme(4, 16), None, False),
    "4-bit-asymmetric": (WeightScheme(4, 16, symmetric=False), None, False),
    "4-bit-in-any-order": (WeightScheme(4, 16), None, True),
    "fp4": (WeightScheme(4, 16, dtype="fp4"), None, False),
    "nvfp4": (WeightScheme(4, 16, dtype="fp4"), NVFP4_INPUTS, False),
    "8-bit": (WeightScheme(8, -1), ActivationScheme("int8"), False),
    "8-bit-static": (WeightScheme(8, -1), INT8, False),
    "fp8": (WeightScheme(8, -1, dtype="fp8"), ActivationScheme("fp8"), False),
    "fp8-blocks": (
        WeightScheme(8, 128, dtype="fp8", rows=128),
        ActivationScheme("fp8", "group", group_size=128),
        False,
    ),
    "fp8-weights": (WeightScheme(8, -1, dtype="fp8"), None, False),
}


def random_weights(kind: str, out: int, inp: int) -> tuple[Tensor | QuantizedWeight, ...]:
    """A weight for each expert, each with its own scales, order of inputs and input scale."""
    if kind in ("float32", "bfloat16"):
        return tuple((0.2 * torch.randn(COUNT, out, inp)).to(getattr(torch, kind)))
    scheme, activations, shuffled = SCHEMES[kind]
    made = []
    for e in range(COUNT):
        weight = make_weight(out, inp, scheme, activations, shuffled=shuffled)
        order = torch.randperm(out)
        zeros, g_idx = weight.zeros, weight.g_idx
        scales = weight.scales if scheme.rows != 1 else weight.scales[order]
        made.append(replace(
            weight, stored=weight.codes[order], scales=scales.half().float() if e else scales,
            zeros=None if zeros is None else zeros[order], g_idx=None if g_idx is None else g_idx.roll(e),
            input_scale=None if weight.input_scale is None else 0.01 + 0.003 * e,
        ))  # fmt: skip
    return tuple(made)


@pytest.mark.parametrize(("kind", "function"), [
    *((kind, "silu") for kind in ("float32", "bfloat16", *SCHEMES)), ("bfloat16", "swigluoai"), ("fp4", "swigluoai"),
])  # fmt: skip
def test_each_expert_is_computed_as_a_product_of_its_own(kind: str, function: Function) -> None:
    """Bit for bit, whatever the other tokens and however many threads. Experts with another function have biases."""
    torch.manual_seed(0)
    rows, top_k, inner = 45, 3, 48
    gate_up, down = random_weights(kind, 2 * inner, WIDTH), random_weights(kind, WIDTH, inner)
    x, weights, start = torch.randn(rows, WIDTH), torch.rand(rows, top_k), torch.randn(rows, WIDTH)
    # Nobody takes the last; the first gets many rows, one gets a single row.
    experts = torch.stack([torch.randperm(COUNT - 2)[:top_k] for _ in range(rows)]).int()
    experts[7, 0] = COUNT - 2
    biases: list[Any] = [None, None]
    if function != "silu":
        biases = [torch.randn(COUNT, 2 * inner), torch.randn(COUNT, WIDTH)]
    rest: dict[str, Any] = {"function": function, "gate_up_bias": biases[0], "down_bias": biases[1]}
    for executor in executors():
        parts = torch.empty(COUNT, rows, WIDTH)
        for e in range(COUNT):
            both, activated = torch.empty(rows, 2 * inner), torch.empty(rows, inner)
            run(
                [
                    Linear(x, gate_up[e], both, None if biases[0] is None else biases[0][e]),
                    Activation(both, activated, function, gated=True),
                    Linear(activated, down[e], parts[e], None if biases[1] is None else biases[1][e]),
                ],
                rows,
                executor,
            )
        want = torch.zeros(rows, WIDTH)
        for j in range(top_k):
            want += weights[:, j, None] * parts[experts[:, j].long(), torch.arange(rows)]
        op = experts_op(x, gate_up, down, experts, weights, start.clone(), accumulate=True, **rest)
        run([op], rows, executor)
        assert torch.equal(op.out, start + want)
        run([replace(op, accumulate=False)], rows, executor)
        assert torch.equal(op.out, want)
        few = experts_op(x[7:8], gate_up, down, experts[7:8], weights[7:8], torch.empty(1, WIDTH), **rest)
        run([few], 1, native.NativeExecutor(1, executor.isa))
        assert torch.equal(few.out[0], want[7])


def test_experts_without_a_kernel_are_named() -> None:
    executor, out = native.NativeExecutor(1), torch.empty(1, WIDTH)
    chosen, weights = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2)
    op = experts_op(out, torch.randn(2, 80, WIDTH), torch.randn(2, WIDTH, 40), chosen, weights, out)
    assert executor.supports(op) == "experts of 40 numbers have no C kernel: it takes multiples of 16"
    mixed = (make_weight(64, WIDTH, WeightScheme(4, 16)), make_weight(64, WIDTH, WeightScheme(8, 16)))
    op = experts_op(out, mixed, torch.randn(2, WIDTH, 32), chosen, weights, out)
    with pytest.raises(ValueError, match="differ in their schemes"):
        executor.program(1).add([op])
