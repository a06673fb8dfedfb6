"""The Triton kernels of latent attention, in the interpreter, against the torch reference over odd shapes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qserve.kernels.executor import Executor, Step
from qserve.kernels.ops import HeadLinear, LatentAttention, Op
from qserve.kernels.reference import ReferenceExecutor
from qserve.kernels.triton import target
from qserve.kernels.triton.support import unsupported
from tests.kernels.test_latent import BLOCK, Sequences, check_write
from tests.kernels.triton.test_engine_kernels import run_on, triton_executor

pytestmark = pytest.mark.skipif(not target.is_interpreted(), reason="the interpreter computes them in float32")
SHAPES = [
    (5, 40, 8, torch.float32), (40, 18, 6, torch.float32),
    pytest.param(71, 33, 2, torch.float16, marks=pytest.mark.slow),
]  # fmt: skip


def unready(op: Op) -> str | None:
    return triton_executor().supports(op)


@pytest.mark.parametrize(("heads", "rank", "rope", "dtype"), SHAPES)
@pytest.mark.parametrize("invariant", [False, True])
def test_attention_is_that_of_its_reference(
    heads: int, rank: int, rope: int, dtype: torch.dtype, invariant: bool
) -> None:
    """Prompts that begin and go on, and decodes of one chunk of keys and of several."""
    batch = Sequences([0, 5, 3, 16, 520, 255], [3, 19, 1, 1, 1, 1], heads, rank, rope, dtype)
    got, want = batch.attend(triton_executor(invariant=invariant)), batch.attend(ReferenceExecutor())
    loose = {"rtol": 0, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 2e-3}
    torch.testing.assert_close(got, want, **loose)


def test_in_the_invariant_mode_a_row_depends_on_no_chunk_and_no_neighbour(same_sums: None) -> None:
    batch = Sequences([250, 0, 600], [9, 3, 1], 5, 20, 4, torch.float32)
    executor = triton_executor(invariant=True)
    whole = batch.attend(executor)
    for first, last in ((0, 9), (0, 1), (1, 6), (6, 7)):
        assert torch.equal(batch.part(0, first, last).attend(executor), whole[first:last])
    assert torch.equal(batch.part(2, 0, 1).attend(executor), whole[12:])


@pytest.mark.slow
def test_a_decode_depends_on_no_neighbour(same_sums: None) -> None:
    batch = Sequences([300, 7, 600], [1, 1, 1], 5, 20, 4, torch.float32)
    whole = batch.attend(triton_executor())
    for sequence in range(3):
        assert torch.equal(batch.part(sequence, 0, 1).attend(triton_executor()), whole[sequence : sequence + 1])


def test_what_is_not_finite_reaches_only_the_sequence_that_sees_it() -> None:
    batch = Sequences([20, 3], [1, 1], 6, 20, 4, torch.float32)
    want = batch.attend(triton_executor())
    batch.cache[batch.tables[0][0], 13, 2] = math.nan
    got = batch.attend(triton_executor())
    assert got[0].isnan().all() and torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_latents_are_written_as_by_the_reference(dtype: torch.dtype) -> None:
    check_write(triton_executor(), dtype, rows=7)


@pytest.mark.parametrize(("heads", "inp", "out"), [(1, 1, 1), (5, 24, 40), (3, 130, 70)])
def test_products_of_heads_are_those_of_the_reference(heads: int, inp: int, out: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    weight = torch.randn(heads, out, inp, generator=generator)
    for rows in (1, 19):
        x = torch.randn(rows, heads, inp + 3, generator=generator)[..., :inp]
        step = Sequences([0], [rows], heads, 16, 2, torch.float32).step()

        def product(executor: Executor, x: Tensor = x, step: Step = step) -> Tensor:
            wide = torch.full((len(x), heads, out + 5), 7.0)
            run_on(executor, [HeadLinear(x, weight, wide[..., 2 : 2 + out])], step)
            return wide

        want = product(ReferenceExecutor())
        for invariant in (False, True):
            torch.testing.assert_close(product(triton_executor(invariant=invariant)), want, rtol=1e-5, atol=1e-4)


def test_what_has_no_kernel_is_refused_by_name() -> None:
    cache = torch.empty(1, BLOCK, 656, dtype=torch.float16)
    wide = LatentAttention(torch.empty(1, 656), torch.empty(1, 592), cache, 1, 1.0)
    assert unready(wide) == "a latent of 592 + 64 has no Triton kernel: at most 512 + 64"


def test_latents_too_wide_for_shared_memory_are_left_to_the_reference() -> None:
    cache = torch.empty(1, BLOCK, 576, dtype=torch.float16)
    op = LatentAttention(torch.empty(1, 576), torch.empty(1, 512), cache, 1, 1.0)
    assert unsupported(op, target.described("sm_89"), compiled=True) is None
    reason = "latents of 512 need 91 KiB of shared memory, gfx942 has less"
    assert unsupported(op, target.described("gfx942"), compiled=True) == reason
