"""A small random model behind the real server, for judges: ``python -m tests.judges.server KEY``; with ``routed``
behind it two such servers behind a router.

Prints the server's address and serves until its standard input ends, so it never outlives the one that started it.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle
from tests.runtime.fleet.conftest import routed
from tests.tiny_model import save_tiny_model

MAX_MODEL_LEN = 64  # answers are short: a judge that sends thousands of requests looks at shapes


def main() -> None:
    key, *routed_too = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = save_tiny_model(Path(directory) / "tiny")
        config = EngineConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=16, kv_cache_memory=64 << 20, threads=1)
        keys = ServerConfig(api_keys=(key,))
        if routed_too:
            servers = [stack.enter_context(ServerHandle(Engine(str(model), config))) for _ in range(2)]
            url = stack.enter_context(routed([each.url.removesuffix("/v1") for each in servers], keys)).url
        else:
            server = stack.enter_context(ServerHandle(Engine(str(model), config), config=keys))
            url = server.url.removesuffix("/v1")
        print(url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
