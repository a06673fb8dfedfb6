"""The C kernels' promises besides their results, on each ISA of this machine: what a row depends on, and what not."""

from __future__ import annotations

import math

import pytest
import torch

from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import native, registry
from qserve.kernels.executor import Step
from qserve.kernels.ops import Argmax, Attention, Linear, Op, RopeKV
from tests.kernels.quantized_weights import make_weight

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.fixture(params=native.available())
def isa(request: pytest.FixtureRequest) -> native.Isa:
    return request.param


def make_step(rows: int) -> Step:
    every = torch.arange(rows, dtype=torch.int32)
    table = torch.arange(-(-rows // 16), dtype=torch.int32)[None]
    return Step(every, every, every, torch.tensor([0, rows], dtype=torch.int32), table, every)


def run_native(op: Op, step: Step, isa: native.Isa, threads: int = 2) -> None:
    executor = native.NativeExecutor(threads, isa)
    assert executor.supports(op) is None
    program = executor.program(len(step.token_ids))
    program.add([op])
    program.run(step)


@pytest.mark.parametrize("window", [0, 11])
def test_attention_does_not_depend_on_chunks_or_neighbours(isa: native.Isa, window: int) -> None:
    """A prompt of 45 tokens at once, in chunks, and beside others gives the same bits."""
    torch.manual_seed(5)
    heads, kv_heads, dim, total = 9, 3, 32, 45
    stream = torch.randn(total, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(total, dim // 2)

    def run(chunks: list[int], neighbour: int) -> torch.Tensor:
        k = torch.full((12, kv_heads, dim, 16), math.nan, dtype=torch.float16)
        v = torch.full((12, kv_heads, 16, dim), math.nan, dtype=torch.float16)
        outs, done = [], 0
        for size in chunks:
            mine = stream[done : done + size]
            other = torch.randn(neighbour, stream.shape[1])
            qkv = torch.cat([other, mine])
            positions = [*range(neighbour), *range(done, done + size)]
            table, other_table = [5, 2, 9], [0, 1, 3]
            slots = [other_table[p // 16] * 16 + p % 16 for p in range(neighbour)]
            slots += [table[p // 16] * 16 + p % 16 for p in range(done, done + size)]
            starts = [0, neighbour, neighbour + size] if neighbour else [0, size]
            tables = [other_table, table] if neighbour else [table]
            as_int = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
            where = as_int(positions), as_int(slots), as_int(starts), as_int(tables)
            step = Step(as_int(positions), *where, as_int([0]))
            out = torch.empty(len(qkv), heads * dim)
            run_native(RopeKV(qkv, angles.cos(), angles.sin(), k, v, heads, kv_heads, dim), step, isa)
            run_native(Attention(qkv, out, k, v, heads, kv_heads, dim, dim**-0.5, window), step, isa)
            outs.append(out[neighbour:])
            done += size
        return torch.cat(outs)

    whole = run([45], 0)
    assert whole.isfinite().all()
    for chunks, neighbour in (([45], 7), ([1] * 45, 0), ([16, 16, 13], 3), ([20, 1, 24], 1), ([5, 40], 20)):
        assert torch.equal(run(chunks, neighbour), whole), (chunks, neighbour)


def test_threads_do_not_change_bits_and_pools_end(isa: native.Isa) -> None:
    torch.manual_seed(7)
    x, weight = torch.randn(9, 128), make_weight(300, 128, WeightScheme(4, 32, False))
    outs = []
    for threads in (1, 2, 3, 5):
        out = torch.empty(9, 300)
        run_native(Linear(x, weight, out), make_step(9), isa, threads)
        outs.append(out)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_linear_may_write_a_slice_of_a_wider_buffer(isa: native.Isa) -> None:
    torch.manual_seed(8)
    x, wide, apart = torch.randn(5, 64), torch.zeros(5, 100), torch.empty(5, 33)
    for weight in (make_weight(33, 64, WeightScheme(4, 32, True)), torch.randn(33, 64)):
        run_native(Linear(x, weight, wide[:, 40:73]), make_step(5), isa)
        run_native(Linear(x, weight, apart), make_step(5), isa)
        assert torch.equal(wide[:, 40:73], apart)
        assert wide[:, :40].abs().sum() == 0 and wide[:, 73:].abs().sum() == 0


@pytest.mark.parametrize("width", [16384, 16411])
def test_a_product_as_wide_as_a_vocabulary(isa: native.Isa, width: int) -> None:
    """It may be written past the caches: the next operation sees it all the same, whole and in parts of a buffer."""
    torch.manual_seed(10)
    x, before = torch.randn(5, 32), torch.randn(5, width)
    for weight in (make_weight(width, 32, WeightScheme(8, 32, True)), torch.randn(width, 32)):
        want = x @ (weight if isinstance(weight, torch.Tensor) else weight.dequantize()).t()
        wide, apart, best = torch.zeros(5, width + 32), before.clone(), torch.empty(5, dtype=torch.int32)
        run_native(Linear(x, weight, wide[:, 16:-16]), make_step(5), isa)
        run_native(Linear(x, weight, apart, accumulate=True), make_step(5), isa)
        assert wide[:, :16].abs().sum() == 0 and wide[:, -16:].abs().sum() == 0
        assert torch.equal(before + wide[:, 16:-16], apart)
        assert (wide[:, 16:-16] - want).abs().max() < 0.02 * want.abs().max()
        program = native.NativeExecutor(3, isa).program(5)
        program.add([Linear(x, weight, apart), Argmax(apart, best)])
        program.run(make_step(5))
        assert torch.equal(best.long(), apart.argmax(-1))


def test_an_infinite_value_reaches_only_the_rows_that_see_it(isa: native.Isa) -> None:
    torch.manual_seed(9)
    heads, kv_heads, dim, total, bad = 6, 2, 32, 24, 13
    qkv = torch.randn(total, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(total, dim // 2)
    outs = []
    for poison in (False, True):
        mine = qkv.clone()
        if poison:
            mine[bad, (heads + kv_heads) * dim :] = math.inf
        k = torch.full((2, kv_heads, dim, 16), math.nan)
        v = torch.full((2, kv_heads, 16, dim), math.nan)
        out = torch.empty(total, heads * dim)
        run_native(RopeKV(mine, angles.cos(), angles.sin(), k, v, heads, kv_heads, dim), make_step(total), isa)
        run_native(Attention(mine, out, k, v, heads, kv_heads, dim, dim**-0.5), make_step(total), isa)
        outs.append(out)
    clean, poisoned = outs
    assert torch.equal(clean[:bad], poisoned[:bad])
    assert not poisoned[bad:].isfinite().any()


def test_a_weight_of_another_shape_is_refused(isa: native.Isa) -> None:
    scheme = WeightScheme(4, 32)
    for weight in (torch.randn(33, 64), make_weight(32, 64, scheme), make_weight(33, 32, scheme)):
        with pytest.raises(ValueError, match="does not map"):
            run_native(Linear(torch.randn(2, 64), weight, torch.empty(2, 34)), make_step(2), isa)


def test_the_list_of_kernels_names_those_that_this_machine_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    here = native.available()
    assert not set(native.not_run()) & set(here)
    monkeypatch.setattr(native, "available", lambda: here[:1])
    listed = next(each.detail for each in registry.executors() if each.name == "native")
    assert listed.endswith(f"; compiled, not run: {', '.join(native.not_run())}")
    assert set(native.not_run()) >= set(here[1:])
