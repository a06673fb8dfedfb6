"""Fused operations of the C kernels give the same bits as the operations one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import native
from qserve.kernels.executor import Step
from qserve.kernels.fusion import FusedLinear, fuse
from qserve.kernels.ops import Activation, Attention, Function, Gather, LayerNorm, Linear, Op, RMSNorm, RopeKV, SoftCap

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
HEADS, KV_HEADS, DIM = 6, 2, 32


def step_of(lengths: list[int], positions: list[int]) -> Step:
    """Sequences whose first token of the step has the given position, each with 4 blocks of its own."""
    at = [first + i for length, first in zip(lengths, positions) for i in range(length)]
    owner = [s for s, length in enumerate(lengths) for _ in range(length)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return Step(
        token_ids=torch.zeros(len(at), dtype=torch.int32),
        positions=torch.tensor(at, dtype=torch.int32),
        slots=torch.tensor([64 * s + p for s, p in zip(owner, at)], dtype=torch.int32),
        seq_start=starts.int(),
        block_tables=torch.arange(4 * len(lengths), dtype=torch.int32).view(-1, 4),
        logit_rows=torch.arange(len(at), dtype=torch.int32),
    )


def run(ops: list[Op], step: Step, isa: native.Isa, *, apart: bool) -> None:
    executor = native.NativeExecutor(2, isa)
    for some in [[op] for op in ops] if apart else [ops]:
        program = executor.program(len(step.token_ids))
        program.add(some)
        program.run(step)


def weights(out: int, inp: int) -> dict[str, Tensor | QuantizedWeight]:
    def packed(
        bits: int, group: int, dtype: str = "int", activations: ActivationScheme | None = None
    ) -> QuantizedWeight:
        scheme = WeightScheme(bits, group, dtype=dtype)  # type: ignore[arg-type]
        codes = torch.randint(0, 1 << bits, (out, inp)).to(torch.uint8)
        codes = codes & 0x77 if dtype == "fp8" else codes
        return QuantizedWeight(scheme, codes, torch.rand(out, scheme.groups(inp)) * 0.01, activations=activations)

    asymmetric = WeightScheme(4, 32, False)
    return {
        "float32": torch.randn(out, inp),
        "bfloat16": torch.randn(out, inp).bfloat16(),
        "w4": packed(4, 64),
        "w4 asymmetric": QuantizedWeight(
            asymmetric,
            torch.randint(0, 16, (out, inp)).to(torch.uint8),
            torch.rand(out, inp // 32) * 0.01,
            torch.randint(0, 16, (out, inp // 32)).to(torch.uint8),
        ),
        "w8a8": packed(8, -1, activations=ActivationScheme("int8")),
        "fp8": packed(8, -1, "fp8"),
        "fp8 rounded": packed(8, -1, "fp8", ActivationScheme("fp8")),
    }


@pytest.mark.parametrize("isa", native.available())
@pytest.mark.parametrize("name", weights(32, 64))
@pytest.mark.parametrize("rows", [1, 3, 45])
def test_a_norm_and_silu_around_a_product(isa: native.Isa, name: str, rows: int) -> None:
    torch.manual_seed(rows)
    inp, width = 192, 112  # 14 tiles: the last piece is not full
    x, weight, bias = torch.randn(rows, inp), weights(2 * width, inp)[name], torch.randn(2 * width)
    scale = torch.rand(inp)
    normed, gate_up = torch.empty(rows, inp), torch.empty(rows, 2 * width)
    outs = []
    for apart in (True, False):
        out = torch.empty(rows, width)
        silu = Activation(gate_up, out, "silu", gated=True)
        ops = [RMSNorm(x, scale, normed, 1e-5), Linear(normed, weight, gate_up, bias), silu]
        run(ops, step_of([rows], [0]), isa, apart=apart)
        outs.append(out)
    assert torch.equal(*outs)


@pytest.mark.parametrize("isa", native.available())
@pytest.mark.parametrize("name", ["float32", "w4"])
@pytest.mark.parametrize("function", get_args(Function))
def test_a_layer_norm_and_an_activation_around_a_product(isa: native.Isa, name: str, function: Function) -> None:
    torch.manual_seed(2)
    inp, width, scale = 192, 112, torch.rand(192)
    for rows, gated, biased in ((1, True, True), (1, False, False), (11, True, False), (11, False, True)):
        n = 2 * width if gated else width
        x, weight = torch.randn(rows, inp) + 1, weights(n, inp)[name]
        norm_bias, bias = (torch.randn(inp), torch.randn(n)) if biased else (None, None)
        normed, between = torch.empty(rows, inp), torch.empty(rows, n)
        outs = []
        for apart in (True, False):
            out = torch.empty(rows, width)
            ops = [
                LayerNorm(x, scale, norm_bias, normed, 1e-5), Linear(normed, weight, between, bias),
                Activation(between, out, function, gated),
            ]  # fmt: skip
            assert apart or len(fuse(ops)) == 1
            run(ops, step_of([rows], [0]), isa, apart=apart)
            outs.append(out)
        assert torch.equal(*outs)


@pytest.mark.parametrize("isa", native.available())
@pytest.mark.parametrize("name", ["float32", "w4"])
@pytest.mark.parametrize("width", [112, 16384])  # a vocabulary is written past the caches
def test_a_soft_cap_behind_a_product(isa: native.Isa, name: str, width: int) -> None:
    torch.manual_seed(2)
    for rows, bias in ((1, None), (5, torch.randn(width))):
        x, weight = torch.randn(rows, 64), weights(width, 64)[name]
        outs = []
        for apart in (True, False):
            out = torch.empty(rows, width)
            ops = [Linear(x, weight, out, bias), SoftCap(out, 3.0, "tokens")]
            assert apart or len(fuse(ops)) == 1
            run(ops, step_of([rows], [0]), isa, apart=apart)
            outs.append(out)
        assert torch.equal(*outs) and outs[0].abs().max() <= 3


@pytest.mark.parametrize("isa", native.available())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [1] * 20, [1, 5, 1]])
def test_a_rotation_before_attention(isa: native.Isa, dtype: torch.dtype, lengths: list[int]) -> None:
    torch.manual_seed(len(lengths))
    step = step_of(lengths, [(7 * s) % 50 for s in range(len(lengths))])
    qkv = torch.randn(sum(lengths), (HEADS + 2 * KV_HEADS) * DIM)
    angles, blocks = torch.rand(64, DIM // 2), 4 * len(lengths)
    k_old = torch.randn(blocks, KV_HEADS, DIM, 16).to(dtype)
    v_old = torch.randn(blocks, KV_HEADS, 16, DIM).to(dtype)
    results = []
    for apart in (True, False):
        mine, k, v, out = qkv.clone(), k_old.clone(), v_old.clone(), torch.empty(len(qkv), HEADS * DIM)
        rope = RopeKV(mine, angles.cos(), angles.sin(), k, v, HEADS, KV_HEADS, DIM, torch.ones(DIM), torch.ones(DIM))
        run([rope, Attention(mine, out, k, v, HEADS, KV_HEADS, DIM, DIM**-0.5)], step, isa, apart=apart)
        results.append((out, k, v))
    for one, other in zip(*results):
        assert torch.equal(one, other)


def test_only_what_nothing_else_reads_is_fused() -> None:
    x, normed, out, last = torch.randn(2, 32), torch.empty(2, 32), torch.empty(2, 64), torch.empty(2, 32)
    norm, product = RMSNorm(x, torch.ones(32), normed, 1e-5), Linear(normed, torch.randn(64, 32), out)
    silu, residual = Activation(out, last, "silu", True), Linear(normed, torch.randn(32, 32), x, accumulate=True)
    both = fuse([norm, product, silu])
    assert len(both) == 1 and isinstance(both[0], FusedLinear) and both[0].norm is norm and both[0].activation is silu
    assert [type(op) for op in fuse([norm, product, product])] == [FusedLinear] * 2
    assert fuse([norm, product, Gather(normed, last)])[0] is norm  # somebody else reads it
    assert fuse([norm, residual, product])[0] is norm  # the second product would see another x
    assert fuse([norm])[0] is norm
    read_twice = replace(norm, weight=torch.zeros(32))
    found = fuse([norm, product, read_twice, product, Gather(normed, last)])
    assert found[1] is read_twice and isinstance(found[2], FusedLinear) and found[2].norm is None
    odd = torch.empty(2, 24), torch.empty(2, 12)
    narrow = Activation(*odd, "silu", True)
    assert fuse([Linear(x, torch.randn(24, 32), odd[0]), narrow])[1] is narrow  # not 16 and 16
    assert len(fuse([product, replace(silu, out=torch.empty(2, 64), gated=False)])) == 1
    assert len(fuse([product, silu, silu])) == 2
    cap = SoftCap(out, 30.0, "tokens")
    assert len(fuse([product, cap])) == 1 and len(fuse([product, replace(cap, rows="logits")])) == 2
    behind = replace(norm, accumulate=True)
    assert fuse([behind, product])[0] is behind  # it adds to what was there
