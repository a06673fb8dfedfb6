"""Two real servers on a tiny model and the router in front of them, in threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.fleet.fleet import Fleet
from qserve.runtime.fleet.local_model import LocalModel
from qserve.runtime.fleet.serve import RouterServer
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.listening import claim_socket
from qserve.runtime.server.serve import ServerHandle


@pytest.fixture(scope="module", autouse=True)
def _plain_http(plain_http: None) -> None:
    """In every module of this folder."""


class RouterHandle:
    """``url`` of a router that runs in a thread."""

    def __init__(
        self, urls: Sequence[str], config: ServerConfig, key: str | None, local: Sequence[LocalModel] = ()
    ) -> None:
        sock = claim_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.fleet = Fleet(urls, "prefix-aware", key, 0.2, local)
        self.server = RouterServer(self.fleet, config, sock)
        self.thread = threading.Thread(target=lambda: self.server.run(sockets=[sock]))

    def until_ready(self, count: int) -> None:
        end = time.monotonic() + 30
        while self.fleet.num_ready != count:
            assert time.monotonic() < end, "the replicas did not get ready"
            time.sleep(0.01)


@contextmanager
def routed(
    urls: Sequence[str],
    config: ServerConfig | None = None,
    key: str | None = None,
    ready: int | None = None,
    local: Sequence[LocalModel] = (),
) -> Iterator[RouterHandle]:
    handle = RouterHandle(urls, config or ServerConfig(), key, local)
    handle.thread.start()
    try:
        if not local:  # those load while requests wait
            handle.until_ready(len(urls) if ready is None else ready)
        yield handle
    finally:
        handle.server.drain(0.0)
        handle.thread.join()
        handle.fleet.router.check()


def root(server: ServerHandle) -> str:
    return server.url.removesuffix("/v1")


@pytest.fixture(scope="session")
def engines(tiny_model: Path) -> list[Engine]:
    config = EngineConfig(max_model_len=512, max_num_seqs=16, kv_cache_memory=64 << 20, threads=1)
    return [Engine(str(tiny_model), config) for _ in range(2)]


@pytest.fixture
def servers(engines: list[Engine]) -> Iterator[list[ServerHandle]]:
    """Without keys."""
    with ServerHandle(engines[0]) as first, ServerHandle(engines[1]) as second:
        yield [first, second]
