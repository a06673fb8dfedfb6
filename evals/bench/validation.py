"""Servers beside their simulation: ``fit`` learns what their steps take, ``compare`` sends them the simulated traffic.

The URL may be that of a router: requests are then those of a fleet.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from qserve.checkpoint.errors import QServeError
from qserve.evals.bench.client import Client
from qserve.evals.bench.drive import Driver, Run, Update
from qserve.evals.bench.job import allow_connections, served_model
from qserve.evals.bench.server_steps import timed_steps
from qserve.evals.bench.workload import Words, sessions_of
from qserve.evals.lengths import Lengths
from qserve.evals.simulator.cost import CostModel, FittedCost
from qserve.evals.simulator.fit import fit as fit_steps
from qserve.evals.simulator.fleet import Fleet, FleetConfig
from qserve.evals.simulator.measure import Comparison, figures
from qserve.evals.simulator.traffic import Arrival
from qserve.runtime.limits import SchedulerConfig

T = TypeVar("T")

_FIELDS = {"temperature": 0.0, "ignore_eos": True}
_REPEATS = 2


def fit(client: Client, model: str | None, limits: SchedulerConfig, update: Update) -> FittedCost:
    """The cost model of the steps of a server that serves nobody else and has these ``limits``.

    ``model`` None takes the first that the server lists. Raises ``QServeError``.
    """

    async def measure() -> FittedCost:
        _, words, fields = await _begin(client, model)
        steps = await timed_steps(client, fields, words, limits, _REPEATS, update)
        return fit_steps(steps, fields["model"])

    return _run(client, measure())


def compare(
    client: Client, model: str | None, arrivals: Sequence[Arrival], fleet: FleetConfig, cost: CostModel, update: Update
) -> Comparison:
    """Send ``arrivals`` at their times, and simulate them. Raises ``QServeError`` where not all were answered."""

    async def measure() -> Run:
        driver, *_ = await _begin(client, model)
        one = Lengths(1)  # there are no further turns
        return await driver.opened(sessions_of(arrivals, 1, one, one, 0), update)

    run = _run(client, measure())
    if len(run.records) < len(arrivals):
        reason = run.stopped or next(iter(run.reasons.values()), "a request was not sent")
        raise QServeError(f"{len(arrivals) - len(run.records)} of {len(arrivals)} requests failed: {reason}")
    outcome = Fleet(fleet, cost).run(arrivals)
    measured, simulated = figures(run.records), figures(outcome.records)
    if queries := sum(usage.prefix_queries for usage in outcome.usages):
        measured["prompt tokens from the cache"] = run.cached_tokens / run.prompt_tokens
        simulated["prompt tokens from the cache"] = sum(usage.prefix_hits for usage in outcome.usages) / queries
    return Comparison(client.url, len(arrivals), measured, simulated)


async def _begin(client: Client, model: str | None) -> tuple[Driver, Words, dict[str, Any]]:
    name, _ = await served_model(client, model)
    words, fields = Words(secrets.token_hex(3)), {"model": name, **_FIELDS}
    driver = Driver(client, "completions", fields, words, 0.0)
    await driver.calibrate()
    return driver, words, fields


def _run(client: Client, work: Coroutine[Any, Any, T]) -> T:
    async def closing() -> T:
        try:
            return await work
        finally:
            client.close()

    allow_connections()
    return asyncio.run(closing())
