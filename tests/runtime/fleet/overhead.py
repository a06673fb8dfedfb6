"""``python -m tests.runtime.fleet.overhead``: what the router adds to a request and to a token, on a tiny model.

Each number comes from pairs: the same requests to the server, and through the router, in turns; medians over the pairs.
The router's own processor time is counted too, which other work on the machine hardly changes. With ``--fleet`` the
router is the ingress of ``qserve fleet``, before a server of its own.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from qserve.evals.bench.client import Client
from qserve.evals.bench.server_process import ServerProcess
from qserve.runtime.config import EngineConfig
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.listening import claim_socket
from tests.tiny_model import save_tiny_model

PAIRS = 10
TEXT = "the quick brown fox and the lazy dog " * 6


async def load(client: Client, streams: int, each: int, tokens: int) -> tuple[float, int]:
    """Seconds, and the tokens that came."""
    began = time.perf_counter()
    body = {"prompt": TEXT, "max_tokens": tokens, "ignore_eos": True}

    async def one() -> int:
        answers = [await client.stream(body, "completions") for _ in range(each)]
        assert all(answer.end == "done" for answer in answers), answers
        return sum(answer.tokens or 0 for answer in answers)

    counts = await asyncio.gather(*(one() for _ in range(streams)))
    return time.perf_counter() - began, sum(counts)


async def compare(direct: str, routed: str, router: psutil.Process) -> None:
    clients = [Client(f"{direct}/v1"), Client(f"{routed}/v1")]
    for streams, each, tokens, what in ((1, 50, 1, "request"), (1, 1, 300, "token"), (64, 1, 100, "token")):
        wall: list[list[float]] = [[], []]
        cpu: list[float] = []
        for _ in range(PAIRS):
            for which, client in enumerate(clients):
                before = sum(router.cpu_times()[:2])
                seconds, count = await load(client, streams, each, tokens)
                wall[which].append(seconds / (each if what == "request" else count))
                if which:
                    cpu.append((sum(router.cpu_times()[:2]) - before) / (each if what == "request" else count))
        more = statistics.median(through - plain for plain, through in zip(*wall))
        print(
            f"{streams} at once: {1e3 * statistics.median(wall[0]):.3f} ms a {what}, the router adds "
            f"{1e3 * more:.3f} ms; it takes {1e3 * statistics.mean(cpu):.3f} ms of a processor for one",
            flush=True,
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, claim_socket("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
        free.close()
        model = save_tiny_model(Path(folder))
        engine = EngineConfig(max_model_len=512, max_num_seqs=64, kv_cache_memory=64 << 20, threads=1)
        with ServerProcess(str(model), engine, ServerConfig()) as server:
            direct, routed = f"http://127.0.0.1:{server.port}", f"http://127.0.0.1:{port}"
            command = ["route", direct, "--log-level", "warning"]
            if "--fleet" in sys.argv:
                command = ["fleet", "--model", str(model), "--replicas", "1"]
            router = subprocess.Popen([sys.executable, "-m", "qserve", *command, "--port", str(port)])
            try:
                time.sleep(40 if "--fleet" in sys.argv else 8)
                process = psutil.Process(router.pid)
                actors = [each for each in process.children(recursive=True) if each.name().endswith("qserve:Ingress")]
                asyncio.run(compare(direct, routed, actors[0] if actors else process))
            finally:
                router.terminate()
                router.wait()


if __name__ == "__main__":
    main()
