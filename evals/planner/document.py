"""A plan as the report that every evaluation writes: tables for a person, figures unrounded for a program.

Needs no torch, because a plan should answer in a second.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from qserve.evals.planner import arithmetic, cost
from qserve.evals.planner.catalog import ApiPrice
from qserve.evals.planner.deployment import Deployment
from qserve.evals.report import Metric, Plot, Report, Section, Series

_SHOWN = 6  # bars


@dataclass(frozen=True)
class Document:
    """The chosen ``plan``, all plans that were ``tried``, and the services to compare with."""

    plan: Deployment
    tried: Sequence[Deployment]
    services: Sequence[ApiPrice]
    command: str

    @property
    def title(self) -> str:
        replica = self.plan.replica
        return f"{replica.roofline.shape.name} for {replica.traffic} within {replica.slo}"

    def recommendation(self) -> Section:
        plan, replica, load = self.plan, self.plan.replica, self.plan.load
        roofline = replica.roofline
        made = roofline.quantization.made_by
        step = f"qserve quantize MODEL OUT {made}" if made else "as it is"
        hourly = plan.dollars_per_hour
        load_share = replica.traffic.rate / (plan.replicas - plan.spare) / replica.full.rate
        spare = f", {plan.spare} of them may be lost" if plan.spare else ""
        rows = [
            ("GPU", f"{plan.gpus} x {roofline.gpu.name}"),
            ("weights", f"{roofline.quantization.name} ({step}), {roofline.weights_per_gpu / 1e9:.1f} GB a GPU"),
            ("KV cache", f"{roofline.kv_dtype}"),
            ("parallelism", f"{plan.replicas} replica{'s' if plan.replicas > 1 else ''} of {roofline.layout}{spare}"),
            ("served by", _server(plan)),
            ("TTFT", f"{load.ttft * 1e3:.0f} ms (limit {replica.slo.ttft * 1e3:g} ms)"),
            ("TPOT", f"{load.tpot * 1e3:.1f} ms (limit {replica.slo.tpot * 1e3:g} ms)"),
            ("batch", f"{load.batch} running, {replica.largest} within the limits, {replica.fits} fit"),
            ("utilization", f"{load_share:.0%} of what they take{', without the spare' if spare else ''}"),
        ]
        if hourly is None:
            rows.append(("cost", f"no price of {roofline.gpu.key} is known: give --gpu-price"))
        else:
            rows += [
                ("cost", f"${hourly:,.2f} an hour, ${hourly * cost.HOURS_PER_MONTH:,.0f} a month ({self._price()})"),
                ("per million tokens", f"${cost.per_million(hourly, plan.tokens_per_second):.3f}, prompt and output"),
            ]
        return Section(self.title, ("", "plan"), tuple(rows))

    def alternatives(self) -> Section:
        """The best of every GPU and quantization; those marked with a star are for another engine."""
        header = ("plan, * not served by qserve run", "GPUs", "batch", "TTFT ms", "TPOT ms", "$/h", "$/M tokens")
        return Section("Best of each GPU and quantization", header, tuple(map(_row, self._ranked())))

    def break_even(self) -> Section:
        """The volume from which the plan's GPUs cost less than a service."""
        rows = []
        for service in self.services:
            when = "" if service.date is None else f", {service.date}"
            blended = service.blended(self.plan.replica.traffic.prompt, self.plan.replica.traffic.output)
            tokens, verdict = self._break_even(blended)
            shown = "never" if math.isinf(tokens) else f"{tokens / 1e6:,.0f} M"
            prices = f"${service.input:g} / ${service.output:g}{when}"
            rows.append((service.key, prices, f"${blended:.3f}", shown, verdict))
        header = ("service", "$/M in / out", "$/M blended", "break-even a month", "")
        return Section("Against services", header, tuple(rows))

    def arithmetic(self) -> Section:
        return Section("Arithmetic", ("", "how"), tuple(arithmetic.lines(self.plan)))

    def answer(self) -> list[Section]:
        """The first tables: the plan, the alternatives, and the services it competes with."""
        priced = self.services and self.plan.dollars_per_hour is not None
        return [self.recommendation(), self.alternatives(), *([self.break_even()] if priced else [])]

    def assumptions(self) -> str:
        """The assumptions behind the times, in a line."""
        e = self.plan.roofline.efficiency
        return (
            f"assumed, not measured: {e.mfu:.0%} of the peak operations (--mfu), {e.mbu:.0%} of the bandwidth (--mbu), "
            f"{e.link:.0%} of the links (--link), {e.all_reduce * 1e6:g} us before the first hop of an all-reduce "
            f"(--all-reduce), {e.overhead * 1e3:g} ms a step (--overhead), {e.memory:.0%} of the memory (--memory), "
            f"{e.utilization:.0%} of the capacity (--utilization)"
        )

    def report(self) -> Report:
        """The figures that plans are compared by, and the costs of the alternatives."""
        load, hourly = self.plan.load, self.plan.dollars_per_hour
        metrics = [
            Metric("ttft", load.ttft, "s", "lower"), Metric("tpot", load.tpot, "s", "lower"),
            Metric("gpus", self.plan.gpus, "", "lower"),
        ]  # fmt: skip
        if hourly is not None:
            million = cost.per_million(hourly, self.plan.tokens_per_second)
            metrics.insert(0, Metric("cost_per_million_tokens", million, "$", "lower"))
            metrics.insert(0, Metric("cost_per_hour", hourly, "$", "lower"))
        assumed = Section("Assumed", ("",), ((self.assumptions(),),))
        return Report(
            "plan", self.title, self.command, json.loads(json.dumps(self._data(), default=str)),
            (*self.answer(), self.arithmetic(), assumed), environment={"qserve": version("qserve-llm")},
            metrics=tuple(metrics), plots=self._plots(),
        )  # fmt: skip

    def _data(self) -> dict[str, Any]:
        replica = self.plan.replica
        shape = replica.roofline.shape
        return {
            "model": {
                **{key: value for key, value in asdict(shape).items() if key not in ("linears", "windows")},
                "parameters": shape.parameters,
                "active_parameters": shape.active_parameters,
                "parameters_by_kind": shape.parameters_by_kind(),
            },
            "traffic": asdict(replica.traffic),
            "slo": asdict(replica.slo),
            "efficiency": asdict(replica.roofline.efficiency),
            "chunk": replica.chunk,
            "plan": _figures(self.plan),
            "tried": [_figures(plan) for plan in self.tried],
            "services": [self._service(service) for service in self.services],
        }

    def _ranked(self) -> list[Deployment]:
        """The best plan of every GPU and quantization; refused ones come last."""
        best: dict[tuple[str, str], Deployment] = {}
        for plan in self.tried:
            best.setdefault((plan.roofline.gpu.key, plan.roofline.quantization.name), plan)
        return sorted(best.values(), key=lambda plan: (bool(plan.refused), plan.rank))

    def _plots(self) -> tuple[Plot, ...]:
        """Dollars per million tokens of the cheapest plans; empty where no price is known."""
        priced = [
            (plan, hourly)
            for plan in self._ranked()
            if not plan.refused and (hourly := plan.dollars_per_hour) is not None
        ][:_SHOWN]
        if len(priced) < 2:
            return ()
        names = tuple(f"{p.gpus} x {p.roofline.gpu.key}\n{p.roofline.quantization.name}" for p, _ in priced)
        dollars = tuple(cost.per_million(hourly, plan.tokens_per_second) for plan, hourly in priced)
        series = Series("cost", tuple(map(float, range(len(dollars)))), dollars)
        caption = "The cheapest plan of each GPU and quantization that keeps the limits, cheapest first."
        return (Plot("Cost of the alternatives", caption, "", "$ per million tokens", (series,), "bar", names),)

    def _price(self) -> str:
        price = self.plan.roofline.gpu.price
        if price is None or price.dollars != self.plan.gpu_price:
            return f"${self.plan.gpu_price:.2f} a GPU, --gpu-price"
        return f"${price.dollars:.2f} a GPU, {price.source.split('/')[2]}, {price.date}"

    def _break_even(self, blended: float) -> tuple[float, str]:
        """Tokens a month, infinite where the GPUs cannot make so many, and a line that says what that means."""
        monthly = self.plan.dollars_per_month
        if monthly is None:
            return math.inf, "no price of the GPU is known"
        tokens = cost.break_even(monthly, blended)
        most = self.plan.full_tokens_per_second * 3600 * cost.HOURS_PER_MONTH
        planned = self.plan.tokens_per_second * 3600 * cost.HOURS_PER_MONTH
        if tokens > most:
            return math.inf, f"these GPUs make {most / 1e6:,.0f} M at most, {tokens / 1e6:,.0f} M would pay"
        return tokens, f"the plan's {planned / 1e6:,.0f} M cost {'less' if planned >= tokens else 'more'} here"

    def _service(self, service: ApiPrice) -> dict[str, Any]:
        blended = service.blended(self.plan.replica.traffic.prompt, self.plan.replica.traffic.output)
        tokens, _ = self._break_even(blended)
        found = {"blended": blended, "break_even_tokens_per_month": None if math.isinf(tokens) else tokens}
        return {**asdict(service), **found}


def _server(plan: Deployment) -> str:
    return f"another engine: qserve run lacks {', '.join(plan.missing)}" if plan.missing else "qserve run"


def _row(plan: Deployment) -> tuple[str, ...]:
    roofline = plan.roofline
    mark = " *" if plan.missing else ""
    name = f"{roofline.gpu.key} {roofline.quantization.name}, KV {roofline.kv_dtype}, {roofline.layout}{mark}"
    if plan.refused:
        return (f"{name}: {plan.refused}", "", "", "", "", "", "")
    load, hourly = plan.load, plan.dollars_per_hour
    money = ("", "")
    if hourly is not None:
        money = (f"{hourly:,.2f}", f"{cost.per_million(hourly, plan.tokens_per_second):.3f}")
    return (name, str(plan.gpus), str(load.batch), f"{load.ttft * 1e3:.0f}", f"{load.tpot * 1e3:.1f}", *money)


def _figures(plan: Deployment) -> dict[str, Any]:
    roofline, hourly = plan.roofline, plan.dollars_per_hour
    found: dict[str, Any] = {
        "gpu": roofline.gpu.key,
        "quantization": roofline.quantization.name,
        "kv_dtype": roofline.kv_dtype,
        "tp": roofline.layout.tp,
        "pp": roofline.layout.pp,
        "refused": plan.refused or None,
        "qserve_run_lacks": list(plan.missing),
        "weight_bytes": roofline.shape.weight_bytes(roofline.quantization.scheme),
        "weight_bytes_per_gpu": roofline.weights_per_gpu,
        "kv_bytes_per_request_and_gpu": roofline.kv_per_request(plan.replica.traffic.held),
        "largest_batch_in_memory": plan.replica.fits,
    }
    if plan.refused:
        return found
    return {
        **found,
        "largest_batch_within_slo": plan.replica.largest,
        "replicas": plan.replicas,
        "spare": plan.spare,
        "gpus": plan.gpus,
        "load": asdict(plan.load),
        "full_load": asdict(plan.replica.full),
        "gpu_price": plan.gpu_price,
        "dollars_per_hour": hourly,
        "dollars_per_million_tokens": None if hourly is None else cost.per_million(hourly, plan.tokens_per_second),
    }
