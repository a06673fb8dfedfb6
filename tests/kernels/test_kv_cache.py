"""KV caches in int8 and e4m3 with static scales, and of 4 bits: each ISA against the torch reference, and their
invariance."""

from __future__ import annotations

import math

import pytest
import torch

from qserve.kernels import native
from qserve.kernels.executor import Executor, Step
from qserve.kernels.kv_cache import decode_packed, encode_packed, hadamard, inverse_hadamard, packed_parts
from qserve.kernels.ops import PACKED_KV, Attention, RopeKV
from qserve.kernels.reference import ReferenceExecutor, decode_kv, encode_kv
from tests.kernels.packed_cache import packed, unpacked

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

DTYPES = [torch.int8, torch.float8_e4m3fn]
ALL = [*DTYPES, PACKED_KV]
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@pytest.fixture(params=native.available())
def isa(request: pytest.FixtureRequest) -> native.Isa:
    return request.param


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Cache:
    """Caches of a few blocks and the two operations over them. Blocks hold the code of NaN until they are written."""

    def __init__(
        self, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int = 0, center: float | None = None
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.window = heads, kv_heads, dim, window
        generator = torch.Generator().manual_seed(3)
        self.k_scale = self.v_scale = None
        if dtype == PACKED_KV:
            unwritten = torch.full((12, kv_heads, 16, dim), math.nan)
            self.k, self.v = (packed(unwritten, keys=keys) for keys in (True, False))
        else:
            nan = -128 if dtype == torch.int8 else 0x7F
            self.k = torch.full((12, kv_heads, dim, 16), nan, dtype=torch.int8).view(dtype)
            self.v = torch.full((12, kv_heads, 16, dim), nan, dtype=torch.int8).view(dtype)
            # Some values saturate.
            self.k_scale = (torch.rand(kv_heads, generator=generator) + 2.5) / LIMITS[dtype]
            self.v_scale = (torch.rand(kv_heads, generator=generator) + 2.5) / LIMITS[dtype]
        self.center = None if center is None else torch.randn(kv_heads, dim, generator=generator) * center
        angles = torch.rand(128, dim // 2, generator=generator) * 6
        self.cosine, self.sine = angles.cos(), angles.sin()

    def run(self, executor: Executor, qkv: torch.Tensor, step: Step, *, store: bool = True) -> torch.Tensor:
        out = torch.empty(len(qkv), self.heads * self.dim)
        shape = (self.heads, self.kv_heads, self.dim)
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale, "k_center": self.center}
        rope = RopeKV(qkv, self.cosine, self.sine, self.k, self.v, *shape, **scales)
        attention = Attention(qkv, out, self.k, self.v, *shape, self.dim**-0.5, self.window, self.k_scale, self.v_scale)
        program = executor.program(len(qkv))
        for op in (rope, attention):
            assert executor.supports(op) is None
        program.add([rope, attention] if store else [attention])
        program.run(step)
        return out


def one_sequence(start: int, end: int, table: list[int]) -> Step:
    positions = range(start, end)
    slots = [table[p // 16] * 16 + p % 16 for p in positions]
    return Step(ints(positions), ints(positions), ints(slots), ints([0, end - start]), ints([table]), ints([0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_is_decoded_and_every_tie_rounded(dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 128).to(torch.int8).view(dtype)
    values = decode_kv(codes[:, None], torch.ones(1))[:, 0]
    assert values.isnan().sum() == (1 if dtype == torch.int8 else 2)
    real = ~values.isnan()
    again = encode_kv(values[real, None], torch.ones(1), dtype)[:, 0]
    assert torch.equal(again.view(torch.int8), codes[real].view(torch.int8))
    x = torch.tensor([[math.nan, math.inf, -math.inf, 1e9, -1e9]])
    got = decode_kv(encode_kv(x, torch.ones(1), dtype), torch.ones(1))[0]
    assert got[:3].isnan().all() and got[3:].tolist() == [LIMITS[dtype], -LIMITS[dtype]]


def test_what_all_keys_share_costs_no_precision_once_it_is_taken_off(isa: native.Isa) -> None:
    """Keys far from zero: softmax does not see the centre, and e4m3 keeps more of what differs."""
    torch.manual_seed(8)
    heads, kv_heads, dim, total, dtype = 6, 2, 32, 40, torch.float8_e4m3fn
    qkv = torch.randn(total, (heads + 2 * kv_heads) * dim)
    outs = {}
    for name, center, kind in (("exact", None, torch.float32), ("centred", 1.0, dtype), ("plain", None, dtype)):
        cache = Cache(dtype, heads, kv_heads, dim, center=center)
        if kind == torch.float32:
            cache.k, cache.v = torch.zeros(cache.k.shape), torch.zeros(cache.v.shape)
            cache.k_scale = cache.v_scale = None
        else:
            cache.v_scale = torch.ones(kv_heads)
        offset = Cache(dtype, heads, kv_heads, dim, center=1.0).center
        cache.cosine, cache.sine = torch.ones(128, dim // 2), torch.zeros(128, dim // 2)
        mine = qkv.clone()
        keys = mine.view(total, -1, dim)[:, heads : heads + kv_heads]
        keys *= 0.3
        keys += offset
        values = mine.view(total, -1, dim)[:, heads + kv_heads :]
        values.copy_(values.sign())  # which e4m3 holds exactly
        outs[name] = cache.run(native.NativeExecutor(2, isa), mine, one_sequence(0, total, [4, 6, 2]))
    error = {name: float((out - outs["exact"]).abs().mean()) for name, out in outs.items()}
    assert error["centred"] < 0.6 * error["plain"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_stored_bit_for_bit_like_the_reference(isa: native.Isa, dtype: torch.dtype) -> None:
    """The values are not rotated: what is divided and rounded is the same."""
    torch.manual_seed(5)
    cache, heads, dim = Cache(dtype, 2, 2, 32), 2, 32
    qkv = torch.randn(16, 6 * dim) * torch.logspace(-6, 3, 16)[:, None]
    qkv[3, 5 * dim :] = math.inf
    cache.run(native.NativeExecutor(1, isa), qkv.clone(), one_sequence(0, 16, [3]))
    want = encode_kv(qkv.view(16, 6, dim)[:, 2 * heads :], cache.v_scale, dtype)
    assert torch.equal(cache.v[3].movedim(0, 1).view(torch.int8), want.view(torch.int8))


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("window", [0, 11])
def test_attention_does_not_depend_on_chunks_or_neighbours(isa: native.Isa, dtype: torch.dtype, window: int) -> None:
    torch.manual_seed(6)
    heads, kv_heads, dim, total = 9, 3, 32, 45
    stream = torch.randn(total, (heads + 2 * kv_heads) * dim)
    one, three = native.NativeExecutor(1, isa), native.NativeExecutor(3, isa)

    def run(chunks: list[int], neighbour: int, executor: Executor) -> torch.Tensor:
        cache, outs, done = Cache(dtype, heads, kv_heads, dim, window), [], 0
        for size in chunks:
            qkv = torch.cat([torch.randn(neighbour, stream.shape[1]), stream[done : done + size]])
            positions = [*range(neighbour), *range(done, done + size)]
            tables = [[0, 1, 3], [5, 2, 9]]
            slots = [tables[i >= neighbour][p // 16] * 16 + p % 16 for i, p in enumerate(positions)]
            starts = [0, neighbour, neighbour + size] if neighbour else [0, size]
            step = Step(ints(positions), ints(positions), ints(slots), ints(starts),
                        ints(tables if neighbour else tables[1:]), ints([0]))  # fmt: skip
            outs.append(cache.run(executor, qkv, step)[neighbour:])
            done += size
        return torch.cat(outs)

    whole = run([45], 0, one)
    assert whole.isfinite().all()
    for chunks, neighbour in (([45], 7), ([1] * 45, 0), ([16, 16, 13], 3), ([20, 1, 24], 1), ([5, 40], 20)):
        assert torch.equal(run(chunks, neighbour, three), whole), (chunks, neighbour)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_reaches_all_that_see_it(
    isa: native.Isa, dtype: torch.dtype, part: str, value: float
) -> None:
    torch.manual_seed(7)
    heads, kv_heads, dim, total, bad = 6, 2, 32, 24, 13
    qkv = torch.randn(total, (heads + 2 * kv_heads) * dim)
    at = (heads if part == "k" else heads + kv_heads) * dim
    for executor in (native.NativeExecutor(2, isa), ReferenceExecutor()):
        outs = []
        for poison in (False, True):
            mine = qkv.clone()
            if poison:
                mine[bad, at : at + kv_heads * dim] = value
            outs.append(Cache(dtype, heads, kv_heads, dim).run(executor, mine, one_sequence(0, total, [4, 6])))
        clean, poisoned = outs
        if isinstance(executor, native.NativeExecutor):
            assert torch.equal(clean[:bad], poisoned[:bad])
        assert poisoned[bad:].isnan().all()


@pytest.mark.parametrize("dim", [32, 96, 128])
def test_codes_of_4_bits_are_stored_bit_for_bit_like_the_reference(isa: native.Isa, dim: int) -> None:
    """Values, which are not rotated by position: large and tiny ones, equal ones, and what float16 cannot hold."""
    torch.manual_seed(5)
    cache, heads = Cache(PACKED_KV, 2, 2, dim), 2
    qkv = torch.randn(16, 6 * dim) * torch.logspace(-9, 3, 16)[:, None]
    qkv[3, 5 * dim :] = math.inf
    qkv[4, 4 * dim :] = 0.0
    qkv[5, 4 * dim : 5 * dim] = 1e6
    qkv[6, 4 * dim :] = torch.eye(2 * dim)[0] * 3.0
    cache.run(native.NativeExecutor(1, isa), qkv.clone(), one_sequence(0, 16, [3]))
    want = encode_packed(hadamard(qkv.view(16, 6, dim)[:, 2 * heads :]))
    for mine, other in zip(packed_parts(cache.v, dim, keys=False), want):
        mine = mine[3].movedim(0, 1)
        assert torch.equal(mine.isnan(), other.isnan()) and torch.equal(mine.nan_to_num(), other.nan_to_num())
    numbers, _ = unpacked(cache.v, dim, keys=False)
    assert numbers[3, 1, 3].isnan().all() and numbers[3, 0, 5].isnan().all()
    assert numbers[3, :, 4].eq(0).all() and numbers[3, :, 6].isfinite().all()


def test_a_number_comes_back_within_half_a_step() -> None:
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 50)[:, None]
    assert ((inverse_hadamard(hadamard(x)) - x).abs() <= 1e-6 * x.abs().amax(-1, keepdim=True)).all()
    codes, step, low = encode_packed(x)
    apart = (decode_packed(codes, step, low) - x).abs()
    # A step and a low in float16 are off by 2^-11 of themselves.
    assert (apart <= 0.5 * step.float()[:, None] * 1.01 + 2**-10 * x.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("channels", [[5], [0, 32]], ids=str)
def test_what_is_large_in_few_channels_spoils_no_others(channels: list[int]) -> None:
    """A channel that is 30 times as large as the others would take all levels for itself, were heads not turned."""
    keys = torch.randn(60, 64, generator=torch.Generator().manual_seed(9))
    keys[..., channels] += 30.0
    spoilt = (decode_packed(*encode_packed(keys)) - keys).square().mean()
    turned = (inverse_hadamard(decode_packed(*encode_packed(hadamard(keys)))) - keys).square().mean()
    assert turned < 0.2 * spoilt


def test_heads_that_fill_no_vectors_of_codes_are_refused() -> None:
    cache, qkv = Cache(PACKED_KV, 2, 2, 48), torch.zeros(1, 6 * 48)
    op = Attention(qkv, qkv, cache.k, cache.v, 2, 2, 48, 1.0)
    assert "multiples of 32" in str(native.NativeExecutor(1).supports(op))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_without_scales_is_refused(dtype: torch.dtype) -> None:
    cache, qkv = Cache(dtype, 2, 2, 32), torch.zeros(1, 6 * 32)
    op = Attention(qkv, qkv, cache.k, cache.v, 2, 2, 32, 1.0)
    assert "scales" in str(native.NativeExecutor(1).supports(op))
