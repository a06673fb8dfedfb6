"""The benchmark of a GPU without one: the contestants' numerics in Triton's interpreter, sizes, and reports of recorded
times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

from qserve import benching
from qserve.checkpoint.errors import UsageError
from qserve.evals.bench.gpu import attention, kernels, linears, peers
from qserve.evals.bench.gpu.attention import Heads
from qserve.evals.bench.gpu.report import Timing, figures, report
from qserve.evals.bench.roofline import Roof
from qserve.evals.planner.catalog import _table
from qserve.evals.report_files import read_report, write_report
from qserve.kernels.triton.target import DEFAULT, is_interpreted
from qserve.kernels.triton.tuning.stopwatch import COLD_BYTES, Stopwatch
from qserve.runtime.config import EngineConfig

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not is_interpreted(), reason="a GPU is here: the benchmark itself runs")
SCHEMA = Path(__file__).parents[4] / "docs" / "report.schema.json"


@interpreted
@pytest.mark.parametrize("contestant", linears.CONTESTANTS, ids=lambda each: f"{each.name} {each.scheme}")
def test_every_contestant_computes_the_same_product(contestant: linears.Contestant) -> None:
    problem = linears.problem(contestant.scheme, (128, 256), 20, CPU, torch.float16)
    first, second = contestant.hold(problem), contestant.hold(problem)
    assert first.nbytes == second.nbytes > 0
    for held, rows in ((first, 1), (second, 20)):
        y = held.run(rows)
        assert y.shape == (rows, 128) and problem.error(y) < 5e-3
    assert problem.error(first.run(3) * 1.2) > 0.1


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    "contestant", [each for each in attention.CONTESTANTS if each.name != "FlashInfer"],
    ids=lambda each: f"{each.name} {each.fp8}",
)  # fmt: skip
def test_every_contestant_attends_to_the_pages_of_its_turn(contestant: attention.Contestant) -> None:
    cache = torch.float8_e4m3fn if contestant.fp8 else torch.float16
    for new in (1, 300) if contestant in attention.PROMPTS else (1,):
        problem = attention.problem(Heads(8, 2, 32), 2, 300, new, 2, CPU, torch.float16, cache)
        first, second = contestant.hold(problem)
        assert problem.error(first()) < 2e-3
        assert problem.error(second()) > 0.5
        assert not set(problem.table(0).flatten().tolist()) & set(problem.table(1).flatten().tolist())
        assert problem.nbytes == 2 * 2 * 300 * 2 * 32 * cache.itemsize
        assert problem.operations == 4 * 2 * (300 if new == 1 else 300 * 301 // 2) * 8 * 32


def test_the_sizes_are_those_of_llama() -> None:
    for model, name in (("llama-3-8b", "8B"), ("llama-3-70b", "70B")):
        shape = _table("shapes")[model]
        hidden, inner = shape["hidden_size"], shape["intermediate_size"]
        heads = kernels.HEADS[name]
        assert (heads.queries, heads.keys) == (shape["num_attention_heads"], shape["num_key_value_heads"])
        assert heads.width == hidden // heads.queries
        assert {key.split()[1]: size for key, size in kernels.FULL.shapes.items() if key.startswith(name)} == {
            "qkv": ((heads.queries + 2 * heads.keys) * heads.width, hidden), "o": (hidden, hidden),
            "gate_up": (2 * inner, hidden), "down": (hidden, inner),
        }  # fmt: skip


def test_copies_take_turns_until_no_cache_holds_one() -> None:
    watch = Stopwatch(CPU)
    for nbytes in (13_000_000, 121_000_000, 940_000_000):
        copies = watch.copies(nbytes)
        assert copies >= 2 and copies * nbytes >= COLD_BYTES
    calls: list[int] = []
    watch = Stopwatch(CPU, repeats=3, least_turns=5)
    found = watch.time([lambda: calls.append(0), lambda: calls.append(1)])
    assert calls == [0, 1] * (1 + 3 * 3) and found.seconds > 0 and not found.replayed


@pytest.mark.slow
@interpreted
def test_the_whole_benchmark_runs_in_the_interpreter(tmp_path: Path) -> None:
    sizes = kernels.Sizes({"8B qkv": (128, 128)}, (1, 17), {"8B": Heads(2, 1, 16)}, ((2, 20),), ((1, 20),), 1 << 16, 64)
    watch = Stopwatch(CPU, repeats=1, cold_bytes=1 << 10, least_turns=1)
    so_far: list[int] = []
    made = kernels.run("qserve bench kernels --device cuda", watch, torch.float16, sizes,
                       save=lambda known: so_far.append(len(known.data["timings"])))  # fmt: skip
    assert so_far[0] > 0 and so_far == sorted(so_far) and so_far[-1] == len(made.data["timings"])
    assert made.data["failures"] == {} and not made.data["partial"]
    others = (("gemlite", "gemlite"), ("gemlite, max", "gemlite"), ("Marlin", "vllm"), ("humming", "humming"),
              ("FlashInfer", "flashinfer"))  # fmt: skip
    absent = {name for name, package in others if peers.missing(package)}
    assert absent <= made.data["not_timed"].keys()
    timed = {(t["contestant"], t["scheme"], t["rows"]) for t in made.data["timings"] if not t["context"]}
    here = {(each.name, each.scheme) for each in linears.CONTESTANTS}
    assert timed >= {(*each, rows) for each in here for rows in (1, 17)}
    write_report(made, tmp_path / "r.json", None)
    content = json.loads((tmp_path / "r.json").read_text())
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    assert read_report(tmp_path / "r.json").metrics == made.metrics


@interpreted
def test_what_is_late_or_broken_is_named() -> None:
    watch = Stopwatch(CPU, repeats=1, cold_bytes=1 << 10, least_turns=1)
    timer = kernels._Timer(watch, torch.float16, until=float("inf"))
    problem = linears.problem("bf16", (128, 128), 1, CPU, torch.float16)

    def wrong(problem: linears.Problem) -> linears.Held:
        return linears.Held(lambda rows: problem.x[:rows] @ problem.weight.t() * 2, 1 << 10)  # type: ignore[union-attr]

    for ours in (True, False):
        contestant = linears.Contestant("wrong", "bf16", wrong, ours)
        timer.run(contestant, "here", lambda contestant=contestant: timer.linear(contestant, "8B o", problem, (1,)))  # type: ignore[misc]
    assert "off by 1" in timer.failures["wrong, here"] and "off by 1" in timer.notes["wrong, here"]
    timer.until = 0.0
    timer.run(linears.CONTESTANTS[0], "late", list)
    assert timer.notes["cuBLAS, late"] == "no time was left" and timer.timings == []


def times(scheme: str, contestant: str, micro: float, shape: str = "8B o", rows: int = 1, context: int = 0) -> Timing:
    return Timing(contestant, scheme, shape, rows, context, micro / 1e6, 2 * 4096 * 4096, 10_000_000,
                  contestant == "qserve", True)  # fmt: skip


def test_the_figures_of_recorded_times() -> None:
    roof = Roof(800e12, 4e12)
    recorded = [
        times("bf16", "cuBLAS", 12.0), times("bf16", "cuBLAS", 8.0, "8B qkv"),
        times("W4A16 g128", "qserve", 4.0), times("W4A16 g128", "qserve", 4.0, "8B qkv"),
        times("W4A16 g128", "gemlite", 8.0), times("W4A16 g128", "gemlite", 2.0, "8B qkv"),
        times("W4A16 g128", "qserve", 5.0, "70B down", 16), times("W4A16 g128", "qserve", 2.5, "70B down", 64),
        times("16-bit cache", "qserve", 9.0, "8B", 1, 1024), times("fp8 cache", "qserve", 5.0, "8B", 1, 1024),
        replace(times("fp8 cache", "qserve", 40.0, "8B", 32, 1024), bytes=80_000_000),
        replace(times("fp8 cache", "qserve", 80.0, "8B", 64, 1024), bytes=240_000_000),
    ]  # fmt: skip
    found = {metric.name: metric.value for metric in figures(roof, recorded)}
    assert found == pytest.approx({
        "W4A16, 70B gate_up and 70B down, up to 16 rows: least share of the copies' rate": 0.5,
        "W4A16 g128, all 8B products, 1 rows: against cuBLAS": 2.5,
        "W4A16 g128 against gemlite: geometric mean": 1.0,
        "W4A16 g128 against gemlite: worst": 0.5,
        "fp8 decode, over 64 MiB or more: least share of the copies' rate": 0.5,
        "fp8 decode against our 16-bit cache: geometric mean": 1.8,
    })  # fmt: skip
    made = report("command", roof, DEFAULT, recorded, {"Marlin": "vllm is not installed"}, {})
    assert made.sections[-1].rows == (("Marlin", "vllm is not installed"),)
    assert {"the machine", "qserve, fp8 cache"} <= {series.name for series in made.plots[0].series}
    assert all(len(row) == len(section.header) for section in made.sections for row in section.rows)


def test_without_a_gpu_the_benchmark_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="no GPU is visible"):
        benching.kernels(EngineConfig(), 1, "cuda")
    with pytest.raises(UsageError, match="--kernels, --threads"):
        benching.kernels(EngineConfig(kernels="native"), 1, "cuda")
    with pytest.raises(UsageError, match="no GPU is visible"):
        benching.kernels(EngineConfig(), 1, "cuda", Path("."), 9.0)
    with pytest.raises(UsageError, match="--tune and --limit are for --device cuda"):
        benching.kernels(EngineConfig(), 1, "cpu", Path("."))
    with pytest.raises(UsageError, match="--limit must be above 0"):
        benching.kernels(EngineConfig(), 1, "cuda", limit=0.0)
    with pytest.raises(UsageError, match="cpu or cuda, not tpu"):
        benching.kernels(EngineConfig(), 1, "tpu")
