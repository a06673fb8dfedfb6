"""Each C kernel, on each ISA of this machine, against the torch reference at odd sizes, and its invariance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qserve.checkpoint.packed import PackedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import native
from qserve.kernels.ops import (
    Argmax,
    Attention,
    Embed,
    Executor,
    Gather,
    Linear,
    LogSoftmax,
    Op,
    RMSNorm,
    RopeKV,
    SiluMul,
    Step,
)
from qserve.kernels.reference import ReferenceExecutor

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


def available() -> list[native.Isa]:
    return list(native.ISAS[: native.ISAS.index(native.best_isa()) + 1]) if native.missing() is None else []


@pytest.fixture(params=available())
def isa(request: pytest.FixtureRequest) -> native.Isa:
    return request.param


def make_step(rows: int, logit_rows: list[int] | None = None, token_ids: torch.Tensor | None = None) -> Step:
    every = torch.arange(rows, dtype=torch.int32)
    return Step(
        token_ids=every if token_ids is None else token_ids.int(),
        positions=every,
        slots=every,
        seq_start=torch.tensor([0, rows], dtype=torch.int32),
        block_tables=torch.arange(-(-rows // 16), dtype=torch.int32)[None],
        logit_rows=every if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int32),
    )


def run_on(executor: Executor, op: Op, step: Step) -> None:
    assert executor.supports(op) is None
    program = executor.program(len(step.token_ids))
    program.add([op])
    program.run(step)


def run_native(op: Op, step: Step, isa: native.Isa, threads: int = 2) -> None:
    run_on(native.NativeExecutor(threads, isa), op, step)


def run_reference(op: Op, step: Step) -> None:
    run_on(ReferenceExecutor(), op, step)


def packed(out: int, inp: int, bits: int, group: int, symmetric: bool, *, shuffled: bool = False) -> PackedWeight:
    scheme = WeightScheme(bits, group, symmetric)
    groups = scheme.groups(inp)
    generator = torch.Generator().manual_seed(out * 31 + inp)
    codes = torch.randint(0, scheme.max_code + 1, (out, inp), generator=generator).to(torch.uint8)
    scales = torch.rand(out, groups, generator=generator) * 0.02 + 0.001
    zeros = None
    if not symmetric:
        zeros = torch.randint(0, scheme.max_code + 1, (out, groups), generator=generator).to(torch.uint8)
    g_idx = None
    if shuffled:
        g_idx = (torch.arange(inp) // scheme.group_width(inp))[torch.randperm(inp, generator=generator)].int()
    weight = PackedWeight(scheme, codes, scales, zeros, g_idx)
    weight.check()
    return weight


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp_min(1e-12))


@pytest.mark.parametrize(
    ("rows", "out", "inp", "bits", "group", "symmetric", "shuffled"),
    [
        (1, 16, 64, 4, 64, True, False),
        (1, 70, 192, 4, 64, True, False),
        (3, 33, 64, 4, 32, False, False),
        (5, 130, 576, 4, 64, True, False),
        (7, 64, 96, 8, 32, True, False),
        (33, 100, 192, 4, 64, False, False),
        (37, 65, 128, 8, 128, False, False),
        (2, 48, 100, 4, -1, True, False),
        (2, 48, 100, 8, -1, True, False),
        (4, 48, 72, 4, 32, True, False),
        (6, 80, 128, 4, 32, True, True),
        (40, 80, 128, 3, 64, False, True),
        (6, 80, 128, 2, 16, True, False),
        (9, 20, 24, 4, 8, True, False),
    ],
)
def test_packed_linear(
    isa: native.Isa, rows: int, out: int, inp: int, bits: int, group: int, symmetric: bool, shuffled: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, inp)
    weight = packed(out, inp, bits, group, symmetric, shuffled=shuffled)
    bias = torch.randn(out)
    got, want = torch.full((rows, out), 3.0), torch.full((rows, out), 3.0)
    step = make_step(rows)
    run_native(Linear(x, weight, got, bias, accumulate=True), step, isa)
    run_reference(Linear(x, weight, want, bias, accumulate=True), step)
    assert relative_error(got - bias - 3, want - bias - 3) < 0.012  # int8 rounding of the input, nothing more


def test_packed_linear_is_exact_where_activations_are(isa: native.Isa) -> None:
    """Inputs that int8 holds exactly leave no rounding but float32's, so a wrong code or zero would show."""
    x = torch.randint(-127, 128, (5, 192)).float()
    x[:, ::32] = 127.0  # of each group that shares a scale
    for bits, symmetric in ((4, True), (4, False), (8, True), (8, False)):
        weight = packed(50, 192, bits, 64, symmetric)
        got, want = torch.empty(5, 50), torch.empty(5, 50)
        run_native(Linear(x, weight, got), make_step(5), isa)
        run_reference(Linear(x, weight, want), make_step(5))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "out", "inp"), [(1, 16, 8), (3, 70, 33), (8, 64, 100), (19, 130, 64)])
def test_dense_linear(isa: native.Isa, dtype: torch.dtype, rows: int, out: int, inp: int) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(rows, inp), torch.randn(out, inp).to(dtype), torch.randn(out)
    got, want = torch.ones(rows, out), torch.ones(rows, out)
    run_native(Linear(x, weight, got, bias, accumulate=True), make_step(rows), isa)
    run_reference(Linear(x, weight, want, bias, accumulate=True), make_step(rows))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@given(rows=st.integers(2, 80), pick=st.integers(0, 10**6), bits=st.sampled_from([0, 4, 8]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_row_does_not_depend_on_its_neighbours(isa: native.Isa, rows: int, pick: int, bits: int) -> None:
    torch.manual_seed(rows)
    inp, out = 128, 90
    x = torch.randn(rows, inp)
    weight = packed(out, inp, bits, 64, True) if bits else torch.randn(out, inp)
    together, alone = torch.empty(rows, out), torch.empty(1, out)
    row = pick % rows
    run_native(Linear(x, weight, together), make_step(rows), isa, threads=2)
    run_native(Linear(x[row : row + 1].clone(), weight, alone), make_step(1), isa, threads=1)
    assert torch.equal(together[row], alone[0])


def test_rmsnorm_silu_embed_gather(isa: native.Isa) -> None:
    torch.manual_seed(2)
    rows, width = 5, 67
    x, weight = torch.randn(rows, width), torch.rand(width) + 0.5
    gate_up = torch.randn(rows, 2 * width) * 5
    table = torch.randn(11, width)
    ids = torch.tensor([3, 10, 0, 3, 7])
    for make in (
        lambda out: RMSNorm(x, weight, out, 1e-5),
        lambda out: SiluMul(gate_up, out),
        lambda out: Embed(table, out),
        lambda out: Embed(table.half(), out),
        lambda out: Embed(table.bfloat16(), out),
        lambda out: Gather(x, out),
    ):
        got, want = torch.empty(rows, width), torch.empty(rows, width)
        step = make_step(rows, [4, 0, 2], ids)
        run_native(make(got), step, isa)
        run_reference(make(want), step)
        n = 3 if isinstance(make(got), Gather) else rows
        torch.testing.assert_close(got[:n], want[:n], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("width", [1, 15, 16, 100, 1003])
def test_log_softmax_and_argmax(isa: native.Isa, width: int) -> None:
    torch.manual_seed(3)
    x = torch.randn(4, width) * 20
    want = x.double().log_softmax(-1).float()
    best = torch.empty(4, dtype=torch.int32)
    run_native(Argmax(x, best), make_step(4), isa)
    assert best.tolist() == x.argmax(-1).tolist()
    run_native(LogSoftmax(x), make_step(4), isa)
    torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-5)
    x[2, width // 2] = math.nan
    run_native(Argmax(x, best), make_step(4), isa)
    assert best[2] == -1 and (best[[0, 1, 3]] >= 0).all()


def attention_case(
    heads: int, kv_heads: int, head_dim: int, lengths: list[tuple[int, int]], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Step]:
    """lengths: (context already cached, new tokens) per sequence. Unused slots hold NaN: nobody may read them."""
    tables, slots, positions, starts, used = [], [], [], [0], 0
    widest = max(-(-(c + n) // 16) for c, n in lengths)
    order = torch.randperm(sum(-(-(c + n) // 16) for c, n in lengths) + 3).tolist()
    for context, new in lengths:
        need = -(-(context + new) // 16)
        table = order[used : used + need]
        used += need
        tables.append(table + [0] * (widest - need))
        positions += range(context, context + new)
        slots += [table[p // 16] * 16 + p % 16 for p in range(context, context + new)]
        starts.append(starts[-1] + new)
    blocks = len(order)
    k_cache = torch.full((blocks, kv_heads, head_dim, 16), math.nan, dtype=dtype)
    v_cache = torch.full((blocks, kv_heads, 16, head_dim), math.nan, dtype=dtype)
    for (context, _), table in zip(lengths, tables):
        for p in range(context):
            k_cache[table[p // 16], :, :, p % 16] = torch.randn(kv_heads, head_dim).to(dtype)
            v_cache[table[p // 16], :, p % 16] = torch.randn(kv_heads, head_dim).to(dtype)
    tokens = starts[-1]
    as_int = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    ids = list(range(tokens))
    step = Step(as_int(ids), as_int(positions), as_int(slots), as_int(starts), as_int(tables), as_int([0]))
    return torch.randn(tokens, (heads + 2 * kv_heads) * head_dim), k_cache, v_cache, step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "lengths"),
    [
        (9, 3, 64, 0, [(0, 1)]),
        (9, 3, 64, 0, [(40, 1), (0, 37), (15, 2), (16, 1)]),
        (4, 4, 16, 0, [(3, 5), (0, 16)]),
        (8, 2, 32, 7, [(50, 1), (0, 40), (6, 20)]),
        (14, 1, 48, 0, [(20, 9), (0, 3)]),
        (2, 1, 256, 20, [(64, 3)]),
    ],
)
def test_rope_and_attention(
    isa: native.Isa, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int,
    lengths: list[tuple[int, int]],
) -> None:  # fmt: skip
    torch.manual_seed(4)
    qkv, k_cache, v_cache, step = attention_case(heads, kv_heads, head_dim, lengths, dtype)
    angles = torch.rand(128, head_dim // 4) * 6
    norm = torch.rand(head_dim) + 0.5
    results = []
    for run in (lambda op: run_native(op, step, isa), lambda op: run_reference(op, step)):
        mine, k, v = qkv.clone(), k_cache.clone(), v_cache.clone()
        out = torch.empty(len(qkv), heads * head_dim)
        run(RopeKV(mine, angles.cos(), angles.sin(), k, v, heads, kv_heads, head_dim, norm, norm, 1e-6))
        run(Attention(mine, out, k, v, heads, kv_heads, head_dim, head_dim**-0.5, window))
        results.append((mine, k, v, out))
    (mine, k, v, out), (mine2, k2, v2, out2) = results
    torch.testing.assert_close(mine[:, : (heads + kv_heads) * head_dim], mine2[:, : (heads + kv_heads) * head_dim])
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(k, k2, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(v, v2, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(out, out2, rtol=tolerance, atol=tolerance)


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e-42, 3e38])
def test_extreme_inputs_stay_in_their_row(isa: native.Isa, value: float) -> None:
    torch.manual_seed(6)
    x = torch.randn(3, 128)
    x[1, 70] = value
    weight = packed(40, 128, 4, 64, True)
    got, clean = torch.empty(3, 40), torch.empty(3, 40)
    run_native(Linear(x, weight, got), make_step(3), isa)
    x[1, 70] = 0
    run_native(Linear(x, weight, clean), make_step(3), isa)
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    if not math.isfinite(value):
        assert got[1].isnan().all()
    elif value < 1:
        torch.testing.assert_close(got[1], clean[1])


def test_threads_do_not_change_bits_and_pools_end(isa: native.Isa) -> None:
    torch.manual_seed(7)
    x, weight = torch.randn(9, 128), packed(300, 128, 4, 32, False)
    outs = []
    for threads in (1, 2, 3, 5):
        out = torch.empty(9, 300)
        run_native(Linear(x, weight, out), make_step(9), isa, threads)
        outs.append(out)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_linear_may_write_a_slice_of_a_wider_buffer(isa: native.Isa) -> None:
    torch.manual_seed(8)
    x, wide, apart = torch.randn(5, 64), torch.zeros(5, 100), torch.empty(5, 33)
    for weight in (packed(33, 64, 4, 32, True), torch.randn(33, 64)):
        run_native(Linear(x, weight, wide[:, 40:73]), make_step(5), isa)
        run_native(Linear(x, weight, apart), make_step(5), isa)
        assert torch.equal(wide[:, 40:73], apart)
        assert wide[:, :40].abs().sum() == 0 and wide[:, 73:].abs().sum() == 0


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
    for weight in (torch.randn(33, 64), packed(32, 64, 4, 32, True), packed(33, 32, 4, 32, True)):
        with pytest.raises(ValueError, match="does not map"):
            run_native(Linear(torch.randn(2, 64), weight, torch.empty(2, 34)), make_step(2), isa)
