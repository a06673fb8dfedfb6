"""The kernels beside the linear products and a whole model on a GPU, in all dtypes and through CUDA graphs.

``pytest -m gpu``. Without a GPU it is the interpreter that runs them, in float16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.source import open_model
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import ops
from qserve.kernels.executor import Step
from qserve.kernels.ops import PACKED_KV
from qserve.kernels.reference import ReferenceExecutor
from qserve.kernels.triton.executor import TritonExecutor
from qserve.kernels.triton.target import is_interpreted, target
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from qserve.runtime.sampling import SamplingParams
from tests.kernels.packed_cache import packed, unpacked

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ACTIVATIONS = [torch.float16] if is_interpreted() else [torch.float16, torch.bfloat16]
CACHES = [torch.float16, torch.int8, *([] if is_interpreted() else [torch.bfloat16])]
if "fp8" in target(DEVICE).features:
    CACHES.append(torch.float8_e4m3fn)
CACHES.append(PACKED_KV)
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SPANS = [(600, 1), (9, 1), (0, 40), (511, 1), (250, 60)]
"""Sequences (start, tokens) of a mixed step."""


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step_of(spans: list[tuple[int, int]]) -> Step:
    width = 42
    tables = torch.randperm(len(spans) * width, generator=torch.Generator().manual_seed(1)).int().view(-1, width)
    positions = [torch.arange(start, start + count, dtype=torch.int32) for start, count in spans]
    slots = [table[p.long() // 16] * 16 + p % 16 for p, table in zip(positions, tables)]
    starts = torch.tensor([0, *(count for _, count in spans)]).cumsum(0).int()
    every = torch.cat(positions)
    return Step(every, every, torch.cat(slots), starts, tables, ints([]))


def pages_of(values: torch.Tensor, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with the numbers [blocks, kv_heads, 16, dim]."""
    if dtype == PACKED_KV:
        return packed(values, keys=True).to(device), packed(values, keys=False).to(device)
    held = (values * 40).round().clamp(-127, 127).to(dtype) if dtype in LIMITS else values.to(dtype)
    return held.to(device, copy=True).transpose(2, 3), held.to(device, copy=True)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize(
    ("cache", "heads", "kv_heads", "dim"),
    [
        pytest.param(cache, *shape, id="-".join(map(str, (cache, *shape))))
        for cache in CACHES
        for shape in [(8, 2, 128), (9, 3, 64), (4, 1, 96 if cache == PACKED_KV else 80), (2, 2, 256)]
    ],
)
@pytest.mark.parametrize("activations", ACTIVATIONS, ids=str)
def test_rotate_store_and_attend(
    activations: torch.dtype, cache: torch.dtype, heads: int, kv_heads: int, dim: int, window: int
) -> None:
    torch.manual_seed(3)
    step = step_of(SPANS)
    qkv = torch.randn(len(step.token_ids), (heads + 2 * kv_heads) * dim).to(activations)
    angles = torch.rand(1200, dim // 2) * 6
    scales = {name: torch.full((kv_heads,), 0.03) for name in ("k_scale", "v_scale")} if cache in LIMITS else {}
    outs = []
    for executor, device, dtype in (
        (TritonExecutor(DEVICE, activations), DEVICE, activations),
        (ReferenceExecutor(), torch.device("cpu"), torch.float32),
    ):
        generator = torch.Generator().manual_seed(2)
        numbers = torch.randn(len(SPANS) * 42, kv_heads, 16, dim, generator=generator)
        k, v = pages_of(numbers, cache, device)
        mine = qkv.to(device, dtype, copy=True)
        out = torch.full((len(qkv), heads * dim), torch.nan, dtype=dtype, device=device)
        on = {name: scale.to(device) for name, scale in scales.items()}
        shape = (heads, kv_heads, dim)
        program = executor.program(len(qkv))
        listed = [
            ops.RopeKV(mine, angles.cos().to(device), angles.sin().to(device), k, v, *shape, **on),
            ops.Attention(mine, out, k, v, *shape, dim**-0.5, window, **on),
        ]
        assert [executor.supports(op) for op in listed] == [None, None]
        program.add(listed)
        program.run(step)
        if cache == PACKED_KV:
            k, v = (unpacked(each.cpu(), dim, keys=keys)[0] for each, keys in ((k, True), (v, False)))
        outs.append((out.float().cpu(), k.float().cpu(), v.float().cpu()))
    limit = 2e-2 if activations == torch.bfloat16 or cache == torch.bfloat16 else 4e-3
    if cache == PACKED_KV:  # what is rounded on its way to a code may become its neighbour
        limit = 6e-2 if activations == torch.bfloat16 else 2.5e-2
    for got, want in zip(*outs):
        assert float((got - want).norm() / want.norm()) < limit


@pytest.mark.parametrize("cache", [each for each in CACHES if each not in (torch.int8, PACKED_KV)], ids=str)
def test_decodes_of_any_length_share_one_graph(cache: torch.dtype) -> None:
    """The second step of a size and those that follow replay it. Their sequences are cut elsewhere."""
    heads, kv_heads, dim, width = 8, 2, 128, 250
    activations = torch.bfloat16 if cache == torch.bfloat16 else torch.float16
    generator = torch.Generator().manual_seed(4)
    k, v = (torch.randn(4 * width, kv_heads, 16, dim, generator=generator) for _ in range(2))
    scales = {}
    if cache in LIMITS:
        k, v = k * 30, v * 30
        scales = {name: torch.full((kv_heads,), 0.03) for name in ("k_scale", "v_scale")}
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim, generator=generator).to(activations)
    tables = torch.randperm(4 * width, generator=generator).int().view(4, width)
    lengths = ([1, 1, 1, 1], [255, 256, 257, 4000], [3999, 1, 64, 65], [1, 7, 700, 1500], [255, 256, 257, 4000])
    outs = []
    for executor, device, dtype in (
        (TritonExecutor(DEVICE, activations), DEVICE, activations),
        (ReferenceExecutor(), torch.device("cpu"), torch.float32),
    ):
        on = {name: scale.to(device) for name, scale in scales.items()}
        out = torch.full((4, heads * dim), torch.nan, dtype=dtype, device=device)
        pages = k.to(cache).to(device).transpose(2, 3), v.to(cache).to(device)
        program = executor.program(4)
        program.add([
            ops.Attention(qkv.to(device, dtype), out, *pages, heads, kv_heads, dim, dim**-0.5, window, **on)
            for window in (300, 0)
        ])  # fmt: skip
        outs.append([])
        for each in lengths:
            positions = ints(each) - 1
            program.run(Step(positions, positions, positions, ints(range(5)), tables, ints([])))
            outs[-1].append(out.to("cpu", torch.float32, copy=True))
    for got, want in zip(*outs):
        assert float((got - want).norm() / want.norm()) < (2e-2 if cache == torch.bfloat16 else 4e-3)
    assert torch.equal(outs[0][1], outs[0][4]), "the counters were not ready again"


def model_on(path: Path, executor: object, kv_dtype: torch.dtype) -> Decoder:
    source = open_model(path)
    limits = DecoderLimits(max_tokens=48, max_logits=12, max_positions=64, num_blocks=24)
    int8_head = executor.batch_invariant  # type: ignore[attr-defined]  # a dense one is cuBLAS's, which is not
    config = decoder_config(source.config, "tiny")
    return Decoder(source, config, executor, limits, kv_dtype=kv_dtype, int8_head=int8_head)  # type: ignore[arg-type]


def logits_of(decoder: Decoder, order: list[int]) -> torch.Tensor:
    """[sequences, steps, vocab]: a prompt each, then decodes together in ``order``, often enough for a graph."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, decoder.config.vocab_size, (len(order), 16), generator=generator).int()
    rows: dict[int, list[torch.Tensor]] = {index: [] for index in order}
    tables = torch.arange(len(order) * 2, dtype=torch.int32).view(-1, 2)

    def run(chosen: list[int], start: int, count: int) -> None:
        positions = torch.arange(start, start + count, dtype=torch.int32)
        step = Step(
            token_ids=torch.cat([tokens[index, start : start + count] for index in chosen]),
            positions=positions.repeat(len(chosen)),
            slots=torch.cat([tables[index][positions.long() // 16] * 16 + positions % 16 for index in chosen]),
            seq_start=torch.arange(0, len(chosen) * count + 1, count, dtype=torch.int32),
            block_tables=tables[chosen],
            logit_rows=ints([]),
        )
        decoder.run(step)
        decoder.head(step, (step.seq_start[1:] - 1).contiguous())
        for row, index in zip(decoder.logits[: len(chosen)].float().cpu(), chosen):
            rows[index].append(row.clone())

    for index in order:
        run([index], 0, 11)
    for position in range(11, 16):
        run(order, position, 1)
    return torch.stack([torch.stack(rows[index]) for index in sorted(rows)])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cache", [each for each in CACHES if each in (torch.float16, torch.float8_e4m3fn)], ids=str)
@pytest.mark.parametrize("activations", ACTIVATIONS, ids=str)
def test_logits_are_those_of_the_cpu(
    tiny_model: Path, tiny_packed: Path, packed: bool, cache: torch.dtype, activations: torch.dtype
) -> None:
    path = tiny_packed if packed else tiny_model
    got = logits_of(model_on(path, TritonExecutor(DEVICE, activations), cache), [0, 1, 2])
    want = logits_of(model_on(path, ReferenceExecutor(), cache), [0, 1, 2])
    error = float((got - want).norm() / want.norm())
    limit = 5e-2 if activations == torch.bfloat16 else 1e-2
    if cache == torch.float8_e4m3fn:  # where a key or a value differs in its last place, its code may be another
        limit *= 4
    assert error < limit, error


def test_in_the_invariant_mode_neighbours_change_nothing(tiny_packed: Path, same_sums: None) -> None:
    executor = TritonExecutor(DEVICE, ACTIVATIONS[-1], invariant=True)
    first = logits_of(model_on(tiny_packed, executor, torch.float16), [0, 1, 2])
    other = logits_of(model_on(tiny_packed, executor, torch.float16), [2, 1, 0])
    alone = logits_of(model_on(tiny_packed, executor, torch.float16), [0])
    assert torch.equal(first, other) and torch.equal(first[:1], alone)


def test_a_replayed_graph_gives_what_the_launches_gave(tiny_model: Path) -> None:
    """The first step of a size is launched and the others replayed: run twice, all are."""
    decoder = model_on(tiny_model, TritonExecutor(DEVICE, ACTIVATIONS[0]), torch.float16)
    first = logits_of(decoder, [0, 1, 2, 3, 4])
    assert torch.equal(logits_of(decoder, [0, 1, 2, 3, 4]), first)


def served(model: Path, way: str) -> tuple[list[int], list[object]]:
    """Tokens and log-probabilities of one request, by the engine in the invariant mode."""
    options: dict[str, Any] = {
        "chunked": {"max_num_batched_tokens": 16}, "preempted": {"kv_cache_memory": 11 * 16 * 256},
    }.get(way, {})  # fmt: skip
    config = EngineConfig(**{
        "kernels": "triton-invariant", "max_num_seqs": 8, "max_model_len": 64, "kv_cache_memory": 4 << 20, **options
    })  # fmt: skip
    engine = Engine(str(model), config)
    tokens = [[3 + (17 * i + 29 * j * j) % 90 for j in range(length)] for i, length in enumerate((40, 20, 20, 20))]
    first, *others = (SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=5)
                      for count in (14, 24, 34, 34))  # fmt: skip
    if way in ("batched", "preempted"):
        for index, params in enumerate(others):
            engine.submit(f"other{index}", tokens[index + 1], params)
        engine.step()
    elif way == "cached":
        engine.submit("before", tokens[0], first)
        while engine.has_work():
            engine.step()
    engine.submit("mine", tokens[0], first)
    found: list[int] = []
    likely: list[object] = []
    while engine.has_work():
        for output in engine.step():
            if output.request_id == "mine":
                found += output.token_ids
                likely += output.logprobs or []
        engine.check()
    stats = engine.stats()
    assert way != "cached" or stats.prefix_hits >= 32
    assert way != "preempted" or stats.num_preemptions
    return found, likely


@pytest.mark.parametrize("way", ["batched", "chunked", "preempted", "cached"])
def test_the_engine_in_the_invariant_mode_serves_the_same_bits(tiny_packed: Path, same_sums: None, way: str) -> None:
    alone = served(tiny_packed, "alone")
    assert len(alone[0]) == 14 == len(alone[1])
    assert served(tiny_packed, way) == alone


@pytest.mark.parametrize("dtype", [*ACTIVATIONS, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 1100, 4096])
def test_what_is_done_row_by_row(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    rows, ids = 5, ints([8, 0, 8, 3, 1])
    table, weight, gate_up = torch.randn(9, width).to(dtype), torch.randn(width), torch.randn(rows, 2 * width) * 4
    codes = QuantizedWeight(
        WeightScheme(4, 32, symmetric=False), torch.randint(0, 16, (9, 64)).to(torch.uint8), torch.rand(9, 2),
        torch.randint(0, 16, (9, 2)).to(torch.uint8),
    )  # fmt: skip
    logits = torch.randn(rows, 5 * width) * 20
    logits[1, 3], logits[2, 7], logits[3] = -torch.inf, torch.nan, 2.0
    every = torch.arange(rows, dtype=torch.int32)
    step = Step(ids, every, every, ints([0, rows]), torch.arange(1, dtype=torch.int32)[None], every.flip(0))
    outs = []
    for executor, device, kind in (
        (TritonExecutor(DEVICE, dtype), DEVICE, dtype),
        (ReferenceExecutor(), torch.device("cpu"), torch.float32),
    ):
        made = [torch.full((rows, n), torch.nan, dtype=kind, device=device) for n in (width, width, width)]
        x, read = (torch.full((rows, n), torch.nan, device=device) for n in (width, 64))
        chosen, scores = torch.zeros(rows, dtype=torch.int32, device=device), logits.to(device, copy=True)
        program = executor.program(rows)
        program.add([
            ops.Embed(table.to(kind), x), ops.Embed(codes, read), ops.RMSNorm(x, weight, made[0], 1e-5),
            ops.Activation(gate_up.to(dtype).to(device, kind), made[1], "silu", True), ops.Gather(x, made[2]),
            ops.Argmax(scores, chosen), ops.LogSoftmax(scores),
        ])  # fmt: skip
        program.run(step)
        outs.append([each.float().cpu() for each in (x, read, *made, chosen, scores)])
    places = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    for got, want in zip(*outs):
        torch.testing.assert_close(got, want, rtol=max(places, 1e-5), atol=1e-5, equal_nan=True)
    assert torch.equal(outs[0][0], table[ids.long()].float()) and torch.equal(outs[0][5], outs[1][5])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is asynchronous without a GPU")
def test_steps_that_overlap_choose_the_same_tokens(tiny_packed: Path) -> None:
    """Requests of different lengths, some of which a token ends: their batches differ, so the mode is invariant."""
    found = []
    for overlaps in (False, True):
        config = EngineConfig(
            kernels="triton-invariant", max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64,
            kv_cache_memory=4 << 20,
        )  # fmt: skip
        engine = Engine(str(tiny_packed), config)
        assert engine.overlaps
        engine.overlaps = overlaps
        prompts: list[str | list[int]] = [list(range(1 + i, 9 + 3 * i)) for i in range(6)]
        params = [
            SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=tuple(range(0, 90, 1 + i))) for i in range(6)
        ]
        outputs = engine.generate(prompts, params)
        found.append(sorted((o.request_id, o.output_tokens, *o.token_ids) for o in outputs))
        engine.check()
    assert found[0] == found[1]
