"""``qserve fleet``: replicas on Ray Serve behind one address."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qserve import console
from qserve.checkpoint.errors import QServeError, UsageError
from qserve.checkpoint.extras import require
from qserve.commands import values
from qserve.commands.options import ApiKey, ApiKeysFile
from qserve.runtime.router import POLICIES

if TYPE_CHECKING:
    from qserve.runtime.fleet.spec import FleetSpec


def fleet(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE.toml]", help="What the fleet serves, see docs/fleet.md.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Without FILE: one model, as qserve run takes it.", metavar="MODEL")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Without FILE: servers of it.")] = 2,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: of FILE, or 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on. [default: of FILE, or 8000]")] = None,
    routing: Annotated[
        str | None, typer.Option(help=f"{', '.join(POLICIES[:-1])} or {POLICIES[-1]}. [default: of FILE, or the first]")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Deploy to the Ray cluster that runs there, as auto or 10.0.0.1:6379, and return; without it the "
            "fleet runs on a Ray of its own on this machine until a signal ends it.",
            metavar="ADDRESS",
        ),
    ] = None,
    api_key: ApiKey = None,
    api_keys: ApiKeysFile = None,
) -> None:
    """Serve models by several replicas each: Ray places, restarts and scales them, one address routes to them.

    SIGHUP reads FILE again, and brings the fleet to what it says without losing a request.
    """
    require("ray", "qserve fleet")
    if (file is None) == (model is None):
        raise UsageError("give either FILE.toml or --model MODEL")
    given = {"host": host, "port": port, "routing": routing, "api_keys": str(api_keys) if api_keys else None}
    keys = values.api_keys(api_key, os.environ)

    def read() -> FleetSpec:
        return _read(file, model, replicas, {name: value for name, value in given.items() if value is not None})

    from qserve.runtime.fleet import on_ray

    if address is not None:
        spec = read()
        if missing := [name for name, each in spec.models.items() if each.cpus is None]:
            raise UsageError(f"model {missing[0]!r}: on a cluster FILE says how many cpus each replica has")
        on_ray.join_cluster(address)
        on_ray.deploy(spec, keys)
        console.note(f"the fleet serves {', '.join(spec.models)} on port {spec.port} of the cluster's head")
        return
    spec = _divided(read())
    console.note(f"starting Ray, and {sum(each.start for each in spec.models.values())} replicas")
    on_ray.start()
    try:
        on_ray.deploy(spec, keys, on_ray.LOOPBACK)
        _serve(spec, lambda: _divided(read()), keys)
    finally:
        on_ray.disconnect()


def _serve(spec: FleetSpec, read: Callable[[], FleetSpec], keys: tuple[str, ...]) -> None:
    """Until SIGTERM or Ctrl-C."""
    from qserve.runtime.fleet import on_ray

    ended, changed = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    signal.signal(signal.SIGHUP, lambda *_: changed.set())
    scheme = "http" if spec.tls_cert is None else "https"
    console.note(f"the fleet serves {', '.join(spec.models)} on {scheme}://{spec.host}:{spec.port}/v1")
    while not ended.wait(0.2):
        if changed.is_set():
            changed.clear()
            try:
                spec = read()
                on_ray.deploy(spec, keys, on_ray.LOOPBACK)
                console.note(f"the fleet serves {', '.join(spec.models)}")
            except (QServeError, OSError) as error:
                console.error(f"the fleet is not as its file says: {error}")
    console.note("draining")
    on_ray.shut_down()


def _read(file: Path | None, model: str | None, replicas: int, given: dict[str, object]) -> FleetSpec:
    from qserve.runtime.fleet.spec import FleetSpec

    if file is not None:
        spec = FleetSpec.read(file)
    else:
        assert model is not None
        name = Path(model).name.removesuffix(".gguf")
        spec = FleetSpec.of({"models": {name: {"model": model, "replicas": replicas}}})
    spec = replace(spec, **given)  # type: ignore[arg-type]
    if spec.routing not in POLICIES:
        raise UsageError(f"unknown routing {spec.routing!r}: choose from {', '.join(POLICIES)}")
    local = {
        name: replace(each, model=str(Path(each.model).absolute()) if Path(each.model).exists() else each.model)
        for name, each in spec.models.items()
    }
    api_keys, tls_cert, tls_key = (
        path and str(Path(path).absolute()) for path in (spec.api_keys, spec.tls_cert, spec.tls_key)
    )
    return replace(spec, models=local, api_keys=api_keys, tls_cert=tls_cert, tls_key=tls_key)


def _divided(spec: FleetSpec) -> FleetSpec:
    """``spec`` with this machine's processors divided among the replicas that do not say how many they have."""
    from qserve.kernels.threads import default_threads

    each = max(1, default_threads() // sum(model.scale.max_replicas for model in spec.models.values()))
    return replace(
        spec, models={name: replace(model, cpus=model.cpus or each) for name, model in spec.models.items()}
    )
