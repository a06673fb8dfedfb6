"""The causal convolution and the gated delta rule: the C kernels beside their references, at odd shapes, and the same
bits however the tokens of a sequence are cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from qserve.kernels import native
from qserve.kernels.executor import Executor, Step
from qserve.kernels.ops import CausalConv, GatedDelta
from qserve.kernels.reference import ReferenceExecutor
from tests.kernels.test_operations import executor, holds, run

SLOTS = 4
WIDTHS = st.sampled_from([4, 4, 2, 3, 8])
ISAS = native.available()


def step_of(spans: Sequence[tuple[int, int]], slots: Sequence[int]) -> Step:
    """Sequences (first position, tokens), with their states in ``slots``."""
    positions = torch.cat([torch.arange(start, start + count, dtype=torch.int32) for start, count in spans])
    starts = torch.tensor([0, *(count for _, count in spans)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tables = torch.zeros(len(spans), 1, dtype=torch.int32)
    return Step(positions, positions, positions, starts, tables, positions[:0],
                state_slots=torch.tensor(slots, dtype=torch.int32))  # fmt: skip


def conv_of(rows: int, channels: int, width: int) -> CausalConv:
    wide = torch.randn(rows, channels + 3)
    return CausalConv(wide[:, :channels], torch.randn(width, channels), torch.randn(SLOTS, width - 1, channels))


def delta_of(rows: int, key_heads: int, group: int, key_dim: int, value_dim: int) -> GatedDelta:
    heads = key_heads * group
    width = 2 * key_heads * key_dim + 2 * heads * (value_dim + 1)
    return GatedDelta(
        3 * torch.randn(rows, width), torch.zeros(rows, heads * value_dim), -4 * torch.rand(heads), torch.randn(heads),
        torch.randn(value_dim), torch.randn(SLOTS, heads, key_dim, value_dim), key_heads, 1e-5,
    )  # fmt: skip


def copied(op: CausalConv | GatedDelta) -> CausalConv | GatedDelta:
    """``op`` with an ``x``, an ``out`` and a state of its own."""
    if isinstance(op, GatedDelta):
        return replace(op, out=torch.zeros_like(op.out), state=op.state.clone())
    wide = torch.zeros(op.x.shape[0], op.x.shape[1] + 3)
    wide[:, : op.x.shape[1]] = op.x
    return replace(op, x=wide[:, : op.x.shape[1]], state=op.state.clone())


def result(op: CausalConv | GatedDelta) -> Tensor:
    return op.out if isinstance(op, GatedDelta) else op.x


def computed(on: Executor, op: CausalConv | GatedDelta, step: Step) -> tuple[Tensor, Tensor]:
    """What it gives, and the states behind it."""
    op = copied(op)
    run(on, [op], step)
    return result(op), op.state


def cut(op: CausalConv | GatedDelta, chunks: Sequence[int], on: Executor, start: int = 0) -> tuple[Tensor, Tensor]:
    """One sequence with its state in slot 2, a chunk at a time."""
    op, done, rows = copied(op), 0, []
    for count in chunks:
        x = op.x[done : done + count]
        part = replace(op, x=x, out=op.out[done : done + count]) if isinstance(op, GatedDelta) else replace(op, x=x)
        run(on, [part], step_of([(start + done, count)], [2]))
        rows.append(result(part))
        done += count
    return torch.cat(rows), op.state


SPANS = [(0, 5), (7, 1), (3, 9), (0, 1)]


def check(op: CausalConv | GatedDelta) -> None:
    step = step_of(SPANS, [2, 0, 3, 1])
    want, states = computed(ReferenceExecutor(), op, step)
    for isa in ISAS:
        got, left = computed(executor(isa), op, step)
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(left, states, rtol=2e-4, atol=2e-4)
        again, left_too = computed(executor(isa, 1), op, step)
        assert torch.equal(again, got) and torch.equal(left_too, left)
        rows = slice(6, 15)  # the third sequence alone
        alone = replace(op, x=op.x[rows], out=op.out[rows]) if isinstance(op, GatedDelta) else replace(op, x=op.x[rows])
        one, kept = computed(executor(isa), alone, step_of([(3, 9)], [3]))
        assert torch.equal(one, got[rows]) and torch.equal(kept[3], left[3])
        assert torch.equal(kept[:3], op.state[:3]), "no other state is touched"
        for start in (0, 4):
            whole = cut(op, [16], executor(isa), start)
            for chunks in ([1] * 16, [3, 1, 12], [15, 1]):
                assert all(map(torch.equal, cut(op, chunks, executor(isa), start), whole))


def check_saves(op: CausalConv | GatedDelta) -> None:
    """States that are saved on the way are those behind a step that ends there, and nothing else changes."""
    saves = torch.full((16,), -1, dtype=torch.int32)
    saves[2], saves[4], saves[9] = 4, 5, 6  # behind 3 and 5 tokens of the first sequence, and 4 of the third
    plain, saving = step_of(SPANS, [2, 0, 3, 1]), replace(step_of(SPANS, [2, 0, 3, 1]), state_saves=saves)
    op = replace(op, state=torch.randn(SLOTS + 3, *op.state.shape[1:]))
    for on in (ReferenceExecutor(), *map(executor, ISAS)):
        exact = not isinstance(on, ReferenceExecutor)
        same = torch.equal if exact else partial(torch.allclose, rtol=1e-4, atol=1e-4)
        want, states = computed(on, op, plain)
        got, left = computed(on, op, saving)
        assert same(got, want) and same(left[:SLOTS], states[:SLOTS]) and torch.equal(states[SLOTS:], op.state[SLOTS:])
        for saved, first, span, slot in ((4, 0, (0, 3), 2), (5, 0, (0, 5), 2), (6, 6, (3, 4), 3)):
            rows = slice(first, first + span[1])
            out = {"out": op.out[rows]} if isinstance(op, GatedDelta) else {}
            part = replace(op, x=op.x[rows], **out)
            _, behind = computed(on, part, step_of([span], [slot]))
            assert same(left[saved], behind[slot])


@pytest.mark.parametrize(
    "case", [(conv_of, 40, 4), (conv_of, 300, 3), (delta_of, 2, 2, 16, 24), (delta_of, 1, 2, 24, 64)]
)
def test_a_state_is_saved_on_the_way(case: tuple[Any, ...]) -> None:
    torch.manual_seed(2)
    make, *shape = case
    check_saves(make(16, *shape))


@pytest.mark.skipif(not ISAS, reason=str(native.missing()))
@holds(st.integers(1, 530), WIDTHS)
def test_a_convolution_is_that_of_the_reference(channels: int, width: int) -> None:
    torch.manual_seed(channels)
    check(conv_of(16, channels, width))


@pytest.mark.skipif(not ISAS, reason=str(native.missing()))
@holds(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.sampled_from([1, 7, 16, 24, 32, 64, 96]))
def test_a_delta_rule_is_that_of_the_reference(key_heads: int, group: int, key_dim: int, value_dim: int) -> None:
    torch.manual_seed(key_dim)
    check(delta_of(16, key_heads, group, key_dim, value_dim))


@pytest.mark.skipif(not ISAS, reason=str(native.missing()))
def test_the_widest_keys_have_a_kernel_and_wider_ones_none() -> None:
    torch.manual_seed(0)
    check(delta_of(16, 1, 2, 256, 32))
    assert "at most 256" in str(executor("scalar").supports(delta_of(1, 1, 1, 257, 32)))
    assert "at most 8" in str(executor("scalar").supports(conv_of(1, 5, 9)))


@pytest.mark.skipif(not ISAS, reason=str(native.missing()))
def test_a_nan_stays_in_its_sequence_and_its_head() -> None:
    torch.manual_seed(0)
    op, step = delta_of(16, 2, 2, 16, 32), step_of(SPANS, [2, 0, 3, 1])
    conv = conv_of(16, 40, 4)
    for isa in ISAS:
        plain, _ = computed(executor(isa), op, step)
        x = op.x.clone()
        x[8, 2 * 2 * 16 + 32 + 5] = torch.nan  # the value of head 1 of the third token of the third sequence
        got, _ = computed(executor(isa), replace(op, x=x), step)
        bad = torch.zeros_like(plain, dtype=torch.bool)
        bad[8:15, 32:64] = True
        assert torch.equal(got.isnan(), bad) and torch.equal(got[~bad], plain[~bad])
        plain, _ = computed(executor(isa), conv, step)
        damaged = copied(conv)
        damaged.x[8, 7] = torch.nan
        got, _ = computed(executor(isa), damaged, step)
        assert torch.equal(got.isnan().nonzero(), torch.tensor([[row, 7] for row in range(8, 12)]))


def test_the_reference_is_transformers_own_chunked_form() -> None:
    torch.manual_seed(1)
    op, tokens = delta_of(150, 2, 3, 16, 24), 150
    got, _ = computed(ReferenceExecutor(), op, step_of([(0, tokens)], [1]))
    q, k, v, z, b, a = op.x.split([32, 32, 144, 144, 6, 6], 1)
    q, k, v = (x.view(1, tokens, -1, dim) for x, dim in ((q, 16), (k, 16), (v, 24)))
    g = (op.rate * F.softplus(a + op.dt_bias))[None]
    want, state = torch_chunk_gated_delta_rule(
        q, k, v, g, b.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    want = F.rms_norm(want[0], (24,), op.norm, op.eps) * F.silu(z.view(tokens, 6, 24))
    torch.testing.assert_close(got, want.flatten(1), rtol=1e-3, atol=1e-4)
    ours = copied(op)
    run(ReferenceExecutor(), [ours], step_of([(0, tokens)], [1]))
    torch.testing.assert_close(ours.state[1], state[0], rtol=1e-3, atol=1e-4)
