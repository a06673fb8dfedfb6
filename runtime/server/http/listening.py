"""Where a server listens, and how HTTP is spoken there. It imports nothing that computes."""

from __future__ import annotations

import errno
import socket
import ssl

import uvicorn
from starlette.types import ASGIApp

from qserve.checkpoint.errors import QServeError
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.connection import Connection
from qserve.runtime.server.http.write_deadline import Socket


def claim_socket(host: str, port: int) -> socket.socket:
    """A listening socket on ``host:port`` (0: any free port), to be claimed before a model is loaded.

    Raises ``QServeError`` where the address cannot be had.
    """
    if not 0 <= port <= 65535:
        raise QServeError(f"cannot listen on {host}:{port}: a port is a number of 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise QServeError(f"cannot listen on {host}:{port}: {error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)  # at once: two sockets could be bound to one port until one of them listens
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise QServeError(f"port {port} on {host} is in use; choose another with --port") from None
        raise QServeError(f"cannot listen on {host}:{port}: {error}") from None
    return sock


def url_of(sock: socket.socket, config: ServerConfig) -> str:
    """The address of the API, for a client's ``base_url``; of a Unix socket ``unix:`` and its path."""
    if isinstance(name := sock.getsockname(), str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{'http' if config.tls_cert is None else 'https'}://{host}:{name[1]}/v1"


def uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    """How HTTP is spoken. Raises ``QServeError`` where the TLS files cannot be used."""
    settings = uvicorn.Config(
        app,
        loop="asyncio",  # what is tested and measured, although other packages may bring uvloop
        http=Connection,
        ws=Socket,
        ws_max_size=config.max_message_bytes,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,  # longer than clients keep theirs: they close, so no request meets a close
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )
    try:
        settings.load()
    except (OSError, ssl.SSLError) as error:
        raise QServeError(f"cannot use the TLS files {config.tls_cert} and {config.tls_key}: {error}") from None
    return settings
