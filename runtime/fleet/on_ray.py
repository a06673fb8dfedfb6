"""The fleet on Ray Serve: Ray places, watches, restarts and counts replicas, and requests never pass through it.

Each model is an application with one deployment. A replica of it is an actor that owns one ``qserve run`` server. The
ingress is an application of one actor, the router of ``qserve route`` with its HTTP server. Replicas join it by a call,
again with each health check, so either may start anew. Streams go from the ingress to a server over HTTP.

What passes through Ray is JSON text; Ray pickles it with its own calls. This is the only file that imports Ray.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Coroutine
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported: a fleet tells nobody that it runs

import ray
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.api import RunTarget
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from qserve.checkpoint.errors import QServeError
from qserve.runtime.fleet.aliases import Aliases
from qserve.runtime.fleet.fleet import Fleet
from qserve.runtime.fleet.replica_process import ReplicaProcess
from qserve.runtime.fleet.scaling import Scaling
from qserve.runtime.fleet.serve import RouterServer
from qserve.runtime.fleet.spec import FleetSpec, ModelSpec
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.listening import claim_socket
from qserve.runtime.server.telemetry import logs

T = TypeVar("T")

logger = logging.getLogger(__name__)

INGRESS, REPLICA = "Ingress", "Replica"  # names of the deployments
INGRESS_APP, MODEL_APP = "qserve", "qserve:"  # names of the applications; the model's follows
HEALTH_PERIOD = 1.0  # seconds between two health checks of a replica, and so between its calls to the ingress
PROBE_INTERVAL = 0.5  # seconds between two probes of the ingress
JOIN_TIMEOUT = 5.0
FIRST_JOIN_TIMEOUT = 60.0  # Serve finds the ingress first; where that fails, the model would be loaded once more
DRAIN_TIMEOUT = 30.0  # seconds that a server has for its running requests, as ``ServerConfig.drain_timeout``
LOOPBACK = "127.0.0.1"
OBJECT_STORE = 100 << 20  # bytes: nothing large passes through it


class ReplicaActor:
    """One ``qserve run``. Its health is that its process runs; whether it answers the ingress finds out."""

    async def __init__(self, text: str) -> None:  # type: ignore[misc]  # Serve awaits it
        model = json.loads(text)
        self._ingress = serve.get_deployment_handle(INGRESS, INGRESS_APP)
        # An actor whose server has ended has nothing to do: Serve starts another one as soon as it is gone.
        self._process = ReplicaProcess(
            model["model"],
            model["options"],
            model["host"] or ray.util.get_node_ip_address(),
            lambda code: os._exit(code or 1),
        )
        try:
            await asyncio.to_thread(self._process.wait_ready)
            await self._join(FIRST_JOIN_TIMEOUT)
        except BaseException:
            self._process.stop(0.0)
            raise

    async def check_health(self) -> None:
        """Serve calls it each ``HEALTH_PERIOD``, and starts another replica where it fails."""
        if not self._process.is_alive:
            raise QServeError("the server of this replica has ended")
        try:
            await self._join(JOIN_TIMEOUT)
        except (TimeoutError, RayServeException, ray.exceptions.RayError) as error:
            logger.warning("the ingress does not answer: %s", error)  # it may be starting anew

    def __del__(self) -> None:
        """Serve calls it where the replica is to end: the server drains, and the ingress sends requests elsewhere."""
        self._process.stop(DRAIN_TIMEOUT + 5)

    async def _join(self, timeout: float) -> None:
        async with asyncio.timeout(timeout):
            await self._ingress.join.remote(json.dumps({"url": self._process.url, "key": self._process.key}))


class IngressActor:
    """The router, with its HTTP server and the autoscaler, in a thread of its own."""

    def __init__(self, text: str) -> None:
        logs.configure("text", "info")
        spec = json.loads(text)
        config = ServerConfig(
            api_keys=tuple(spec["api_key_texts"]),
            api_keys_file=Path(spec["api_keys"]) if spec["api_keys"] else None,
            tls_cert=Path(spec["tls_cert"]) if spec["tls_cert"] else None,
            tls_key=Path(spec["tls_key"]) if spec["tls_key"] else None,
            allowed_hosts=tuple(spec["allowed_hosts"]),
            cors_origins=tuple(spec["cors_origins"]),
            drain_timeout=DRAIN_TIMEOUT,
        )
        self._fleet = Fleet((), spec["routing"], None, PROBE_INTERVAL)
        self._scaling = Scaling(self._fleet, _ask_for)
        sock = claim_socket(spec["host"], spec["port"])
        self._server = RouterServer(self._fleet, config, sock, self._scaling)
        self._thread = threading.Thread(target=self._server.run, args=([sock],), name="qserve-ingress")
        self._thread.start()
        self._server.listens.wait()

    async def reconfigure(self, content: dict[str, Any]) -> None:
        """Serve calls it after the start, and where models, aliases, rules or keys change; nothing starts anew."""
        self._server.keys.reload()
        spec = FleetSpec.from_json(content["fleet"])

        async def follow() -> None:
            self._fleet.promise(spec.models)
            self._fleet.prefill = {name: each.prefill for name, each in spec.models.items() if each.prefill}
            self._server.ingress.aliases = Aliases(spec.aliases)
            self._scaling.follow({name: each.scale for name, each in spec.models.items() if each.is_scaled})

        await self._there(follow())

    async def join(self, text: str) -> None:
        replica = json.loads(text)
        await self._there(self._fleet.join(replica["url"], replica["key"]))

    def check_health(self) -> None:
        if not self._thread.is_alive():
            raise QServeError("the HTTP server of the ingress has ended")

    def __del__(self) -> None:
        self._server.drain(DRAIN_TIMEOUT)
        self._thread.join()

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        """Run it in the event loop of the server."""
        assert self._server.loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._server.loop))


def start() -> None:
    """A Ray of its own on this machine, which ends with this process.

    Ray counts the processors that replicas ask for and shares out none. Here it is told of more than there are, so that
    an update may start a replica before its predecessor ends.
    """
    ray.init(
        num_cpus=1 << 16, object_store_memory=OBJECT_STORE, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR, _node_ip_address=LOOPBACK,
    )  # fmt: skip


def join_cluster(address: str) -> None:
    """Raises ``QServeError`` where there is none."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise QServeError(f"there is no Ray cluster at {address!r}: {str(error).splitlines()[0]}") from None


def deploy(spec: FleetSpec, api_keys: tuple[str, ...] = (), host: str = "") -> None:
    """Bring the cluster to what ``spec`` says, and return when it serves.

    ``host`` is where servers listen, each at the address of its node where it is empty.

    What has not changed goes on. Of a model that has changed, each replica ends when its successor takes requests.
    Raises ``QServeError``, which says why, where a replica does not start.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # its progress; what fails is raised
    serve.start(
        proxy_location="Disabled", logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False)
    )
    applications = serve.status().applications
    fixed = {
        name: getattr(spec, name)
        for name in ("host", "port", "routing", "api_keys", "tls_cert", "tls_key", "allowed_hosts", "cors_origins")
    }
    ingress = _deployment(IngressActor).options(
        name=INGRESS,
        num_replicas=1,
        # Where the cluster's head is: at an address that does not change.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        user_config={"fleet": spec.to_json(), "keys": _digest(spec.api_keys)},
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT + 10,
        graceful_shutdown_wait_loop_s=0.1,
        max_ongoing_requests=10_000,
        max_constructor_retry_count=1,
        health_check_period_s=HEALTH_PERIOD,
    )
    _run([_target(INGRESS_APP, ingress, fixed | {"api_key_texts": api_keys})])
    _run([_model_target(each, _running(applications, each), host) for each in spec.models.values()])
    for name in applications:
        if name.startswith(MODEL_APP) and name.removeprefix(MODEL_APP) not in spec.models:
            serve.delete(name)


def shut_down() -> None:
    """End the fleet: the ingress with its last request, then the replicas."""
    applications = serve.status().applications
    for name in sorted(applications, key=len):
        if name == INGRESS_APP or name.startswith(MODEL_APP):
            serve.delete(name)


def disconnect() -> None:
    """Leave Ray, which ends where ``start`` has started it."""
    ray.shutdown()


def _model_target(model: ModelSpec, running: int, host: str) -> RunTarget:
    replica = _deployment(ReplicaActor).options(
        name=REPLICA,
        num_replicas=min(max(running, model.start), model.scale.max_replicas),
        ray_actor_options={"num_cpus": model.cpus, "num_gpus": model.gpus},
        max_surge_percent=100,  # a new replica takes requests before an old one ends
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT + 10,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=1,
        health_check_period_s=HEALTH_PERIOD,
    )
    options = ["--served-model-name", model.name, *model.options]
    if model.kv_transfer and "--kv-transfer" not in options:
        options += ["--kv-transfer"]
    if not model.gpus and not any(each.split("=")[0] in ("--threads", "--cpu-list") for each in model.options):
        options += ["--threads", str(model.cpus)]
    content = {"model": model.model, "options": options, "version": model.version, "host": host}
    return _target(MODEL_APP + model.name, replica, content)


def _digest(path: str | None) -> str:
    """What tells that a file has changed; empty where it cannot be read here."""
    try:
        return sha256(Path(path).read_bytes()).hexdigest() if path else ""
    except OSError:
        return ""


def _deployment(actor: type) -> serve.Deployment:
    """Without the types of a decorator."""
    made: Any = serve.deployment(actor)
    return cast(serve.Deployment, made)


def _target(name: str, deployment: serve.Deployment, content: dict[str, Any]) -> RunTarget:
    """An application of one deployment, whose actors are made with ``content``."""
    text = json.dumps(content, sort_keys=True)
    # Serve makes up a version where it is given none, and a new version starts every replica anew. It takes one from
    # the builders of its configuration files alone.
    deployment = deployment.options(version=sha256(text.encode()).hexdigest(), _internal=True)
    return RunTarget(deployment.bind(text), name=name, route_prefix=None, external_scaler_enabled=True)


def _run(targets: list[RunTarget]) -> None:
    try:
        serve.run_many(targets)
    except RuntimeError as error:
        raise QServeError(_reason(targets, error)) from None


def _reason(targets: list[RunTarget], error: RuntimeError) -> str:
    """What the actor said, of all that Serve says about it."""
    applications = serve.status().applications
    said = [
        deployment.message
        for target in targets
        for deployment in getattr(applications.get(target.name), "deployments", {}).values()
    ]
    lines = [line.strip() for text in [*said, str(error)] for line in text.splitlines() if "QServeError" in line]
    return lines[-1].split("QServeError: ")[-1] if lines else str(error)


def _running(applications: dict[str, Any], model: ModelSpec) -> int:
    """How many replicas it has now: an update leaves what the autoscaler has asked for."""
    application = applications.get(MODEL_APP + model.name)
    deployment = application.deployments.get(REPLICA) if application is not None and model.is_scaled else None
    return sum(deployment.replica_states.values()) if deployment is not None else 0


def _ask_for(model: str, count: int) -> None:
    """As ``POST .../deployments/Replica/scale`` of Ray's dashboard, which does not run here, does."""
    client = _get_global_client()
    assert client is not None
    client._controller.update_deployment_replicas.remote(DeploymentID(name=REPLICA, app_name=MODEL_APP + model), count)
