"""``FleetMetrics``: the metrics of the router, and those of each replica's that say how full it is."""

from __future__ import annotations

import asyncio
import re

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from qserve.runtime.fleet.fleet import Fleet, Replica
from qserve.runtime.fleet.upstream import Lost, Unreachable
from qserve.runtime.server.telemetry.metrics import REJECTIONS

_SHOWN = {  # a replica's own metrics that are repeated with its address
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
}
_SAMPLE = re.compile(rb"(?m)^qserve:(\w+)\{[^}]*\} (\S+)$")
_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1)


class FleetMetrics:
    """Counts what the router does. Prompt blocks are those of ``prompts.prompt_of``."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._registry = CollectorRegistry()
        self._requests = self._counter("router_requests", "Requests sent to a replica.", "replica")
        self._retries = self._counter("router_retries", "Requests that a replica lost or did not take.", "replica")
        self._broken = self._counter("router_streams_broken", "Streams that ended with a replica.", "replica")
        self._blocks = self._counter("router_prompt_blocks", "Blocks of prompts sent to a replica.", "replica")
        self._cached = self._counter("router_cached_blocks", "Those of them that it was believed to hold.", "replica")
        self._rejected = self._counter("requests_rejected", "Requests that were refused, by reason.", "reason")
        self._overhead = Histogram(
            "qserve:router_overhead_seconds", "Time from a body to its replica.", buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        for reason in sorted(set(REJECTIONS.values()) | {"draining"}):
            self._rejected.labels(reason)
        self._by_replica = (self._requests, self._retries, self._broken, self._blocks, self._cached)
        self._urls = set[str]()  # those that have counters

    def placed(self, url: str, blocks: int, cached: int, overhead: float) -> None:
        if url not in self._urls:
            self._know(url)
        self._requests.labels(url).inc()
        self._blocks.labels(url).inc(blocks)
        self._cached.labels(url).inc(cached)
        self._overhead.observe(overhead)

    def retried(self, url: str) -> None:
        if url in self._urls:  # else it has left
            self._retries.labels(url).inc()

    def broken(self, url: str) -> None:
        if url in self._urls:
            self._broken.labels(url).inc()

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    async def render(self, now: float) -> bytes:
        """The text exposition format; replicas are asked meanwhile, and one that does not answer is left out."""
        asked = list(self._fleet.replicas.values())
        pages = dict(zip((each.url for each in asked), await asyncio.gather(*(_page(each) for each in asked))))
        replicas = list(self._fleet.replicas.values())  # some left meanwhile
        self._keep({each.url for each in replicas})
        own = {
            "ready": ("gauge", {each.url: str(int(each.takes_requests(now))) for each in replicas}),
            "requests": ("gauge", {each.url: str(self._fleet.router.load(each.url)) for each in replicas}),
            "starts_total": ("counter", {each.url: str(each.local.starts) for each in replicas if each.local}),
        }
        theirs = {
            name: (kind, {each.url: value for each in replicas if (value := pages.get(each.url, {}).get(name))})
            for name, kind in _SHOWN.items()
        }
        lines = []
        for name, (kind, values) in (own | theirs).items():
            lines.append(f"# TYPE qserve:replica_{name} {kind}")
            lines += [f'qserve:replica_{name}{{replica="{url}"}} {value}' for url, value in values.items()]
        return generate_latest(self._registry) + ("\n".join(lines) + "\n").encode()

    def _keep(self, urls: set[str]) -> None:
        """Each of these has its counters, from 0; those of replicas that left are gone."""
        for url in urls - self._urls:
            self._know(url)
        for url in self._urls - urls:
            for counter in self._by_replica:
                counter.remove(url)
        self._urls = urls

    def _know(self, url: str) -> None:
        self._urls.add(url)
        for counter in self._by_replica:
            counter.labels(url)

    def _counter(self, name: str, about: str, label: str) -> Counter:
        return Counter(f"qserve:{name}", about, (label,), registry=self._registry)


async def _page(replica: Replica) -> dict[str, str]:
    try:
        status, body = await replica.get("/metrics")
    except (Unreachable, Lost, TimeoutError):
        return {}
    found = {name.decode(): value.decode() for name, value in _SAMPLE.findall(body)} if status == 200 else {}
    return {name: value for name, value in found.items() if name in _SHOWN}
