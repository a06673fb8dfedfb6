"""The arithmetic of published texts, reproduced; where a text is wrong, the test says so and gives the right number."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from qserve.evals.planner import catalog, cost
from qserve.evals.planner.deployment import replica_roofline
from qserve.evals.planner.efficiency import Efficiency
from qserve.evals.planner.quantization import quantization
from qserve.evals.planner.replica_roofline import Layout, ReplicaRoofline
from qserve.evals.planner.shape import BLOCK, Linear
from qserve.runtime.blocks import BlockManager
from qserve.runtime.limits import SchedulerConfig
from qserve.runtime.request import Request
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.scheduler import Scheduler

GB, GIB = 10**9, 2**30


def test_llama_70b_leaves_327680_bytes_per_token_and_671_mb_per_request() -> None:
    for name in ("llama-2-70b", "llama-3-70b"):
        shape = catalog.model(name)
        assert shape.attention == "GQA"
        assert shape.kv_bytes_per_token(2) == 2 * 80 * 8 * 128 * 2 == 327_680
        assert shape.kv_bytes(2048, 2) == 671_088_640


def test_a_text_gives_llama_3_70b_two_and_a_half_mb_per_token_by_ignoring_grouped_heads() -> None:
    shape = catalog.model("llama-3-70b")
    ungrouped = 2 * shape.num_heads * shape.score_width * shape.num_layers * 2
    assert ungrouped == 2.5 * 2**20  # what the text says: all 64 heads cached
    assert shape.kv_bytes_per_token(2) == ungrouped / 8  # what is so: 8 are


def test_llama_3_8b_leaves_128_kib_per_token_and_44_requests_fit_into_24_gb() -> None:
    shape = catalog.model("llama-3-8b")
    assert shape.kv_bytes_per_token(2) == 128 * 1024
    request = shape.kv_bytes(4096, 2)
    assert request == GIB // 2
    assert 24 * GB // request == 44
    # A text has 48 of them in "24 GB": that takes 24 GiB, which is 25.8 GB.
    assert 24 * GIB // request == 48


def test_a_gpt_3_shaped_cache_of_32_requests_is_309_gb_not_24() -> None:
    shape = catalog.model("gpt-3-175b")
    assert shape.attention == "MHA"
    assert shape.kv_bytes_per_token(2) == 2 * 96 * 12288 * 2 == 4_718_592
    # A text multiplies this out by 2,048 tokens and 32 requests and writes 24 GB; the product is:
    assert 32 * shape.kv_bytes(2048, 2) == 309_237_645_312
    assert shape.kv_bytes(2048, 2) == 9_663_676_416


def test_a_batch_of_64_dollars_an_hour_makes_a_million_tokens_for_5_93() -> None:
    assert cost.per_million(64, 3000) == pytest.approx(5.93, abs=0.005)
    assert cost.per_million(64, 1500) == pytest.approx(11.85, abs=0.005)


def test_break_even_at_63_million_tokens() -> None:
    # The source's own inputs: a GPU of $3.50 for a month of 720 hours, against $40 a million.
    assert cost.break_even(3.50 * 720, 40) == 63e6
    assert cost.break_even(100, 5, 5) == float("inf")


def test_the_figures_for_13b_are_those_of_opt_and_of_llama_2() -> None:
    for name, parameters in (("opt-13b", 12_853_473_280), ("llama-2-13b", 13_015_864_320)):
        shape = catalog.model(name)
        assert (shape.parameters, shape.attention) == (parameters, "MHA")
        assert shape.kv_bytes_per_token(2) == 2 * 40 * 5120 * 2 == 819_200 == 800 * 1024
        assert shape.kv_bytes(2048, 2) == 1_677_721_600 and pytest.approx(1.56, abs=0.005) == 1_677_721_600 / GIB
    weights = catalog.model("opt-13b").weight_bytes(None)
    assert weights / GB == pytest.approx(25.7, abs=0.05) and weights / (40 * GIB) == pytest.approx(0.60, abs=0.005)
    assert 26 / 40 == 0.65  # as the paper has it, of a memory in GB


def test_70_tokens_fill_five_pages() -> None:
    assert BlockManager(16, 16).blocks_for(70) == 5 == -(-70 // BLOCK)
    assert 70 - 4 * 16 == 6


def test_four_a100_cannot_hold_175b_in_16_bits() -> None:
    shape, a100 = catalog.model("gpt-3-175b"), catalog.gpu("a100-80gb")
    assert shape.weight_bytes(None) / GB == pytest.approx(349.2, abs=0.05)
    assert 4 * a100.memory / GB == pytest.approx(343.6, abs=0.05)
    everything = Efficiency(memory=1.0)
    assert replica_roofline(shape, a100, Layout(4), "bf16", "fp16", everything).largest_batch(1) == 0
    assert replica_roofline(shape, a100, Layout(8), "bf16", "fp16", everything).largest_batch(2048) > 0
    assert replica_roofline(shape, a100, Layout(4), "w8a8", "fp16", everything).largest_batch(2048) > 0


def test_32_requests_in_150_ms_are_213_a_second() -> None:
    assert round(32 / 0.150) == 213


def test_100_tokens_without_a_cache_compute_5050_positions() -> None:
    assert sum(range(1, 101)) == 100 * 101 // 2 == 5050
    # With it, as the engine's own scheduler plans it:
    request = Request("it", (7,), SamplingParams(max_tokens=100, ignore_eos=True), arrival=0, arrival_time=0.0)
    scheduler = Scheduler(SchedulerConfig(max_model_len=128), BlockManager(16, 16))
    scheduler.add(request)
    computed = 0
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        assert plan is not None
        computed += sum(len(each.token_ids) for each in plan.sequences)
        scheduler.commit(plan, {"it": (7,)})
    assert computed == 100


def test_the_best_point_of_the_curve_of_batch_sizes_and_the_page_that_shows_it() -> None:
    page = (Path(__file__).parents[3] / "docs/corrections.md").read_text(encoding="utf-8")
    roofline = replica_roofline(
        catalog.model("llama-3-8b"), catalog.gpu("h100"), Layout(), "bf16", "fp16", Efficiency()
    )
    most = roofline.largest_batch(2048)
    seconds = {batch: roofline.decode(batch, 2048) for batch in range(1, most + 1)}
    best = max(seconds, key=lambda batch: batch / seconds[batch] ** 2)
    for batch in (1, 8, 32, best, 128, most):
        time = seconds[batch]
        assert f"| {batch} | {time * 1e3:.1f} | {batch / time:,.0f} | {1 / time:.0f} |" in page
    assert f"The best point is {best}," in page and f"From {best} to the {most} that fit" in page
    more, slower = most / seconds[most] / (best / seconds[best]), seconds[most] / seconds[best]
    assert f"grows by {more:.2f}" in page and f"{slower:.2f} times as long" in page
    for batch in range(2, most + 1):  # throughput never falls and a step never gets shorter
        assert batch / seconds[batch] > (batch - 1) / seconds[batch - 1] and seconds[batch] >= seconds[batch - 1]


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-2-7b", 6_738_415_616, None),
        ("llama-3-8b", 8_030_261_248, None),
        ("llama-3-70b", 70_553_706_496, None),
        ("llama-3.1-405b", 405_853_388_800, None),
        ("mistral-7b", 7_241_732_096, None),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("qwen2.5-7b", 7_615_616_512, None),
        ("qwen3-8b", 8_190_735_360, None),
        ("qwen3-30b-a3b", 30_532_122_624, None),
        ("gpt-oss-120b", 116_829_156_672, None),
        ("deepseek-v3", 671_026_419_200, None),
        ("gemma-3-27b", 27_009_346_304, None),  # the text part of each
        ("mistral-small-3.1-24b", 23_572_403_200, None),
        ("llama-4-scout", 107_769_861_120, 17_172_894_720),
        ("gpt-2", 124_439_808, None),
        ("smollm2-135m", 134_515_008, None),
    ],
)
def test_parameters_are_those_of_the_checkpoints(name: str, total: int, active: int | None) -> None:
    shape = catalog.model(name)
    assert shape.parameters == total == sum(shape.parameters_by_kind().values())
    assert active is None or shape.active_parameters == active


def test_what_papers_say_of_their_models() -> None:
    assert catalog.model("gpt-3-175b").parameters / 1e9 == pytest.approx(175, rel=0.005)
    deepseek = catalog.model("deepseek-v3")
    assert deepseek.active_parameters / 1e9 == pytest.approx(37, rel=0.02)
    assert deepseek.kv_bytes_per_token(2) == (512 + 64) * 61 * 2
    oss = catalog.model("gpt-oss-120b")
    assert oss.parameters / 1e9 == pytest.approx(116.8, rel=0.001)
    # The published 5.1 billion active ones are without the embedding, and without the biases of idle experts.
    assert (oss.active_parameters - oss.embedding) / 1e9 == pytest.approx(5.1, rel=0.015)


@pytest.mark.parametrize(
    ("layer", "shape", "microseconds"),
    [
        ("8B qkv", (6144, 4096), (3.0, 3.1, 4.1, 16.3)),
        ("8B gate_up", (28672, 4096), (14.1, 14.3, 19.0, 76.1)),
        ("8B down", (4096, 14336), (7.0, 7.2, 9.5, 38.1)),
        ("70B gate_up", (57344, 8192), (56.4, 56.8, 76.1, 305)),
        ("70B down", (8192, 28672), (28.2, 28.4, 38.1, 152)),
    ],
)
def test_linears_take_what_the_roofline_of_an_h200_says(
    layer: str, shape: tuple[int, int], microseconds: tuple[float, ...]
) -> None:
    """4-bit weights in groups of 128, at the 4.3 TB/s and 790 TFLOP/s that were measured."""
    h200 = catalog.gpu("h200")
    reached = Efficiency(mfu=790e12 / h200.flops["bf16"], mbu=4.3e12 / h200.bandwidth)
    roofline = ReplicaRoofline(catalog.model("llama-3-8b"), quantization("w4g128"), "fp16", h200, Layout(), reached)
    for rows, expected in zip((1, 16, 64, 256), microseconds, strict=True):
        seconds = roofline.linear(Linear("mlp", *shape, count=1), rows)
        assert seconds * 1e6 == pytest.approx(expected, rel=0.025), (layer, rows)


def test_the_memory_of_a_gpu_is_neither_gb_nor_gib_of_its_name() -> None:
    h100, h200 = catalog.gpu("h100"), catalog.gpu("h200")
    assert h100.memory / GB == pytest.approx(85.5, abs=0.05) and h100.memory / GIB == pytest.approx(79.6, abs=0.05)
    assert h200.memory / GB == pytest.approx(150.8, abs=0.05) and h200.memory / GIB == pytest.approx(140.4, abs=0.05)


def test_sparse_figures_of_data_sheets_are_not_taken_for_dense_ones() -> None:
    for gpu in catalog.gpus().values():
        eight = gpu.flops["int8"]
        # A GeForce halves its rate where 16-bit products accumulate in fp32.
        times = 4 if "GeForce" in gpu.name else 2
        assert eight == pytest.approx(times * gpu.flops["bf16"], rel=0.05)
        assert gpu.flops.get("fp8", 2 * gpu.flops["bf16"]) == pytest.approx(2 * gpu.flops["bf16"], rel=0.05)
        assert dataclasses.is_dataclass(gpu.price) or gpu.price is None
    assert catalog.gpu("h100").flops["bf16"] == pytest.approx(1979e12 / 2, rel=0.001)
