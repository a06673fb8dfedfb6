"""The arithmetic of published texts, reproduced; where a text is wrong, the test says so and gives the right number."""

from __future__ import annotations

import dataclasses

import pytest

from qserve.evals.planner import catalog, cost
from qserve.evals.planner.quantization import quantization
from qserve.evals.planner.replica_roofline import Efficiency, Layout, ReplicaRoofline
from qserve.evals.planner.shape import Linear

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


def test_break_even_at_63_million_tokens() -> None:
    # 1,890 dollars a month (a GPU of $2.59 for 730 h) against a service of $30 a million.
    assert cost.break_even(2.59 * cost.HOURS_PER_MONTH, 30) == pytest.approx(63e6, rel=0.001)
    # A day of the $64 machine, its $5.93 a million taken off the service's $30: what is fixed is paid twice there.
    assert cost.break_even(64 * 24, 30, cost.per_million(64, 3000)) == pytest.approx(63.8e6, rel=0.001)
    assert cost.break_even(100, 5, 5) == float("inf")


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
        assert eight == pytest.approx(2 * gpu.flops["bf16"], rel=0.05) or gpu.key == "rtx-4090"
        assert dataclasses.is_dataclass(gpu.price) or gpu.price is None
    assert catalog.gpu("h100").flops["bf16"] == pytest.approx(1979e12 / 2, rel=0.001)
