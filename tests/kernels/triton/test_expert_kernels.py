"""Routing and experts in Triton, in the interpreter, against the torch reference over odd sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import NVFP4_INPUTS, ActivationScheme, WeightScheme
from qserve.kernels.ops import Activation, Experts, ExpertSum, Linear, Route
from qserve.kernels.reference import ReferenceExecutor
from qserve.kernels.triton import grouped
from qserve.kernels.triton.executor import TritonExecutor
from tests.kernels.quantized_weights import make_weight
from tests.kernels.triton.test_engine_kernels import CPU, FP8, make_step, run_on, triton_executor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_gpu_engine.py runs")


def route(logits: Tensor, top_k: int, **rest: Any) -> Route:
    shape = len(logits), top_k
    return Route(logits, torch.full(shape, -7, dtype=torch.int32), torch.full(shape, torch.nan), **rest)


def fresh(op: Route) -> Route:
    return replace(op, experts=torch.empty_like(op.experts), weights=torch.empty_like(op.weights))


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("count", "groups", "top_k"), [(5, 1, 1), (128, 1, 8), (60, 4, 6), (21, 3, 3)])
def test_choices_are_those_of_the_reference(count: int, groups: int, top_k: int, sigmoid: bool) -> None:
    torch.manual_seed(count)
    logits, bias = torch.randn(7, count), 0.1 * torch.randn(count)
    logits[3] = 0.25  # of equal experts the first
    logits[4, 1::2], logits[5, 0] = 0.5, -torch.inf
    for renormalize, given in ((False, bias), (True, None)):
        want = route(
            logits, top_k, bias=given, sigmoid=sigmoid, groups=groups, top_groups=max(1, groups - 1),
            renormalize=renormalize, scale=1.5,
        )  # fmt: skip
        got = fresh(want)
        run_on(ReferenceExecutor(), [want], make_step(7))
        run_on(triton_executor(), [got], make_step(7))
        assert torch.equal(got.experts, want.experts)
        torch.testing.assert_close(got.weights, want.weights, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_row_without_numbers_still_has_experts_and_padding_has_none(sigmoid: bool) -> None:
    logits = torch.randn(4, 12)
    logits[1, 4] = torch.nan
    op = route(logits, 4, sigmoid=sigmoid, renormalize=True, groups=3, top_groups=2)
    step = make_step(4)
    step.slots[3] = -1  # as a row that fills up a captured graph
    run_on(triton_executor(), [op], step)
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 12 for row in op.experts[:3].tolist())
    assert op.weights[1].isnan().any() and op.weights[[0, 2]].isfinite().all()
    assert op.experts[3].tolist() == [-1] * 4


@pytest.mark.parametrize(("rows", "top_k", "count", "block_m"), [(1, 1, 3, 16), (7, 2, 5, 16), (700, 3, 6, 32)])
def test_choices_are_sorted_by_expert_in_their_order(rows: int, top_k: int, count: int, block_m: int) -> None:
    torch.manual_seed(rows)
    experts = torch.stack([torch.randperm(count - 1)[:top_k] for _ in range(rows)]).int()  # nobody takes the last
    experts[rows // 2] = -1
    choices = rows * top_k
    most = grouped.most_tiles(choices, count, block_m)
    counts, order, tiles = (torch.full((n,), -9, dtype=torch.int32) for n in (count, choices, 3 * most))
    found = grouped.sort(experts, counts, order, tiles, choices, block_m)
    assert (found.choices, found.most, found.top_k) == (choices, most, top_k)
    flat = experts.flatten()
    want = [(flat == expert).nonzero().flatten().tolist() for expert in range(count)]
    got: list[list[int]] = [[] for _ in range(count)]
    listed = tiles.view(-1, 3).tolist()
    used = [tile for tile in listed if tile[0] >= 0]
    assert all(tile[0] == -1 for tile in listed[len(used) :])
    for expert, first, held in used:
        assert 1 <= held <= block_m
        got[expert] += order[first : first + held].tolist()
    assert got == want


WIDTH, INNER, COUNT = 80, 96, 6
SCHEMES: dict[str, tuple[WeightScheme, ActivationScheme | None]] = {
    "4-bit": (WeightScheme(4, 16), None),
    "4-bit-asymmetric": (WeightScheme(4, 32, symmetric=False), None),
    "fp4": (WeightScheme(4, 32, dtype="fp4"), None),
    "8-bit": (WeightScheme(8, -1), None),
    "trellis": (WeightScheme(3, 16, dtype="trellis"), None),
    "int8": (WeightScheme(8, -1), ActivationScheme("int8")),
    "int8-groups": (WeightScheme(4, 32), ActivationScheme("int8", "group", group_size=32)),
    "fp8": (WeightScheme(8, -1, dtype="fp8"), ActivationScheme("fp8")),
}


def weights_of(kind: str, out: int, inp: int) -> tuple[Tensor | QuantizedWeight, ...]:
    if kind == "dense":
        return tuple((0.2 * torch.randn(COUNT, out, inp)).half())
    scheme, activations = SCHEMES[kind]
    made = [make_weight(out, inp, scheme, activations, seed=e) for e in range(COUNT)]
    scales = made[0].scales * (0.1 / made[0].dequantize().std())  # so that float16 holds what comes of it
    return tuple(replace(weight, scales=(scales * (1 + e)).half().float()) for e, weight in enumerate(made))


def experts_op(kind: str, rows: int, top_k: int, dtype: torch.dtype = torch.float32) -> Experts:
    torch.manual_seed(rows)
    width = 96 if kind == "int8-groups" else WIDTH
    # Nobody takes the last; one gets a single row.
    experts = torch.stack([torch.randperm(COUNT - 2)[:top_k] for _ in range(rows)]).int()
    experts[0, 0] = COUNT - 2
    x, out = torch.randn(rows, width).to(dtype), torch.randn(rows, width)
    room = [torch.full((rows * top_k, n), torch.nan, dtype=dtype) for n in (2 * INNER, INNER, width)]
    return Experts(
        x, weights_of(kind, 2 * INNER, width), weights_of(kind, width, INNER), experts, torch.rand(rows, top_k),
        *room, out, accumulate=True,
    )  # fmt: skip


def like_gpt_oss(op: Experts) -> Experts:
    biases = [torch.randn(COUNT, n) for n in (2 * INNER, op.out.shape[1])]
    return replace(op, function="swigluoai", gate_up_bias=biases[0], down_bias=biases[1])


@pytest.mark.parametrize("rows", [1, 21])
def test_experts_in_fp4_with_biases_are_those_of_the_reference(rows: int) -> None:
    op = like_gpt_oss(experts_op("fp4", rows, 3))
    want = replace(op, out=op.out.clone())
    run_on(ReferenceExecutor(), [want], make_step(rows))
    run_on(triton_executor(), [op], make_step(rows))
    torch.testing.assert_close(op.out, want.out, rtol=0, atol=1e-5 * float(want.out.abs().max()))


def test_inputs_of_experts_that_nvfp4_rounds_stay_finer() -> None:
    op = experts_op("fp4", 5, 2)
    rounded = [tuple(replace(weight, activations=NVFP4_INPUTS, input_scale=0.01 * (1 + e)) for e, weight in
                     enumerate(weights)) for weights in (op.gate_up, op.down)]  # fmt: skip
    other = replace(op, gate_up=rounded[0], down=rounded[1], out=op.out.clone())
    for each in (op, other):
        assert triton_executor().supports(each) is None
        run_on(triton_executor(), [each], make_step(5))
    assert torch.equal(op.out, other.out)


def test_projections_of_experts_may_differ_in_their_tiles() -> None:
    """Both go by the smaller."""
    op, other = experts_op("trellis", 40, 3), experts_op("4-bit", 40, 3)
    op = replace(op, down=other.down)
    want = replace(op, out=op.out.clone())
    run_on(ReferenceExecutor(), [want], make_step(40))
    run_on(triton_executor(), [op], make_step(40))
    torch.testing.assert_close(op.out, want.out, rtol=0, atol=1e-5 * float(want.out.abs().max()))


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "4-bit-asymmetric", "8-bit", "int8-groups")]


@pytest.mark.parametrize(("kind", "rows"), [("dense", 1), ("int8", 1), ("4-bit", 37), ("trellis", 21)])
def test_experts_are_those_of_the_reference(kind: str, rows: int) -> None:
    op = experts_op(kind, rows, 3)
    want = replace(op, out=op.out.clone())
    run_on(ReferenceExecutor(), [want], make_step(rows))
    run_on(triton_executor(), [op], make_step(rows))
    torch.testing.assert_close(op.out, want.out, rtol=0, atol=1e-5 * float(want.out.abs().max()))


@pytest.mark.parametrize("kind", ["dense", "4-bit"])
def test_some_of_the_experts_add_their_terms(kind: str) -> None:
    """Or give them out; with those of the others they are what all experts add."""
    rows, top_k, cut = 21, 3, 2
    op = like_gpt_oss(experts_op(kind, rows, top_k))
    want, found = replace(op, out=op.out.clone()), op.out.clone()
    run_on(ReferenceExecutor(), [want], make_step(rows))
    terms = torch.zeros(rows, top_k * op.out.shape[1])
    for part in (slice(0, cut), slice(cut, COUNT)):
        assert op.gate_up_bias is not None and op.down_bias is not None
        own = replace(
            op, gate_up=op.gate_up[part], down=op.down[part], gate_up_bias=op.gate_up_bias[part],
            down_bias=op.down_bias[part], total=COUNT, first=part.start,
        )  # fmt: skip
        got: dict[str, list[Tensor]] = {"out": [], "terms": []}
        for executor in (ReferenceExecutor(), triton_executor()):
            added = replace(own, out=torch.full_like(op.out, torch.nan), accumulate=False)
            given = replace(own, out=torch.full_like(op.out, torch.nan), terms=torch.full_like(terms, torch.nan))
            run_on(executor, [added, given], make_step(rows))
            assert given.out.isnan().all() and given.terms is not None
            got["out"].append(added.out)
            got["terms"].append(given.terms)
        for reference, kernel in got.values():
            torch.testing.assert_close(kernel, reference, rtol=0, atol=1e-5 * float(reference.abs().max()))
        found += got["out"][1]
        terms += got["terms"][1]
    close = {"rtol": 0, "atol": 1e-5 * float(want.out.abs().max())}
    torch.testing.assert_close(found, want.out, **close)
    for executor in (ReferenceExecutor(), triton_executor()):
        summed = ExpertSum(terms, op.weights, op.out.clone(), accumulate=True)
        run_on(executor, [summed], make_step(rows))
        torch.testing.assert_close(summed.out, want.out, **close)


@pytest.mark.parametrize("kind", ["dense", pytest.param("fp8", marks=FP8), *SLOW])
def test_each_expert_is_computed_as_a_product_of_its_own(kind: str) -> None:
    """By the kernels of plain products."""
    rows, top_k = 19, 3
    op = experts_op(kind, rows, top_k)
    want = op.out.clone()
    parts = torch.empty(COUNT, rows, op.out.shape[1])
    for e in range(COUNT - 1):
        both, activated = torch.empty(rows, 2 * INNER), torch.empty(rows, INNER)
        product = [
            Linear(op.x, op.gate_up[e], both), Activation(both, activated, "silu", gated=True),
            Linear(activated, op.down[e], parts[e]),
        ]  # fmt: skip
        run_on(triton_executor(), product, make_step(rows))
    for j in range(top_k):
        want += op.weights[:, j, None] * parts[op.experts[:, j].long(), torch.arange(rows)]
    run_on(triton_executor(), [op], make_step(rows))
    torch.testing.assert_close(op.out, want, rtol=0, atol=1e-6 * float(want.abs().max()))


@pytest.mark.parametrize("kind", ["4-bit", SLOW[0]])
def test_a_neighbour_never_changes_a_row_of_experts(kind: str, same_sums: None) -> None:
    """In the invariant mode: alone, or among so many that the tiles are larger, and with padding behind."""
    rows = 41
    op = experts_op(kind, rows, 3)
    start = op.out.clone()
    run_on(triton_executor(invariant=True), [op], make_step(rows))
    for row in (0, 40):
        alone = replace(
            op, x=op.x[[row] * 2], experts=torch.stack([op.experts[row], torch.full((3,), -1, dtype=torch.int32)]),
            weights=op.weights[[row] * 2], out=start[[row] * 2],
        )  # fmt: skip
        run_on(triton_executor(invariant=True), [alone], make_step(2))
        assert torch.equal(alone.out[0], op.out[row])


def test_experts_without_a_kernel_are_named() -> None:
    executor = TritonExecutor(CPU, torch.float32)
    op = experts_op("4-bit", 2, 1)
    first = op.down[0]
    assert isinstance(first, QuantizedWeight) and executor.supports(op) is None
    shuffled = replace(first, g_idx=torch.arange(INNER, dtype=torch.int32) // 16)
    assert "out of order" in str(executor.supports(replace(op, down=(shuffled,) * COUNT)))
    assert "differ" in str(executor.supports(replace(op, down=(*op.down[1:], torch.zeros(WIDTH, INNER)))))
    static = make_weight(WIDTH, INNER, WeightScheme(8, -1), ActivationScheme("int8", "tensor", dynamic=False))
    assert "static" in str(executor.supports(replace(op, down=(static,) * COUNT)))
    odd = make_weight(WIDTH, INNER, WeightScheme(4, 24))
    assert "groups of 24" in str(executor.supports(replace(op, down=(odd,) * COUNT)))
