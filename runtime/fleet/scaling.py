"""``Scaling``: watches what each model has to do, and asks for as many replicas as its rule says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from qserve.runtime.autoscale import Autoscale, Autoscaler, Load
from qserve.runtime.fleet.fleet import Fleet
from qserve.runtime.server.telemetry.logs import event

logger = logging.getLogger(__name__)

PERIOD = 0.5  # seconds between two looks


class Scaling:
    """All of its methods belong to the fleet's event loop. ``scale(model, count)`` is told each new number."""

    def __init__(self, fleet: Fleet, scale: Callable[[str, int], None]) -> None:
        self._fleet = fleet
        self._scale = scale
        self._scalers: dict[str, Autoscaler] = {}
        self._asked: dict[str, int] = {}

    def follow(self, rules: Mapping[str, Autoscale]) -> None:
        """The rules from now on. What was learnt by a rule that stays is kept; the number is said again."""
        known = {name: each for name, each in self._scalers.items() if rules.get(name) == each.rule}
        self._scalers = {name: known.get(name) or Autoscaler(rule) for name, rule in rules.items()}
        self._asked.clear()

    async def watch(self) -> None:
        """Decide now and then; does not return."""
        decided: dict[str, float] = {}
        while True:
            now = time.monotonic()
            for model, scaler in self._scalers.items():
                # A request that waits for a first replica waits no interval too.
                if now - decided.get(model, 0.0) >= scaler.rule.interval or self._fleet.held[model]:
                    decided[model] = now
                    self.decide(model, scaler, now)
            await asyncio.sleep(PERIOD)

    def decide(self, model: str, scaler: Autoscaler, now: float) -> None:
        fleet, held = self._fleet, self._fleet.held[model]
        ready = fleet.ready(model)
        if not (ready or held or model in self._asked):
            return  # its first replica still loads
        load = Load(
            ready=len(ready),
            starting=max(0, self._asked.get(model, len(ready)) - len(ready)),
            ongoing=held + sum(fleet.router.load(each.url) for each in ready),
            waiting=held + sum(each.waiting for each in ready),
            begun=fleet.begun[model],
        )
        count = scaler.decide(now, load)
        if count != self._asked.get(model):
            event(logger, "replicas", model=model, count=count, ongoing=load.ongoing, waiting=load.waiting)
            self._asked[model] = count
            self._scale(model, count)
