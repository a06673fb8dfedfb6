"""``qserve route``: one address for several servers."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from qserve import console
from qserve.checkpoint.errors import UsageError
from qserve.commands import values
from qserve.commands.options import (
    AllowedHosts,
    ApiKey,
    ApiKeysFile,
    BatchDir,
    BatchDirSize,
    CorsOrigin,
    Host,
    LogFormat,
    LogLevel,
    Port,
    TlsCert,
    TlsKey,
    Uds,
)
from qserve.runtime.router import POLICIES


def route(
    replicas: Annotated[
        list[str], typer.Argument(metavar="URL...", help="The servers: http://HOST:PORT, https://HOST or unix:PATH.")
    ],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    uds: Uds = None,
    routing: Annotated[str, typer.Option(help="prefix-aware, least-loaded or round-robin.")] = POLICIES[0],
    health_interval: Annotated[float, typer.Option(help="Seconds between two looks at each server.")] = 2.0,
    replica_key: Annotated[
        str | None,
        typer.Option(
            help="The key that the servers are shown, made by qserve key NAME --router. Other users of the machine see "
            "it in ps: set QSERVE_REPLICA_KEY in the environment instead.",
            metavar="KEY",
            envvar="QSERVE_REPLICA_KEY",
            show_envvar=False,
        ),
    ] = None,
    api_key: ApiKey = None,
    api_keys: ApiKeysFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    allowed_hosts: AllowedHosts = None,
    cors_origin: CorsOrigin = None,
    batch_dir: BatchDir = None,
    batch_dir_size: BatchDirSize = "16GiB",
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
) -> None:
    """Serve one address for several servers: each request goes where most of its prompt is cached."""
    if uds is not None and (host, port) != ("127.0.0.1", 8000):
        raise UsageError("--uds takes the place of --host and --port")
    if routing not in POLICIES:
        raise UsageError(f"unknown routing {routing!r}: choose from {', '.join(POLICIES)}")
    if not 0.1 <= health_interval <= 3600:
        raise UsageError(f"--health-interval must be 0.1..3600 seconds, not {health_interval:g}")
    from qserve.runtime.fleet.fleet import Fleet
    from qserve.runtime.fleet.serve import RouterServer
    from qserve.runtime.server.config import ServerConfig
    from qserve.runtime.server.http.listening import claim_socket, url_of
    from qserve.runtime.server.telemetry import logs
    from qserve.runtime.server.unix_socket import UnixSocket

    if replica_key is not None and not (replica_key.isascii() and replica_key.isprintable() and replica_key):
        raise UsageError("--replica-key must be printable ASCII")
    config = ServerConfig(
        api_keys=values.api_keys(api_key, os.environ),
        api_keys_file=api_keys,
        tls_cert=tls_cert,
        tls_key=tls_key,
        allowed_hosts=tuple(allowed_hosts or ()),
        cors_origins=tuple(cors_origin or ()),
        batch_dir=batch_dir,
        batch_dir_size=values.byte_count(batch_dir_size) or 0,
    )
    fleet = Fleet(replicas, routing, replica_key, health_interval)
    say = logs.start(log_format, log_level, console.note)
    sock = claim_socket(host, port) if uds is None else UnixSocket(uds)
    server = RouterServer(fleet, config, sock)
    say(f"routing to {len(fleet.replicas)} servers on {url_of(sock, config)}")
    server.serve_until_stopped()
