"""``python -m tests.runtime.fleet.simulated MODEL``: two servers behind a router, beside their simulation.

A server of one thread on each of two processors; the same traffic under every routing policy. A machine may be quicker
at one time than at another, so steps are timed between the loads, of one server while the other is idle, and the
simulation takes the mean. What servers cost each other (``--interference``) is chosen for the mean time to the first
token of round-robin; the other policies are the test of it. With ``--repeats 2`` every load is played twice, and how
far apart its figures lie is shown: what no simulation can foretell.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import httpx

from qserve.evals.bench import validation
from qserve.evals.bench.client import Client
from qserve.evals.bench.server_process import ServerProcess
from qserve.evals.lengths import Lengths
from qserve.evals.simulator.cost import CostModel
from qserve.evals.simulator.fleet import Fleet, FleetConfig
from qserve.evals.simulator.measure import figures
from qserve.evals.simulator.replica import ReplicaConfig
from qserve.evals.simulator.traffic import Arrival, Traffic
from qserve.runtime.config import EngineConfig
from qserve.runtime.limits import SchedulerConfig
from qserve.runtime.router import POLICIES
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.listening import claim_socket

ENGINE = EngineConfig(max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=512, kv_cache_memory=110 << 20)
LIMITS = SchedulerConfig(
    max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=512, max_waiting=1024, max_waiting_tokens=1 << 20
)
BLOCKS = 312  # of a server, for SmolLM2-135M in 16 bits
CHOSEN_ON = "round-robin"
FIGURES = {"output tokens/s": "{:.1f}", "TTFT mean, s": "{:.3f}", "TTFT p95, s": "{:.3f}", "TPOT mean, s": "{:.4f}"}


@dataclass(frozen=True)
class Mean:
    costs: Sequence[CostModel]

    def seconds(self, tokens: int, rows: int, prefill_kv: int, decode_kv: int) -> float:
        return statistics.mean(cost.seconds(tokens, rows, prefill_kv, decode_kv) for cost in self.costs)


@contextlib.contextmanager
def routed(servers: Sequence[str], policy: str) -> Iterator[str]:
    with claim_socket("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "qserve", "route", *servers, "--port", str(port), "--routing", policy]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as router:
        try:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            router.terminate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    one = FleetConfig(ReplicaConfig(LIMITS, BLOCKS), 2)
    traffic = [
        list(Traffic(args.rate, args.requests, Lengths(32), Lengths(32), 1, 16, 512, 1024, seed + 1))
        for seed in range(args.seeds)
    ]
    measured: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    costs: list[CostModel] = []
    with contextlib.ExitStack() as stack:
        servers = [
            f"http://127.0.0.1:{stack.enter_context(each).port}"
            for each in (ServerProcess(args.model, replace(ENGINE, cpu_list=(cpu,)), ServerConfig()) for cpu in (0, 1))
        ]
        for arrivals in (each for each in traffic for _ in range(args.repeats)):
            for policy in POLICIES:
                client = Client(f"{servers[len(costs) % 2]}/v1")
                costs.append(validation.fit(client, None, LIMITS, lambda done, total: None))
                with routed(servers, policy) as url:
                    fleet = replace(one, routing=policy)
                    found = validation.compare(Client(url), None, arrivals, fleet, costs[-1], lambda done, total: None)
                measured[policy].append(found.measured)
                print(policy, found.measured, flush=True)
    cost = Mean(costs)

    def simulated(policy: str, interference: float) -> list[dict[str, float]]:
        return [_simulate(replace(one, routing=policy, interference=interference), cost, each) for each in traffic]

    def error(interference: float) -> float:
        name = "TTFT mean, s"
        return abs(_mean(simulated(CHOSEN_ON, interference), name) / _mean(measured[CHOSEN_ON], name) - 1)

    chosen = min((1 + step / 50 for step in range(26)), key=error)
    print(f"interference {chosen:.2f}")
    for policy in POLICIES:
        for name, form in FIGURES.items():
            real, made = _mean(measured[policy], name), _mean(simulated(policy, chosen), name)
            apart = _apart(measured[policy], name, args.repeats)
            print(
                f"{policy}, {name}: {form.format(real)}, simulated {form.format(made)}, {made / real - 1:+.1%}; "
                f"the same load again {apart:.1%}"
            )


def _simulate(config: FleetConfig, cost: CostModel, arrivals: list[Arrival]) -> dict[str, float]:
    return figures(Fleet(config, cost).run(arrivals).records)


def _mean(found: Sequence[dict[str, float]], name: str) -> float:
    return statistics.mean(each[name] for each in found)


def _apart(found: Sequence[dict[str, float]], name: str, repeats: int) -> float:
    """The greatest less the least of each load's repeats, by their mean; the mean over loads."""
    loads = [[each[name] for each in found[begin : begin + repeats]] for begin in range(0, len(found), repeats)]
    return statistics.mean((max(load) - min(load)) / statistics.mean(load) for load in loads)


if __name__ == "__main__":
    main()
