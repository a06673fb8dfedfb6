"""Operations of families beyond Llama against plain formulas, at odd sizes: by the reference and by every executor that
runs here, which falls back on the reference where it has no kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from qserve.kernels import native
from qserve.kernels.executor import Executor, Step
from qserve.kernels.ops import (
    Activation,
    Attention,
    Cast,
    Function,
    HeadNorm,
    LayerNorm,
    Op,
    PositionEmbed,
    RMSNorm,
    RopeKV,
    SoftCap,
)
from qserve.kernels.reference import ReferenceExecutor

ROWS, WIDTH = 7, 37
HEADS, KV_HEADS, DIM = 6, 2, 16
FORMULAS: dict[Function, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + (x / math.sqrt(2)).erf()) / 2,
    "gelu_tanh": lambda x: x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2,
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x**2 * (x > 0),
    "swigluoai": lambda x: x.clamp(max=7) / (1 + (-1.702 * x.clamp(max=7)).exp()),
}


@pytest.fixture(params=["reference", "native"])
def executor(request: pytest.FixtureRequest) -> Executor:
    torch.manual_seed(3)
    if request.param == "reference":
        return ReferenceExecutor()
    if native.missing():
        pytest.skip(str(native.missing()))
    return native.NativeExecutor(2)


def run(executor: Executor, op: Op, positions: Tensor | None = None) -> None:
    """``op`` on one sequence of ``ROWS`` tokens, at 0, 1, … if not told where."""
    every = torch.arange(ROWS, dtype=torch.int32)
    places = every if positions is None else positions
    table = torch.arange(4, dtype=torch.int32)[None]
    program = executor.program(ROWS)
    program.add([op])
    program.run(Step(every, places, places, torch.tensor([0, ROWS], dtype=torch.int32), table, every))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight).float()


@pytest.mark.parametrize("function", get_args(Function))
def test_activation(executor: Executor, function: Function) -> None:
    x, out = 4 * torch.randn(ROWS, 2 * WIDTH), torch.empty(ROWS, WIDTH)
    gate, up = x.chunk(2, -1)
    run(executor, Activation(x, out, function, gated=True))
    factor = up.clamp(-7, 7) + 1 if function == "swigluoai" else up
    torch.testing.assert_close(out, FORMULAS[function](gate) * factor, rtol=1e-5, atol=1e-5)
    want = FORMULAS[function](x)
    run(executor, Activation(x, x, function, gated=False))
    torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-5)


def test_a_norm_behind_a_sublayer_adds_to_the_stream(executor: Executor) -> None:
    x, weight, stream = torch.randn(ROWS, WIDTH), torch.randn(WIDTH), torch.randn(ROWS, WIDTH)
    want = stream + rms(x, weight, 1e-3)
    run(executor, RMSNorm(x, weight, stream, 1e-3, accumulate=True))
    torch.testing.assert_close(stream, want)


@pytest.mark.parametrize("rows", ["tokens", "logits"])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm(executor: Executor, biased: bool, rows: str) -> None:
    x, weight = 3 + torch.randn(ROWS, WIDTH), torch.randn(WIDTH)
    bias = torch.randn(WIDTH) if biased else None
    out = torch.empty(ROWS, WIDTH)
    run(executor, LayerNorm(x, weight, bias, out, 1e-2, rows))
    centred = x.double() - x.double().mean(-1, keepdim=True)
    want = rms(centred, weight, 1e-2) + (bias if biased else 0.0)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=3e-6)  # a mean of 3 has the precision of 3


def test_head_norm_of_some_columns(executor: Executor) -> None:
    wide, weight = 3 + torch.randn(ROWS, 60), torch.randn(45)
    before = wide.clone()
    heads = before[:, 6:51].unflatten(-1, (5, 9))
    want = rms((heads - heads.mean(-1, keepdim=True)).double(), weight.view(5, 9), 1e-2).flatten(-2)
    run(executor, HeadNorm(wide[:, 6:51], weight, 9, 1e-2))
    torch.testing.assert_close(wide[:, 6:51], want, rtol=1e-5, atol=1e-6)
    assert torch.equal(wide[:, :6], before[:, :6]) and torch.equal(wide[:, 51:], before[:, 51:])


def test_soft_cap(executor: Executor) -> None:
    logits = 50 * torch.randn(ROWS, WIDTH)
    want = 30 * (logits / 30).tanh()
    run(executor, SoftCap(logits, 30.0))
    torch.testing.assert_close(logits, want)


def test_position_embed(executor: Executor) -> None:
    table, out = torch.randn(20, WIDTH).half(), torch.randn(ROWS, WIDTH)
    want = out + table[5 : 5 + ROWS]
    run(executor, PositionEmbed(table, out, 2), torch.arange(3, 3 + ROWS, dtype=torch.int32))
    assert torch.equal(out, want)


def test_cast(executor: Executor) -> None:
    x, out = torch.randn(ROWS, WIDTH), torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)
    run(executor, Cast(x, out))
    assert torch.equal(out, x.bfloat16())


def cache() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, KV_HEADS, DIM, 16), torch.zeros(4, KV_HEADS, 16, DIM)


@pytest.mark.parametrize("k_norm", [True, False])
def test_norms_over_all_heads_and_scaled_queries(executor: Executor, k_norm: bool) -> None:
    qkv, angles = torch.randn(ROWS, (HEADS + 2 * KV_HEADS) * DIM), torch.rand(32, DIM // 2)
    norms = torch.randn(HEADS * DIM), torch.randn(KV_HEADS * DIM) if k_norm else None
    scale, positions = torch.rand(32) + 0.5, torch.arange(9, 9 + ROWS, dtype=torch.int32)
    q, k, _ = qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
    k = k if norms[1] is None else rms(k, norms[1], 1e-3)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.view(ROWS, -1, DIM).chunk(2, -1)
        cosine, sine = (each[positions, None] for each in (angles.cos(), angles.sin()))
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).flatten(1)

    want = torch.cat([rotated(rms(q, norms[0], 1e-3)) * scale[positions, None], rotated(k)], -1)
    k_cache, v_cache = cache()
    op = RopeKV(
        qkv, angles.cos(), angles.sin(), k_cache, v_cache, HEADS, KV_HEADS, DIM, *norms, 1e-3, q_scale=scale
    )
    assert op.norm_over_heads
    run(executor, op, positions)
    torch.testing.assert_close(qkv[:, : (HEADS + KV_HEADS) * DIM], want, rtol=1e-5, atol=1e-5)
    stored = k_cache[positions // 16, :, :, positions % 16].flatten(1)
    torch.testing.assert_close(stored, want[:, HEADS * DIM :], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_capped_scores(executor: Executor, softcap: float) -> None:
    qkv, out = torch.randn(ROWS, (HEADS + 2 * KV_HEADS) * DIM), torch.empty(ROWS, HEADS * DIM)
    k_cache, v_cache = (each.copy_(torch.randn(each.shape)) for each in cache())
    op = Attention(qkv, out, k_cache, v_cache, HEADS, KV_HEADS, DIM, 2.0, window=3, softcap=softcap)
    run(executor, op)
    q = qkv[:, : HEADS * DIM].view(ROWS, KV_HEADS, -1, DIM)
    scores = torch.einsum("tgid,gdk->gitk", q, k_cache[0, :, :, :ROWS]) * 2
    scores = scores if softcap == 0 else softcap * (scores / softcap).tanh()
    seen = torch.ones(ROWS, ROWS).tril() - torch.ones(ROWS, ROWS).tril(-3)
    weights = scores.masked_fill(seen == 0, -math.inf).softmax(-1)
    want = torch.einsum("gitk,gkd->tgid", weights, v_cache[0, :, :ROWS]).flatten(1)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
