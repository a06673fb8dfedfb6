"""Gated delta nets on a GPU, in its 16 bits, and decodes through a graph.

``pytest -m gpu``; beside ``test_gpu_engine.py``. Without a GPU it is the interpreter that runs them, in float16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from qserve.kernels.executor import Step
from qserve.kernels.ops import GatedDelta
from qserve.kernels.reference import ReferenceExecutor, on_device
from qserve.kernels.triton.executor import TritonExecutor
from tests.kernels.test_delta import conv_of, delta_of, step_of
from tests.kernels.triton.test_gpu_engine import ACTIVATIONS, DEVICE, ints

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
PLACES = {torch.float16: 2**-9, torch.bfloat16: 2**-6}
MIXED = step_of([(7, 1), (0, 70), (3, 1), (130, 5)], [2, 0, 3, 1])
DECODES = step_of([(7, 1), (0, 1), (130, 1)], [2, 0, 3])


def in_16_bits(op: Any, dtype: torch.dtype) -> Any:
    """``op`` with inputs, and where it has outputs of its own with those, in ``dtype``."""
    out = {"out": op.out.to(dtype)} if isinstance(op, GatedDelta) else {}
    return replace(op, x=op.x.to(dtype), state=torch.cat([op.state, op.state]), **out)


def check(op: Any, step: Step, dtype: torch.dtype, *, runs: int = 1, invariant: bool = False) -> None:
    """Both from the same states, ``runs`` times; what a run leaves in place is made anew."""
    executor = TritonExecutor(DEVICE, dtype, invariant=invariant)
    want = replace(op, x=op.x.float(), state=op.state.clone())
    got = on_device(replace(op, x=op.x.clone(), state=op.state.clone()), DEVICE)
    assert executor.supports(got) is None
    programs = executor.program(len(op.x)), ReferenceExecutor().program(len(op.x))
    for program, made in zip(programs, (got, want)):
        program.add([made])
    for _ in range(runs):
        for program, made in zip(programs, (got, want)):
            made.x.copy_(op.x)
            program.run(step)
    outs = (got.out, want.out) if isinstance(op, GatedDelta) else (got.x, want.x)
    rows = step.tokens
    torch.testing.assert_close(
        outs[0][:rows].cpu().float(), outs[1][:rows].float(), rtol=PLACES[dtype], atol=2 * PLACES[dtype]
    )
    torch.testing.assert_close(got.state.cpu(), want.state, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("invariant", [False, True])
def test_prompts_beside_decodes(dtype: torch.dtype, invariant: bool) -> None:
    torch.manual_seed(4)
    saves = torch.full((MIXED.tokens,), -1, dtype=torch.int32)
    saves[0], saves[40], saves[-2] = 4, 5, 6
    for op in (delta_of(MIXED.tokens, 1, 2, 40, 48), conv_of(MIXED.tokens, 100, 4)):
        check(in_16_bits(op, dtype), replace(MIXED, state_saves=saves), dtype, invariant=invariant)


@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
def test_decodes_in_a_graph(dtype: torch.dtype) -> None:
    """Launched, captured and replayed, padded from three rows to four; each goes on from the states of the last."""
    torch.manual_seed(5)
    step = replace(DECODES, state_saves=ints([-1, 5, -1]))
    for op in (delta_of(4, 1, 3, 24, 40), conv_of(4, 300, 4)):
        check(in_16_bits(op, dtype), step, dtype, runs=3)
