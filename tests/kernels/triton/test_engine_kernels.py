"""The Triton kernels beside the linear products, in the interpreter, against the torch reference over odd shapes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels.executor import Executor, Step
from qserve.kernels.ops import PACKED_KV, Activation, Argmax, Attention, Embed, Gather, LogSoftmax, Op, RMSNorm, RopeKV
from qserve.kernels.reference import ReferenceExecutor
from qserve.kernels.triton import executor as triton_executors
from qserve.kernels.triton import target
from qserve.kernels.triton.executor import TritonExecutor
from qserve.kernels.triton.launch import compiling
from tests.kernels.packed_cache import packed, unpacked

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_gpu_engine.py runs")

CPU = torch.device("cpu")
FP8 = pytest.mark.skipif("fp8" not in target.target(CPU).features, reason="this GPU has no e4m3")
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_step(rows: int, ids: Any = None) -> Step:
    every = torch.arange(rows, dtype=torch.int32)
    tables = torch.arange(-(-rows // 16), dtype=torch.int32)[None]
    return Step(every if ids is None else ints(ids), every, every, ints([0, rows]), tables, every)


def run_on(executor: Executor, ops: list[Op], step: Step) -> None:
    program = executor.program(max(len(step.token_ids), len(step.logit_rows)))
    for op in ops:
        assert executor.supports(op) is None
    program.add(ops)
    program.run(step)


def triton_executor(*, invariant: bool = False) -> TritonExecutor:
    return TritonExecutor(CPU, torch.float32, invariant=invariant)


def test_gather_and_dense_embeddings() -> None:
    torch.manual_seed(0)
    got = torch.empty(3, 1100)
    step = replace(make_step(3, [8, 0, 8]), logit_rows=ints([2, 0]))
    table = torch.randn(9, 1100).half()
    run_on(triton_executor(), [Embed(table, got)], step)
    assert torch.equal(got, table[[8, 0, 8]].float())
    run_on(triton_executor(), [Embed(table, got, scale=0.3)], step)
    torch.testing.assert_close(got, table[[8, 0, 8]].float() * 0.3)
    out = torch.zeros(2, 1100, dtype=torch.float16)
    run_on(triton_executor(), [Gather(got, out)], step)
    assert torch.equal(out, got[[2, 0]].half())


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "width"),
    [(4, 32, True, 520), (8, -1, False, 520), (3, 24, False, 520), (6, 64, True, 576), (6, -1, True, 101),
     (6, 24, False, 1100)],
)  # fmt: skip
def test_packed_embeddings(bits: int, group: int, symmetric: bool, width: int) -> None:
    torch.manual_seed(0)
    scheme = WeightScheme(bits, group, symmetric)
    groups = scheme.groups(width)
    codes = torch.randint(0, scheme.max_code + 1, (11, width)).to(torch.uint8)
    zeros = None if symmetric else torch.randint(0, scheme.max_code + 1, (11, groups)).to(torch.uint8)
    table = QuantizedWeight(scheme, codes, torch.rand(11, groups), zeros)
    got = torch.empty(3, width)
    for scale in (1.0, 0.3):
        run_on(triton_executor(), [Embed(table, got, scale=scale)], make_step(3, [10, 0, 4]))
        torch.testing.assert_close(got, table.dequantize()[[10, 0, 4]] * scale)


@FP8
def test_embeddings_in_e4m3() -> None:
    codes = torch.randn(5, 40).to(torch.float8_e4m3fn).view(torch.uint8)
    table = QuantizedWeight(WeightScheme(8, -1, dtype="fp8"), codes, torch.rand(5, 1))
    got = torch.empty(2, 40)
    run_on(triton_executor(), [Embed(table, got)], make_step(2, [4, 1]))
    torch.testing.assert_close(got, table.dequantize()[[4, 1]])


@pytest.mark.parametrize("width", [7, 1000, 9000])
def test_argmax_is_the_first_of_equals_and_tells_of_nan(width: int) -> None:
    torch.manual_seed(1)
    x = torch.randint(0, 50, (6, width)).float()
    x[2, width // 2] = math.nan
    x[3] = -math.inf
    x[4, [width - 1, width // 3]] = math.inf
    got, want = torch.full((6,), 7, dtype=torch.int32), torch.empty(6, dtype=torch.int32)
    run_on(triton_executor(), [Argmax(x, got)], make_step(6))
    run_on(ReferenceExecutor(), [Argmax(x, want)], make_step(6))
    assert got.tolist() == want.tolist() and got[2] == -1


def test_log_softmax() -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 5000) * 20
    x[1, 3] = -math.inf
    x[2, 4] = math.nan
    want = x.log_softmax(-1)
    run_on(triton_executor(), [LogSoftmax(x)], make_step(3))
    torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-5, equal_nan=True)


class Cache:
    """Pages that lie token by token, and the two operations over them. They hold NaN until they are written."""

    def __init__(self, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int = 0,
                 activations: torch.dtype = torch.float32, *, norm: tuple[int, ...] = (),
                 center: bool = False, turned: int | None = None, scaled: bool = False,
                 softcap: float = 0.0, sinks: bool = False) -> None:  # fmt: skip
        self.sinks = torch.linspace(-2, 3, heads) if sinks else None
        self.shape, self.window, self.activations = (heads, kv_heads, dim), window, activations
        self.softcap = softcap
        if dtype == PACKED_KV:
            unwritten = torch.full((80, kv_heads, 16, dim), math.nan)
            self.k, self.v = packed(unwritten, keys=True), packed(unwritten, keys=False)
        else:
            self.k = self._pages(dtype, kv_heads, dim).transpose(2, 3)
            self.v = self._pages(dtype, kv_heads, dim)
        generator = torch.Generator().manual_seed(3)
        angles = torch.rand(1200, dim // 2, generator=generator) * 6
        angles = angles[:, : dim // 2 if turned is None else turned]
        self.options: dict[str, Any] = {"cosine": angles.cos(), "sine": angles.sin()}
        self.scales: dict[str, torch.Tensor] = {}
        if dtype in LIMITS:
            for name in ("k_scale", "v_scale"):
                self.scales[name] = (torch.rand(kv_heads, generator=generator) + 2.5) / LIMITS[dtype]
        for name, count in zip(("q_norm", "k_norm"), norm):
            self.options[name] = torch.rand(count * dim, generator=generator) + 0.5
        if center:
            self.options["k_center"] = torch.randn(kv_heads, dim, generator=generator) * 0.3
        if scaled:
            self.options["q_scale"] = torch.rand(1200, generator=generator) + 0.5

    @staticmethod
    def _pages(dtype: torch.dtype, kv_heads: int, dim: int) -> torch.Tensor:
        if dtype.itemsize > 1:
            return torch.full((80, kv_heads, 16, dim), math.nan, dtype=dtype)
        nan = -128 if dtype == torch.int8 else 0x7F
        return torch.full((80, kv_heads, 16, dim), nan, dtype=torch.int8).view(dtype)

    def ops(self, qkv: torch.Tensor) -> tuple[RopeKV, Attention, torch.Tensor]:
        heads, _, dim = self.shape
        out = torch.full((len(qkv), heads * dim), math.nan, dtype=self.activations)
        cosine, sine = self.options["cosine"], self.options["sine"]
        rest = {name: x for name, x in self.options.items() if name not in ("cosine", "sine")}
        rope = RopeKV(qkv, cosine, sine, self.k, self.v, *self.shape, **rest, **self.scales)
        kind = {"window": self.window, "softcap": self.softcap, "sinks": self.sinks}
        return rope, Attention(qkv, out, self.k, self.v, *self.shape, dim**-0.5, **kind, **self.scales), out

    def run(self, executor: Executor, qkv: torch.Tensor, step: Step, *, store: bool = True) -> torch.Tensor:
        rope, attention, out = self.ops(qkv)
        run_on(executor, [rope, attention] if store else [attention], step)
        return out


def sequences(*spans: tuple[int, int, list[int]]) -> Step:
    """A step of sequences (start, end, block table)."""
    positions, slots, starts, width = [], [], [0], max(len(table) for _, _, table in spans)
    for start, end, table in spans:
        positions += range(start, end)
        slots += [table[p // 16] * 16 + p % 16 for p in range(start, end)]
        starts.append(len(positions))
    tables = [[*table, *[0] * (width - len(table))] for _, _, table in spans]
    return Step(ints(positions), ints(positions), ints(slots), ints(starts), ints(tables), ints([]))


PLAIN: dict[str, Any] = {}
CASES = [
    # heads, kv_heads, dim, window, cache, activations, chunks
    (9, 3, 64, 0, torch.float16, torch.float16, [37, 1, 12], PLAIN),
    (4, 4, 16, 0, torch.float32, torch.float32, [5, 16], {"scaled": True}),
    (8, 2, 80, 7, torch.float16, torch.float32, [40, 1, 20], {"turned": 12, "norm": (1, 1)}),
    (6, 3, 100, 0, torch.float32, torch.float32, [21, 1], {"turned": 0, "softcap": 1.5, "sinks": True}),
    (8, 1, 64, 9, torch.float16, torch.float16, [30, 1, 2], {"sinks": True}),
    (3, 3, 20, 9, torch.float32, torch.float32, [18, 1], {"norm": (3, 3), "softcap": 0.3, "turned": 5}),
    (4, 2, 16, 0, torch.float32, torch.float32, [5, 2], {"norm": (4, 1)}),
    (71, 1, 16, 0, torch.float16, torch.float32, [3, 1], PLAIN),
    pytest.param(14, 1, 48, 0, torch.float8_e4m3fn, torch.float16, [20, 9, 1], PLAIN, marks=FP8),
    pytest.param(8, 1, 128, 20, torch.float8_e4m3fn, torch.float32, [64, 3, 1], {"center": True}, marks=FP8),
    (2, 1, 256, 0, torch.int8, torch.float32, [30, 1], {"center": True, "turned": 64}),
    (6, 2, 32, 0, torch.int8, torch.float16, [33, 1], {"center": True, "norm": (1, 1), "softcap": 2.0}),
    (9, 3, 64, 0, PACKED_KV, torch.float32, [37, 1, 12], PLAIN),
    (6, 2, 96, 20, PACKED_KV, torch.float16, [64, 3, 1], {"center": True, "sinks": True, "turned": 24}),
    (8, 1, 128, 0, PACKED_KV, torch.float16, [33, 1], {"norm": (1, 1), "softcap": 2.0, "scaled": True}),
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "dtype", "activations", "chunks", "options"), CASES)
def test_store_and_attend(heads: int, kv_heads: int, dim: int, window: int, dtype: torch.dtype,
                          activations: torch.dtype, chunks: list[int], options: dict[str, Any]) -> None:  # fmt: skip
    torch.manual_seed(4)
    mine = Cache(dtype, heads, kv_heads, dim, window, activations, **options)
    other = Cache(dtype, heads, kv_heads, dim, window, **options)
    executor, reference = triton_executor(), ReferenceExecutor()
    tight = activations == torch.float32
    done = 0
    for size in chunks:
        qkv = torch.randn(size, (heads + 2 * kv_heads) * dim).to(activations)
        first, second = qkv.clone(), qkv.float()
        step = sequences((done, done + size, [7, 2, 9, 0, 4]))
        got = mine.run(executor, first, step)
        other.run(reference, second, step)
        torch.testing.assert_close(first.float(), second, **({} if tight else {"rtol": 2e-3, "atol": 2e-3}))
        for a, b, keys in ((mine.k, other.k, True), (mine.v, other.v, False)):
            if dtype == PACKED_KV:
                (one, step_of), (two, _) = unpacked(a, dim, keys=keys), unpacked(b, dim, keys=keys)
                assert torch.equal(one.isnan(), two.isnan())
                apart = (one - two).abs().nan_to_num()
                # A number that is rounded to 16 bits on its way may cross a tie.
                assert (apart <= 1.02 * step_of.nan_to_num() + 2e-3).all()
                assert (apart > 0.5 * step_of).float().mean() < (1e-3 if tight else 1e-2)
                b.copy_(a)
            elif dtype in LIMITS:
                ahead = a.view(torch.int8).short() - b.view(torch.int8).short()
                assert ahead.abs().max() <= 1  # the last bit of a rotation may cross a tie
                assert (ahead != 0).float().mean() < 1e-3
                b.view(torch.int8).copy_(a.view(torch.int8))
            else:
                torch.testing.assert_close(a, b, equal_nan=True)
                b.copy_(a)
        want = other.run(reference, first.float(), step, store=False)
        # Queries and weights become what the matrix unit takes: 11 bits of float16.
        loose = {"rtol": 0, "atol": 4e-3} if activations == torch.float16 or dtype == torch.float16 else {}
        torch.testing.assert_close(got.float(), want, **(loose or {"rtol": 1e-5, "atol": 2e-5}))
        done += size


@FP8
def test_values_are_stored_bit_for_bit_like_the_reference() -> None:
    torch.manual_seed(5)
    for dtype in LIMITS:
        qkv = torch.randn(16, 6 * 32) * torch.logspace(-6, 3, 16)[:, None]
        qkv[3, 5 * 32 :], qkv[4, 5 * 32 + 3] = math.inf, math.nan
        mine, other = Cache(dtype, 2, 2, 32), Cache(dtype, 2, 2, 32)
        for cache, executor in ((mine, triton_executor()), (other, ReferenceExecutor())):
            run_on(executor, [cache.ops(qkv.clone())[0]], sequences((0, 16, [3])))
        assert torch.equal(mine.v[3].view(torch.int8), other.v[3].view(torch.int8))


def test_a_decode_of_several_chunks_counts_its_sinks_once() -> None:
    torch.manual_seed(7)
    table = list(range(20))
    mine, other = (Cache(torch.float32, 4, 2, 16, sinks=True) for _ in range(2))
    for first, last in ((0, 280), (280, 281)):
        qkv, step = torch.randn(last - first, 8 * 16), sequences((first, last, table))
        got, want = mine.run(triton_executor(), qkv.clone(), step), other.run(ReferenceExecutor(), qkv, step)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_partial_results_never_take_more_memory_than_the_first_decode_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes that are shared hold more keys than the cache has blocks: the step is computed in parts, to the same
    bits, and what it needs does not grow."""
    torch.manual_seed(6)
    cache = Cache(torch.float32, 4, 2, 16)
    qkv = torch.randn(280, (4 + 2 * 2) * 16)
    table = list(range(18))
    cache.run(triton_executor(invariant=True), qkv, sequences((0, 280, table)))
    shared = sequences(*((279, 280, table) for _ in range(9)), (3, 4, table))
    want = cache.run(triton_executor(invariant=True), qkv[:10].clone(), shared, store=False)
    rows = 4 * (16 + 2) * 4  # bytes of a unit
    monkeypatch.setattr(triton_executors, "PARTIAL_BYTES", 7 * rows)
    for first in (1, 10):
        program = triton_executor(invariant=True).program(10)
        _, attention, out = cache.ops(qkv[:10].clone())
        program.add([attention])
        one = sequences(*((279, 280, table) for _ in range(first)))
        for step in (one, shared):
            program.run(step)
            assert len(program._partials.values) == 7  # type: ignore[attr-defined]
    assert torch.equal(out, want)


def test_kernels_that_are_only_compiled_write_nothing() -> None:
    """So that a whole step can be had compiled at once."""
    cache = Cache(torch.float32, 4, 2, 16)
    cache.k.zero_()
    cache.v.zero_()
    x, out, logits, chosen = torch.randn(6, 64), torch.full((6, 64), math.nan), torch.randn(6, 50), ints([-7] * 6)
    qkv, before = torch.randn(6, 8 * 16), logits.clone()
    rope, attention, attended = cache.ops(qkv)
    rotated = qkv.clone()
    program = triton_executor().program(6)
    program.add([
        RMSNorm(x, torch.ones(64), out, 1e-5), rope, attention,
        Activation(torch.randn(6, 128), out, "silu", True), Gather(x, out),
        Argmax(logits, chosen), LogSoftmax(logits), Embed(torch.randn(9, 64), out),
    ])  # fmt: skip
    step = sequences((0, 5, [1]), (299, 300, list(range(30))))
    with compiling(2):
        program.run(replace(step, token_ids=ints([1] * 6), logit_rows=ints(range(6))))
    assert out.isnan().all() and attended.isnan().all() and torch.equal(qkv, rotated)
    assert not cache.k.any() and torch.equal(logits, before) and (chosen == -7).all()


def test_a_mixed_step_of_prompts_and_decodes_over_several_chunks() -> None:
    """Decodes whose keys are one chunk, several, and behind a window; prompts that begin and go on."""
    torch.manual_seed(6)
    heads, kv_heads, dim = 4, 2, 16
    for window in (0, 300):
        cache = Cache(torch.float32, heads, kv_heads, dim, window)
        cache.k.copy_(torch.randn(cache.k.shape))
        cache.v.copy_(torch.randn(cache.v.shape))
        tables = torch.randperm(80).tolist()
        step = sequences((600, 601, tables[:40]), (9, 10, tables[40:41]), (0, 20, tables[41:43]),
                         (511, 512, tables[43:75]), (250, 290, tables[43:75]), (256, 257, tables[:40]))  # fmt: skip
        qkv = torch.randn(len(step.token_ids), (heads + 2 * kv_heads) * dim)
        got = cache.run(triton_executor(), qkv, step, store=False)
        want = cache.run(ReferenceExecutor(), qkv, step, store=False)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_attention_does_not_depend_on_chunks_or_neighbours(same_sums: None) -> None:
    """In the invariant mode a query's bits are the same whatever it is computed with, across a chunk's end too."""
    torch.manual_seed(6)
    heads, kv_heads, dim, begin, end = 6, 2, 16, 240, 275
    table = list(range(40, 60))
    cache = Cache(torch.float16, heads, kv_heads, dim)
    before = torch.randn(begin, (heads + 2 * kv_heads) * dim)
    run_on(triton_executor(), [cache.ops(before)[0]], sequences((0, begin, table)))
    stream = torch.randn(end - begin, before.shape[1])

    def run(chunks: list[int], neighbour: int) -> torch.Tensor:
        outs, done = [], begin
        for size in chunks:
            qkv = torch.cat([torch.randn(neighbour, stream.shape[1]), stream[done - begin : done - begin + size]])
            spans = [(done, done + size, table)]
            step = sequences(*([(0, neighbour, [1, 2])] if neighbour else []), *spans)
            outs.append(cache.run(triton_executor(invariant=True), qkv, step)[neighbour:])
            done += size
        return torch.cat(outs)

    whole = run([end - begin], 0)
    assert whole.isfinite().all()
    for chunks, neighbour in (([35], 7), ([15, 1, 1, 18], 1)):
        assert torch.equal(run(chunks, neighbour), whole), (chunks, neighbour)


def test_what_has_no_kernel_is_computed_by_its_reference() -> None:
    """A norm that is too wide, beside a kernel, also in the 16 bits of a GPU."""
    torch.manual_seed(8)
    x, weight = torch.randn(3, 20_000), torch.rand(20_000)
    for activations in (torch.float32, torch.float16):
        outs = []
        for executor in (triton_executor(), ReferenceExecutor()):
            normed, out = torch.empty(3, 20_000, dtype=activations), torch.empty(3, 20_000)
            program = executor.program(3)
            program.add([RMSNorm(x, weight, normed, 1e-5), Gather(normed, out)])
            program.run(make_step(3))
            outs.append(out)
        assert torch.equal(*outs)


def test_what_is_not_finite_reaches_all_that_see_it() -> None:
    torch.manual_seed(7)
    heads, kv_heads, dim, bad = 6, 2, 32, 13
    caches = [torch.float32, torch.int8]
    if not target.is_interpreted() and "fp8" in target.target(CPU).features:
        caches = [torch.int8, torch.float8_e4m3fn]  # whose NaN the interpreter reads as a number
    for dtype, activations in zip(caches, (torch.float32, torch.float16)):  # one does not see what the other is
        for at in (heads, heads + kv_heads):
            qkv = torch.randn(24, (heads + 2 * kv_heads) * dim)
            qkv[bad, at * dim : (at + kv_heads) * dim] = math.nan
            cache = Cache(dtype, heads, kv_heads, dim, activations=activations)
            prompt = cache.run(triton_executor(), qkv.to(activations), sequences((0, 24, [4, 6])))
            assert prompt[bad:].isnan().all() and (at > heads or prompt[:bad].isfinite().all())
            token = cache.run(triton_executor(), qkv[-1:].to(activations), sequences((24, 25, [4, 6])))
            assert token.isnan().all()


@FP8
def test_what_has_no_kernel_is_refused_by_name() -> None:
    executor = triton_executor()
    cache = Cache(torch.float8_e4m3fn, 2, 2, 32)
    rope, attention, _ = cache.ops(torch.zeros(1, 6 * 32))
    assert executor.supports(rope) is None and executor.supports(attention) is None
    assert "scales" in str(executor.supports(replace(attention, k_scale=None)))
    assert "token by token" in str(executor.supports(replace(rope, k_cache=cache.k.contiguous())))
    assert "not an even number" in str(executor.supports(replace(attention, head_dim=25)))
    assert "at most 64" in str(executor.supports(replace(attention, heads=71, kv_heads=1, head_dim=96)))
    wide = torch.zeros(1, 20_000)
    assert "at most 16384" in str(executor.supports(RMSNorm(wide, wide[0], wide, 1e-5)))
