"""Cost models: shapes of plans, rooflines, and a fit that finds what it was given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qserve.checkpoint.errors import CapacityError, DataError, UsageError
from qserve.evals.planner import catalog
from qserve.evals.planner.deployment import replica_roofline
from qserve.evals.planner.efficiency import Efficiency
from qserve.evals.planner.replica_roofline import Layout, ReplicaRoofline
from qserve.evals.simulator.cost import FittedCost, RooflineCost, StepShape, shape_of
from qserve.evals.simulator.fit import fit
from qserve.evals.simulator.model_cost import ModelCost
from qserve.runtime.step_plan import ScheduledSequence, StepPlan


def test_the_shape_of_a_plan_counts_every_attended_position() -> None:
    prompt = ScheduledSequence("a", (5, 6, 7), 10, (0,), 0, True)  # attend to 11, 12, 13
    decode = ScheduledSequence("b", (9,), 20, (1, 2), 1, False)
    assert shape_of(StepPlan(0, (decode, prompt), (), ())) == StepShape(4, 1, 36, 21)


def test_a_roofline_is_the_slower_of_arithmetic_and_memory() -> None:
    cost = RooflineCost(flops=1000.0, bandwidth=100.0, parameters=10.0, weights=200.0, kv=1.0, overhead=0.5)
    assert cost.seconds(1, 1, 0, 99) == (200 + 99 + 1) / 100 + 0.5
    assert cost.seconds(1000, 1, 0, 0) == 20.0 + 0.5


def on_gpu(model: str, layout: Layout = Layout(), scheme: str = "bf16") -> ReplicaRoofline:  # noqa: B008 (frozen)
    return replica_roofline(catalog.model(model), catalog.gpu("h200"), layout, scheme, "fp16", Efficiency())


@pytest.mark.parametrize("model", ["llama-3-70b", "mixtral-8x7b", "gpt-oss-120b", "deepseek-v3"])
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("tokens", [100, 4000])
def test_the_simulator_and_the_planner_have_one_roofline(model: str, tp: int, tokens: int) -> None:
    roofline = on_gpu(model, Layout(tp))
    cost = ModelCost(roofline)
    assert cost.seconds(24, 24, 0, 24 * tokens) == pytest.approx(roofline.decode(24, tokens))
    # A prompt alone in a step: what it looks at is exact without windows, and not below with them.
    pairs = tokens * (tokens + 1) // 2
    step = cost.seconds(tokens, 1, pairs, 0) - roofline.efficiency.overhead
    planned = roofline.prefill(tokens, tokens)
    assert step == pytest.approx(planned) if not any(roofline.shape.windows) else step >= planned * (1 - 1e-9)


def test_the_blocks_of_a_gpu_are_what_the_planner_would_fit() -> None:
    roofline = on_gpu("llama-3-70b", Layout(2))
    per_block = 16 * roofline.shape.kv_bytes_per_token(2) / 2
    assert ModelCost(roofline).num_blocks(64) == int(roofline.kv_room // per_block) > 10_000
    with pytest.raises(CapacityError, match="raise --tp"):
        _ = ModelCost(on_gpu("llama-3-70b")).num_blocks(64)
    with pytest.raises(UsageError, match="one stage"):
        ModelCost(on_gpu("llama-3-70b", Layout(2, 2)))
    with pytest.raises(UsageError, match="--tp 3"):
        on_gpu("llama-3-70b", Layout(3))


def test_states_of_a_hybrid_and_their_snapshots_take_room() -> None:
    state, plain = 75 << 20, on_gpu("llama-3-8b")
    hybrid = replace(plain, shape=replace(plain.shape, state_bytes=state))
    room = plain.kv_room - (64 + 16) * state
    assert ModelCost(hybrid).num_blocks(64) == int(room // plain.kv_per_request(16))
    with pytest.raises(CapacityError, match="GB of states of --max-num-seqs 4000 leave no room"):
        ModelCost(hybrid).num_blocks(4000)
    fits, request = hybrid.largest_batch(1000), plain.kv_per_request(1000) + state
    assert fits * request + fits // 4 * state <= hybrid.kv_room < (fits + 1) * request + (fits + 1) // 4 * state


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flops=1", "lacks bandwidth, kv, parameters, weights"),
        ("flops=x,bandwidth=1", "not 'flops=x'"),
        ("speed=1", "not 'speed=1'"),
        ("flops=nan,bandwidth=1,parameters=1,weights=1,kv=0", "flops must be"),
        ("flops=1,bandwidth=1,parameters=1,weights=0,kv=0", "weights must be"),
    ],
)
def test_a_bad_roofline_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RooflineCost.parse(text)


TRUE = FittedCost(
    curve=((1, 0.01), (8, 0.012), (64, 0.05), (512, 0.3)), per_row=2e-4, per_prefill_kv=1e-7, per_decode_kv=2e-6
)


def shapes() -> list[StepShape]:
    sizes = (8, 16, 64, 128, 300, 512)
    found = [StepShape(n, 1, n * (n + 1) // 2 + n * context, 0) for n in sizes for context in (0, 900)]
    found += [StepShape(n, n, 0, n * context) for n in (1, 2, 4, 8, 16, 32, 64) for context in (20, 300, 1000)]
    return found + [StepShape(n + 100, n, 5050, n * 100) for n in (1, 8, 30)]


def test_a_fit_finds_the_coefficients_it_was_given_though_steps_were_interrupted() -> None:
    steps = [(shape, TRUE.seconds(*shape)) for shape in shapes()]
    steps += [(shape, 3 * TRUE.seconds(*shape)) for shape in shapes()[::11]]
    found = fit(steps, "made up")
    unseen = [StepShape(40, 20, 300, 5000), StepShape(200, 3, 9000, 600), StepShape(6, 6, 0, 3000)]
    for shape in unseen:
        assert found.seconds(*shape) == pytest.approx(TRUE.seconds(*shape), rel=0.05)
    assert found.per_decode_kv == pytest.approx(2e-6, rel=0.1)
    assert min(found.per_row, found.per_prefill_kv, *(seconds for _, seconds in found.curve)) >= 0


def test_a_fit_finds_the_mean_where_steps_vary() -> None:
    found = fit([(shape, factor * TRUE.seconds(*shape)) for shape in shapes() for factor in (0.7, 0.8, 1.5)])
    for shape in (StepShape(40, 20, 300, 5000), StepShape(200, 3, 9000, 600), StepShape(1, 1, 0, 300)):
        assert found.seconds(*shape) == pytest.approx(TRUE.seconds(*shape), rel=0.02)


def test_no_coefficient_is_negative_where_least_squares_would_have_one() -> None:
    shapes = [StepShape(n, n, 0, context) for n in (1, 8, 64) for context in (1, 9000)]
    steps = [(shape, 0.01 + shape.tokens * 1e-3 - shape.decode_kv * 1e-7) for shape in shapes]
    found = fit(steps * 2)
    assert found.per_decode_kv == 0.0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="too few"):
        fit([(StepShape(1, 1, 0, 1), 0.1)] * 20)


def test_a_cost_model_is_the_same_after_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(TRUE.to_json()))
    assert FittedCost.load(path) == TRUE
    assert TRUE.seconds(4, 0, 0, 0) == pytest.approx(0.01 + 0.002 * 3 / 7)
    assert TRUE.seconds(960, 0, 0, 0) == pytest.approx(0.55)  # on from the last two points


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"curve": 3}', '{"curve": [[1, 0.1]], "per_row": 0, "per_prefill_kv": 0, "per_decode_kv": 0}',
        '{"curve": [[1, 0.1], [2, -1]], "per_row": 0, "per_prefill_kv": 0, "per_decode_kv": 0}',
        '{"curve": [[1, 0.1], [2, NaN]], "per_row": 0, "per_prefill_kv": 0, "per_decode_kv": 0}',
        '{"curve": [[1, 0.1], [9e9, 1]], "per_row": 0, "per_prefill_kv": 0, "per_decode_kv": 0}',
        '{"curve": [[1, 0.1], [2, 0.2]], "per_row": 0, "per_prefill_kv": 0, "per_decode_kv": 0, "more": 1}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_cost_model_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(DataError):
        FittedCost.load(path)
