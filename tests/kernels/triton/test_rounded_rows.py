"""Norms and SiLU·up that leave their rows in 8 bits for the next product: the same bits as a separate rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels.executor import Step
from qserve.kernels.ops import Activation, Linear, Op, RMSNorm
from qserve.kernels.triton import eight_bit, target
from qserve.kernels.triton.executor import TritonExecutor

pytestmark = pytest.mark.skipif(target.missing() is not None, reason=str(target.missing()))

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = pytest.mark.skipif("fp8" not in target.target(DEVICE).features, reason="this GPU has no e4m3")
ROWS, CAPACITY = 5, 7
TOKEN = {kind: ActivationScheme(kind) for kind in ("int8", "fp8")}
STATIC = {kind: ActivationScheme(kind, "tensor", dynamic=False) for kind in ("int8", "fp8")}
round_rows = eight_bit.round_rows
GROUPED = ActivationScheme("int8", "group", group_size=64)


def weight(inp: int, activations: ActivationScheme, group: int = -1, *, shuffled: bool = False) -> QuantizedWeight:
    """20 outputs, in the integers that both kinds of inputs multiply."""
    scheme = WeightScheme(4, group)
    codes = torch.randint(0, 16, (20, inp)).to(torch.uint8)
    g_idx = (torch.arange(inp) // group)[torch.randperm(inp)].int() if shuffled else None
    scale = None if activations.dynamic else 0.02
    scales = torch.rand(20, scheme.groups(inp)) * 0.02
    return QuantizedWeight(scheme, codes, scales, None, g_idx, activations=activations, input_scale=scale)


def makers(width: int) -> list[RMSNorm | Activation]:
    """Each with an input whose second row is not finite, third zero and fourth large; the output is in float16."""
    x = torch.randn(CAPACITY, 2 * width, device=DEVICE)
    x[1, width // 2], x[2], x[3] = torch.inf, 0.0, x[3] * 20
    out = torch.empty(CAPACITY, width, dtype=torch.float16, device=DEVICE)
    norm = RMSNorm(x[:, :width].contiguous(), torch.randn(width), out, 1e-5)
    return [norm, Activation(x.half(), torch.empty_like(out), "silu", True)]


def run(*programs: list[Op]) -> None:
    rows = torch.arange(ROWS, dtype=torch.int32)
    starts, tables = torch.tensor([0, ROWS], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    step = Step(rows, rows, rows, starts, tables, rows)
    executor = TritonExecutor(DEVICE, torch.float16)
    for ops in programs:
        program = executor.program(CAPACITY)
        program.add(ops)
        program.run(step)


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=FP8)])
@pytest.mark.parametrize(("width", "group"), [(100, -1), (192, 64), (576, -1)])
def test_the_bits_are_those_of_a_rounding_of_its_own(
    kind: str, width: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    rounds = []
    monkeypatch.setattr(eight_bit, "round_rows", lambda *arguments: rounds.append(round_rows(*arguments)))
    for activations in (TOKEN[kind], STATIC[kind]):
        for maker in makers(width):
            apart = Linear(maker.out, weight(width, activations, group), torch.zeros(CAPACITY, 20, device=DEVICE))
            at_once = replace(apart, out=torch.zeros(CAPACITY, 20, device=DEVICE))
            run([maker], [apart])
            wanted = maker.out.clone()
            assert len(rounds) == 1
            run([maker, at_once])
            assert len(rounds) == 1, "nothing is rounded twice"
            rounds.clear()
            assert not maker.out[1].isfinite().all()
            torch.testing.assert_close(maker.out[:ROWS], wanted[:ROWS], rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(at_once.out, apart.out, rtol=0, atol=0, equal_nan=True)
            assert at_once.out[1].isnan().all() and at_once.out[[0, 2, 3, 4]].isfinite().all()
            assert not at_once.out[ROWS:].any()


@FP8
def test_who_else_reads_the_row_finds_it() -> None:
    """The second product has scales of its own kind: its input is rounded from what was made."""
    torch.manual_seed(1)
    for maker in makers(128):
        first, second = (
            Linear(maker.out, weight(128, scheme), torch.zeros(CAPACITY, 20, device=DEVICE))
            for scheme in (TOKEN["int8"], STATIC["fp8"])
        )
        run([maker], [first], [second])
        wanted = [first.out.clone(), second.out.clone()]
        run([maker, first, second])
        for op, want in zip((first, second), wanted):
            torch.testing.assert_close(op.out, want, rtol=0, atol=0, equal_nan=True)


def test_what_is_rounded_otherwise_stays_apart() -> None:
    """Groups of inputs, groups out of order, products that read other rows, and what is no norm."""
    torch.manual_seed(2)
    maker = makers(128)[0]
    for read in (
        Linear(maker.out, weight(128, GROUPED), torch.zeros(CAPACITY, 20, device=DEVICE)),
        Linear(maker.out, weight(128, TOKEN["int8"], 64, shuffled=True), torch.zeros(CAPACITY, 20, device=DEVICE)),
        Linear(maker.out, weight(128, TOKEN["int8"]), torch.zeros(CAPACITY, 20, device=DEVICE), rows="logits"),
        Linear(maker.out.clone(), weight(128, TOKEN["int8"]), torch.zeros(CAPACITY, 20, device=DEVICE)),
    ):
        run([maker], [read])
        wanted = read.out.clone()
        run([maker, read])
        torch.testing.assert_close(read.out, wanted, rtol=0, atol=0, equal_nan=True)
