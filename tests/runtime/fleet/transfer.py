"""``python -m tests.runtime.fleet.transfer MODEL``: what it takes to fetch a prompt's KV blocks, and to compute them.

Two servers of one thread each, behind a router in this process. Each prompt is computed by the first, then the second
answers it with one token, with blocks of the first and without; medians of the seconds of whole requests.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from random import Random

from qserve.runtime.server.http.listening import claim_socket
from qserve.runtime.server.limits.keys import add_key
from tests.runtime.fleet.conftest import RouterHandle, routed

LENGTHS = (128, 512, 1024, 2000)
EACH = 7
VOCABULARY = 1000


def seconds(url: str, prompt: list[int]) -> tuple[float, int]:
    """Of a request, and how many tokens of its prompt were cached."""
    body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
        return time.perf_counter() - began, int(answer.headers["X-Cached-Tokens"])


def only(router: RouterHandle, url: str) -> None:
    assert router.server.loop is not None
    for each in router.fleet.replicas:
        router.server.loop.call_soon_threadsafe(router.fleet.hold_back, each, each != url)
    time.sleep(0.2)


def main() -> None:
    free = [claim_socket("127.0.0.1", 0) for _ in range(2)]
    ports = [each.getsockname()[1] for each in free]
    for each in free:
        each.close()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        key = add_key("router", keys, router=True)
        servers = [
            subprocess.Popen(
                [sys.executable, "-m", "qserve", "run", sys.argv[1], "--port", str(port), "--threads", "1",
                 "--api-keys", str(keys), "--kv-transfer", "--max-model-len", "2048", "--log-level", "warning"]
            )
            for port in ports
        ]  # fmt: skip
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        try:
            with routed(urls, key=key) as router:
                measure(router, *urls)
        finally:
            for server in servers:
                server.terminate()
                server.wait()


def measure(router: RouterHandle, first: str, second: str) -> None:
    draw = Random(1)
    prompts = {size: [[draw.randrange(VOCABULARY) for _ in range(size)] for _ in range(2 * EACH)] for size in LENGTHS}
    only(router, second)
    computed = {
        size: statistics.median(seconds(router.url, each)[0] for each in prompts[size][EACH:]) for size in LENGTHS
    }
    only(router, first)
    for size in LENGTHS:
        for each in prompts[size][:EACH]:
            seconds(router.url, each)
    only(router, second)
    for size in LENGTHS:
        found = [seconds(router.url, each) for each in prompts[size][:EACH]]
        print(
            f"{size} tokens: computed in {1e3 * computed[size]:.0f} ms, with blocks of the other server in "
            f"{1e3 * statistics.median(each for each, _ in found):.0f} ms; {sum(count > 0 for _, count in found)} of "
            f"{EACH} were fetched",
            flush=True,
        )


if __name__ == "__main__":
    main()
