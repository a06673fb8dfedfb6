"""The choice of a plan, against a naive reference that tries every batch and plan; and refusals with the arithmetic."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.checkpoint.families import native_families
from qserve.evals.planner import catalog, cost
from qserve.evals.planner.demand import Traffic, parse_traffic
from qserve.evals.planner.deployment import Deployment, choose, consider
from qserve.evals.planner.document import Document
from qserve.evals.planner.efficiency import Efficiency
from qserve.evals.planner.quantization import quantization
from qserve.evals.planner.replica import Replica
from qserve.evals.planner.replica_roofline import Layout, ReplicaRoofline
from qserve.evals.planner.served import SERVED, Served
from qserve.evals.planner.wish import Wish
from qserve.evals.report_files import write_report
from qserve.evals.slo import Slo, parse_duration, parse_slo
from qserve.kernels.kv_cache import head_numel, stored_as
from qserve.kernels.ops import PACKED_KV

TRAFFIC = Traffic(10, 2048, 256)


def replica(
    model: str = "llama-3-8b",
    gpu: str = "h100",
    scheme: str = "bf16",
    layout: Layout = Layout(),  # noqa: B008 (frozen)
    traffic: Traffic = TRAFFIC,
    slo: Slo = Slo(),  # noqa: B008
) -> Replica:
    roofline = ReplicaRoofline(
        catalog.model(model), quantization(scheme), "fp16", catalog.gpu(gpu), layout, Efficiency()
    )
    return Replica(roofline, traffic, slo, 2048)


MODELS = st.sampled_from(["llama-3-8b", "mixtral-8x7b", "gpt-oss-120b", "mistral-7b", "smollm2-135m"])
LAYOUTS = st.builds(Layout, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
LOADS = st.builds(Traffic, st.just(1.0), st.integers(1, 4000), st.integers(1, 1000))
LIMITS = st.builds(Slo, st.floats(0.02, 2), st.floats(0.002, 0.1))


@settings(max_examples=40, deadline=None)
@given(MODELS, st.sampled_from(["bf16", "fp8", "w4g128"]), LAYOUTS, LOADS, LIMITS, st.floats(0.01, 1))
def test_the_largest_batch_is_the_last_that_keeps_the_limits(
    model: str, scheme: str, layout: Layout, traffic: Traffic, slo: Slo, part: float
) -> None:
    found = replica(model, "h200", scheme, layout, traffic, slo)
    most = min(found.fits, 300)
    kept = [b for b in range(1, most + 1) if found.at(b).ttft <= slo.ttft and found.at(b).tpot <= slo.tpot]
    assert kept == list(range(1, len(kept) + 1))
    assert found.largest == len(kept) or found.largest >= 300 == most
    if found.largest:
        load = found.under(found.full.rate * part)
        assert load.rate >= found.full.rate * part * (1 - 1e-9) and load.batch <= found.largest
        assert load.batch == 1 or found.at(load.batch - 1).rate < found.full.rate * part


@settings(max_examples=40, deadline=None)
@given(MODELS, LAYOUTS, LOADS, st.integers(1, 200))
def test_littles_law_holds(model: str, layout: Layout, traffic: Traffic, batch: int) -> None:
    load = replica(model, "h200", "bf16", layout, traffic).at(batch)
    assert load.rate * traffic.output * load.tpot == pytest.approx(batch)
    assert 0 <= load.prefilling < 1 and load.tpot >= load.decode and load.ttft > 0


def test_more_gpus_are_faster_and_hold_more() -> None:
    one, two = replica(layout=Layout(1)), replica(layout=Layout(2))
    assert one.roofline.weights_per_gpu == 2 * two.roofline.weights_per_gpu
    assert two.at(8).tpot < one.at(8).tpot and two.prefill < one.prefill and two.fits > 2 * one.fits
    staged = replica(layout=Layout(1, 2))
    assert one.roofline.weights_per_gpu > staged.roofline.weights_per_gpu >= two.roofline.weights_per_gpu
    # Stages make no token come sooner: each passes through all layers.
    assert staged.at(1).tpot > two.at(1).tpot


def test_a_cache_is_split_by_heads_and_a_latent_one_not_at_all() -> None:
    request = catalog.model("llama-3-8b").kv_bytes(4096, 2)
    for tp, share in ((1, 1), (2, 2), (8, 8), (16, 8)):  # 8 KV heads: the ninth GPU repeats one
        assert replica(layout=Layout(tp)).roofline.kv_per_request(4096) == request / share
    latent = [replica("deepseek-v3", layout=Layout(tp)).roofline.kv_per_request(4096) for tp in (1, 8)]
    assert latent[0] == latent[1]


def test_weights_bind_one_request_and_operations_many() -> None:
    roofline = replica().roofline
    weights = roofline.shape.layer_bytes(None) + roofline.shape.head_bytes
    one, many = roofline.linears(1, 1), roofline.linears(4096, 4096)
    assert one == pytest.approx(weights / roofline.bandwidth, rel=0.001)
    operations = 2 * 4096 * (roofline.shape.parameters - roofline.shape.embedding - roofline.shape.other)
    assert many == pytest.approx(operations / roofline.flops(), rel=0.001)


def test_an_all_reduce_of_one_row_takes_microseconds_not_nanoseconds() -> None:
    one = replica("llama-3-70b", "h200", layout=Layout(1)).roofline
    assert one.exchange(1) == 0 == one.all_reduce_latency
    for tp, microseconds in ((2, 7.8), (4, 10.2), (8, 15.0)):  # NCCL's model: 6.6 + 2 (n - 1) x 0.6
        roofline = replica("llama-3-70b", "h200", layout=Layout(tp)).roofline
        assert roofline.all_reduce_latency * 1e6 == pytest.approx(microseconds)
        assert roofline.exchange(1) >= 2 * 80 * microseconds * 1e-6
    # So eight GPUs are not eight times as fast as one, nor twice as fast as four with a small model.
    small = [replica("smollm2-135m", "h200", layout=Layout(tp)).roofline.decode(1, 100) for tp in (1, 8)]
    assert small[1] > small[0]
    assert replica("llama-3-70b", "h200", layout=Layout(8, 2)).roofline.exchange(1) > roofline.exchange(1)
    given = dataclasses.replace(roofline, efficiency=Efficiency(all_reduce=100e-6))
    assert given.exchange(1) - roofline.exchange(1) == pytest.approx(2 * 80 * (100e-6 - 6.6e-6))
    with pytest.raises(UsageError, match="an all-reduce must take"):
        Efficiency(all_reduce=math.nan)


def test_experts_that_nobody_chose_are_not_read() -> None:
    roofline = replica("mixtral-8x7b", "h200", "fp8").roofline
    expert = next(linear for linear in roofline.shape.linears if linear.kind == "experts")
    assert expert.experts_read(1) == pytest.approx(2)
    assert expert.experts_read(1) < expert.experts_read(4) < expert.experts_read(64) < 8


def test_the_cheapest_plan_wins_and_of_equals_the_least_compressed() -> None:
    shape = catalog.model("llama-3-70b")
    best, tried = choose(shape, list(catalog.gpus().values()), TRAFFIC, Slo(), Efficiency(), Wish())
    possible = [plan for plan in tried if not plan.refused]
    priced = [plan for plan in possible if plan.dollars_per_hour is not None]
    assert best.dollars_per_hour == min(plan.dollars_per_hour or 0 for plan in priced)
    equal = [plan for plan in priced if plan.dollars_per_hour == best.dollars_per_hour]
    assert best.compression == min(plan.compression for plan in equal)
    for plan in possible:
        assert plan.load.ttft <= 0.5 and plan.load.tpot <= 0.05
        assert plan.replicas * plan.replica.full.rate * 0.8 >= TRAFFIC.rate
        assert plan.replicas == 1 or (plan.replicas - 1) * plan.replica.full.rate * 0.8 < TRAFFIC.rate
        held = plan.roofline.weights_per_gpu + plan.load.batch * plan.roofline.kv_per_request(TRAFFIC.tokens)
        assert held <= plan.roofline.gpu.memory * 0.9
    small = choose(catalog.model("llama-3-8b"), [catalog.gpu("h200")], Traffic(0.1), Slo(), Efficiency(), Wish())[0]
    assert (small.roofline.quantization.name, small.roofline.kv_dtype, small.gpus) == ("bf16", "fp16", 1)


def test_what_a_gpu_does_not_compute_is_not_planned() -> None:
    a100 = catalog.gpu("a100-80gb")
    tried = consider(catalog.model("llama-3-8b"), a100, TRAFFIC, Slo(), Efficiency(), Wish())
    assert {plan.roofline.quantization.name for plan in tried} == {"bf16", "w8a8", "w4g128"}
    assert {plan.roofline.kv_dtype for plan in tried} == {"fp16", "int8"}
    for wish, words in ((Wish("fp8"), "has no products of fp8"), (Wish(kv_dtype="fp8"), "has no fp8")):
        with pytest.raises(UsageError, match=words):
            consider(catalog.model("llama-3-8b"), a100, TRAFFIC, Slo(), Efficiency(), wish)


def test_plans_that_qserve_run_cannot_serve_are_marked() -> None:
    def best(model: str, wish: Wish) -> Deployment:
        return choose(catalog.model(model), [catalog.gpu("h200")], Traffic(0.1), Slo(5, 1), Efficiency(), wish)[0]

    alone, split = best("llama-3-8b", Wish(tp=1)), best("llama-3-8b", Wish(tp=1, pp=2))
    foreign = best("llama-4-scout", Wish())
    assert (alone.missing, split.missing) == ((), ("PP 2",)) and foreign.missing[0] == "the family llama4_text"
    shown = [dict(Document(plan, [plan], [], "").recommendation().rows)["served by"] for plan in (alone, split)]
    assert shown == ["qserve run", "another engine: qserve run lacks PP 2"]
    rows = [Document(plan, [plan], [], "").alternatives().rows[0][0] for plan in (alone, split)]
    assert [row.endswith(" *") for row in rows] == [False, True]
    later = Served(("llama", "llama4_text"), 2, 2)  # what later work adds to the table changes the marks, nothing else
    assert later.missing(split.roofline.shape, Layout(1, 2)) == () == later.missing(foreign.roofline.shape, Layout(1))
    assert later.missing(foreign.roofline.shape, Layout(4, 4)) == ("TP 4", "PP 4")
    latent = catalog.model("deepseek-v3")
    assert SERVED.missing(latent, Layout(1)) == () and SERVED.missing(latent, Layout(1), "fp8") == ("latents in fp8",)
    assert set(SERVED.families) == set(native_families()) and (SERVED.tp, SERVED.pp) == (8, 1)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        ("fp16", torch.float16),
        ("fp8", torch.float8_e4m3fn),
        ("int8", torch.int8),
        ("int4_per_token_head", PACKED_KV),
    ],
)
def test_a_cache_takes_what_the_engine_allots_it(dtype: str, stored: torch.dtype) -> None:
    for head_dim in (64, 128):
        shape = dataclasses.replace(catalog.model("llama-3-8b"), score_width=head_dim, kv_width=2 * 8 * head_dim)
        roofline = dataclasses.replace(replica().roofline, shape=shape, kv_dtype=dtype)
        block = 2 * shape.num_layers * 8 * head_numel(stored, head_dim) * stored_as(stored).itemsize
        assert roofline.kv_per_request(160) == 10 * block
        assert roofline.decode_attention(16 * shape.num_layers) == pytest.approx(block / roofline.bandwidth)


def test_what_heads_are_cached_in_4_bits() -> None:
    shape, cache = catalog.model("llama-3-8b"), "int4_per_token_head"
    assert SERVED.missing(shape, Layout(1), cache) == ()
    narrow, shared = dataclasses.replace(shape, score_width=80), dataclasses.replace(shape, num_heads=32, kv_heads=1)
    assert SERVED.missing(narrow, Layout(1), cache) == ("heads of 80 in 4 bits",)
    assert SERVED.missing(shared, Layout(1), cache) == ("32 query heads a key head in 4 bits",)
    assert SERVED.missing(narrow, Layout(1), "int8") == SERVED.missing(shared, Layout(1), "int8") == ()


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_what_is_divided_among_gpus_is_not_marked(model: str) -> None:
    shape = catalog.model(model)
    assert SERVED.missing(shape, Layout(8)) == SERVED.missing(shape, Layout(1)) == ()


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"kv_heads": 6}, "TP of 6 key heads"),
    ],
)
def test_what_a_model_has_that_is_not_divided(changes: dict[str, Any], lacks: str) -> None:
    shape = dataclasses.replace(catalog.model("llama-3-8b"), **changes)
    assert SERVED.missing(shape, Layout(4)) == (lacks,) and SERVED.missing(shape, Layout(1)) == ()


def test_what_the_prefix_cache_has_is_not_computed() -> None:
    cold, warm = replica(traffic=Traffic(10, 2048, 256)), replica(traffic=Traffic(10, 2048, 256, 0.75))
    assert warm.traffic.computed == 512 and cold.traffic.computed == 2048
    # The last quarter looks back at all that lies before it, so it costs more than a prompt of its length.
    alone = replica(traffic=Traffic(10, 512, 256)).prefill
    assert alone < warm.prefill < cold.prefill / 3
    shape = warm.roofline.shape
    assert shape.looked_at(2048) - shape.looked_at(1536) == shape.num_layers * sum(range(1537, 2049))
    assert warm.full.rate > cold.full.rate and warm.fits == cold.fits
    assert Traffic(1, 10, 1, 0.999).computed == 1
    assert parse_traffic("rate=2,hit=0.75") == Traffic(2, hit=0.75) == parse_traffic(str(Traffic(2, hit=0.75)))


def test_lengths_that_differ_wait_longer_and_hold_more_than_their_means() -> None:
    equal = replica(traffic=parse_traffic("rate=1,prompt=1000,output=200"))
    drawn = replica(traffic=parse_traffic("rate=1,prompt=100/1900,output=50/350"))
    assert (drawn.traffic.prompt, drawn.traffic.output) == (1000, 200) and equal.variation == 1
    one, other = (equal.roofline.prefill(n, 2048) for n in (100, 1900))
    assert drawn.prefill == pytest.approx((one + other) / 2)
    assert drawn.variation == pytest.approx((one**2 + other**2) / 2 / drawn.prefill**2) and drawn.variation > 1.5
    # Of those that run, seven of eight have the long output, for it runs seven times as long.
    assert drawn.traffic.held == pytest.approx(1000 + (50 * 1 + 350 * 7) / 8)
    assert drawn.fits < equal.fits and drawn.at(8).waiting > 1.5 * equal.at(8).waiting
    text = "rate=2/s,prompt=lognormal:500:0.8,output=uniform:64:512,hit=0.5"
    assert str(parse_traffic(text)) == text and parse_traffic("prompt=7").prompts is None
    long = parse_traffic("prompt=uniform:128:8192,output=64")
    with pytest.raises(UsageError, match="uniform:128:8192 \\+ 64 tokens exceeds the context"):
        choose(catalog.model("llama-3-8b"), [catalog.gpu("h200")], long, Slo(), Efficiency(), Wish())


def test_a_spare_replica_is_paid_and_not_needed() -> None:
    shape, h200 = catalog.model("llama-3-8b"), [catalog.gpu("h200")]
    plain, spare = (choose(shape, h200, TRAFFIC, Slo(), Efficiency(), Wish("fp8", tp=1, spare=n))[0] for n in (0, 1))
    assert (spare.replicas, spare.spare) == (plain.replicas + 1, 1) and spare.load == plain.load
    assert spare.dollars_per_hour == pytest.approx((plain.dollars_per_hour or 0) * spare.replicas / plain.replicas)
    shown = dict(Document(spare, [spare], [], "").recommendation().rows)
    assert shown["parallelism"].endswith("1 of them may be lost")


def test_stages_are_tried_where_a_machine_is_too_small() -> None:
    shape, h100 = catalog.model("llama-3.1-405b"), catalog.gpu("h100")
    tried = consider(shape, h100, Traffic(1, 1024, 256), Slo(5, 0.2), Efficiency(), Wish("bf16", "fp16"))
    assert {str(plan.roofline.layout) for plan in tried if not plan.refused} >= {"TP 8 x PP 2"}
    assert all(plan.refused for plan in tried if plan.roofline.layout.pp == 1)
    fits = consider(shape, h100, Traffic(1, 1024, 256), Slo(5, 0.2), Efficiency(), Wish("w4g128", "fp16"))
    assert {plan.roofline.layout.pp for plan in fits} == {1}


def test_what_cannot_be_is_refused_with_the_arithmetic() -> None:
    def refusal(model: str, gpu: str, traffic: Traffic = TRAFFIC, wish: Wish = Wish()) -> str:  # noqa: B008
        with pytest.raises((CapacityError, UsageError)) as caught:
            choose(catalog.model(model), [catalog.gpu(gpu)], traffic, Slo(), Efficiency(), wish)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "TTFT" in refusal("llama-3-70b", "a10") and "exceeds 500 ms" in refusal("llama-3-70b", "a10")
    fixed = refusal("llama-3-70b", "a10", wish=Wish(tp=1, pp=1))
    assert "39.8 GB of weights" in fixed and "exceed 21.7 GB of a GPU" in fixed
    long = refusal("llama-3-8b", "h200", Traffic(1, 8000, 200))
    assert "8000 + 200 tokens exceeds the context of llama-3-8b, 8192" in long
    assert "64 heads in 80 layers, which --tp 3 and --pp 1" in refusal("llama-3-70b", "h200", wish=Wish(tp=3))
    with pytest.raises(UsageError, match="unknown GPU 'v100': choose from b200, h200"):
        catalog.gpu("v100")


def test_money(tmp_path: Path) -> None:
    shape = catalog.model("llama-3-70b")
    best, tried = choose(shape, [catalog.gpu("h200")], TRAFFIC, Slo(), Efficiency(), Wish(gpu_price=2.0))
    assert best.dollars_per_hour == 2.0 * best.gpus
    services = [catalog.api_price("0.9/0.9"), catalog.api_price("0.0001/0.0001")]
    document = Document(best, tried, services, "qserve plan it")
    dear, cheap = document.break_even().rows
    monthly = 2.0 * best.gpus * 730
    assert dear[3] == f"{monthly / 0.9:,.0f} M" and "cost less here" in dear[4]
    assert cheap[3] == "never" and "at most" in cheap[4]
    write_report(document.report(), tmp_path / "p.json", tmp_path / "p.md")
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["kind"] == "plan" and written["schema"] == 2 and written["passed"]
    per_million = cost.per_million(2.0 * best.gpus, 10 * 2304)
    assert written["data"]["plan"]["dollars_per_million_tokens"] == pytest.approx(per_million)
    assert len(written["data"]["tried"]) == len(tried)
    assert written["data"]["services"][0]["break_even_tokens_per_month"] == pytest.approx(monthly / 0.9 * 1e6)
    assert written["data"]["services"][1]["break_even_tokens_per_month"] is None
    text = (tmp_path / "p.md").read_text()
    assert "2 x 8 KV heads x 128 x 80 layers" in text and "assumed, not measured" in text
    unpriced = choose(shape, [catalog.gpu("mi300x")], TRAFFIC, Slo(), Efficiency(), Wish())[0]
    assert unpriced.dollars_per_hour is None
    assert "give --gpu-price" in str(Document(unpriced, [unpriced], services, "").answer())


def test_every_fact_has_its_source_and_date() -> None:
    gpus, services = catalog.gpus(), catalog.api_prices()
    assert {"h100", "h200", "b200", "a100-80gb", "l40s", "l4", "h20", "rtx-5090", "mi325x"} <= gpus.keys()
    assert all(16 * 2**30 < gpu.memory < 300 * 2**30 and 30e9 <= gpu.link <= 1e12 for gpu in gpus.values())
    for gpu in gpus.values():
        assert 300e9 <= gpu.bandwidth <= 10e12 and {"bf16", "int8"} <= gpu.flops.keys()
        assert gpu.price is None or (gpu.price.source.startswith("https://") and gpu.price.date.year >= 2026)
    assert any(gpu.price for gpu in gpus.values())
    for service in services.values():
        assert service.source.startswith("https://") and service.date is not None
        assert min(service.input, service.output) <= service.blended(1000, 200) <= max(service.input, service.output)


@pytest.mark.parametrize(
    ("text", "traffic"),
    [
        ("rate=10/s,prompt=2048,output=256", TRAFFIC),
        ("rate=600/min, prompt=2048, output=256", TRAFFIC),
        ("rate=36000/h,prompt=2048,output=256", TRAFFIC),
        ("rate=10,prompt=2048,output=256", TRAFFIC),
        ("prompt=7", Traffic(prompt=7)),
    ],
)
def test_traffic_is_read(text: str, traffic: Traffic) -> None:
    assert parse_traffic(text) == traffic == parse_traffic(str(traffic))


def test_limits_are_read() -> None:
    assert parse_slo("ttft=500ms,tpot=50ms") == Slo(0.5, 0.05) == parse_slo(str(Slo()))
    assert parse_slo("tpot=0.02s") == Slo(tpot=0.02)
    assert parse_duration("it", "800us") == pytest.approx(8e-4)


@pytest.mark.parametrize(
    "text",
    ["", "rate", "rate=", "rate=0", "rate=nan", "rate=inf", "rate=-1", "rate=1/y", "rate=1,rate=2", "speed=1",
     "prompt=0", "prompt=1.5", "prompt=-4", "prompt=9999999999", "output=x", "output=²", "prompt=1,,output=2",
     "hit=1", "hit=-0.1", "hit=nan", "hit=x"],
)  # fmt: skip
def test_other_traffic_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_traffic(text)


@pytest.mark.parametrize("text", ["", "ttft=1", "ttft=0ms", "ttft=nanms", "ttft=5min", "tpot=-1s", "e2e=1s"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_slo(text)


@pytest.mark.parametrize("text", ["gpt-5", "1", "1/2/3", "nan/1", "-1/2", "1/inf", "0/0"])
def test_other_services_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="IN/OUT"):
        catalog.api_price(text)


@pytest.mark.parametrize("name", ["w7g128", "w4", "w4g7", "int4", "w4g0", "", "w4g999999"])
def test_other_quantizations_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        quantization(name)


def test_shares_and_wishes_have_bounds() -> None:
    for name in ("mfu", "mbu", "link", "memory", "utilization"):
        for value in (0.0, 1.5, math.nan, -1.0):
            with pytest.raises(UsageError, match=f"--{name}"):
                Efficiency(**{name: value})
    for wish in ({"tp": -1}, {"pp": 65}, {"chunk": 0}, {"spare": -1}, {"gpu_price": math.inf}, {"kv_dtype": "fp4"}):
        with pytest.raises(UsageError):
            Wish(**wish)  # type: ignore[arg-type]
    assert dataclasses.replace(Wish(), tp=8).tp == 8
    assert Deployment(replica(), 1, None).dollars_per_month is None
