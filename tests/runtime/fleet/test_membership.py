"""Replicas that join and leave, requests that wait for a first one, aliases, and the file that says a fleet."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qserve.checkpoint.errors import QServeError, UsageError
from qserve.runtime.autoscale import Autoscale
from qserve.runtime.fleet import ingress
from qserve.runtime.fleet.aliases import Aliases
from qserve.runtime.fleet.fleet import Fleet
from qserve.runtime.fleet.metrics import FleetMetrics
from qserve.runtime.fleet.replica_process import ReplicaProcess
from qserve.runtime.fleet.scaling import Scaling
from qserve.runtime.fleet.spec import FleetSpec
from qserve.runtime.server.serve import ServerHandle

from .conftest import RouterHandle, root, routed


def there(router: RouterHandle, call: Any) -> Any:
    """Run a coroutine in the router's event loop."""
    assert router.server.listens.wait(30) and router.server.loop is not None
    return asyncio.run_coroutine_threadsafe(call, router.server.loop).result(30)


def answer(router: RouterHandle, **body: Any) -> bytes:
    request = urllib.request.Request(
        f"{router.url}/v1/completions", json.dumps({"prompt": "x", "max_tokens": 1} | body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=30) as response:
        content: bytes = response.read()
    return content


def ask(router: RouterHandle, **body: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(answer(router, **body))
    return content


def test_a_replica_joins_again_and_again_and_leaves_when_it_is_down(servers: list[ServerHandle]) -> None:
    with routed([root(servers[0])]) as router:
        for _ in range(3):
            there(router, router.fleet.join(root(servers[1]), None))
        assert router.fleet.num_ready == 2 and len(router.fleet.replicas) == 2
        servers[1].stop()
        for _ in range(20):
            assert ask(router)["object"] == "text_completion"
        end = time.monotonic() + 30
        while root(servers[1]) in router.fleet.replicas:
            assert time.monotonic() < end, "a replica that is down has not left"
            time.sleep(0.05)
        assert ask(router)["object"] == "text_completion"
        assert list(router.fleet.replicas) == [root(servers[0])], "one that was given stays"
        router.fleet.router.check()


def test_a_replica_that_leaves_while_it_is_asked_is_not_in_the_metrics(servers: list[ServerHandle]) -> None:
    class Leaves(FleetMetrics):
        async def render(self, now: float) -> bytes:
            asyncio.get_running_loop().call_soon(router.fleet._leave, router.fleet.replicas[gone])
            return await super().render(now)

    stays, gone = map(root, servers[:2])
    with routed([stays]) as router:
        there(router, router.fleet.join(gone, None))
        page = there(router, Leaves(router.fleet).render(0.0)).decode()
    assert stays in page and gone not in page


def test_requests_wait_for_a_first_replica_of_a_promised_model(
    servers: list[ServerHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "HEARTBEAT_SECONDS", 0.05)
    name = servers[0].service.model_name

    async def promise(*names: str) -> None:
        router.fleet.promise(names)

    with routed([], ready=0) as router:
        there(router, promise(name))
        bodies = [{"model": name}, {}, {"model": name, "stream": True}]
        with ThreadPoolExecutor() as pool:
            asking = [pool.submit(answer, router, **body) for body in bodies]
            end = time.monotonic() + 10
            while router.fleet.held[name] < 3:
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(0.2)
            there(router, router.fleet.join(root(servers[0]), None))
        named, unnamed, stream = (each.result() for each in asking)
        assert json.loads(named)["model"] == json.loads(unnamed)["model"] == name
        assert stream.startswith(b": waiting\n\n: waiting\n\n") and b"data: [DONE]" in stream
        assert not router.fleet.held[name] and router.fleet.begun[name] == 3


def test_an_alias_is_listed_and_answers_as_its_model(servers: list[ServerHandle]) -> None:
    name = servers[0].service.model_name
    with routed([root(servers[0])]) as router:
        router.server.ingress.aliases = Aliases({"chat": {name: 1.0}})
        assert ask(router, model="chat")["model"] == name
        with urllib.request.urlopen(f"{router.url}/v1/models") as answer:
            assert [each["id"] for each in json.load(answer)["data"]] == ["chat", name]


def test_weights_are_shares_of_keys_and_a_model_that_is_away_gets_nothing() -> None:
    aliases = Aliases({"chat": {"old": 95, "new": 5, "off": 0}})
    names = [aliases.target("chat", str(key), lambda model: True) for key in range(4000)]
    assert 140 <= names.count("new") <= 260 and "off" not in names
    assert names == [aliases.target("chat", str(key), lambda model: True) for key in range(4000)]
    assert {aliases.target("chat", str(key), lambda model: model == "new") for key in range(50)} == {"new"}
    assert Counter(aliases.target("chat", str(key), lambda model: False) for key in range(4000))["new"] < 260
    more = Aliases({"chat": {"old": 90, "new": 10}})
    moved = [more.target("chat", str(key), lambda model: True) for key in range(4000)]
    assert all(now == "new" for before, now in zip(names, moved) if before == "new"), "a growing canary keeps its own"


def test_what_waits_and_what_runs_is_told_to_the_rule() -> None:
    asked: list[tuple[str, int]] = []
    fleet = Fleet((), "prefix-aware", None, 1.0)
    scaling = Scaling(fleet, lambda model, count: asked.append((model, count)))
    scaling.follow({"m": Autoscale(0, 3, cooldown=5.0)})
    scaler = scaling._scalers["m"]
    scaling.decide("m", scaler, 0.0)
    assert not asked, "nobody knows yet how many there are"
    fleet.held["m"] = 1
    scaling.decide("m", scaler, 1.0)
    assert asked == [("m", 1)]
    fleet.held["m"] = 9
    scaling.decide("m", scaler, 2.0)
    assert asked[-1] == ("m", 2), "one starts, and nine wait"
    fleet.held["m"] = 0
    for second in range(3, 9):
        scaling.decide("m", scaler, float(second))
    assert asked[-1] == ("m", 0)
    scaling.follow({"m": Autoscale(0, 3, cooldown=5.0)})
    assert scaling._scalers["m"] is scaler, "a rule that stays keeps what it has learnt"


@pytest.mark.slow
def test_a_server_in_a_process_of_its_own_tells_its_address_and_its_end(tiny_model: Path) -> None:
    ended: list[int] = []
    replica = ReplicaProcess(str(tiny_model), ["--kv-cache-memory", "16MiB"], "127.0.0.1", ended.append)
    replica.wait_ready()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{replica.url}/v1/models")
    known = urllib.request.Request(f"{replica.url}/v1/models", headers={"Authorization": f"Bearer {replica.key}"})
    with urllib.request.urlopen(known) as answer:
        assert answer.status == 200
    assert replica.is_alive
    replica.stop(30)
    assert not replica.is_alive and not ended, "it was asked to end"


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(QServeError, match=r"the replica did not start: .*config\.json"):
        ReplicaProcess(str(tmp_path), [], "127.0.0.1", lambda code: None).wait_ready()


FILE = """
port = 9000
[models.v1]
model = "out"
replicas = 2
[models.v2]
model = "out2"
min_replicas = 0
max_replicas = 4
ttft = 0.5
spare_replicas = 1
cpus = 2
options = ["--max-model-len", "2048"]
[aliases.chat]
v1 = 95
v2 = 5
"""


def test_a_file_says_a_fleet(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FILE)
    spec = FleetSpec.read(path)
    assert spec.port == 9000 and spec.aliases == {"chat": {"v1": 95, "v2": 5}}
    assert not spec.models["v1"].is_scaled and spec.models["v1"].start == 2
    assert spec.models["v2"].scale == Autoscale(0, 4, ttft=0.5, spare_replicas=1) and spec.models["v2"].start == 1
    assert FleetSpec.from_json(spec.to_json()) == spec
    roles = {"model": "o", "roles": {"prefill": 1, "decode": 2}}
    spec = FleetSpec.of({"models": {"r": roles, "x": {"model": "o", "kv_transfer": True}}})
    assert spec.models["r"].start == 3 and spec.models["r"].prefill == 1 and spec.models["r"].kv_transfer
    assert spec.models["x"].prefill == 0 and spec.models["x"].kv_transfer
    assert FleetSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a model"),
        ("x = 1", "no field 'x'"),
        ("[models.m]", "model = "),
        ('[models.m]\nmodel = "o"\nreplicas = 2\nmax_replicas = 3', "not both"),
        ('[models.m]\nmodel = "o"\nmin_replicas = 3', "not 3 to 1"),
        ('[models.m]\nmodel = "o"\nreplicas = 0', "not 0 to 0"),
        ('[models.m]\nmodel = "o"\nreplicas = 2\nspare_replicas = 1', "spare_replicas needs min_replicas below max"),
        ('[models.m]\nmodel = "o"\ncooldown = 60', "cooldown needs min_replicas below max_replicas"),
        ('[models.m]\nmodel = "o"\nmax_replicas = 2\nspare_replicas = 1.5', "an integer"),
        ('[models.m]\nmodel = "o"\nmax_replicas = 2\nspare_replicas = -1', "at least 0"),
        ('[models.m]\nmodel = "o"\nreplicas = "2"', "an integer"),
        ('[models.m]\nmodel = "o"\nroles = {prefill = 1}', "P and D at least 1"),
        ('[models.m]\nmodel = "o"\nroles = {prefill = 1, decoder = 2}', "no role 'decoder'"),
        ('[models.m]\nmodel = "o"\nreplicas = 3\nroles = {prefill = 1, decode = 2}', "leave out replicas"),
        ('[models.m]\nmodel = "o"\nroles = 3', "a table of integers"),
        ('[models.m]\nmodel = "o"\nkv_transfer = 1', "true or false"),
        ('[models.m]\nmodel = "o"\nreplicas = true', "an integer"),
        ('[models.m]\nmodel = "o"\noptions = ["--port=1"]', "sets --port itself"),
        ('[models."-m"]\nmodel = "o"', "a name has"),
        ('[models.m]\nmodel = "o"\n[aliases.x]\nn = 1', "no model 'n'"),
        ('[models.m]\nmodel = "o"\n[aliases.x]\nm = 0', "weights"),
        ('[models.m]\nmodel = "o"\n[aliases.m]\nm = 1', "no model has"),
        ('[models.m]\nmodel = "o"\n[aliases.x]\nm = "1"', "a number"),
        ("models = 3", "a table"),
        ("[", "not valid TOML"),
    ],
)
def test_a_file_that_says_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        FleetSpec.read(path)
