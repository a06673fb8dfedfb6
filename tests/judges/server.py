"""A small random model behind the real server, for judges: ``python -m tests.judges.server KEY``.

Prints the server's address and serves until its standard input ends, so it never outlives the one that started it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle
from tests.tiny_model import save_tiny_model

MAX_MODEL_LEN = 64  # answers are short: a judge that sends thousands of requests looks at shapes


def main() -> None:
    (key,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        model = save_tiny_model(Path(directory) / "tiny")
        config = EngineConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=16, kv_cache_memory=64 << 20, threads=1)
        with ServerHandle(Engine(str(model), config), config=ServerConfig(api_keys=(key,))) as server:
            print(server.url.removesuffix("/v1"), flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main()
